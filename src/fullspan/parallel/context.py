"""What a model sees of the packed sequence: SequenceContext, made once per microbatch, the identity on one rank.

Every fact about position (place inside the document, key range) is derived here from the pack's global document
bounds and handed to all layers, so no layer builds a table or asks the host. The context also owns the two exchanges
of an attention layer: the differentiable gather of the latent key/value, whose adjoint is a float32 reduce-scatter,
and the gather of the frozen indexer's keys. It leaves out what is exchanged between experts.

    forward   gathered = all_gather(latent);       out = sparse_attention(query, gathered, selection)
    backward  dgathered (float32) = sum over this rank's queries;   dlatent = reduce_scatter(dgathered)

The gather and the attention are one autograd function, because autograd would otherwise round the gathered gradient
to the latent's dtype before the sum over ranks. A second, outer function waits for the reduce-scatter, so that it
overlaps whatever the backward pass does between the two.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullspan.ops.backend import OpOptions
from fullspan.ops.packed import PackedLayout
from fullspan.ops.selection import Selection
from fullspan.ops.sparse_attention.op import (
    sparse_attention,
    sparse_attention_backward,
    sparse_attention_forward,
)
from fullspan.parallel.collectives import (
    PendingTensor,
    gather_rows,
    start_all_gather_rows,
    start_reduce_scatter_rows,
)
from fullspan.parallel.sequence import Partition
from fullspan.shapes import Float, Int64, Tensor


class _PendingGradient:
    """Carries the reduce-scatter in flight from the attention's backward to the place where its result is used."""

    def __init__(self) -> None:
        self.work: PendingTensor | None = None


class _AwaitGradient(torch.autograd.Function):
    """Identity on the latent; its backward waits for the reduce-scatter that the attention's backward started."""

    @staticmethod
    def forward(ctx, latent: Tensor, pending: _PendingGradient) -> Tensor:
        ctx.pending = pending
        return latent.view_as(latent)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        if ctx.pending.work is None:
            return gradient, None
        summed = ctx.pending.work.wait()
        ctx.pending.work = None
        return summed.to(gradient.dtype), None


class _GatheredSparseAttention(torch.autograd.Function):
    """Sparse attention of local queries over the gathered latent; the latent's gradient is summed in float32."""

    @staticmethod
    def forward(ctx, query, latent, gathered, ids, counts, scale, value_dim, options, group, pending):
        out, lse = sparse_attention_forward(
            query, gathered, ids, counts, None, scale, value_dim, options.sparse_attention, options.workspace_bytes
        )
        ctx.save_for_backward(query, gathered, ids, counts, out, lse)
        ctx.scale, ctx.value_dim, ctx.options, ctx.group, ctx.pending = scale, value_dim, options, group, pending
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, gathered, ids, counts, out, lse = ctx.saved_tensors
        options = ctx.options
        grad_query, grad_gathered, _ = sparse_attention_backward(
            grad_out.contiguous(), query, gathered, ids, counts, out, lse, None, ctx.scale, ctx.value_dim,
            options.sparse_attention, options.workspace_bytes,
        )  # fmt: skip
        if not ctx.needs_input_grad[1]:
            return grad_query, *[None] * 9
        ctx.pending.work = start_reduce_scatter_rows(grad_gathered, ctx.group)
        rows = gathered.shape[0] // dist.get_world_size(ctx.group)
        # Stands for the sum in flight: its values are never read, _AwaitGradient replaces it.
        placeholder = gathered.new_zeros(()).expand(rows, gathered.shape[1])
        return grad_query, placeholder, *[None] * 8


@dataclass(frozen=True)
class GatheredLatent:
    """A layer's latent on its way to every rank. Made by `SequenceContext.start_gather`, used up by `attend`."""

    local: Float[Tensor, "rows qk"]
    full: PendingTensor


@dataclass(frozen=True, kw_only=True)
class SequenceContext:
    """One microbatch as the model sees it on this rank.

    positions   place of each local row inside its document; 0 on padding
    key_start, key_end   the global keys [key_start, key_end) that each local row may attend to; empty on padding
    """

    positions: Int64[Tensor, "rows"]
    key_start: Int64[Tensor, "rows"]
    key_end: Int64[Tensor, "rows"]
    group: dist.ProcessGroup | None = None

    @classmethod
    def create(
        cls,
        layout: PackedLayout,
        partition: Partition,
        *,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> "SequenceContext":
        """Derive the facts of `rank` from the global layout. `group` is None exactly when the partition has one rank."""
        assert (group is None) == (partition.size == 1), "a group is given exactly where the sequence is split"
        assert layout.padded_length == partition.length, "layout and partition describe packs of unlike length"
        rows = partition.rows(rank)
        start, end = layout.key_ranges(rows)
        facts = [tensor.to(device) for tensor in (layout.positions(rows), start, end)]
        return cls(positions=facts[0], key_start=facts[1], key_end=facts[2], group=group)

    def start_gather(self, latent: Float[Tensor, "rows qk"]) -> GatheredLatent:
        """Begin to send the latent to every rank; other work may run before `attend` uses it."""
        return GatheredLatent(latent, start_all_gather_rows(latent, self.group))

    def gather_index_keys(self, keys: Float[Tensor, "rows index_dim"]) -> Float[Tensor, "pack index_dim"]:
        """The frozen indexer's keys of the whole pack; no gradient flows through them."""
        return gather_rows(keys.detach(), self.group)

    def attend(
        self,
        query: Float[Tensor, "rows heads qk"],
        latent: GatheredLatent,
        selection: Selection,
        *,
        scale: float,
        value_dim: int,
        options: OpOptions,
    ) -> Float[Tensor, "rows heads value"]:
        """Attention of the local queries over the selected keys of the whole pack.

        Gradients flow to `query` and to the latent of every rank.
        """
        if self.group is None:
            out, _ = sparse_attention(
                query, latent.local, selection, scale=scale, value_dim=value_dim, options=options
            )
            return out
        pending = _PendingGradient()
        return _GatheredSparseAttention.apply(
            query, _AwaitGradient.apply(latent.local, pending), latent.full.wait(), selection.ids, selection.counts,
            scale, value_dim, options, self.group, pending,
        )  # fmt: skip
