"""Documents into packs of one fixed length.

Best-fit decreasing: documents from the longest to the shortest, each into the fullest pack that
still has room. Deterministic, and within 11/9 of the fewest possible packs, up to a constant
(Johnson et al. 1974). Leaves out tokenising (encode.py) and the order of packs (loader.py).
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fullspan.data.report import PackingReport, ReadLog
from fullspan.errors import DataError, LayoutError
from fullspan.ops.linear_cross_entropy.op import IGNORE
from fullspan.shapes import Int64, Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack:
    """One packed sequence, padding last.

    labels[i] is the token to be predicted at row i, IGNORE where nothing is trained; the last row
    of a document and all padding are IGNORE. cu_seqlens are the real document bounds: 0 first,
    strictly increasing, the real length last. Raises LayoutError when these do not hold.
    """

    tokens: Int64[Tensor, "pack"]
    labels: Int64[Tensor, "pack"]
    cu_seqlens: Int64[Tensor, "bounds"]

    def __post_init__(self) -> None:
        bounds, size = self.cu_seqlens, len(self.tokens)
        if len(self.labels) != size:
            raise LayoutError(f"pack: {size} tokens but {len(self.labels)} labels")
        if len(bounds) < 2 or bounds[0] != 0 or not bool((bounds.diff() > 0).all()):
            raise LayoutError(f"pack: cu_seqlens must rise from 0, got {bounds.tolist()[:8]}")
        if bounds[-1] > size:
            raise LayoutError(
                f"pack: cu_seqlens ends at {int(bounds[-1])}, the pack has {size} rows"
            )
        last_rows, padding = self.labels[bounds[1:] - 1], self.labels[int(bounds[-1]) :]
        if bool((last_rows != IGNORE).any()) or bool((padding != IGNORE).any()):
            raise LayoutError("pack: a label on the last row of a document or on padding")

    @property
    def real_length(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def trained_tokens(self) -> int:
        return int((self.labels != IGNORE).sum())


def untrained(pack: Pack) -> Pack:
    """The same rows, none of them trained: a filler that adds nothing to any sum."""
    return replace(pack, labels=torch.full_like(pack.labels, IGNORE))


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    """One encoded sample: tokens, and for each token whether it is to be learned (not shifted)."""

    tokens: Tensor
    """int32 [tokens]"""
    trained: Tensor
    """bool [tokens]"""
    source: str
    """file and line, for messages"""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def trained_tokens(self) -> int:
        """Tokens that some row predicts: a trained first token has no row before it."""
        return int(self.trained[1:].sum())

    def part(self, start: int, end: int) -> "Document":
        return Document(
            tokens=self.tokens[start:end], trained=self.trained[start:end], source=self.source
        )


@dataclass(kw_only=True)
class _Counts:
    """Fields of a PackingReport."""

    dropped: int = 0
    dropped_tokens: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    split: int = 0
    pieces: int = 0
    repeated_tokens: int = 0
    untrained: int = 0
    untrained_tokens: int = 0

    def keeps(self, document: Document) -> bool:
        """Whether it has anything to train."""
        if document.trained_tokens:
            return True
        self.untrained += 1
        self.untrained_tokens += len(document)
        return False


def pack_documents(
    documents: list[Document],
    *,
    pack_length: int,
    overlong: str,
    pad_token: int,
    log: ReadLog,
    source: str = "the documents",
) -> tuple[list[Pack], PackingReport]:
    """Packs in order of their first document.

    Documents stay whole unless `overlong` is truncate or split. A document without a trained token
    is left out and counted. Raises DataError for a document longer than pack_length when overlong
    is "error", and when no trained token is left in the whole data set.
    """
    counts = _Counts()
    fitting = (part for d in documents for part in _fit(d, pack_length, overlong, counts))
    kept = list(filter(counts.keeps, fitting))
    groups = assign([len(document) for document in kept], pack_length)
    packs = [build_pack([kept[i] for i in g], pack_length, pad_token) for g in groups]
    report = _report(documents, groups, packs, pack_length, counts, log)
    report.check()
    if not packs:
        raise DataError(
            f"{source}: no token to train on: {report.rows} rows, {len(report.bad_rows)} bad, "
            f"{report.dropped} dropped as longer than data.pack_length ({pack_length}), "
            f"{report.untrained} without a trained token"
        )
    return packs, report


def _fit(
    document: Document, pack_length: int, overlong: str, counts: _Counts
) -> Iterator[Document]:
    """What of it can go into a pack."""
    length = len(document)
    if length <= pack_length:
        yield document
    elif overlong == "drop":
        counts.dropped += 1
        counts.dropped_tokens += length
    elif overlong == "truncate":
        counts.truncated += 1
        counts.truncated_tokens += length - pack_length
        yield document.part(0, pack_length)
    elif overlong == "split":
        # Pieces overlap by one token, so that the first token of each is still predicted, by the
        # last row before it.
        starts = range(0, length - 1, pack_length - 1)
        counts.split += 1
        counts.pieces += len(starts)
        counts.repeated_tokens += len(starts) - 1
        for start in starts:
            yield document.part(start, min(start + pack_length, length))
    else:
        raise DataError(
            f"{document.source}: {length} tokens, data.pack_length is {pack_length}; raise it, "
            "or set data.overlong to truncate, split or drop"
        )


def assign(lengths: list[int], pack_length: int) -> list[list[int]]:
    """Best-fit decreasing: every index in one group, whose lengths sum to at most pack_length.

    Indices ascend within a group, groups by their first index. Ties: the pack opened first.
    """
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free rows, group), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        at = bisect.bisect_left(room, (length, -1))
        if at == len(room):
            free, group = pack_length, len(groups)
            groups.append([])
        else:
            free, group = room.pop(at)
        groups[group].append(index)
        bisect.insort(room, (free - length, group))
    return sorted(sorted(group) for group in groups)


def build_pack(documents: list[Document], pack_length: int, pad_token: int) -> Pack:
    """One pack of `documents` in order; labels are shifted inside each document."""
    tokens = torch.full((pack_length,), pad_token, dtype=torch.int64)
    labels = torch.full((pack_length,), IGNORE, dtype=torch.int64)
    bounds = [0]
    for document in documents:
        start, end = bounds[-1], bounds[-1] + len(document)
        tokens[start:end] = document.tokens
        targets = torch.where(document.trained, document.tokens, IGNORE)
        labels[start : end - 1] = targets[1:]
        bounds.append(end)
    return Pack(tokens=tokens, labels=labels, cu_seqlens=torch.tensor(bounds, dtype=torch.int64))


def _report(
    documents: list[Document],
    groups: list[list[int]],
    packs: list[Pack],
    pack_length: int,
    counts: _Counts,
    log: ReadLog,
) -> PackingReport:
    sizes = [len(group) for group in groups] or [0]
    lengths = [len(document) for document in documents]
    return PackingReport(
        **log.counted(),
        **vars(counts),
        documents=len(documents),
        source_tokens=sum(lengths),
        longest=max(lengths, default=0),
        pack_length=pack_length,
        packs=len(packs),
        packed_documents=sum(len(group) for group in groups),
        tokens=sum(pack.real_length for pack in packs),
        trained_tokens=sum(pack.trained_tokens for pack in packs),
        documents_per_pack=(min(sizes), sum(sizes) / len(sizes), max(sizes)),
    )
