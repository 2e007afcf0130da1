"""How near the choice of a row was whose selected keys differ from those of another split.

The scores of that one row are computed once more, in float64, from the queries, keys and head
weights that the indexer had. Left out are the scores of the other split, which differ by rounding
where the row's input does, and rows with index scores in FP8.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from fullspan.models.dsa.attention import Indexer
from fullspan.ops.options import OpOptions
from fullspan.ops.selection import Selection
from fullspan.parallel.collectives import PendingTensor
from fullspan.parallel.context import SequenceContext
from fullspan.shapes import Float, Float32, Int64, Tensor


@dataclass(frozen=True)
class Margin:
    """Of a row of the pack. gap: the lowest score of a key that was chosen less the highest of one
    that was not; far below 0 the choice is not that of the scores. rounding: eps of the model's
    dtype times the sizes of the products that are summed to one of the two, the larger."""

    row: int
    gap: float
    rounding: float

    def __str__(self) -> str:
        times = self.gap / self.rounding if self.gap else 0.0
        return (
            f"in row {self.row} the last key chosen and the next score {self.gap:.1e} apart, "
            f"{times:.1g} times their rounding"
        )


@dataclass(frozen=True, kw_only=True)
class _Listener(SequenceContext):
    """Keeps what an indexer would choose from, and hands back what it has chosen before."""

    chosen: Selection
    kept: list[Tensor] = field(default_factory=list)

    def select(
        self, query: Tensor, keys: PendingTensor, weights: Tensor, *, topk: int, options: OpOptions
    ) -> Selection:
        gathered = keys.wait()
        if self.order is not None:
            gathered = gathered.index_select(0, self.order.places)
        self.kept.extend((query, gathered, weights))
        return self.chosen


@torch.no_grad()
def margin(
    indexer: Indexer,
    given: tuple[Any, ...],
    selection: Selection,
    differs: Tensor,
    rows: Int64[Tensor, "rows"],
) -> Margin | None:
    """Of the first local row that `differs`; None where there is none, it chose every key, or index
    scores are FP8.

    given: what the indexer's forward got, to which it gave `selection`. differs: bool [rows]. rows:
    places of the local rows in the pack. Entered by every rank of the sequence.
    """
    x, q_latent, angles, sequence, options = given
    facts = {fact.name: getattr(sequence, fact.name) for fact in fields(sequence)}
    listener = _Listener(**facts, chosen=selection)
    indexer.forward(x, q_latent, angles, listener, options)
    query, keys, weights = listener.kept
    places = differs.nonzero()[:1, 0].tolist()
    if not places or options.index_scores == "fp8":
        return None
    (place,) = places
    first, end = int(sequence.key_start[place]), int(sequence.key_end[place])
    ids = selection.ids[place].long() - first
    chosen = ids[(ids >= 0) & (ids < end - first)]
    return _margin(query[place], keys[first:end], weights[place], chosen, int(rows[place]))


def _margin(
    query: Float[Tensor, "index_heads index_dim"],
    keys: Float[Tensor, "range index_dim"],
    weights: Float32[Tensor, "index_heads"],
    chosen: Int64[Tensor, "chosen"],
    row: int,
) -> Margin | None:
    """chosen: places among the row's keys."""
    if len(chosen) in (0, len(keys)):
        return None
    eps = torch.finfo(query.dtype).eps
    query, keys, weights = query.double(), keys.double(), weights.double()
    scores = weights @ (query @ keys.T).relu()
    last = chosen[scores[chosen].argmin()]
    best = scores.index_fill(0, chosen, -torch.inf).argmax()
    two = keys[torch.stack([last, best])]
    sizes = weights.abs() @ (query.abs() @ two.abs().T)
    return Margin(row, float(scores[last] - scores[best]), eps * float(sizes.max()))
