"""Files into checked rows: finds the files, reads lines, settles the format.

BOM, CRLF and blank lines are harmless and counted. Whatever else is wrong with a line is a
RowError, which the ReadLog raises or counts. Rows are read one at a time, but every document of a
data set is held in memory afterwards. Leaves out tokens (encode.py).
"""

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullspan.data.report import FieldError, ReadLog, RowError
from fullspan.data.schema import check_row, row_format
from fullspan.errors import DataError

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample. value: the checked fields of its format (schema.py), {"text": ..} of "files"."""

    file: Path
    line: int
    """from 1; 0 for a whole file"""
    format: str
    value: dict[str, Any]

    @property
    def source(self) -> str:
        return f"{self.file} line {self.line}" if self.line else str(self.file)

    def error(self, error: FieldError) -> RowError:
        return RowError(self.file, self.line, error.where, error.reason)


def find_files(path: str, setting: str = "data.path") -> list[Path]:
    """The files that `path` (a file, a folder or a glob) names, sorted.

    Hidden ones are left out of folders and globs.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        found = [file for file in place.rglob("*") if file.is_file()]
        found = [f for f in found if not any(p[0] == "." for p in f.relative_to(place).parts)]
        kind = "folder"
    elif glob.has_magic(path):
        names = glob.glob(str(place), recursive=True)  # noqa: PTH207 - also absolute patterns
        found = [Path(name) for name in names if Path(name).is_file()]
        kind = "glob"
    else:
        raise DataError(f"{setting}: {path} does not exist; name a JSONL file, a folder or a glob")
    if not found:
        raise DataError(f"{setting}: the {kind} {path} holds no file")
    return sorted(found)


def read_rows(path: str, format: str, log: ReadLog, *, setting: str = "data.path") -> Iterator[Row]:
    """Rows of every file that `path` names, in file and line order.

    `format` is one of config.FORMATS. With "auto", files ending in .jsonl, .ndjson or .json are
    JSONL whose format the first row decides, others are plain files. `setting` is what messages
    call the path. Raises DataError, or RowError for a bad row unless `log` allows it.
    """
    files = find_files(path, setting)
    if format == "auto":
        jsonl = [file for file in files if file.suffix.lower() in JSONL_SUFFIXES]
        if jsonl and len(jsonl) < len(files):
            other = next(file for file in files if file not in jsonl)
            raise DataError(
                f"{setting}: {path} mixes JSONL ({jsonl[0].name}) and plain files ({other.name}); "
                "narrow the glob, or set data.format"
            )
        format = "auto" if jsonl else "files"
    log.format = format
    for file in files:
        try:
            rows = _plain_file(file, log) if format == "files" else _jsonl_file(file, log)
            yield from rows
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror or error}") from error
    if log.rows == 0:
        raise DataError(f"{setting}: no rows in {path} (empty file, or blank lines only)")


def _plain_file(file: Path, log: ReadLog) -> Iterator[Row]:
    raw = file.read_bytes()
    log.rows += 1
    try:
        text = _decode(_without_bom(raw, log))
        if not text.strip():
            raise FieldError("", "the file is empty")
    except FieldError as error:
        log.bad(RowError(file, 0, error.where, error.reason))
        return
    log.crlf_lines += text.count("\r\n")
    yield Row(file=file, line=0, format="files", value={"text": text})


def _jsonl_file(file: Path, log: ReadLog) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            line = _without_bom(raw, log) if number == 1 else raw
            log.crlf_lines += line.endswith(b"\r\n")
            if not line.strip():
                log.blank_lines += 1
                continue
            log.rows += 1
            try:
                value = _parse(line)
                found = row_format(value, log.format)
                checked = check_row(value, found, log.unused_fields)
            except FieldError as error:
                log.bad(RowError(file, number, error.where, error.reason))
                continue
            log.format = found
            yield Row(file=file, line=number, format=found, value=checked)


def _without_bom(raw: bytes, log: ReadLog) -> bytes:
    log.byte_order_marks += raw.startswith(_BOM)
    return raw.removeprefix(_BOM)


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"0x{raw[error.start]:02x} at byte {error.start + 1}"
        raise FieldError("", f"not UTF-8 ({byte}); convert the file to UTF-8") from error


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(_decode(line), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error.msg} (column {error.colno})"
        if line.lstrip().startswith(b"["):
            reason += "; a JSON array is not JSONL, write one object a line"
        if not line.endswith(b"\n"):
            reason += "; the last line has no end, the file looks truncated"
        raise FieldError("", reason) from error
    except (RecursionError, ValueError) as error:
        raise FieldError("", f"not usable JSON: {error}") from error
    if not isinstance(value, dict):
        raise FieldError("", f"expected one JSON object a line, got {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
