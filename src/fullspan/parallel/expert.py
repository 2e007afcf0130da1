"""Expert parallelism: which experts a rank holds, and the exchange of rows with their ranks.

    start      slots of each expert, on the rank of their rows  ->  routes: how many go where
    dispatch   slots sorted by expert, and a weight for each, on the rank of their row  ->  slots
               sorted by local expert, on the rank of their expert
    combine    the inverse, for the experts' outputs

    follow     what `dispatch` does with rows, without autograd: the adjoint of `combine`

The middle two are all-to-alls with autograd, and the adjoint of each is the other. The sizes of
their parts depend on the router, so the host has to know them: it asks once, for all exchanges of a
layer's pass, and what is launched between `start` and `wait` keeps the device busy meanwhile. What
an exchange needs to know lives in the Dispatch that `dispatch` returns and is gone with it. On one
rank they are identities.
"""

from collections.abc import Sequence
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
    def forward(ctx, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group):
        ctx.route = received, sent, group
        return all_to_all_rows(rows, sent, received, group, "rows of experts")

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        gradient = grad_outputs[0].contiguous()
        returned = all_to_all_rows(gradient, *ctx.route, what="gradients of rows of experts")
        return returned, None, None, None


@dataclass(frozen=True)
class Route:
    """Of one exchange: slots of each local expert; on several ranks also those that came from each
    rank for each, and the slots that go to and come from each rank.
    """

    counts: Int64[Tensor, "local_experts"]
    incoming: Int64[Tensor, "ranks local_experts"] | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class PendingRoutes:
    """Routes of some exchanges, whose sizes are on their way to the host.

    counts: [exchanges, local experts]; incoming: [ranks, exchanges, local experts] and sizes:
    [sent and received, exchanges, ranks], neither on one rank.
    """

    def __init__(
        self, counts: Tensor, incoming: Tensor | None = None, sizes: Tensor | None = None
    ) -> None:
        self._counts, self._incoming = counts, incoming
        self._sizes = None if sizes is None else sizes.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if sizes is not None and sizes.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> list[Route]:
        """The host waits here."""
        if self._incoming is None or self._sizes is None:
            return [Route(counts) for counts in self._counts]
        if self._copied is not None:
            self._copied.synchronize()
        parts = zip(self._counts, self._incoming.unbind(1), *self._sizes.tolist(), strict=True)
        return [Route(counts, came, tuple(s), tuple(r)) for counts, came, s, r in parts]


@dataclass(frozen=True)
class Dispatch:
    """The way of some slots to their experts and back.

    order    place among the received slots of each slot at the experts, and the inverse; None on
             one rank
    """

    route: Route
    order: tuple[Int64[Tensor, "slots 1"], Int64[Tensor, "slots 1"]] | None = None


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

    def start(self, counts: Int64[Tensor, "exchanges experts"]) -> PendingRoutes:
        """counts[i, e]: slots of the i-th exchange for expert e. Every rank has as many."""
        if self.group is None:
            return PendingRoutes(counts)
        # Row r: what goes to the experts of rank r; after the exchange, what came from rank r.
        outgoing = counts.unflatten(1, (self.size, -1)).transpose(0, 1)
        even = [1] * self.size
        incoming = all_to_all_rows(outgoing, even, even, self.group, "rows per expert")
        sizes = torch.stack([outgoing.sum(2).t(), incoming.sum(2).t()])
        return PendingRoutes(incoming.sum(0), incoming, sizes)

    def dispatch(
        self, slots: Float[Tensor, "slots hidden"], weights: Float32[Tensor, "slots"], route: Route
    ) -> tuple[Float[Tensor, "here hidden"], Float32[Tensor, "here"], Dispatch]:
        """`slots` sorted by expert to their experts' ranks, sorted by local expert there."""
        if self.group is None or route.incoming is None:
            return slots, weights, Dispatch(route)
        order = _by_expert(route.incoming, sum(route.received))
        places = order[:, None], inverse(order)[:, None]
        way = route.sent, route.received, self.group
        slots = gather_rows(_Exchange.apply(slots, *way), *places, backend=self.backend)
        weights = _Exchange.apply(weights[:, None], *way)
        weights = gather_rows(weights, *places, backend=self.backend).squeeze(1)
        return slots, weights, Dispatch(route, places)

    def combine(
        self, out: Float[Tensor, "here hidden"], dispatch: Dispatch
    ) -> Float[Tensor, "slots hidden"]:
        """The experts' outputs, back in the order of the dispatched slots."""
        if self.group is None or dispatch.order is None:
            return out
        order, arrival = dispatch.order
        out = gather_rows(out, arrival, order, backend=self.backend)
        return _Exchange.apply(out, dispatch.route.received, dispatch.route.sent, self.group)

    def follow(
        self, gradient: Float[Tensor, "slots hidden"], dispatch: Dispatch
    ) -> Float[Tensor, "here hidden"]:
        """The gradient of what `combine` was given, from that of what it gave."""
        if self.group is None or dispatch.order is None:
            return gradient
        way = dispatch.route.sent, dispatch.route.received, self.group
        arrived = all_to_all_rows(gradient, *way, "gradients of rows of experts")
        return gather_rows(arrived, *dispatch.order, backend=self.backend)


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
