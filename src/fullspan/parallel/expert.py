"""Expert parallelism: which experts a rank holds, and the exchange of rows with their ranks.

    dispatch   slots sorted by expert, and a weight for each, on the rank of their row  ->  slots
               sorted by local expert, on the rank of their expert
    combine    the inverse, for the experts' outputs

Both are all-to-alls with autograd, and the adjoint of each is the other. The sizes of the parts
depend on the router, so each exchange asks the host once for them. What an exchange needs to know
lives in the Dispatch that `dispatch` returns and is gone with it. On one rank both are identities.
"""

from dataclasses import dataclass

import torch

from fullspan.errors import ConfigError
from fullspan.ops.rows.op import gather_rows
from fullspan.parallel.collectives import all_to_all_rows
from fullspan.parallel.group import Group
from fullspan.shapes import Float, Float32, Int64, Tensor


class _Exchange(torch.autograd.Function):
    """Rows to other ranks; the gradient of each row comes back the same way."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int], group: Group):
        ctx.route = received, sent, group
        return all_to_all_rows(rows, sent, received, group, "rows of experts")

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        gradient = grad_outputs[0].contiguous()
        returned = all_to_all_rows(gradient, *ctx.route, what="gradients of rows of experts")
        return returned, None, None, None


@dataclass(frozen=True)
class Dispatch:
    """Slots on the rank of their experts, and the way back.

    rows, weights   sorted by local expert
    counts   slots of each local expert
    order    place among the received slots of each slot of `rows`, and the inverse; None on one
             rank
    sent, received   slots that go to and come from each rank
    """

    rows: Float[Tensor, "slots hidden"]
    weights: Float32[Tensor, "slots"]
    counts: Int64[Tensor, "local_experts"]
    order: tuple[Int64[Tensor, "slots 1"], Int64[Tensor, "slots 1"]] | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """`size` ranks share `experts` routed experts in equal runs; `group` is None on one rank.
    backend: of ops/rows.

    Raises:
        ConfigError: the ranks cannot share the experts evenly.
    """

    experts: int
    rank: int = 0
    size: int = 1
    group: Group | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        assert (self.group is None) == (self.size == 1), "a group where experts are shared"
        if self.experts % self.size:
            raise ConfigError(
                f"parallel.ep is {self.size}, which does not divide the model's {self.experts} "
                "routed experts"
            )

    @property
    def local(self) -> range:
        """The experts of this rank."""
        share = self.experts // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def dispatch(
        self,
        slots: Float[Tensor, "slots hidden"],
        weights: Float32[Tensor, "slots"],
        counts: Int64[Tensor, "experts"],
    ) -> Dispatch:
        """`slots` sorted by expert, `counts[e]` of them for expert e, to their experts' ranks."""
        if self.group is None:
            return Dispatch(slots, weights, counts)
        # Row r: what goes to the experts of rank r; after the exchange, what came from rank r.
        outgoing = counts.view(self.size, -1)
        even = [1] * self.size
        incoming = all_to_all_rows(outgoing, even, even, self.group, "rows per expert")
        sent, received = torch.stack([outgoing.sum(1), incoming.sum(1)]).tolist()
        slots = _Exchange.apply(slots, sent, received, self.group)
        weights = _Exchange.apply(weights[:, None], sent, received, self.group)
        order = _by_expert(incoming, sum(received))
        places = order[:, None], inverse(order)[:, None]
        slots = gather_rows(slots, *places, backend=self.backend)
        weights = gather_rows(weights, *places, backend=self.backend).squeeze(1)
        return Dispatch(slots, weights, incoming.sum(0), places, tuple(sent), tuple(received))

    def combine(
        self, out: Float[Tensor, "slots hidden"], dispatch: Dispatch
    ) -> Float[Tensor, "sent hidden"]:
        """The experts' outputs for `dispatch.rows`, back in the order of the dispatched slots."""
        if self.group is None or dispatch.order is None:
            return out
        order, arrival = dispatch.order
        out = gather_rows(out, arrival, order, backend=self.backend)
        return _Exchange.apply(out, list(dispatch.received), list(dispatch.sent), self.group)


def inverse(order: Int64[Tensor, "slots"]) -> Int64[Tensor, "slots"]:
    """The place of 0, 1, ... in a permutation of them."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def _by_expert(
    incoming: Int64[Tensor, "ranks local_experts"], slots: int
) -> Int64[Tensor, "slots"]:
    """Order that sorts slots that came rank by rank, and by expert within a rank, by expert alone;
    slots of one expert stay in the order of the ranks."""
    sizes = incoming.t().flatten()  # of the runs of one expert from one rank, as they will lie
    first = incoming.flatten().cumsum(0).view_as(incoming) - incoming
    moved = first.t().flatten() - (sizes.cumsum(0) - sizes)
    place = torch.arange(slots, device=incoming.device)
    return place + moved.repeat_interleave(sizes, output_size=slots)
