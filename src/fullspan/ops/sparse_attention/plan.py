"""Host side of the backward's plan (see kernels_plan.py): buffers and launches.

A plan depends on ids and counts alone, so layers that share a selection share it. Nothing here
waits for the device: every buffer has the size of its worst case.
"""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fullspan.ops.sizes import ceil_div, power_of_2
from fullspan.ops.sparse_attention.chunks import GROUP, Sizes
from fullspan.ops.sparse_attention.kernels_plan import (
    columns_kernel,
    mark_kernel,
    place_kernel,
    share_kernel,
)
from fullspan.shapes import Int32, Tensor

FEW_DIRECT = 64  # fewer direct pairs than this a row are not worth a kernel of their own
DENSE = 0.9  # a group with a greater share of direct pairs shares nothing
# The same where dquery makes the partial rows of such a group (Sizes.fused). One chunk's times on
# an H200 (4096 rows of 2048 keys) meet there: 7.4 + 9.6 d ms with shared keys, 9.3 + 1.5 d without,
# d the share of direct pairs.
DENSE_FUSED = 0.25


class Plan(NamedTuple):
    """The plan of some rows, in chunks.

    order: partial rows, chunk after chunk and key after key; start [chunks * keys + 1]: where each
    key's begin. slots: the chunk's slot of (active row, shared key) or -1; shared: number of shared
    keys, whose partial rows are the group's first; active, active_count: rows of a block. direct,
    direct_count: slots of each row that are direct; direct_first: their first partial row. mode: 0
    where a group shares nothing, and each direct pair's partial row is its slot.
    """

    order: Int32[Tensor, "pairs"]
    start: Int32[Tensor, "bounds"]
    slots: Int32[Tensor, "groups blocks group block"]
    shared: Int32[Tensor, "groups"]
    active: Int32[Tensor, "groups blocks group"]
    active_count: Int32[Tensor, "groups blocks"]
    direct: Int32[Tensor, "rows topk"]
    direct_count: Int32[Tensor, "rows"]
    direct_first: Int32[Tensor, "rows"]
    mode: Int32[Tensor, "groups"]

    def chunks(self, chunk: int) -> list["Chunk"]:
        """Its chunks of so many rows, in order."""
        rows = len(self.direct_count)
        starts = range(0, rows, chunk)
        pack = len(self.start) // len(starts)
        return [
            Chunk(self, at, min(chunk, rows - at), self.start[n * pack : (n + 1) * pack + 1])
            for n, at in enumerate(starts)
        ]

    def part(self, rows: slice, chunk: int) -> "Plan":
        """Of some of its rows, which are whole chunks."""
        whole, groups = len(self.direct_count), slice(rows.start // GROUP, -(-rows.stop // GROUP))
        pack = len(self.start) // -(-whole // chunk)
        first, last = rows.start // chunk, -(-rows.stop // chunk)
        by_group = ("slots", "shared", "active", "active_count", "mode")
        cut = {name: getattr(self, name)[groups] for name in by_group}
        by_row = ("direct", "direct_count", "direct_first")
        cut |= {name: getattr(self, name)[rows] for name in by_row}
        return self._replace(start=self.start[first * pack : last * pack + 1], **cut)


@dataclass(frozen=True)
class Chunk:
    """Rows [at, at + rows) of a plan. start: where each key's partial rows begin in its order."""

    plan: Plan
    at: int
    rows: int
    start: Int32[Tensor, "bounds"]

    @property
    def groups(self) -> slice:
        """Its groups within the plan."""
        return slice(self.at // GROUP, -(-(self.at + self.rows) // GROUP))

    @property
    def window(self) -> slice:
        """Its rows within the plan."""
        return slice(self.at, self.at + self.rows)


def build_plan(
    ids: Int32[Tensor, "rows topk"],
    counts: Int32[Tensor, "rows"],
    sizes: Sizes,
    chunk: int,
    *,
    share: bool = True,
) -> Plan:
    """Plan of all rows, in chunks of so many, whole groups. share False: every pair direct."""
    assert chunk % GROUP == 0, chunk
    rows, topk = ids.shape
    pack, width, blocks = sizes.pack, sizes.width, sizes.blocks
    groups, chunks = ceil_div(rows, GROUP), ceil_div(rows, chunk)

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    table = new(groups, pack).zero_()
    scratch, bits = new(groups, 2, width), new(groups, blocks)
    count = new(chunks * pack)
    plan = Plan(
        order=new(rows * topk),
        start=new(chunks * pack + 1),
        slots=new(groups, blocks, GROUP, sizes.block).fill_(-1),
        shared=new(groups),
        active=new(groups, blocks, GROUP),
        active_count=new(groups, blocks),
        direct=new(rows, topk),
        direct_count=new(rows),
        direct_first=new(rows),
        mode=new(groups),
    )
    kp = power_of_2(topk)
    shape = {"TOPK": topk, "KP": kp, "GROUP": GROUP}
    mark_kernel[(rows,)](ids, counts, table, 0, pack, **shape, num_warps=4)
    share_kernel[(groups,)](
        ids, counts, table, plan.mode, scratch, plan.shared, plan.active, plan.active_count, bits,
        plan.direct_first, 0, rows, chunk, pack, **shape, QB=max(1, min(2, 4096 // kp)),
        SHARE=GROUP // 2 if share else GROUP + 1, FEW=FEW_DIRECT,
        DENSE=DENSE_FUSED if sizes.fused else DENSE, WIDTH=width, BLOCKS=blocks, BM=sizes.block,
        num_warps=8,
    )  # fmt: skip
    columns_kernel[(ceil_div(pack, 128), chunks)](
        table, count, groups, chunk // GROUP, pack, GB=16, BK=128, num_warps=4
    )
    plan.start[:1].zero_()
    torch.cumsum(count, 0, dtype=torch.int32, out=plan.start[1:])
    place_kernel[(rows,)](
        ids, counts, table, plan.mode, bits, plan.direct_first, plan.start, plan.order, plan.slots,
        plan.direct, plan.direct_count, 0, chunk, pack, **shape, BLOCKS=blocks, BM=sizes.block,
        num_warps=8,
    )  # fmt: skip
    return plan
