"""The keys that an indexer chose. A value: made by one forward call and handed from layer to layer, never stored."""

from dataclasses import dataclass

from fullspan.shapes import Int32, Tensor


@dataclass(frozen=True)
class Selection:
    """ids: global key ids of each row, ascending, then -1. counts: how many ids each row has."""

    ids: Int32[Tensor, "rows topk"]
    counts: Int32[Tensor, "rows"]
