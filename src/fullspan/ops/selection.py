"""The keys that an indexer chose: a value that one forward call makes and layers hand on."""

from dataclasses import dataclass

from fullspan.shapes import Int32, Tensor


@dataclass(frozen=True, eq=False)
class Selection:
    """ids: global key ids of each row, ascending, then -1. counts: how many ids each row has."""

    ids: Int32[Tensor, "rows topk"]
    counts: Int32[Tensor, "rows"]
