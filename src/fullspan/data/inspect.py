"""A data set in words: the packing report, and one sample with its trained tokens marked.

The marks are {+ and +} around every run of trained tokens, or a colour on a terminal. Control
characters of the data are written as escapes, so that a sample cannot act on the terminal. Leaves
out any change to the data.
"""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from fullspan.data.config import DataConfig
from fullspan.data.load import load_documents, load_tokenizer, model_vocab_size, pad_token
from fullspan.data.packing import Document, pack_documents
from fullspan.data.report import PackingReport
from fullspan.errors import DataError

_OPEN, _CLOSE = "{+", "+}"
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SHOWN = 300
"""characters kept at each end of a long untrained run"""


def report_lines(report: PackingReport) -> list[str]:
    """The report as aligned lines, every count included; bad rows last, one line each."""
    fewest, mean, most = report.documents_per_pack
    share = report.trained_tokens / report.tokens if report.tokens else 0.0
    unused = ", ".join(f"{name} ({count})" for name, count in report.unused_fields.items())
    entries = [
        ("format", report.format),
        ("rows", f"{report.rows:,} read, {len(report.bad_rows):,} bad"),
        (
            "documents",
            f"{report.documents:,} of {report.source_tokens:,} tokens, "
            f"longest {report.longest:,} tokens",
        ),
        (
            "overlong",
            f"{report.dropped:,} dropped ({report.dropped_tokens:,} tokens), "
            f"{report.truncated:,} truncated ({report.truncated_tokens:,} tokens cut), "
            f"{report.split:,} split into {report.pieces:,} pieces "
            f"({report.repeated_tokens:,} tokens repeated)",
        ),
        (
            "nothing to train",
            f"{report.untrained:,} documents or pieces left out "
            f"({report.untrained_tokens:,} tokens)",
        ),
        (
            "packs",
            f"{report.packs:,} of {report.pack_length:,} rows, efficiency "
            f"{100 * report.efficiency:.1f} %, {report.packed_documents:,} documents: "
            f"{fewest} / {mean:.1f} / {most} a pack (fewest / mean / most)",
        ),
        ("tokens", f"{report.tokens:,}, trained {report.trained_tokens:,} ({100 * share:.1f} %)"),
        (
            "harmless",
            f"{report.byte_order_marks:,} byte order marks, {report.crlf_lines:,} CRLF lines, "
            f"{report.blank_lines:,} blank lines",
        ),
        ("unused fields", unused or "none"),
    ]
    lines = [f"{name:<17}{text}" for name, text in entries]
    return lines + [f"{'bad row':<17}{reason}" for reason in report.bad_rows]


def sample_text(
    document: Document,
    tokenizer: PreTrainedTokenizerBase,
    *,
    color: bool = False,
    full: bool = False,
) -> str:
    """The decoded document, trained tokens marked.

    Long untrained runs are cut in the middle unless `full`. A mark stands inside the document as
    the mask does, before the shift by one that packing does.
    """
    pieces: list[str] = []
    pairs = zip(document.tokens.tolist(), document.trained.tolist())
    for trained, run in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in run]
        text = _decode(tokenizer, ids)
        if trained:
            start, end = (_GREEN, _PLAIN) if color else (_OPEN, _CLOSE)
            text = f"{start}{text}{end}"
        elif not full and len(text) > 2 * _SHOWN + 100:
            left_out = len(text) - 2 * _SHOWN
            text = f"{text[:_SHOWN]}\n[... {left_out:,} characters ...]\n{text[-_SHOWN:]}"
        pieces.append(text)
    return "".join(pieces)


def inspect_data(
    path: str,
    tokenizer_folder: Path,
    *,
    pack_length: int | None,
    settings: dict[str, Any],
    sample: int,
    color: bool = False,
    full: bool = False,
) -> str:
    """The report of `path` and its document `sample` (from 0), read and packed as training would.

    `settings` are further fields of DataConfig; without pack_length a pack is as long as the
    longest document. Raises DataError as training would, and when there is no such sample.
    """
    if pack_length is not None:
        settings = {**settings, "pack_length": pack_length}
    config = DataConfig(path=path, **settings)
    tokenizer = load_tokenizer(tokenizer_folder)
    vocab_size = model_vocab_size(tokenizer_folder)
    documents, log = load_documents(path, config, tokenizer, vocab_size=vocab_size)
    longest = max((len(document) for document in documents), default=0)
    _, report = pack_documents(
        documents,
        pack_length=longest if pack_length is None else pack_length,
        overlong=config.overlong,
        pad_token=pad_token(tokenizer),
        log=log,
    )
    if not 0 <= sample < len(documents):
        raise DataError(f"--sample: got {sample}, allowed are 0 to {len(documents) - 1}")
    document = documents[sample]
    marks = "green" if color else f"between {_OPEN} and {_CLOSE}"
    heading = (
        f"sample {sample}: {document.source}, {len(document):,} tokens, "
        f"{document.trained_tokens:,} trained ({marks})"
    )
    text = sample_text(document, tokenizer, color=color, full=full)
    return "\n".join([*report_lines(report), "", heading, "", text])


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return _CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", text)
