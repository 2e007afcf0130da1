"""What was read and what became of it: nothing may vanish without a count.

Leaves out how it is printed (inspect.py).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullspan.errors import DataError


class RowError(DataError):
    """One row that cannot be used: `FILE line N, field F: reason`, N from 1, F only if known."""

    def __init__(self, file: Path, line: int, where: str, reason: str) -> None:
        at = f"{file} line {line}" if line else f"{file}"
        place = f"{at}, field {where}" if where else at
        self.row = f"{place}: {reason}"
        super().__init__(f"{self.row} (data.max_bad_rows allows to skip such rows)")


def brief(error: Exception) -> str:
    """Somebody else's error message on one line, cut to 200 characters; its type if it is empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


class FieldError(Exception):
    """Raised below the level that knows file and line; always turned into a RowError there."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where = where
        self.reason = reason


@dataclass(kw_only=True)
class ReadLog:
    """Counts kept while files are read. Bad rows beyond `max_bad_rows` stop the reading."""

    max_bad_rows: int = 0
    format: str = ""
    rows: int = 0
    bad_rows: list[str] = field(default_factory=list)
    byte_order_marks: int = 0
    crlf_lines: int = 0
    blank_lines: int = 0
    unused_fields: dict[str, int] = field(default_factory=dict)

    def counted(self) -> dict[str, Any]:
        """Those fields that a PackingReport has too."""
        return {name: value for name, value in vars(self).items() if name != "max_bad_rows"}

    def bad(self, error: RowError) -> None:
        """Counts a row that is skipped, or raises `error` when max_bad_rows allows no more."""
        self.bad_rows.append(error.row)
        if len(self.bad_rows) <= self.max_bad_rows:
            return
        if self.max_bad_rows == 0:
            raise error
        raise DataError(
            f"{len(self.bad_rows)} bad rows, data.max_bad_rows allows {self.max_bad_rows}; "
            f"the last: {error.row}"
        )


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """Counts of one data set, lengths in tokens. `check` holds for every report made here.

    rows = len(bad_rows) + documents
    documents + (pieces - split) = packed_documents + dropped + untrained
    source_tokens + repeated_tokens = tokens + dropped_tokens + untrained_tokens + truncated_tokens
    """

    format: str
    rows: int
    bad_rows: list[str]
    byte_order_marks: int
    crlf_lines: int
    blank_lines: int
    unused_fields: dict[str, int]
    documents: int
    source_tokens: int
    longest: int
    pack_length: int
    packs: int
    packed_documents: int
    tokens: int
    trained_tokens: int
    documents_per_pack: tuple[int, float, int]
    """fewest, mean, most"""
    dropped: int
    dropped_tokens: int
    truncated: int
    truncated_tokens: int
    split: int
    pieces: int
    repeated_tokens: int
    """each piece after the first repeats the last token of the piece before as untrained context"""
    untrained: int
    """documents or pieces without a token to train, left out: they could change nothing"""
    untrained_tokens: int

    @property
    def efficiency(self) -> float:
        """Share of the packs' rows that are real tokens."""
        return self.tokens / (self.packs * self.pack_length) if self.packs else 0.0

    def check(self) -> None:
        """Asserts that every row and every token is accounted for."""
        assert self.rows == len(self.bad_rows) + self.documents
        arrived = self.documents + self.pieces - self.split
        assert arrived == self.packed_documents + self.dropped + self.untrained
        gone = self.dropped_tokens + self.untrained_tokens + self.truncated_tokens
        assert self.source_tokens + self.repeated_tokens == self.tokens + gone
