"""Which rows of a pack each context-parallel rank holds: pure index maps, no communication.

`contiguous` (the default): of a pack of `length` rows, rank r of `size` holds rows [r * length /
size, (r + 1) * length / size). The name is that of Megatron-LM and verl. A gather over the ranks
therefore returns the pack in its own order. Document bounds play no part: a document may cross any
number of rank borders.
"""

from dataclasses import dataclass

import torch

from fullspan.errors import LayoutError
from fullspan.shapes import Int64, Tensor

PARTITIONS = ("contiguous",)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """An even split of `length` pack rows over `size` ranks.

    Raises:
        LayoutError: an unknown mode, or a length that the ranks cannot share evenly.
    """

    mode: str = "contiguous"
    size: int
    length: int

    def __post_init__(self) -> None:
        if self.mode not in PARTITIONS:
            raise LayoutError(
                f"unknown partition {self.mode!r}: allowed are {', '.join(PARTITIONS)} "
                "(setting parallel.partition)"
            )
        if self.size < 1 or self.length < 1 or self.length % self.size:
            raise LayoutError(
                f"a pack of {self.length} rows cannot be shared evenly by {self.size} ranks: the "
                "length must be a "
                "positive multiple of the ranks (settings data.pack_length and parallel.cp)"
            )

    @property
    def rows_per_rank(self) -> int:
        return self.length // self.size

    def rows(self, rank: int) -> Int64[Tensor, "rows"]:
        """Global row ids of the rows that `rank` holds, in the order in which it holds them."""
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank} is outside a partition over {self.size} ranks")
        first = rank * self.rows_per_rank
        return torch.arange(first, first + self.rows_per_rank, dtype=torch.int64)

    def owner(self, rows: Int64[Tensor, "n"]) -> tuple[Int64[Tensor, "n"], Int64[Tensor, "n"]]:
        """The inverse map: for global row ids, the rank that holds each and its place among that
        rank's rows.
        """
        return rows // self.rows_per_rank, rows % self.rows_per_rank


def padded_length(tokens: int, multiple: int) -> int:
    """The smallest length >= max(tokens, 1) that `multiple` ranks can share evenly."""
    return -(-max(tokens, 1) // multiple) * multiple
