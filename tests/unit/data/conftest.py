"""The real tiny tokenizer, and helpers that write data files and read masks."""

import json

import pytest

from fullspan.data.load import load_tokenizer
from fullspan.data.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def jsonl(tmp_path):
    """write(rows, name=...) -> path; a row is an object, or the bytes of a line as they are."""

    def write(rows, name="data.jsonl"):
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path = tmp_path / name
        path.write_bytes(b"\n".join(lines) + b"\n")
        return str(path)

    return write
