"""The demo data: real, repeatable, held-out questions about other functions."""

import argparse
import json

import pytest

from fullspan.cli import data
from fullspan.data.config import DataConfig
from fullspan.data.demo import write_demo
from fullspan.data.load import load_packs
from fullspan.errors import DataError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("demo"), samples=40, held_out=8)


def rows(path):
    chats = [json.loads(line)["messages"] for line in path.read_text("utf-8").splitlines()]
    return [(question["content"], answer["content"]) for question, answer in chats]


def test_answers_stand_in_the_context(made):
    for question, answer in rows(made.train) + rows(made.held_out):
        assert all(line in question for line in answer.splitlines())
        assert "def " in question
        assert question.splitlines()[-1].startswith("What does ")


def test_sizes(made):
    train, held_out = rows(made.train), rows(made.held_out)
    assert (len(train), len(held_out)) == (made.train_samples, made.held_out_samples) == (40, 8)
    assert made.longest_bytes == max(len(q.encode()) for q, _ in train + held_out) < 6200
    assert made.modules > 15


def test_held_out_questions_and_answers_are_not_trained(made):
    train, held_out = rows(made.train), rows(made.held_out)
    assert not {question for question, _ in train} & {question for question, _ in held_out}
    answers = [answer for _, answer in train + held_out]
    assert len(set(answers)) == len(answers)


def test_the_same_python_gives_the_same_files(made, tmp_path):
    again = write_demo(tmp_path, samples=40, held_out=8)
    assert again.train.read_bytes() == made.train.read_bytes()
    assert again.held_out.read_bytes() == made.held_out.read_bytes()


def test_fewer_samples_are_the_first_of_more(made, tmp_path):
    fewer = write_demo(tmp_path, samples=10, held_out=2)
    assert rows(fewer.held_out) == rows(made.held_out)[:2]
    assert set(rows(fewer.train)) <= set(rows(made.train))


def test_packs(made, tokenizer):
    path = str(made.train)
    packs, report = load_packs(path, DataConfig(path=path, pack_length=6400), tokenizer)
    assert report.packed_documents == report.rows == 40
    assert report.trained_tokens == sum(len(a.encode()) + 1 for _, a in rows(made.train))
    assert sum(pack.trained_tokens for pack in packs) == report.trained_tokens


def test_nothing_fits(tmp_path):
    with pytest.raises(DataError, match="no train questions in modules of at most 10 bytes; raise"):
        write_demo(tmp_path, max_context_bytes=10)
    with pytest.raises(DataError, match="--samples: got 0"):
        write_demo(tmp_path, samples=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write demo data"):
        write_demo(tmp_path / "file", samples=1, held_out=1)


def test_command(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    data.add_parser(parser.add_subparsers())
    words = ["data", "demo", str(tmp_path), "--samples", "3", "--held-out", "2"]
    args = parser.parse_args([*words, "--max-context-bytes", "4000"])
    assert args.run(args) == 0
    assert "train.jsonl: 3 questions\n" in capsys.readouterr().out
    assert len(rows(tmp_path / "heldout.jsonl")) == 2
