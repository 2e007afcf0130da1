"""Expert parallelism: which experts a rank holds, and the exchange of rows with their ranks.

    dispatch   slots sorted by expert, on the rank of their row  ->  slots sorted by local expert,
               on the rank of their expert
    combine    the inverse, for the experts' outputs

Both are all-to-alls with autograd, and the adjoint of each is the other. The sizes of the parts
depend on the router, so each exchange asks the host once for them. What an exchange needs to know
lives in the Dispatch that `dispatch` returns and is gone with it. On one rank both are identities.
"""

from dataclasses import dataclass

import torch

from fullspan.errors import ConfigError
from fullspan.parallel.collectives import all_to_all_rows
from fullspan.parallel.group import Group
from fullspan.shapes import Float, Int64, Tensor


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

    rows     sorted by local expert
    counts   slots of each local expert
    order    place among the received slots of each slot of `rows`; None on one rank
    sent, received   slots that go to and come from each rank
    """

    rows: Float[Tensor, "slots hidden"]
    counts: Int64[Tensor, "local_experts"]
    order: Int64[Tensor, "slots"] | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """`size` ranks share `experts` routed experts in equal runs; `group` is None on one rank.

    Raises:
        ConfigError: the ranks cannot share the experts evenly.
    """

    experts: int
    rank: int = 0
    size: int = 1
    group: Group | None = None

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
        self, slots: Float[Tensor, "slots hidden"], counts: Int64[Tensor, "experts"]
    ) -> Dispatch:
        """`slots` sorted by expert, `counts[e]` of them for expert e, to their experts' ranks."""
        if self.group is None:
            return Dispatch(slots, counts)
        # Row r: what goes to the experts of rank r; after the exchange, what came from rank r.
        outgoing = counts.view(self.size, -1)
        even = [1] * self.size
        incoming = all_to_all_rows(outgoing, even, even, self.group, "rows per expert")
        sent, received = torch.stack([outgoing.sum(1), incoming.sum(1)]).tolist()
        arrived = _Exchange.apply(slots, sent, received, self.group)
        order = _by_expert(incoming, sum(received))
        return Dispatch(arrived[order], incoming.sum(0), order, tuple(sent), tuple(received))

    def combine(
        self, out: Float[Tensor, "slots hidden"], dispatch: Dispatch
    ) -> Float[Tensor, "sent hidden"]:
        """The experts' outputs for `dispatch.rows`, back in the order of the dispatched slots."""
        if self.group is None or dispatch.order is None:
            return out
        arrival = torch.empty_like(dispatch.order)
        arrival[dispatch.order] = torch.arange(len(arrival), device=arrival.device)
        return _Exchange.apply(
            out[arrival], list(dispatch.received), list(dispatch.sent), self.group
        )


def _by_expert(
    incoming: Int64[Tensor, "ranks local_experts"], slots: int
) -> Int64[Tensor, "slots"]:
    """Order that sorts slots that came rank by rank, and by expert within a rank, by expert alone;
    slots of one expert stay in the order of the ranks."""
    ranks, local = incoming.shape
    expert = torch.arange(local, device=incoming.device).repeat(ranks)
    of_slot = expert.repeat_interleave(incoming.flatten(), output_size=slots)
    return of_slot.argsort(stable=True)
