"""What a model sees of the packed sequence: SequenceContext, made once per microbatch, the identity
on one rank.

Every fact about position (place inside the document, key range) is derived here from the pack's
global document bounds and handed to all layers, so no layer builds a table or asks the host. The
context also owns the two exchanges of an attention layer: the differentiable gather of the latent
key/value, whose adjoint is a float32 reduce-scatter, and the gather of the frozen indexer's keys.
It leaves out what is exchanged between experts.

    forward   gathered = all_gather(latent);       out = sparse_attention(query, gathered,
              selection)
    backward  dgathered (float32) = sum over this rank's queries;   dlatent =
              reduce_scatter(dgathered)

The gather and the attention are one autograd function, because autograd would otherwise round the
gathered gradient to the latent's dtype before the sum over ranks. A second, outer function waits
for the reduce-scatter, so that it overlaps whatever the backward pass does between the two.
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


@dataclass
class _AttentionCall:
    """What one call of the gathered attention needs besides tensors, and its reduce-scatter in
    flight.
    """

    scale: float
    value_dim: int
    options: OpOptions
    group: dist.ProcessGroup
    pending: PendingTensor | None = None

    def constants(self) -> tuple[None, float, int, str, int]:
        """The arguments that the attention op takes after its tensors: no sink, then these."""
        backend, workspace = self.options.sparse_attention, self.options.workspace_bytes
        return None, self.scale, self.value_dim, backend, workspace


class _AwaitGradient(torch.autograd.Function):
    """Identity on the latent; its backward waits for the reduce-scatter in flight."""

    @staticmethod
    def forward(ctx, latent: Tensor, call: _AttentionCall) -> Tensor:
        ctx.call = call
        return latent.view_as(latent)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        assert ctx.call.pending is not None, "the attention's backward runs before this one"
        summed = ctx.call.pending.wait()
        ctx.call.pending = None
        return summed.to(gradient.dtype), None


class _GatheredSparseAttention(torch.autograd.Function):
    """Sparse attention of local queries over the gathered latent, whose gradient is summed in
    float32.
    """

    @staticmethod
    def forward(ctx, query, latent, gathered, ids, counts, call: _AttentionCall):
        out, lse = sparse_attention_forward(query, gathered, ids, counts, *call.constants())
        ctx.save_for_backward(query, gathered, ids, counts, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        query, gathered, *selected = ctx.saved_tensors
        call = ctx.call
        grad_query, grad_gathered, _ = sparse_attention_backward(
            grad_outputs[0].contiguous(), query, gathered, *selected, *call.constants()
        )
        placeholder = None
        if ctx.needs_input_grad[1]:
            call.pending = start_reduce_scatter_rows(grad_gathered, call.group)
            # Stands for the sum in flight: its values are never read, _AwaitGradient replaces it.
            rows = gathered.shape[0] // dist.get_world_size(call.group)
            placeholder = gathered.new_zeros(()).expand(rows, gathered.shape[1])
        return grad_query, placeholder, None, None, None, None


@dataclass(frozen=True)
class GatheredLatent:
    """A layer's latent on its way to every rank. Made by `SequenceContext.start_gather`, used up by
    `attend`.
    """

    local: Float[Tensor, "rows qk"]
    full: PendingTensor


@dataclass(frozen=True, kw_only=True)
class SequenceContext:
    """One microbatch as the model sees it on this rank.

    positions   place of each local row inside its document; 0 on padding
    key_start, key_end   the global keys [key_start, key_end) that each local row may attend to;
                         empty on padding
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
        """Derive the facts of `rank` from the global layout. `group` is None exactly when the
        partition has one rank.
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
        return cls(positions=facts[0], key_start=facts[1], key_end=facts[2], group=group)

    def start_gather(self, latent: Float[Tensor, "rows qk"]) -> GatheredLatent:
        """Begin to send the latent to every rank; other work may run before `attend` uses it."""
        return GatheredLatent(latent, start_all_gather_rows(latent, self.group))

    def gather_index_keys(
        self, keys: Float[Tensor, "rows index_dim"]
    ) -> Float[Tensor, "pack index_dim"]:
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
        call = _AttentionCall(scale, value_dim, options, self.group)
        awaited = _AwaitGradient.apply(latent.local, call)
        return _GatheredSparseAttention.apply(
            query, awaited, latent.full.wait(), selection.ids, selection.counts, call
        )
