"""The keys that an indexer chose: a value that one forward call makes and layers hand on."""

from dataclasses import dataclass, field
from typing import Any

from fullspan.shapes import Int32, Tensor


@dataclass(frozen=True, eq=False)
class Selection:
    """ids: global key ids of each row, ascending, then -1. counts: how many ids each row has.

    plans: what backward passes derived from the ids alone, for the next layer that uses them (see
    sparse_attention/plan.py). The layer that chose the keys comes last and empties it.
    """

    ids: Int32[Tensor, "rows topk"]
    counts: Int32[Tensor, "rows"]
    plans: dict[Any, Any] = field(default_factory=dict)
