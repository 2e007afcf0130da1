"""Host side of the backward's plan (see kernels_plan.py): how many rows make a chunk, its buffers, and the launches.

A plan depends on ids and counts alone, so layers that share a selection may share it. Nothing here waits for the device:
every buffer has the size of its worst case.
"""

from dataclasses import dataclass

import torch
import triton

from fullspan.ops.sparse_attention.kernels_plan import (
    columns_kernel,
    mark_kernel,
    place_kernel,
    share_kernel,
)
from fullspan.shapes import Int32, Tensor

GROUP = 16  # neighbouring rows whose common keys are summed together; a bit of a plan word each
BLOCK = 128  # shared keys of one block
FEW_DIRECT = 64  # fewer direct pairs than this a row are not worth a kernel of their own
DENSE = 0.9  # a group with a greater share of direct pairs shares nothing
MOST_ROWS = 16384  # a plan word counts 15 bits of partial rows a key
MOST_TOPK = 8192


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """The plan of rows [first, first + rows). Sizes: groups = rows / GROUP up, width = shared keys of a group at most.

    order: partial rows, key after key; start: where each key's begin, one more than keys. slots [groups, width / BLOCK,
    GROUP, BLOCK]: slot of (row, shared key) or -1; active, active_count: rows of a block. direct, direct_count: slots of
    each row that are direct. mode: 0 where a group shares nothing.
    """

    first: int
    rows: int
    width: int
    order: Int32[Tensor, "pairs"]
    start: Int32[Tensor, "bounds"]
    slots: Int32[Tensor, "groups blocks group block"]
    active: Int32[Tensor, "groups blocks group"]
    active_count: Int32[Tensor, "groups blocks"]
    direct: Int32[Tensor, "chunk topk"]
    direct_count: Int32[Tensor, "chunk"]
    mode: Int32[Tensor, "groups"]


def shared_width(topk: int) -> int:
    """Shared keys that a group can have: each has GROUP / 2 of its GROUP * topk pairs."""
    return max(2 * triton.next_power_of_2(topk), BLOCK)


def partial_rows(rows: int, topk: int) -> int:
    """Partial rows of a chunk at most: one a slot, and the shared keys of every group behind them."""
    return rows * topk + -(-rows // GROUP) * shared_width(topk)


def bytes_per_row(topk: int, pack: int, qk: int, heads: int, itemsize: int) -> int:
    """Workspace of the backward for one more row of a chunk: P, dS, partial rows, plan."""
    width = shared_width(topk)
    partial = (topk + width / GROUP) * qk * itemsize
    plan = 4 * (2 * topk + width + 3 * width / GROUP + pack / GROUP) + 64
    return int(2 * topk * heads * itemsize + partial + plan)


def chunk_rows(
    rows: int, topk: int, pack: int, qk: int, heads: int, itemsize: int, workspace: int, units: int
) -> int:
    """Rows of a chunk that fit `workspace` bytes; whole rounds of the device's `units` where possible, and at least GROUP."""
    fit = (workspace - 8 * pack) // bytes_per_row(topk, pack, qk, heads, itemsize)
    fit = min(fit, MOST_ROWS, rows, (2**31 - 1) // (topk * heads))
    if fit < rows and fit >= units:
        return fit // units * units
    return max(fit, min(rows, GROUP))


def build_plan(
    ids: Int32[Tensor, "rows topk"], counts: Int32[Tensor, "rows"], *, pack: int, first: int, rows: int, share: bool
) -> ChunkPlan:
    """Plan of rows [first, first + rows) over `pack` keys. share False: every pair direct."""
    topk, groups = ids.shape[1], -(-rows // GROUP)
    width = shared_width(topk)
    blocks = width // BLOCK

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    table = new(groups, pack).zero_()
    count, mode, scratch = new(pack), new(groups), new(groups, 2, width)
    active, active_count = new(groups, blocks, GROUP), new(groups, blocks)
    direct, direct_count, order = new(rows, topk), new(rows), new(rows * topk)
    slots = new(groups, blocks, GROUP, BLOCK).fill_(-1)
    shape = {"TOPK": topk, "KP": triton.next_power_of_2(topk), "GROUP": GROUP}
    mark_kernel[(rows,)](ids, counts, table, first, pack, **shape, num_warps=4)
    share_kernel[(groups,)](
        ids, counts, table, mode, scratch, active, active_count, first, rows, pack, **shape,
        SHARE=GROUP // 2 if share else GROUP + 1, FEW=FEW_DIRECT, DENSE=DENSE, WIDTH=width, BM=BLOCK,
        num_warps=8,
    )  # fmt: skip
    columns_kernel[(triton.cdiv(pack, 128),)](table, count, groups, pack, GB=16, BK=128, num_warps=4)
    start = new(pack + 1)
    start[0] = 0
    torch.cumsum(count, 0, dtype=torch.int32, out=start[1:])
    place_kernel[(rows,)](
        ids, counts, table, mode, start, order, slots, direct, direct_count, first, rows * topk, pack,
        **shape, WIDTH=width, BM=BLOCK, num_warps=4,
    )  # fmt: skip
    return ChunkPlan(
        first=first, rows=rows, width=width, order=order, start=start, slots=slots, active=active,
        active_count=active_count, direct=direct, direct_count=direct_count, mode=mode,
    )  # fmt: skip
