"""What `fullspan data inspect` prints, through the command's own functions."""

import argparse

import pytest

from fullspan.cli import data
from fullspan.errors import DataError

CHAT = [{"role": "user", "content": "Q" * 900}, {"role": "assistant", "content": "A\x1b[31m"}]


def fullspan(*words):
    parser = argparse.ArgumentParser()
    data.add_parser(parser.add_subparsers())
    args = parser.parse_args(["data", *map(str, words)])
    return args.run(args)


def test_report_and_marked_sample(jsonl, tokenizer_folder, capsys):
    path = jsonl([{"messages": CHAT, "id": 1}, b"{", {"messages": [*CHAT, *CHAT]}, b""])
    options = ("--pack-length", "2000", "--max-bad-rows", "1", "--sample", "1")
    assert fullspan("inspect", path, "--tokenizer", tokenizer_folder, *options) == 0
    out = capsys.readouterr().out
    assert "rows             3 read, 1 bad\n" in out
    assert "packs            2 of 2,000 rows, efficiency 68.3 %, 2 documents: 1 / 1.0 / 1" in out
    assert "1 blank lines" in out
    assert "unused fields    id (1)" in out
    assert f"bad row          {path} line 2: not JSON" in out
    assert f"sample 1: {path} line 3, 1,821 tokens, 14 trained (between {{+ and +}})" in out
    assert "[... 341 characters ...]" in out
    # The stop token of each turn is inside the marks; escape codes of the data are shown, not sent.
    assert "{+A\\x1b[31m<|user|>+}Q" in out
    assert "{+A\\x1b[31m<|endoftext|>+}\n" in out
    assert "\x1b" not in out


def test_default_pack_length_is_the_longest_document_and_full_shows_all(
    jsonl, tokenizer_folder, capsys
):
    path = jsonl([{"messages": CHAT}])
    assert fullspan("inspect", path, "--tokenizer", tokenizer_folder, "--full") == 0
    out = capsys.readouterr().out
    assert "efficiency 100.0 %" in out
    assert "Q" * 900 in out


def test_colour_on_a_terminal(jsonl, tokenizer_folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    fullspan(
        "inspect", jsonl([{"prompt": "ab", "completion": "cd"}]), "--tokenizer", tokenizer_folder
    )
    assert "ab\x1b[32mcd<|endoftext|>\x1b[0m\n" in capsys.readouterr().out


def test_ids_of_the_model_beyond_the_tokenizer(jsonl, tokenizer_folder, tmp_path, capsys):
    path = jsonl([{"tokens": [1, 319]}])
    with pytest.raises(DataError, match="outside the vocabulary"):
        fullspan("inspect", path, "--tokenizer", tokenizer_folder)
    model = tmp_path / "model"
    model.mkdir()
    for file in tokenizer_folder.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "config.json").write_text('{"model_type": "glm_moe_dsa", "vocab_size": 320}')
    assert fullspan("inspect", path, "--tokenizer", model) == 0
    assert "2 tokens, 1 trained" in capsys.readouterr().out


def test_sample_out_of_range_and_overlong(jsonl, tokenizer_folder):
    path = jsonl([{"text": "abcdef"}])
    with pytest.raises(DataError, match=r"--sample: got 1, allowed are 0 to 0"):
        fullspan("inspect", path, "--tokenizer", tokenizer_folder, "--sample", "1")
    with pytest.raises(DataError, match=r"line 1: 7 tokens, data.pack_length is 4"):
        fullspan("inspect", path, "--tokenizer", tokenizer_folder, "--pack-length", "4")
