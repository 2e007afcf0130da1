"""Index top-k over spans of keys, in a bounded workspace: the loop that the `triton` and `hopper`
backends share.

Rows go in slabs, the keys of a slab in spans counted from the first key that each block of BQ rows
reaches. The first span stores its scores; a merge finds each row's threshold; every later span
stores only what passes it. A span is never larger than a buffer that holds ALL its keys, so adverse
data cost time, not exactness. Left out: the scores themselves.
"""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fullspan.errors import ConfigError
from fullspan.ops.index_topk.kernels_scores import bounds_kernel
from fullspan.ops.index_topk.kernels_select import emit_kernel, merge_first_kernel, merge_kernel
from fullspan.ops.sizes import power_of_2
from fullspan.shapes import Float32, Int32, Int64, Tensor

BQ = 64  # rows of a block, which share a first key
SEG = 128  # keys of a segment
MOST_ROWS = 2048  # of a slab
FIRST_SPAN = 8192  # keys whose scores are stored whole
SLACK = 4  # a list may hold 1 / SLACK more than topk before it is cut, but after the last span
# A span has at most so many times the keys before it, and lets through as many entries as a list
# holds, in the mean; a list has room for 4 / (1 + 1 / SLACK) = 3.2 times the most that it keeps.
GROWTHS = [1 + tenths / 10 for tenths in range(13)]
LAUNCH_ROWS = 700  # rows whose merge takes as long as the launches and the last round of a span
ALL = 1 << 20  # more than any count: no tie is cut


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Key range of every row, and of every block of BQ rows, int32."""

    start: Int32[Tensor, "rows"]
    end: Int32[Tensor, "rows"]
    base: Int32[Tensor, "blocks"]
    block_end: Int32[Tensor, "blocks"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Rows [row0, row0 + rows) against the keys [lo, lo + keys) after each block's first. gate:
    keep only survivors.
    """

    row0: int
    rows: int
    lo: int
    keys: int
    gate: bool


# (span, ranges, thresholds of the slab, output [slab, columns] fp32 scores or int64 entries,
# numbers [slab, segments])
Score = Callable[[Span, Ranges, Tensor, Tensor, Tensor], None]


def list_width(topk: int) -> int:
    """Entries of a row's list."""
    return 4 * max(SEG // 2, power_of_2(topk))


def slab_bytes(slab: int, columns: int, topk: int, rows: int) -> int:
    """Workspace of slabs of `slab` rows whose largest span has `columns` keys."""
    lists = slab * (columns * 8 + columns // SEG * 4 + list_width(topk) * 8 + 8)
    return lists + 8 * -(-rows // BQ)


def plan_spans(
    rows: int, pack: int, topk: int, workspace: int, unit: int, first: int
) -> tuple[int, list[tuple[int, int]]]:
    """Rows of a slab and the (offset, keys) of its spans. unit: keys of a score tile; spans are
    multiples of it.

    A smaller slab has room for larger spans, so fewer merges a row, and launches more.
    """
    total = -(-(pack + SEG) // unit) * unit
    first = min(max(first // unit, 1) * unit, total)
    slab, found = min(MOST_ROWS, -(-rows // BQ) * BQ), []
    while slab:
        room = workspace - slab_bytes(slab, 0, topk, rows)
        columns = int(room / (slab * (8 + 4 / SEG))) // unit * unit
        if columns >= (unit if slab == BQ else first):
            spans = min((_spans(total, min(first, columns), columns, unit, g) for g in GROWTHS),
                        key=len)  # fmt: skip
            cost = len(spans) * (rows + LAUNCH_ROWS * -(-rows // slab))
            found.append((cost, slab, spans))
        slab = slab // 2 // BQ * BQ
    if not found:
        least = slab_bytes(BQ, unit, topk, rows)
        raise ConfigError(
            f"ops.workspace_bytes is {workspace}; index_topk of {topk} keys for {rows} rows needs "
            f"at least {least}"
        )
    return min(found, key=lambda plan: plan[0])[1:]


def _spans(total: int, first: int, columns: int, unit: int, growth: float) -> list[tuple[int, int]]:
    """(offset, keys) of spans over `total` keys, of at most `columns` and growth times what is
    before them."""
    spans, lo = [], 0
    while lo < total:
        keys = int(growth * lo) // unit * unit if lo else first
        keys = min(keys, columns, total - lo)
        spans.append((lo, keys))
        lo += keys
    if (
        len(spans) > 2 and spans[-1][1] < spans[-2][1] // 2
    ):  # no short last span: share the last two evenly
        both = spans[-2][1] + spans[-1][1]
        keys = -(-both // 2 // unit) * unit
        spans[-2:] = [(spans[-2][0], keys), (spans[-2][0] + keys, both - keys)]
    return spans


def block_ranges(key_start: Int64[Tensor, "rows"], key_end: Int64[Tensor, "rows"]) -> Ranges:
    """Ranges of a call."""
    start, end = key_start.int().contiguous(), key_end.int().contiguous()
    blocks = -(-start.shape[0] // BQ)
    base = torch.empty(blocks, dtype=torch.int32, device=start.device)
    block_end = torch.empty_like(base)
    bounds_kernel[(blocks,)](
        start, end, base, block_end, start.shape[0], BQ=BQ, SEG=SEG, num_warps=1
    )
    return Ranges(start=start, end=end, base=base, block_end=block_end)


def stream_topk(
    key_start: Int64[Tensor, "rows"], key_end: Int64[Tensor, "rows"], *, pack: int, topk: int,
    workspace_bytes: int, unit: int, score: Score, first: int = FIRST_SPAN,
) -> tuple[Int32[Tensor, "rows topk"], Int32[Tensor, "rows"]]:  # fmt: skip
    """ids (ascending, -1 tail) and counts of the topk best keys of each row's range, by the scores
    that `score` writes.
    """
    rows, device = key_start.shape[0], key_start.device
    ids = torch.empty(rows, topk, dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0 or pack == 0:
        return ids.fill_(-1), counts.zero_()
    slab, spans = plan_spans(rows, pack, topk, workspace_bytes, unit, first)
    columns = max(keys for _, keys in spans)
    entries = torch.empty(slab, columns, dtype=torch.int64, device=device)
    numbers = torch.empty(slab, columns // SEG, dtype=torch.int32, device=device)
    best = torch.empty(slab, list_width(topk), dtype=torch.int64, device=device)
    have = torch.empty(slab, dtype=torch.int32, device=device)
    tau: Float32[Tensor, slab] = torch.empty(slab, dtype=torch.float32, device=device)
    ranges = block_ranges(key_start, key_end)
    shape = {"KCAP": best.shape[1], "K": topk}
    search = {**shape, "PC": min(2048, best.shape[1]), "ALL": ALL, "ASM": device.type == "cuda"}
    for row0 in range(0, rows, slab):
        here = min(slab, rows - row0)
        for lo, keys in spans:
            most = topk if lo + keys >= spans[-1][0] + spans[-1][1] else topk + topk // SLACK
            span = Span(row0=row0, rows=here, lo=lo, keys=keys, gate=lo > 0)
            if not span.gate:
                scores = entries.view(torch.float32)
                score(span, ranges, tau, scores, numbers)
                merge_first_kernel[(here,)](
                    scores, ranges.start, ranges.end, ranges.base, tau, best, have, row0, keys,
                    scores.stride(0), most, SPAN=power_of_2(keys), BQ=BQ, **search,
                    num_warps=16 if keys > 8192 else 8,
                )  # fmt: skip
                continue
            score(span, ranges, tau, entries, numbers)
            tp = max(32, power_of_2(keys // SEG))
            merge_kernel[(here,)](
                entries, numbers, tau, best, have, keys // SEG, entries.stride(0),
                numbers.stride(0), most, SEG=SEG, TP=tp, J=max(1, 4096 // tp), **search,
                num_warps=8, maxnreg=128,
            )  # fmt: skip
        emit_kernel[(here,)](
            best, have, ids, counts, row0, **shape, KP=best.shape[1] // 4, num_warps=4
        )
    return ids, counts
