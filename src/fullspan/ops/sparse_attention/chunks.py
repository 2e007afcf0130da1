"""How many rows of a backward pass go together under a budget of bytes. Imports no torch.

Three numbers. The kernels work on one *chunk* of rows after the other, whose partial rows exist at
once, and after which the gradient of every key that the chunk chose is read and written. A *span*
is some whole chunks and one call of the kernels: a caller that makes queries a span at a time holds
them for as long. A *block* is some whole spans that share a plan (plan.py), whose kernels want many
groups of rows. README.md has the arithmetic.
"""

import functools
from dataclasses import dataclass
from math import exp
from typing import NamedTuple

from fullspan.errors import ConfigError
from fullspan.ops.sizes import power_of_2

GROUP = 16  # neighbouring rows whose common keys are summed together; a bit of a plan word each
BLOCK = 128  # shared keys of one block, where a backend does not say otherwise
HOPPER_BLOCK = 256  # those of `hopper`
MOST_ROWS = 16384  # of a chunk: a plan word counts 15 bits of partial rows a key
SPAN_ROWS = 512  # of a span at least: enough for the products of its rows
PLAN_ROWS = 264 * GROUP  # of a block at least: two groups for each multiprocessor of an H200,
PLAN_SHARE = 16  # unless their plan takes more than 1 / this of the budget
KEPT_SHARE = 4  # plans are kept for the next layer where all of a selection's take 1 / this at most
SLACK = 1.05  # how much slower than the best a chunk may be that needs less memory
TAIL = 0.2  # of a round over the multiprocessors, lost at the end of every chunk


class Rows(NamedTuple):
    """Of a chunk, of a span and of a block; a span is whole chunks, a block whole spans, or each is
    all there are.
    """

    chunk: int
    span: int
    block: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What decides the memory of a backward. heads: padded. units: multiprocessors; tiles: programs
    a row. beside: bytes of a row that the caller holds while its span runs. fused: P and dS of
    groups that share keys lie among their partial rows, those of others nowhere. block: shared keys
    of a block.
    """

    topk: int
    pack: int
    qk: int
    heads: int
    itemsize: int
    units: int
    tiles: int = 1
    beside: int = 0
    fused: bool = False
    block: int = BLOCK

    @property
    def width(self) -> int:
        """Shared keys that a group can have: each has GROUP / 2 of its GROUP * topk pairs."""
        return max(2 * power_of_2(self.topk), self.block)

    @property
    def blocks(self) -> int:
        """Blocks of shared keys that a group may have. With more than 3 / 4 of the possible keys
        each is shared by so few rows that little is won, and in `triton` every block costs a
        program, used or not.
        """
        return max(1, self.width * 3 // (4 * self.block))

    @property
    def row_bytes(self) -> int:
        """Of a row of a chunk: P, dS and partial rows."""
        return self.topk * self.pair_width * self.itemsize

    @property
    def pair_width(self) -> int:
        """Elements of a (row, key) pair in a chunk's buffers."""
        return self.qk + (0 if self.fused else 2 * self.heads)

    @property
    def plan_bytes(self) -> int:
        """Of a row of a plan, the bounds of its chunks aside (plan.Plan)."""
        shared = self.blocks * self.block
        return 8 * self.topk + 4 * shared + (68 * self.blocks + 8) // GROUP + 8

    @property
    def span_bytes(self) -> int:
        """Of a row of a span while it runs: cleaned ids of `hopper`, what is beside."""
        return 4 * self.topk + 16 + self.beside

    @property
    def table_bytes(self) -> int:
        """Of a row, only while its plan is made: the table and the scratch of the shared keys."""
        return (4 * self.pack + 8 * self.width + 4 * self.blocks) // GROUP

    def kept_bytes(self, rows: int, chunk: int) -> int:
        """Of the plan of so many rows in such chunks."""
        return rows * self.plan_bytes + 4 * (self.pack * -(-rows // chunk) + 1)

    def keeps(self, rows: int, chunk: int, budget: int) -> bool:
        """Whether the plans of so many rows are kept for the next layer."""
        return self.kept_bytes(rows, chunk) <= budget // KEPT_SHARE

    def rows(self, chunk: int, rows: int, budget: int) -> Rows:
        """With so many rows a chunk. A span, and the table of a plan being made, take a quarter of
        the budget, the plan itself a PLAN_SHARE-th, before they are rounded up."""
        least = min(SPAN_ROWS, budget // 4 // self.span_bytes) if self.beside else PLAN_ROWS
        span = min(rows, max(1, -(-least // chunk)) * chunk)
        table, plan = budget // 4 // self.table_bytes, budget // PLAN_SHARE // self.plan_bytes
        least = min(PLAN_ROWS, table, plan)
        return Rows(chunk, span, min(rows, max(1, -(-least // span)) * span))

    def held(self, chosen: Rows, rows: int, budget: int) -> int:
        """Bytes of a backward pass over so many rows."""
        chunk, span, block = chosen
        plans = self.kept_bytes(rows if self.keeps(rows, chunk, budget) else block, chunk)
        bounds = 4 * self.pack * -(-block // chunk)  # counted before they are summed
        most = max(chunk * self.row_bytes, block * self.table_bytes + bounds)
        return span * self.span_bytes + plans + most

    def cost(self, chunk: int) -> float:
        """Of a chunk, in bytes moved: its rounds over the multiprocessors, and its keys' gradients
        read and written in fp32, for ids drawn at random.
        """
        rounds = -(-chunk * self.tiles // self.units) + TAIL
        moved = self.units / self.tiles * self.row_bytes * 2
        keys = self.pack * (1 - exp(-chunk * self.topk / self.pack))
        return rounds * moved + keys * self.qk * 8


def span_rows(rows: int, beside: int, budget: int) -> int:
    """Rows of a span that only the caller holds anything for, in a quarter of the budget."""
    return max(1, min(rows, budget // 4 // beside) if beside else rows)


def beside_span(budget: int) -> int:
    """Bytes for a backend without a plan, beside what the caller of `span_rows` holds."""
    return budget // 4 * 3


def least_budget(needed: int) -> int:
    """The smallest budget whose `beside_span` is enough."""
    return -(-needed // 3) * 4


@functools.lru_cache(maxsize=256)
def choose_rows(sizes: Sizes, rows: int, budget: int) -> Rows:
    """Of the smallest chunk whose cost a row is within SLACK of the best one's that fits.
    ConfigError: not even GROUP rows fit.
    """
    rows = max(rows, 1)
    most = min(MOST_ROWS, (2**31 - 1) // (sizes.topk * sizes.heads), budget // sizes.row_bytes)
    most = min(most, -(-rows // GROUP) * GROUP)
    chunks = range(GROUP, most + 1, GROUP)
    for each in (
        [sizes.rows(chunk, rows, budget) for chunk in chunks],
        [Rows(chunk, min(chunk, rows), min(chunk, rows)) for chunk in chunks],
    ):
        each = [chosen for chosen in each if sizes.held(chosen, rows, budget) <= budget]
        if each:
            break
    else:
        least = sizes.held(Rows(GROUP, GROUP, GROUP), rows, 0)
        raise ConfigError(
            f"ops.attention_bytes is {budget}; the backward of sparse attention needs at least "
            f"{least} ({GROUP} rows, {sizes.topk} of {sizes.pack} keys, {sizes.heads} heads)"
        )
    cost = [sizes.cost(n) / n for n in (min(chosen.chunk, rows) for chosen in each)]
    enough = SLACK * min(cost)
    return next(chosen for chosen, its in zip(each, cost) if its <= enough)
