"""Attention in absorbed form as one autograd function, a span of rows at a time.

An absorbed query is kv_lora_rank + rope wide for every head, and so are its gradient and nearly the
output of attention: at GLM-5.2's widths 213 kB a row. They exist for a span of rows only, as many
as the workspace allows. Forward, for each span: queries are absorbed and turned, the kernel runs,
its outputs are projected to values. The outputs and their lse are kept for the backward pass, which
makes the absorbed queries again from those that q_b_proj gave.

    absorbed[t, h] = (W_k[h]^T nope[t, h],  rope(rope[t, h]))
    value[t, h]    = W_v[h] attention(absorbed)[t, h]

Each half of kv_b_proj is a product by head, with an adapter through its rank beside it. Products
write where their result belongs: nothing is concatenated, transposed or added by itself.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fullspan.models.common.frozen import BlockLayout, FrozenWeight
from fullspan.ops.backend import choose
from fullspan.ops.options import OpOptions
from fullspan.ops.rope.op import rope_into
from fullspan.ops.selection import Selection
from fullspan.ops.sparse_attention.op import AttentionCall
from fullspan.parallel.context import GatheredLatent, GradientSum
from fullspan.shapes import Float, Float32, Tensor


class Angles(NamedTuple):
    """cos and sin of the local rows' positions, made once per microbatch for all layers."""

    cos: Float32[Tensor, "rows half"]
    sin: Float32[Tensor, "rows half"]


class Half(NamedTuple):
    """One half of kv_b_proj by head h: y[:, h] = x[:, h] (weight[h] + scale left[h] right[h]).

    left, right: of the adapter; None without one.
    """

    weight: Float[Tensor, "heads in out"]
    left: Float[Tensor, "heads in rank"] | None = None
    right: Float[Tensor, "heads rank out"] | None = None
    scale: float = 1.0

    def product(
        self, x: Float[Tensor, "rows heads in"], into: Float[Tensor, "rows heads out"]
    ) -> None:
        """y, written into a tensor of any strides."""
        x, into = x.transpose(0, 1), into.transpose(0, 1)
        torch.bmm(x, self.weight, out=into)
        if self.left is not None and self.right is not None:
            into.baddbmm_(torch.bmm(x, self.left), self.right, alpha=self.scale)

    def adjoint(
        self,
        x: Float[Tensor, "rows heads in"],
        grad: Float[Tensor, "rows heads out"],
        into: Float[Tensor, "rows heads in"],
    ) -> tuple[Tensor, Tensor] | None:
        """Gradient of x, written into a tensor of any strides; those of left and right."""
        x, grad, into = (tensor.transpose(0, 1) for tensor in (x, grad, into))
        torch.bmm(grad, self.weight.mT, out=into)
        if self.left is None or self.right is None:
            return None
        low, back = torch.bmm(x, self.left), torch.bmm(grad, self.right.mT)
        into.baddbmm_(back, self.left.mT, alpha=self.scale)
        return torch.bmm(x.mT, back), torch.bmm(low.mT, grad)


class UpWeights(NamedTuple):
    """Tensors of kv_b_proj. a [rank, latent], b [out, rank]: its adapter's, in float32, or None."""

    values: Float[Tensor, "out latent"]
    block_scale: Float32[Tensor, "blocks latent_blocks"] | None
    a: Float32[Tensor, "rank latent"] | None = None
    b: Float32[Tensor, "out rank"] | None = None


@dataclass(frozen=True, kw_only=True)
class UpProjection:
    """How kv_b_proj [heads * (nope + value), latent] lies: rows by head, each in two halves.

    layout: of FP8 blocks, or None. scale: of the adapter's product.
    """

    heads: int
    nope: int
    value: int
    layout: BlockLayout | None = None
    scale: float = 0.0

    def split(self, rows: Float[Tensor, "out width"]) -> tuple[Tensor, Tensor]:
        """Views of the key half [heads, nope, width] and the value half [heads, value, width] of a
        tensor whose rows are laid out as the weight's.
        """
        key, value = rows.unflatten(0, (self.heads, -1)).split([self.nope, self.value], dim=1)
        return key, value

    def halves(self, weights: UpWeights, dtype: torch.dtype) -> tuple[Half, Half]:
        """From queries to absorbed ones; from outputs to values. FP8 becomes dtype once, here."""
        frozen = FrozenWeight(weights.values, weights.block_scale, self.layout)
        key, value = self.split(frozen.dense(dtype))
        if weights.a is None or weights.b is None:
            return Half(key), Half(value.mT)
        a = weights.a.to(dtype).expand(self.heads, -1, -1)
        b_key, b_value = self.split(weights.b.to(dtype))
        return Half(key, b_key, a, self.scale), Half(value.mT, a.mT, b_value.mT, self.scale)


LowGradients = tuple[Tensor, Tensor] | None  # of the left and the right of a Half


class AdapterGradient:
    """Of the adapter's two matrices in float32, summed over spans; None where there is none."""

    def __init__(self, up: UpProjection, weights: UpWeights) -> None:
        self.a = self.b = None
        if weights.a is not None and weights.b is not None:
            self.a, self.b = torch.zeros_like(weights.a), torch.zeros_like(weights.b)
            self._key, self._value = up.split(self.b)
            self._scale = up.scale

    def add(self, key: LowGradients, value: LowGradients) -> None:
        """What the adjoints of both halves gave for a span."""
        if self.a is None or key is None or value is None:
            return
        self._key.add_(key[0], alpha=self._scale)
        self._value.add_(value[1].mT, alpha=self._scale)
        both = key[1].sum(0, dtype=self.a.dtype) + value[0].sum(0, dtype=self.a.dtype).t()
        self.a.add_(both, alpha=self._scale)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What one call needs besides tensors that autograd keeps. keep: there will be a backward pass.
    last: it ends the use of the selection there."""

    up: UpProjection
    angles: Angles
    attention: AttentionCall
    gradient: GradientSum
    keep: bool
    last: bool

    def absorb(self, query: Tensor, span: slice, key: Half) -> Tensor:
        """Absorbed queries of a span."""
        query, nope, width = query[span], self.up.nope, self.attention.value_dim
        absorbed = query.new_empty(*query.shape[:2], self.attention.qk)
        key.product(query[..., :nope], absorbed[..., :width])
        self._turn(query[..., nope:], absorbed[..., width:], span, inverse=False)
        return absorbed

    def query_gradient(
        self, query: Tensor, span: slice, key: Half, absorbed: Tensor, into: Tensor
    ) -> LowGradients:
        """Gradient of the span's queries, from that of its absorbed ones, into its rows."""
        query, into = query[span], into[span]
        nope, width = self.up.nope, self.attention.value_dim
        self._turn(absorbed[..., width:], into[..., nope:], span, inverse=True)
        return key.adjoint(query[..., :nope], absorbed[..., :width], into[..., :nope])

    def _turn(self, x: Tensor, into: Tensor, span: slice, *, inverse: bool) -> None:
        cos, sin = self.angles.cos[span], self.angles.sin[span]
        rope_into(x, cos, sin, into, interleaved=True, inverse=inverse)


class _AbsorbedAttention(torch.autograd.Function):
    """Gradients flow to the query, the local latent and the adapter."""

    @staticmethod
    def forward(ctx, query, local, latent: GatheredLatent, call: _Call, *tensors):
        weights = UpWeights(*tensors)
        key, value = call.up.halves(weights, query.dtype)
        out = query.new_empty(*query.shape[:2], call.up.value)
        kv, kept = None, []
        for span in call.attention.spans:
            absorbed = call.absorb(query, span, key)
            kv = latent.wait() if kv is None else kv
            mixed, lse = call.attention.forward(span, absorbed, kv)
            del absorbed
            value.product(mixed, out[span])
            kept += [mixed, lse] if call.keep else []
            del mixed
        if call.keep:
            chosen = call.attention.selection
            ctx.save_for_backward(query, kv, chosen.ids, chosen.counts, *weights, *kept)
            ctx.call = call
        return out

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        call: _Call = ctx.call
        query, kv, _, _, *tensors = ctx.saved_tensors
        weights, kept = UpWeights(*tensors[:4]), tensors[4:]
        halves = call.up.halves(weights, query.dtype)
        grad_query, grad_local = torch.empty_like(query), None
        adapter, dkv = AdapterGradient(call.up, weights), kept[1].new_empty(kv.shape)
        spans = call.attention.spans
        for span, mixed, lse in zip(spans, kept[::2], kept[1::2], strict=True):
            grad = grad_outputs[0][span]
            absorbed, by_value = _absorbed_gradient(
                call, halves, query, kv, span, mixed, lse, grad, dkv
            )
            if span == spans[-1]:  # the sum over ranks runs beside what follows
                if call.last:
                    call.attention.selection.plans.clear()
                if ctx.needs_input_grad[1]:
                    grad_local = call.gradient.start(dkv, kv.dtype)
            adapter.add(call.query_gradient(query, span, halves[0], absorbed, grad_query), by_value)
            del absorbed
        return grad_query, grad_local, None, None, None, None, adapter.a, adapter.b


def _absorbed_gradient(
    call: _Call, halves: tuple[Half, Half], query: Tensor, kv: Tensor, span: slice, mixed: Tensor,
    lse: Tensor, grad: Tensor, dkv: Tensor,
) -> tuple[Tensor, LowGradients]:  # fmt: skip
    """That of a span's absorbed queries, and the adapter's by the value half. Adds to dkv."""
    key, value = halves
    grad_mixed = torch.empty_like(mixed)
    low = value.adjoint(mixed, grad, grad_mixed)
    absorbed = call.absorb(query, span, key)
    pulled, _ = call.attention.backward(span, grad_mixed, absorbed, kv, mixed, lse, dkv)
    return pulled, low


def absorbed_attention(
    query: Float[Tensor, "rows heads width"],
    latent: GatheredLatent,
    selection: Selection,
    up: UpProjection,
    weights: UpWeights,
    angles: Angles,
    *,
    scale: float,
    last: bool,
    options: OpOptions,
) -> Float[Tensor, "rows heads value"]:
    """Values of the local rows over the selected keys of the whole pack.

    query: nope, then rope channels, not turned. Gradients flow to it, to the latent of every rank
    and to the adapter. last: the backward pass ends its use of the selection here.
    """
    qk, value_dim = latent.local.shape[1], weights.values.shape[1]
    widths = tuple(
        sorted({"qk": qk, "value_dim": value_dim, "topk": selection.ids.shape[1]}.items())
    )
    backend = choose(
        "sparse_attention", options.sparse_attention, query.device, query.dtype, widths
    )
    attention = AttentionCall(
        selection=selection, pack=latent.pack, heads=up.heads, qk=qk, value_dim=value_dim,
        scale=scale, dtype=query.dtype, backend=backend, workspace=options.attention_bytes,
        # Absorbed queries, their gradient, and that of the kernel's output.
        beside=up.heads * (2 * qk + value_dim) * query.element_size(),
    )  # fmt: skip
    call = _Call(
        up=up, angles=angles, attention=attention, gradient=latent.gradient,
        keep=torch.is_grad_enabled(), last=last,
    )  # fmt: skip
    return _AbsorbedAttention.apply(query, latent.local, latent, call, *weights)
