"""What a model sees of the packed sequence: a SequenceContext for each microbatch.

Every fact about position (place inside the document, key range) is derived here from the pack's
global document bounds and handed to all layers, so no layer builds a table or asks the host. The
context also owns the exchanges of an attention layer: the differentiable gather of the latent
key/value, whose adjoint is a float32 reduce-scatter, and for the frozen indexer the gather of its
keys and the trade of rows that evens its work (balance.py). On one rank every exchange is the
identity. It hands on, and leaves to expert.py, what is exchanged between experts.

    forward   gathered  = all_gather(latent)
              out       = attention of this rank's queries over gathered
    backward  dgathered = sum over this rank's queries, in float32
              dlatent   = reduce_scatter(dgathered)

The gather is no autograd function of its own, because autograd would round the gathered gradient to
the latent's dtype before the sum over ranks: the attention, which is one, takes the gathered latent
and starts the reduce-scatter (models/dsa/absorbed.py). A second function stands at the latent and
waits for it. Autograd runs what was recorded last first, so the place where it is recorded, at the
start of the gather, decides what overlaps: the backward of all that the attention was given and
that was made after the gather, which is the whole query.
"""

from dataclasses import dataclass

import torch

from fullspan.ops.index_topk.op import index_topk
from fullspan.ops.options import OpOptions
from fullspan.ops.packed import PackedLayout
from fullspan.ops.selection import Selection
from fullspan.parallel.balance import IndexerBalance, Trade
from fullspan.parallel.collectives import (
    PendingTensor,
    start_all_gather_rows,
    start_reduce_scatter_rows,
    sum_over_ranks,
)
from fullspan.parallel.expert import ExpertParallel
from fullspan.parallel.group import Group
from fullspan.parallel.sequence import Partition
from fullspan.shapes import Float, Float32, Int64, Tensor


@dataclass
class GradientSum:
    """The sum over ranks of one latent's gradient, between its start and its wait."""

    group: Group | None
    order: "GatherOrder | None"
    pending: PendingTensor | None = None

    def start(self, gradient: Float[Tensor, "pack qk"], dtype: torch.dtype) -> Tensor:
        """Begin to sum the gradient of the whole, in its own dtype. What comes back, [rows, qk] of
        the latent's dtype, is for autograd: it stands for the sum in flight, which replaces it.
        """
        if self.group is None:
            return gradient.to(dtype)
        if self.order is not None:
            gradient = gradient.index_select(0, self.order.gathered)
        self.pending = start_reduce_scatter_rows(gradient, self.group, "the latent's gradient")
        # Its values are never read.
        rows = len(gradient) // self.group.size
        return gradient.new_zeros((), dtype=dtype).expand(rows, gradient.shape[1])


class _AwaitGradient(torch.autograd.Function):
    """Identity on the latent; its backward waits for the reduce-scatter in flight."""

    @staticmethod
    def forward(ctx, latent: Tensor, gradient: GradientSum) -> Tensor:
        ctx.gradient = gradient
        return latent.view_as(latent)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (placeholder,) = grad_outputs
        assert ctx.gradient.pending is not None, "the attention's backward runs before this one"
        summed = ctx.gradient.pending.wait()
        ctx.gradient.pending = None
        return summed.to(placeholder.dtype), None


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks; the gradients of the ranks' uses of it are summed the same way."""

    @staticmethod
    def forward(ctx, local: Tensor, group: Group):
        ctx.group = group
        return sum_over_ranks(local, group, "the documents' sums")

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        gradient = grad_outputs[0].contiguous()
        return sum_over_ranks(gradient, ctx.group, "gradients of the documents' sums"), None


@dataclass(frozen=True)
class GatherOrder:
    """How a gather in rank order becomes the pack in its own order, where the two differ.

    places     place in the gather of each row of the pack
    gathered   the inverse: row of the pack at each place of the gather
    """

    places: Int64[Tensor, "pack"]
    gathered: Int64[Tensor, "pack"]


@dataclass(frozen=True)
class GatheredLatent:
    """A layer's latent on its way to every rank, and the way back of its gradient."""

    local: Float[Tensor, "rows qk"]
    full: PendingTensor
    gradient: GradientSum

    @property
    def pack(self) -> int:
        """Rows of the whole."""
        group = self.gradient.group
        return len(self.local) * (1 if group is None else group.size)

    def wait(self) -> Float[Tensor, "pack qk"]:
        """The whole, in the pack's order; once. No autograd: `gradient` takes its gradient."""
        return _ordered(self.full.wait(), self.gradient.order)


@dataclass(frozen=True, kw_only=True)
class SequenceContext:
    """One microbatch as the model sees it on this rank.

    positions   place of each local row inside its document; 0 on padding
    key_start, key_end   the global keys [key_start, key_end) that each local row may attend to;
                         empty on padding
    order    how a gather becomes the pack; None where it is the pack
    trade    which rows the indexer scores here; None: this rank's own
    """

    positions: Int64[Tensor, "rows"]
    key_start: Int64[Tensor, "rows"]
    key_end: Int64[Tensor, "rows"]
    experts: ExpertParallel
    group: Group | None = None
    order: GatherOrder | None = None
    trade: Trade | None = None

    @classmethod
    def create(
        cls,
        layout: PackedLayout,
        partition: Partition,
        *,
        experts: ExpertParallel,
        rank: int = 0,
        group: Group | None = None,
        device: torch.device | None = None,
        balance: IndexerBalance | None = None,
    ) -> "SequenceContext":
        """Derive the facts of `rank` from the global layout. `group` is None exactly when the
        partition has one rank; without a `balance` every rank's indexer scores its own rows.
        """
        assert (group is None) == (partition.size == 1), (
            "a group is given exactly where the sequence is split"
        )
        assert layout.padded_length == partition.length, (
            "layout and partition describe packs of unlike length"
        )
        rows = partition.rows(rank)
        start, end = layout.key_ranges(rows)
        facts = [tensor.to(device) for tensor in (layout.positions(rows), start, end)]
        order = None
        if partition.mode != "contiguous" and group is not None:
            order = GatherOrder(partition.places().to(device), partition.gathered().to(device))
        return cls(
            positions=facts[0],
            key_start=facts[1],
            key_end=facts[2],
            experts=experts,
            group=group,
            order=order,
            trade=None if balance is None else balance.plan(layout, partition, rank, device),
        )

    def start_gather(self, latent: Float[Tensor, "rows qk"]) -> GatheredLatent:
        """Begin to send the latent to every rank; other work may run before it is waited for."""
        gradient = GradientSum(self.group, self.order)
        if self.group is not None:
            latent = _AwaitGradient.apply(latent, gradient)
        full = start_all_gather_rows(latent, self.group, "the latent")
        return GatheredLatent(latent, full, gradient)

    def start_index_gather(self, keys: Float[Tensor, "rows index_dim"]) -> PendingTensor:
        """Begin to send the frozen indexer's keys to every rank; no gradient flows through them."""
        return start_all_gather_rows(keys.detach(), self.group, "the indexer's keys")

    def select(
        self,
        query: Float[Tensor, "rows index_heads index_dim"],
        keys: PendingTensor,
        weights: Float32[Tensor, "rows index_heads"],
        *,
        topk: int,
        options: OpOptions,
    ) -> Selection:
        """The best `topk` keys of the whole pack for each local row, see `index_topk`. `keys` are
        those of `start_index_gather`."""
        start, end = self.key_start, self.key_end
        if self.trade is not None and self.group is not None:
            start, end = self.trade.key_start, self.trade.key_end
            query, weights = self.trade.exchange(query, weights, self.group)
        gathered = _ordered(keys.wait(), self.order)
        found = index_topk(query, gathered, weights, start, end, topk=topk, options=options)
        if self.trade is not None and self.group is not None:
            found = self.trade.give_back(found, self.group)
        return found

    def sum_over_ranks(self, local: Tensor) -> Tensor:
        """The sum of `local`, of one shape everywhere, over the ranks of the sequence; with
        autograd. Every rank calls it, and every rank's loss has to depend on the result.
        """
        return local if self.group is None else _SumOverRanks.apply(local, self.group)


def _ordered(gathered: Tensor, order: GatherOrder | None) -> Tensor:
    return gathered if order is None else gathered.index_select(0, order.places)
