"""What a model sees of the packed sequence: a SequenceContext for each microbatch.

Every fact about position (place inside the document, key range) is derived here from the pack's
global document bounds and handed to all layers, so no layer builds a table or asks the host. The
context also owns the exchanges of an attention layer: the differentiable gather of the latent
key/value, whose adjoint is a float32 reduce-scatter, and for the frozen indexer the gather of its
keys and the trade of rows that evens its work (balance.py). On one rank every exchange is the
identity. It hands on, and leaves to expert.py, what is exchanged between experts.

    forward   gathered  = all_gather(latent)
              out       = sparse_attention(query, gathered, selection)
    backward  dgathered = sum over this rank's queries, in float32
              dlatent   = reduce_scatter(dgathered)

The gather and the attention are one autograd function, because autograd would otherwise round the
gathered gradient to the latent's dtype before the sum over ranks. A second function stands at the
latent and waits for the reduce-scatter. Autograd runs what was recorded last first, so the place
where it is recorded, at the start of the gather, decides what overlaps: the backward of all that
`attend` was given and that was made after the gather, which is the whole query.
"""

from dataclasses import dataclass

import torch

from fullspan.ops.backend import resolve
from fullspan.ops.index_topk.op import index_topk
from fullspan.ops.options import OpOptions
from fullspan.ops.packed import PackedLayout
from fullspan.ops.selection import Selection
from fullspan.ops.sparse_attention.op import (
    sparse_attention_forward,
    sparse_attention_gradients,
)
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
class _SumInFlight:
    """The reduce-scatter of one latent's gradient, between its start and its wait."""

    pending: PendingTensor | None = None


@dataclass(frozen=True)
class _AttentionCall:
    """What one call of the gathered attention needs besides tensors."""

    scale: float
    value_dim: int
    options: OpOptions
    selection: Selection
    last: bool
    group: Group | None
    order: "GatherOrder | None"
    gradient: _SumInFlight

    def constants(self) -> tuple[None, float, int, str, int]:
        """The arguments that the attention op takes after its tensors: no sink, then these."""
        backend, workspace = self.options.sparse_attention, self.options.workspace_bytes
        return None, self.scale, self.value_dim, backend, workspace


class _AwaitGradient(torch.autograd.Function):
    """Identity on the latent; its backward waits for the reduce-scatter in flight."""

    @staticmethod
    def forward(ctx, latent: Tensor, gradient: _SumInFlight) -> Tensor:
        ctx.gradient = gradient
        return latent.view_as(latent)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (placeholder,) = grad_outputs
        assert ctx.gradient.pending is not None, "the attention's backward runs before this one"
        summed = ctx.gradient.pending.wait()
        ctx.gradient.pending = None
        return summed.to(placeholder.dtype), None


class _GatheredSparseAttention(torch.autograd.Function):
    """Sparse attention of local queries over the gathered latent; its gradient sums in float32."""

    @staticmethod
    def forward(ctx, query, latent, gathered, call: _AttentionCall):
        chosen = call.selection
        out, lse = sparse_attention_forward(
            query, gathered, chosen.ids, chosen.counts, *call.constants()
        )
        ctx.save_for_backward(query, gathered, out, lse, chosen.ids, chosen.counts)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        query, gathered, out, lse, *_ = ctx.saved_tensors
        call = ctx.call
        grad_query, grad_gathered, _ = sparse_attention_gradients(
            grad_outputs[0].contiguous(), query, gathered, call.selection, out, lse,
            *call.constants(),
        )  # fmt: skip
        if call.last:
            call.selection.plans.clear()
        if call.group is None:
            return grad_query, grad_gathered.to(gathered.dtype), None, None
        placeholder = None
        if ctx.needs_input_grad[1]:
            if call.order is not None:
                grad_gathered = grad_gathered.index_select(0, call.order.gathered)
            call.gradient.pending = start_reduce_scatter_rows(
                grad_gathered, call.group, "the latent's gradient"
            )
            # Stands for the sum in flight: its values are never read, _AwaitGradient replaces it.
            rows = gathered.shape[0] // call.group.size
            placeholder = gathered.new_zeros(()).expand(rows, gathered.shape[1])
        return grad_query, placeholder, None, None


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
    """A layer's latent on its way to every rank: from `start_gather`, used up by `attend`."""

    local: Float[Tensor, "rows qk"]
    full: PendingTensor
    gradient: _SumInFlight


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
        """Begin to send the latent to every rank; other work may run before `attend` uses it."""
        gradient = _SumInFlight()
        if self.group is not None:
            latent = _AwaitGradient.apply(latent, gradient)
        return GatheredLatent(
            latent, start_all_gather_rows(latent, self.group, "the latent"), gradient
        )

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
        gathered = self._ordered(keys.wait())
        found = index_topk(query, gathered, weights, start, end, topk=topk, options=options)
        if self.trade is not None and self.group is not None:
            found = self.trade.give_back(found, self.group)
        return found

    def attend(
        self,
        query: Float[Tensor, "rows heads qk"],
        latent: GatheredLatent,
        selection: Selection,
        *,
        last: bool,
        scale: float,
        value_dim: int,
        options: OpOptions,
    ) -> Float[Tensor, "rows heads value"]:
        """Attention of the local queries over the selected keys of the whole pack.

        Gradients flow to `query` and to the latent of every rank. last: the backward pass ends its
        use of the selection here.
        """
        widths = {"qk": query.shape[2], "value_dim": value_dim, "topk": selection.ids.shape[1]}
        options = resolve(options, query.device, query.dtype, **widths)
        call = _AttentionCall(
            scale, value_dim, options, selection, last, self.group, self.order, latent.gradient
        )
        gathered = self._ordered(latent.full.wait())
        return _GatheredSparseAttention.apply(query, latent.local, gathered, call)

    def sum_over_ranks(self, local: Tensor) -> Tensor:
        """The sum of `local`, of one shape everywhere, over the ranks of the sequence; with
        autograd. Every rank calls it, and every rank's loss has to depend on the result.
        """
        return local if self.group is None else _SumOverRanks.apply(local, self.group)

    def _ordered(self, gathered: Tensor) -> Tensor:
        return gathered if self.order is None else gathered.index_select(0, self.order.places)
