"""Reading: every format, every planted fault, what is harmless, what a policy lets pass."""

import json

import pytest

from fullspan.data.config import DataConfig
from fullspan.data.load import load_documents
from fullspan.errors import ConfigError, DataError, FullspanError

GOOD = {"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]}


def read(path, tokenizer, **settings):
    config = DataConfig(path=path, **settings)
    return load_documents(path, config, tokenizer, vocab_size=320)


def message(**fields):
    return {"messages": [{"role": "user", "content": "U"}, {"role": "assistant", **fields}]}


def learned(document):
    return document.tokens[document.trained].tolist()


def test_prompt_completion(jsonl, tokenizer):
    documents, log = read(jsonl([{"prompt": "ab", "completion": "cd"}]), tokenizer)
    assert log.format == "prompt_completion"
    assert documents[0].tokens.tolist() == [*b"abcd", 256]
    assert learned(documents[0]) == [*b"cd", 256]
    assert documents[0].trained_tokens == 3


def test_text_learns_everything_and_one_eos(jsonl, tokenizer):
    documents, _ = read(jsonl([{"text": "ab"}, {"text": "c<|endoftext|>"}]), tokenizer)
    assert [d.tokens.tolist() for d in documents] == [[*b"ab", 256], [*b"c", 256]]
    assert all(d.trained.all() for d in documents)
    assert [d.trained_tokens for d in documents] == [2, 1]


@pytest.mark.parametrize(
    ("extra", "trained"),
    [
        ({}, [7, 256, 9]),
        ({"labels": [-100, 256, 9]}, [256, 9]),
        ({"mask": [0, 1, False]}, [256]),
        ({"labels": None}, [7, 256, 9]),
    ],
)
def test_tokens(jsonl, tokenizer, extra, trained):
    documents, _ = read(jsonl([{"tokens": [7, 256, 9], **extra}]), tokenizer)
    assert documents[0].tokens.tolist() == [7, 256, 9]
    assert learned(documents[0]) == trained


def test_folder_and_glob_of_plain_files(tmp_path, tokenizer):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfb<|user|>\r\n")
    (tmp_path / "sub" / "a.py").write_text("x")
    (tmp_path / ".hidden").write_text("no")
    documents, log = read(str(tmp_path), tokenizer)
    assert (log.format, log.byte_order_marks, log.crlf_lines) == ("files", 1, 1)
    # Control tokens in a plain file are characters.
    assert [d.tokens.tolist() for d in documents] == [[*b"b<|user|>\r\n", 256], [*b"x", 256]]
    documents, _ = read(str(tmp_path / "**" / "*.py"), tokenizer)
    assert [d.source for d in documents] == [str(tmp_path / "sub" / "a.py")]


def test_several_jsonl_files_share_one_format(jsonl, tmp_path, tokenizer):
    jsonl([{"text": "b"}], name="b.jsonl")
    path = jsonl([{"text": "a"}], name="a.jsonl")
    documents, _ = read(str(tmp_path), tokenizer)
    assert documents[0].source == f"{path} line 1"
    jsonl([GOOD], name="b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl line 1: format text needs text.*is messages"):
        read(str(tmp_path), tokenizer)


def test_harmless_oddities_are_counted(tmp_path, tokenizer):
    line = json.dumps(GOOD).encode()
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line)
    documents, log = read(str(tmp_path / "d.jsonl"), tokenizer)
    assert documents[0].tokens.tolist() == documents[1].tokens.tolist()
    assert [d.source[-6:] for d in documents] == ["line 1", "line 4"]
    assert (log.rows, log.byte_order_marks, log.crlf_lines, log.blank_lines) == (2, 1, 2, 2)


def test_unused_fields_are_counted(jsonl, tokenizer):
    _, log = read(jsonl([{**GOOD, "id": 1}, {**GOOD, "id": 2, "source": "x"}]), tokenizer)
    assert log.unused_fields == {"id": 2, "source": 1}


def test_tool_calls_and_text_parts_are_normalised(jsonl, tokenizer):
    text = message(tool_calls=[{"name": "f", "arguments": '{"a": 1}'}])
    parts = [{"type": "text", "text": "U"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    objects = {
        "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "tools": None,
    }
    documents, _ = read(jsonl([text, objects]), tokenizer)
    assert documents[0].tokens.tolist() == documents[1].tokens.tolist()


BAD_ROWS = {
    "not an object": ([1, 2], ": expected one JSON object a line, got list"),
    "no JSON": (b"{'text': 1}", ": not JSON: .*column 2"),
    "array": (b"[", ": not JSON: .*a JSON array is not JSONL"),
    "NaN": (b'{"text": NaN}', ": not usable JSON: NaN"),
    "too deep": (b'{"text": ' + b"[" * 100_000, ": not usable JSON: "),
    "UTF-8": (b'{"text": "\xff"}', r": not UTF-8 \(0xff at byte 11\)"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), r": not UTF-8 \(0xff at byte 1\)"),
    "surrogate": (b'{"text": "a\\ud800"}', ", field text: holds half of a surrogate pair .* 2"),
    "no field": ({"txt": "a"}, ": fields are txt; a row needs one of: messages, prompt"),
    "two formats": ({"text": "a", **GOOD}, r": fits several formats \(messages, text\)"),
    "empty text": ({"text": " \n"}, ", field text: is empty"),
    "text type": ({"text": 5}, ", field text: expected text, got int"),
    "completion": ({"prompt": "a", "completion": ""}, ", field completion: is empty"),
    "messages type": ({"messages": "hi"}, ", field messages: expected a list, got str"),
    "no messages": ({"messages": []}, ", field messages: is empty"),
    "message type": ({"messages": [3]}, r", field messages\[0\]: expected an object, got int"),
    "no role": ({"messages": [{"content": "a"}]}, r"messages\[0\].role: expected text, got null"),
    "unknown role": (
        {"messages": [{"role": "bot", "content": "a"}]},
        r"messages\[0\].role: unknown role 'bot'; allowed: system, user, assistant, tool",
    ),
    "empty content": (message(content=""), r"messages\[1\].content: is empty"),
    "null content": (message(content=None), r"messages\[1\].content: expected text, got null"),
    "no content": (message(), r"messages\[1\].content: expected text, got null"),
    "image": (message(content=[{"type": "image"}]), r"content\[0\]: only parts of type 'text'"),
    "unknown key": (message(content="A", weight=0), r"messages\[1\].weight: unknown in a"),
    "reasoning": (message(content="A", reasoning_content=1), "reasoning_content: expected text"),
    "calls type": (message(tool_calls={}), r"messages\[1\].tool_calls: expected a list, got dict"),
    "call type": (message(tool_calls=["f"]), r"tool_calls\[0\]: expected an object, got str"),
    "call name": (message(tool_calls=[{"arguments": {}}]), r"tool_calls\[0\].name: expected text"),
    "call key": (message(tool_calls=[{"name": "f", "args": 1}]), r"tool_calls\[0\].args: unknown"),
    "arguments": (
        message(tool_calls=[{"function": {"name": "f", "arguments": "{a"}}]),
        r"tool_calls\[0\].function.arguments: not JSON text",
    ),
    "arguments list": (
        message(tool_calls=[{"name": "f", "arguments": "[1]"}]),
        r"tool_calls\[0\].arguments: expected an object, got list",
    ),
    "nested": (
        message(tool_calls=[{"name": "f", "arguments": {"k": json.loads("[" * 200 + "]" * 200)}}]),
        r"arguments\.k\[0\].*: is nested more than 100 deep",
    ),
    "tools type": ({**GOOD, "tools": {}}, ", field tools: expected a list, got dict"),
    "tool name": ({**GOOD, "tools": [{}]}, r"tools\[0\].*name: expected text, got null"),
    "control": (message(content="<|user|>"), r"messages\[1\].content: holds the control token"),
    "no tokens": ({"tokens": []}, ", field tokens: is empty"),
    "token type": ({"tokens": [1, "2"]}, r"tokens\[1\]: expected a token id, got str"),
    "token bool": ({"tokens": [True]}, r"tokens\[0\]: expected a token id, got bool"),
    "token range": ({"tokens": [1, 320]}, r"tokens\[1\]: token id 320 is outside .*0 to 319"),
    "token sign": ({"tokens": [-1]}, r"tokens\[0\]: token id -1 is outside"),
    "token huge": ({"tokens": [1 << 70]}, r"tokens\[0\]: token id .* is outside"),
    "labels count": ({"tokens": [1, 2], "labels": [1]}, "labels: has 1 entries for 2 tokens"),
    "labels shifted": ({"tokens": [1, 2], "labels": [2, -100]}, r"labels\[0\]: .*not shifted"),
    "mask value": ({"tokens": [1, 2], "mask": [0, 2]}, r"mask\[1\]: expected 0, 1, true or false"),
    "both": ({"tokens": [1], "mask": [1], "labels": [1]}, "labels: give labels or mask, not both"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_names_file_line_and_field(jsonl, tokenizer, name):
    row, reason = BAD_ROWS[name]
    path = jsonl([b"", row])
    with pytest.raises(DataError, match=rf"data\.jsonl line 2.*{reason}") as caught:
        read(path, tokenizer)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


# Once a first row has settled the format, a row that fits two is none.
@pytest.mark.parametrize("name", [name for name in BAD_ROWS if name != "two formats"])
def test_bad_row_is_skipped_and_listed_where_the_policy_allows(jsonl, tokenizer, name):
    row, _ = BAD_ROWS[name]
    tokens = "token" in name or "mask" in name or "labels" in name or name == "both"
    good = {"tokens": [1, 2]} if tokens else GOOD
    documents, log = read(jsonl([good, row, good]), tokenizer, max_bad_rows=1)
    assert (len(documents), len(log.bad_rows), log.rows) == (2, 1, 3)
    assert "data.jsonl line 2" in log.bad_rows[0]


def test_first_row_bad_then_the_format_is_the_next_ones(jsonl, tokenizer):
    documents, log = read(jsonl([b"{", {"text": "a"}]), tokenizer, max_bad_rows=1)
    assert (len(documents), log.format) == (1, "text")


def test_truncated_last_line(tmp_path, tokenizer):
    line = json.dumps(GOOD).encode()
    (tmp_path / "d.jsonl").write_bytes(line + b"\n" + line[:-9])
    with pytest.raises(DataError, match=r"line 2: not JSON: .*the file looks truncated"):
        read(str(tmp_path / "d.jsonl"), tokenizer)


def test_one_bad_row_more_than_allowed(jsonl, tokenizer):
    path = jsonl([GOOD, b"{", b"}", GOOD])
    with pytest.raises(
        DataError, match=r"2 bad rows, data\.max_bad_rows allows 1; the last: .*line 3"
    ):
        read(path, tokenizer, max_bad_rows=1)
    assert len(read(path, tokenizer, max_bad_rows=2)[0]) == 2


def test_mixed_formats_are_refused_by_line(jsonl, tokenizer):
    path = jsonl([GOOD, GOOD, {"text": "a"}])
    with pytest.raises(
        DataError, match=r"line 3: format messages needs messages, fields are text \(mixed"
    ):
        read(path, tokenizer)


def test_a_named_format_settles_rows_that_fit_two(jsonl, tokenizer):
    documents, log = read(jsonl([{**GOOD, "text": "a"}]), tokenizer, format="text")
    assert documents[0].tokens.tolist() == [*b"a", 256]
    assert log.unused_fields == {"messages": 1}


@pytest.mark.parametrize(
    ("files", "pattern", "reason"),
    [
        ({}, "none.jsonl", "does not exist"),
        ({}, "", "holds no file"),
        ({}, "*.jsonl", "the glob .* holds no file"),
        ({"a.jsonl": b""}, "a.jsonl", "no rows in"),
        ({"a.jsonl": b"\n \r\n"}, "a.jsonl", "no rows in"),
        (
            {"a.jsonl": b"{}", "b.txt": b"x"},
            "",
            r"mixes JSONL \(a.jsonl\) and plain files \(b.txt\)",
        ),
        ({"b.txt": b" "}, "", r"b\.txt: the file is empty"),
        ({"b.txt": b"a\xe9"}, "", r"b\.txt: not UTF-8 \(0xe9 at byte 2\)"),
    ],
)
def test_paths_that_give_nothing(tmp_path, tokenizer, files, pattern, reason):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        read(str(tmp_path / pattern), tokenizer)


def test_a_tokenizer_that_does_not_fit_the_model(jsonl, tokenizer):
    path = jsonl([{"text": "é"}])
    with pytest.raises(DataError, match=r"token id 195 is outside .*does not belong to this model"):
        load_documents(path, DataConfig(path=path), tokenizer, vocab_size=128)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"format": "message"}, "data.format: got 'message', allowed are auto, messages"),
        ({"overlong": "cut"}, "data.overlong: got 'cut', allowed are error, truncate"),
        ({"pack_length": 1}, "data.pack_length: got 1, it must be at least 2"),
        ({"pack_length": True}, "data.pack_length: got True"),
        ({"max_bad_rows": -1}, "data.max_bad_rows: got -1"),
        ({"path": ""}, "data.path: got an empty path"),
    ],
)
def test_config_errors(settings, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        DataConfig(**{"path": "x", **settings})
    assert isinstance(caught.value, FullspanError)
