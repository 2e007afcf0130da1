"""How many rows of a backward pass go together under a budget of bytes. Imports no torch.

A *span* of rows shares one plan (plan.py) and one call of the kernels; a caller that makes queries
a span at a time holds them for as long. Within it the kernels work on one *chunk* after the other,
whose probabilities and partial rows exist at once, and after which the gradient of every key that
the chunk chose is read and written. README.md has the arithmetic.
"""

import functools
from dataclasses import dataclass
from math import exp

from fullspan.errors import ConfigError
from fullspan.ops.sizes import power_of_2

GROUP = 16  # neighbouring rows whose common keys are summed together; a bit of a plan word each
BLOCK = 128  # shared keys of one block
MOST_ROWS = 16384  # of a chunk: a plan word counts 15 bits of partial rows a key
SPAN_SHARE = 4  # a span's plan, and what the caller holds for it, take 1 / this of the budget
KEPT_SHARE = 4  # plans are kept for the next layer where all of a selection's take 1 / this at most
SLACK = 1.03  # how much slower than the best a chunk may be that needs less memory
TAIL = 0.2  # of a round over the multiprocessors, lost at the end of every chunk


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What decides the memory of a backward. heads: padded. units: multiprocessors; tiles: programs
    a row. beside: bytes of a row that the caller holds while its span runs. fused: P and dS of
    groups that share keys lie among their partial rows, those of others nowhere.
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

    @property
    def width(self) -> int:
        """Shared keys that a group can have: each has GROUP / 2 of its GROUP * topk pairs."""
        return max(2 * power_of_2(self.topk), BLOCK)

    @property
    def blocks(self) -> int:
        """Blocks of shared keys that a group may have. With more than 3 / 4 of the possible keys
        each is shared by so few rows that little is won, and every block costs a program, used or
        not.
        """
        return max(1, self.width * 3 // (4 * BLOCK))

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
        shared = self.blocks * BLOCK
        return 8 * self.topk + 4 * shared + (68 * self.blocks + 8) // GROUP + 8

    @property
    def span_bytes(self) -> int:
        """Of a row of a span while it runs: plan, cleaned ids of `hopper`, what is beside."""
        return self.plan_bytes + 4 * self.topk + 16 + self.beside

    @property
    def table_bytes(self) -> int:
        """Of a row, only while its plan is made: the table and the scratch of the shared keys."""
        return (4 * self.pack + 8 * self.width + 4 * self.blocks) // GROUP

    def kept_bytes(self, rows: int, chunk: int) -> int:
        """Of the plan of so many rows in such chunks."""
        return rows * self.plan_bytes + 4 * (self.pack * -(-rows // chunk) + 1)

    def cost(self, chunk: int) -> float:
        """Of a chunk, in bytes moved: its rounds over the multiprocessors, and its keys' gradients
        read and written in fp32, for ids drawn at random.
        """
        rounds = -(-chunk * self.tiles // self.units) + TAIL
        moved = self.units / self.tiles * self.row_bytes * 2
        keys = self.pack * (1 - exp(-chunk * self.topk / self.pack))
        return rounds * moved + keys * self.qk * 8


def even(rows: int, most: int) -> int:
    """Rows of a part, where `rows` go in the fewest parts of at most `most`, all but the last alike
    and whole groups."""
    parts = max(1, -(-rows // most))
    return -(-rows // (parts * GROUP)) * GROUP


def span_rows(rows: int, beside: int, workspace: int) -> int:
    """Rows of a span where nothing but the caller holds anything for it."""
    return max(1, min(rows, workspace // SPAN_SHARE // beside) if beside else rows)


@functools.lru_cache(maxsize=256)
def choose_rows(sizes: Sizes, rows: int, workspace: int) -> tuple[int, int]:
    """Rows of a span and of a chunk that fit `workspace` bytes. A span is all rows or whole chunks.
    ConfigError: not even GROUP fit.
    """
    whole = max(GROUP, -(-rows // GROUP) * GROUP)
    most = workspace // SPAN_SHARE // sizes.span_bytes
    most = min(whole, most, workspace // (sizes.span_bytes + sizes.table_bytes))
    most = max(GROUP, most // GROUP * GROUP)
    while True:
        fitting = _fitting(sizes, most, workspace - most * sizes.span_bytes)
        if most == GROUP or (fitting and fitting[-1] >= min(most, 4 * GROUP)):
            break
        most = max(GROUP, most // 2 // GROUP * GROUP)
    if not fitting or GROUP * (sizes.span_bytes + sizes.table_bytes) > workspace:
        least = GROUP * (sizes.span_bytes + max(sizes.table_bytes, sizes.row_bytes))
        raise ConfigError(
            f"ops.attention_bytes is {workspace}; the backward of sparse attention needs at least "
            f"{least + 8 * sizes.pack} ({GROUP} rows, {sizes.topk} of {sizes.pack} keys, "
            f"{sizes.heads} heads)"
        )
    if most == whole:
        fitting = sorted({even(rows, chunk) for chunk in fitting})
        cost = {chunk: -(-rows // chunk) * sizes.cost(chunk) for chunk in fitting}
    else:
        cost = {chunk: sizes.cost(chunk) / chunk for chunk in fitting}
    enough = SLACK * min(cost.values())
    chunk = next(chunk for chunk in fitting if cost[chunk] <= enough)
    return (whole if most == whole else most // chunk * chunk), chunk


def _fitting(sizes: Sizes, span: int, room: int) -> list[int]:
    """Every chunk whose buffers, with the bounds of all chunks, fit into `room`."""
    most = min(span, MOST_ROWS, (2**31 - 1) // (sizes.topk * sizes.heads), room // sizes.row_bytes)
    return [
        chunk
        for chunk in range(GROUP, most + 1, GROUP)
        if chunk * sizes.row_bytes + 8 * sizes.pack * -(-span // chunk) <= room
    ]
