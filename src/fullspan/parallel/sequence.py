"""Which rows of a pack each context-parallel rank holds: pure index maps, no communication.

contiguous   (the default) rank r of `size` holds the r-th of `size` equal runs of rows. A gather in
             rank order is then the pack in its own order.
zigzag       the pack is cut into 2 * size equal chunks and rank r holds the chunks r and
             2 * size - 1 - r, so that causal work is even. A gather has to be put in order.

The names are those of Megatron-LM and verl, whose zigzag cuts every document; here it is the pack
that is cut. Document bounds play no part: a document may cross any number of rank borders.
"""

from dataclasses import dataclass

import torch

from fullspan.errors import LayoutError
from fullspan.parallel.config import PARTITIONS
from fullspan.shapes import Int64, Tensor


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
        multiple = self.size * PARTITIONS[self.mode]
        if self.size < 1 or self.length < 1 or self.length % multiple:
            raise LayoutError(
                f"a pack of {self.length} rows cannot be shared evenly by {self.size} ranks "
                f"({self.mode}): the length must be a positive multiple of {multiple} "
                "(settings data.pack_length and parallel.cp)"
            )

    @property
    def rows_per_rank(self) -> int:
        return self.length // self.size

    def rows(self, rank: int) -> Int64[Tensor, "rows"]:
        """Global row ids of the rows that `rank` holds, in the order in which it holds them."""
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank} is outside a partition over {self.size} ranks")
        chunks = torch.arange(self.length).view(PARTITIONS[self.mode] * self.size, -1)
        if self.mode == "contiguous":
            return chunks[rank]
        return torch.cat([chunks[rank], chunks[2 * self.size - 1 - rank]])

    def gathered(self) -> Int64[Tensor, "pack"]:
        """Global row ids of a gather's rows: those of all ranks, in rank order."""
        return torch.cat([self.rows(rank) for rank in range(self.size)])

    def places(self) -> Int64[Tensor, "pack"]:
        """The inverse map: the place in a gather of each global row. Rank r holds the places
        [r * rows_per_rank, (r + 1) * rows_per_rank)."""
        return torch.argsort(self.gathered())
