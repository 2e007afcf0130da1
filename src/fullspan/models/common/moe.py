"""Mixture of experts with DeepSeek-V3's router (noaux_tc): choose in groups by corrected score,
weigh by plain score.

Rows are sorted by expert, exchanged so that each is where its expert is (the identity on one rank),
run through grouped linears, and brought back. A row's weight for an expert travels with it and is
applied between the two projections, where a row is a third as wide, so that no output of an expert
has to be kept for the weight's gradient. Nothing here depends on how many ranks there are.
"""

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fullspan.models.common.linear import GroupedLinear, wide_linear
from fullspan.models.common.mlp import GatedMLP
from fullspan.ops.rows.op import gather_rows, swiglu
from fullspan.parallel.expert import ExpertParallel, Route, inverse
from fullspan.shapes import Float, Float32, Int64, Tensor


class Routing(NamedTuple):
    """The experts of each row and their weights (float32), in the router's order."""

    experts: Int64[Tensor, "rows chosen"]
    weights: Float32[Tensor, "rows chosen"]


class Slots(NamedTuple):
    """The choices of some rows, sorted by expert.

    order   the choice (its row times the choices of a row, plus its place there) of each slot
    places  the slot of each choice
    counts  of slots, by expert
    """

    order: Int64[Tensor, "slots"]
    places: Int64[Tensor, "slots"]
    counts: Int64[Tensor, "experts"]

    @classmethod
    def of(cls, chosen: Int64[Tensor, "rows chosen"], experts: int) -> "Slots":
        # Not bincount: on a GPU it asks the host twice.
        expert, order = chosen.flatten().sort(stable=True)
        ends = torch.arange(experts + 1, device=expert.device)
        return cls(order, inverse(order), torch.searchsorted(expert, ends).diff())


class Router(nn.Module):
    """Sigmoid scores in float32; `e_score_correction_bias` steers the choice and never the weight.

    Groups: a group's rank is the sum of its two best corrected scores; only experts of the best
    `topk_group` groups can be chosen (DeepSeek-V3, section 2.1.2).
    """

    e_score_correction_bias: Tensor

    def __init__(
        self,
        hidden: int,
        experts: int,
        *,
        chosen: int,
        groups: int,
        topk_group: int,
        scaling: float,
        normalise: bool,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(experts, hidden, dtype=torch.float32), requires_grad=False
        )
        self.register_buffer("e_score_correction_bias", torch.empty(experts, dtype=torch.float32))
        self.chosen, self.groups, self.topk_group = chosen, groups, topk_group
        self.scaling, self.normalise = scaling, normalise

    def forward(self, x: Float[Tensor, "rows hidden"]) -> Routing:
        scores = wide_linear(x, self.weight).sigmoid()
        experts = self._choose(scores.detach() + self.e_score_correction_bias)
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * self.scaling)

    def _choose(self, corrected: Float32[Tensor, "rows experts"]) -> Int64[Tensor, "rows chosen"]:
        if self.topk_group < self.groups:
            grouped = corrected.unflatten(1, (self.groups, -1))
            ranks = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
            kept = torch.zeros_like(ranks, dtype=torch.bool)
            kept.scatter_(1, ranks.topk(self.topk_group, dim=1).indices, True)
            corrected = grouped.masked_fill(~kept.unsqueeze(2), float("-inf")).flatten(1)
        return corrected.topk(self.chosen, dim=1).indices


class GroupedExperts(nn.Module):
    """The routed experts that a rank holds, as two grouped linears; the first has gate above up, as
    `transformers` fuses them.
    """

    backend = "auto"  # of ops/rows

    def __init__(self, experts: int, held: range, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.intermediate = intermediate
        self.gate_up_proj = GroupedLinear(experts, hidden, 2 * intermediate, held=held)
        self.down_proj = GroupedLinear(experts, intermediate, hidden, held=held)

    def gated(
        self,
        x: Float[Tensor, "slots hidden"],
        weights: Float32[Tensor, "slots"],
        counts: Int64[Tensor, "experts"],
    ) -> Float[Tensor, "slots inner"]:
        """What the second projection reads, times weights: `x` is sorted by expert, `counts[e]` of
        its rows are expert e's.
        """
        return swiglu(self.gate_up_proj(x, counts), weights=weights, backend=self.backend)

    def forward(
        self,
        x: Float[Tensor, "slots hidden"],
        weights: Float32[Tensor, "slots"],
        counts: Int64[Tensor, "experts"],
    ) -> Float[Tensor, "slots hidden"]:
        """Outputs times weights, see `gated`."""
        return self.down_proj(self.gated(x, weights, counts), counts)


class _Unread(torch.autograd.Function):
    """Stands for a linear function of x whose values nobody reads: memory without values, and its
    adjoint.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size, adjoint: Callable[[Tensor], Tensor]):
        ctx.adjoint = adjoint
        return x.new_empty(shape)

    @staticmethod
    @once_differentiable  # which hides the parameters' names from pyright
    def backward(ctx: Any, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.adjoint(grads[0]), None, None


class MixtureOfExperts(nn.Module):
    """Routed experts plus the shared expert. Padding rows are computed like any other: nothing
    depends on them.

    expert_bytes: rows go to the experts in chunks whose slots stay below it, if they were even.
    """

    backend = "auto"  # of ops/rows

    def __init__(
        self,
        router: Router,
        experts: GroupedExperts,
        shared_experts: GatedMLP,
        *,
        expert_bytes: int,
    ) -> None:
        super().__init__()
        self.expert_bytes = expert_bytes
        self.gate = router
        self.experts = experts
        self.shared_experts = shared_experts

    def forward(
        self, x: Float[Tensor, "rows hidden"], parallel: ExpertParallel, *, unread: bool = False
    ) -> Float[Tensor, "rows hidden"]:
        """unread: nobody reads the values of the output, as in recompute, which is for the graph:
        what makes only the routed experts' is left out, and they are not set.
        """
        routing = self.gate(x)
        # As many chunks on every rank: all hold as many rows.
        rows = self._chunk_rows(x)
        slots = [Slots.of(part, parallel.experts) for part in routing.experts.split(rows)]
        routes = parallel.start(torch.stack([part.counts for part in slots]))
        shared = self.shared_experts(x)  # while the host waits for the sizes
        chunks = zip(x.split(rows), routing.weights.split(rows), slots, routes.wait())
        out = [self._exchanged(*chunk, parallel, unread) for chunk in chunks]
        routed = out.pop() if len(out) == 1 else torch.cat(out)
        out.clear()
        return routed.add_(shared)

    def _chunk_rows(self, x: Float[Tensor, "rows hidden"]) -> int:
        """Of as few and as even chunks as can be. A row's slots are held sorted, received and
        sorted again, and as outputs; between the two projections as gate, up and their product."""
        rows, hidden = x.shape
        slot_bytes = (4 * hidden + 3 * self.experts.intermediate) * x.element_size()
        most = max(1, self.expert_bytes // (self.gate.chosen * slot_bytes))
        return ceil(rows / ceil(rows / most)) if rows else most

    def _exchanged(
        self,
        x: Float[Tensor, "rows hidden"],
        weights: Float32[Tensor, "rows chosen"],
        slots: Slots,
        route: Route,
        parallel: ExpertParallel,
        unread: bool,
    ) -> Float[Tensor, "rows hidden"]:
        rows, chosen = weights.shape
        order, places = slots.order[:, None], slots.places[:, None]
        row_of_slot, slots_of_row = order // chosen, places.view(rows, chosen)
        # Nested calls, so that no name keeps the rows of a step alive through the next one.
        here, weights, dispatch = parallel.dispatch(
            gather_rows(x, row_of_slot, slots_of_row, backend=self.backend),
            gather_rows(weights.view(-1, 1), order, places, backend=self.backend).squeeze(1),
            route,
        )
        second = self.experts.down_proj
        if unread and isinstance(second, GroupedLinear):  # an adapter keeps what it makes

            def adjoint(gradient: Tensor) -> Tensor:
                gradient = gather_rows(gradient, row_of_slot, slots_of_row, backend=self.backend)
                return second.adjoint(parallel.follow(gradient, dispatch), route.counts)

            return _Unread.apply(self.experts.gated(here, weights, route.counts), x.shape, adjoint)
        out = parallel.combine(self.experts(here, weights, route.counts), dispatch)
        # In the order of the choices and without atomics: the same sum on every run.
        return gather_rows(out, slots_of_row, row_of_slot, backend=self.backend)
