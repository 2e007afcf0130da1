"""Host side of the backward's plan (see kernels_plan.py): how many rows go together, buffers,
launches.

A plan depends on ids and counts alone, so layers that share a selection may share it. Nothing here
waits for the device: every buffer has the size of its worst case.
"""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false

import functools
from dataclasses import dataclass

import torch

from fullspan.errors import ConfigError
from fullspan.ops.sizes import ceil_div, power_of_2
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
MOST_ROWS = 16384  # of a chunk: a plan word counts 15 bits of partial rows a key
TABLE_SHARE, PLAN_SHARE = 8, 4  # a plan's table, and the rest of it, take 1 / this of the workspace


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of rows [first, first + rows) in chunks of `chunk` rows (a multiple of GROUP).

    order: partial rows, chunk after chunk and key after key; start [chunks * keys + 1]: where each
    key's begin. slots: the chunk's slot of (active row, shared key) or -1; leader: partial row of
    each shared key; active, active_count: rows of a block. direct, direct_count: slots of each row
    that are direct. mode: 0 where a group shares nothing.
    """

    first: int
    rows: int
    chunk: int
    order: Int32[Tensor, "pairs"]
    start: Int32[Tensor, "bounds"]
    slots: Int32[Tensor, "groups blocks group block"]
    leader: Int32[Tensor, "groups shared"]
    active: Int32[Tensor, "groups blocks group"]
    active_count: Int32[Tensor, "groups blocks"]
    direct: Int32[Tensor, "rows topk"]
    direct_count: Int32[Tensor, "rows"]
    mode: Int32[Tensor, "groups"]

    def chunks(self) -> list["Chunk"]:
        """Its chunks, in order."""
        starts = range(0, self.rows, self.chunk)
        return [Chunk(self, at, min(self.chunk, self.rows - at)) for at in starts]


@dataclass(frozen=True)
class Chunk:
    """Rows [at, at + rows) of a plan."""

    plan: Plan
    at: int
    rows: int

    @property
    def groups(self) -> slice:
        """Its groups within the plan."""
        return slice(self.at // GROUP, -(-(self.at + self.rows) // GROUP))

    @property
    def window(self) -> slice:
        """Its rows within the plan."""
        return slice(self.at, self.at + self.rows)

    @property
    def first(self) -> int:
        """Its first row within the call."""
        return self.plan.first + self.at

    def start(self, pack: int) -> Tensor:
        """Where each key's partial rows begin in the plan's order, [pack + 1]."""
        begin = self.at // self.plan.chunk * pack
        return self.plan.start[begin : begin + pack + 1]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What decides the memory of a backward. heads: padded. units: multiprocessors; tiles: programs
    a row.
    """

    topk: int
    pack: int
    qk: int
    heads: int
    itemsize: int
    units: int
    tiles: int = 1

    @property
    def width(self) -> int:
        """Shared keys that a group can have: each has GROUP / 2 of its GROUP * topk pairs."""
        return max(2 * power_of_2(self.topk), BLOCK)

    @property
    def row_bytes(self) -> int:
        """Of a row of a chunk: P, dS and partial rows."""
        return self.topk * (2 * self.heads + self.qk) * self.itemsize

    @property
    def plan_row_bytes(self) -> int:
        """Of a row of a plan, its table aside, and of the cleaned ids of backend `hopper`."""
        return 12 * self.topk + 4 * self.width + (4 * 4 * self.width + 256) // GROUP + 16


@functools.lru_cache(maxsize=64)
def choose_rows(sizes: Sizes, rows: int, workspace: int) -> tuple[int, int]:
    """Rows of a plan and of a chunk that fit `workspace` bytes. ConfigError: not even GROUP fit.

    A chunk costs its rounds over the multiprocessors and about one more, so the last rounds of
    chunks should be full.
    """
    table = -(-4 * sizes.pack // GROUP)  # bytes of a row of a plan
    whole = -(-rows // GROUP) * GROUP
    span = min(workspace // TABLE_SHARE // table, workspace // PLAN_SHARE // sizes.plan_row_bytes)
    span = min(max(span // GROUP * GROUP, GROUP), whole)
    while True:
        # one plan's table is gone before the chunks begin; the next one's lies beside their buffers
        room = workspace - span * (sizes.plan_row_bytes + (table if span < whole else 0))
        most = min(span, MOST_ROWS, (2**31 - 1) // (sizes.topk * sizes.heads))
        fit = min(room // sizes.row_bytes, most) // GROUP * GROUP
        bounds = 8 * sizes.pack * -(-span // max(fit, GROUP))  # of every chunk of the plan
        fit = min((room - bounds) // sizes.row_bytes, most) // GROUP * GROUP
        if fit >= min(span, 4 * GROUP) or span <= GROUP:
            break
        span = max(GROUP, span // 2 // GROUP * GROUP)

    def cost(chunk: int) -> tuple[int, int]:
        rounds = -(-chunk * sizes.tiles // sizes.units)
        return -(-span // chunk) * (rounds + 1), -chunk

    if fit < GROUP:
        least = GROUP * (table + sizes.plan_row_bytes + sizes.row_bytes) + 8 * sizes.pack
        raise ConfigError(
            f"ops.workspace_bytes is {workspace}; the backward of sparse attention needs at least "
            f"{least} ({GROUP} rows, {sizes.topk} of {sizes.pack} keys, {sizes.heads} heads)"
        )
    chunk = min(range(GROUP, fit + 1, GROUP), key=cost)
    return (span if span == whole else span // chunk * chunk), chunk


def _most_blocks(width: int) -> int:
    """Blocks of shared keys that a group may have. With more than 3 / 4 of the possible keys each
    is shared by so few rows that little is won, and every block costs a program, used or not.
    """
    return max(1, width * 3 // (4 * BLOCK))


def build_plan(
    ids: Int32[Tensor, "rows topk"],
    counts: Int32[Tensor, "rows"],
    *,
    pack: int,
    first: int,
    rows: int,
    chunk: int,
    share: bool = True,
) -> Plan:
    """Plan of rows [first, first + rows) over `pack` keys. share False: every pair direct."""
    assert chunk % GROUP == 0, chunk
    topk, groups, chunks = ids.shape[1], -(-rows // GROUP), -(-rows // chunk)
    width = max(2 * power_of_2(topk), BLOCK)
    blocks = _most_blocks(width)

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    table = new(groups, pack).zero_()
    mode, scratch, leader = new(groups), new(groups, 3, width), new(groups, blocks * BLOCK)
    active, active_count, bits = (
        new(groups, blocks, GROUP),
        new(groups, blocks),
        new(groups, blocks),
    )
    direct, direct_count = new(rows, topk), new(rows)
    slots = new(groups, blocks, GROUP, BLOCK).fill_(-1)
    kp = power_of_2(topk)
    shape = {"TOPK": topk, "KP": kp, "GROUP": GROUP}
    mark_kernel[(rows,)](ids, counts, table, first, pack, **shape, num_warps=4)
    share_kernel[(groups,)](
        ids, counts, table, mode, scratch, leader, active, active_count, bits, first, rows, chunk,
        pack, **shape,
        QB=max(1, min(2, 4096 // kp)), SHARE=GROUP // 2 if share else GROUP + 1, FEW=FEW_DIRECT,
        DENSE=DENSE,
        WIDTH=width, BLOCKS=blocks, BM=BLOCK, num_warps=8,
    )  # fmt: skip
    count, start = new(chunks * pack), new(chunks * pack + 1)
    columns_kernel[(ceil_div(pack, 128), chunks)](
        table, count, groups, chunk // GROUP, pack, GB=16, BK=128, num_warps=4
    )
    start[:1].zero_()
    torch.cumsum(count, 0, dtype=torch.int32, out=start[1:])
    order = new(rows * topk)
    place_kernel[(rows,)](
        ids, counts, table, leader, bits, start, order, slots, direct, direct_count, first, chunk,
        pack,
        **shape, BLOCKS=blocks, BM=BLOCK, num_warps=8,
    )  # fmt: skip
    return Plan(
        first=first, rows=rows, chunk=chunk, order=order, start=start, slots=slots,
        leader=leader, active=active, active_count=active_count, direct=direct,
        direct_count=direct_count,
        mode=mode,
    )  # fmt: skip
