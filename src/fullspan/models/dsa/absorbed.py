"""Attention in absorbed form as one autograd function, a span of rows at a time.

An absorbed query is kv_lora_rank + rope wide for every head, and so are its gradient and nearly the
output of attention: at GLM-5.2's widths 213 kB a row. They exist for a span of rows only, as many
as the workspace allows. Forward, for each span: queries are absorbed and turned, the kernel runs,
its outputs are projected to values. The backward pass makes the absorbed queries again from those
that q_b_proj gave; kept for it are lse, and the outputs where kv_b_proj has an adapter, else the
values.

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
from fullspan.ops.sparse_attention.op import AttentionCall, row_products
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
            _add_product(into, torch.bmm(x, self.left), self.right, self.scale)

    def adjoint(
        self,
        x: Float[Tensor, "rows heads in"],
        grad: Float[Tensor, "rows heads out"],
        into: Float[Tensor, "rows heads in"],
    ) -> tuple[Tensor, Tensor] | None:
        """Gradient of x, written into a tensor of any strides, which may be x; those of left and
        right."""
        x, grad, into = (tensor.transpose(0, 1) for tensor in (x, grad, into))
        if self.left is None or self.right is None:
            torch.bmm(grad, self.weight.mT, out=into)
            return None
        low, back = torch.bmm(x, self.left), torch.bmm(grad, self.right.mT)
        found = torch.bmm(x.mT, back), torch.bmm(low.mT, grad)
        torch.bmm(grad, self.weight.mT, out=into)
        _add_product(into, back, self.left.mT, self.scale)
        return found


def _add_product(into: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    torch.baddbmm(into, left, right, alpha=scale, out=into)


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
    rows: backend of the rotary position."""

    up: UpProjection
    angles: Angles
    attention: AttentionCall
    gradient: GradientSum
    keep: bool
    rows: str

    def absorb(self, query: Tensor, span: slice, key: Half) -> Tensor:
        """Absorbed queries of a span."""
        query, nope, width = query[span], self.up.nope, self.attention.value_dim
        absorbed = query.new_empty(*query.shape[:2], self.attention.qk)
        key.product(query[..., :nope], absorbed[..., :width])
        self._turn(query[..., nope:], absorbed[..., width:], span, inverse=False)
        return absorbed

    def to_gradient(self, query: Tensor, absorbed: Tensor, span: slice, key: Half) -> LowGradients:
        """The span's queries become their gradient, given that of its absorbed ones."""
        query, nope, width = query[span], self.up.nope, self.attention.value_dim
        self._turn(absorbed[..., width:], query[..., nope:], span, inverse=True)
        return key.adjoint(query[..., :nope], absorbed[..., :width], query[..., :nope])

    def _turn(self, x: Tensor, into: Tensor, span: slice, *, inverse: bool) -> None:
        cos, sin = self.angles.cos[span], self.angles.sin[span]
        rope_into(x, cos, sin, into, interleaved=True, inverse=inverse, backend=self.rows)


class _AbsorbedAttention(torch.autograd.Function):
    """Gradients flow to the query, the local latent and the adapter. The backward pass runs once:
    the query's gradient takes the query's place.
    """

    @staticmethod
    def forward(ctx, query, local, latent: GatheredLatent, call: _Call, *tensors):
        weights = UpWeights(*tensors)
        key, value = call.up.halves(weights, query.dtype)
        out = query.new_empty(*query.shape[:2], call.up.value)
        kv, sums, mixes = None, [], []
        for span in call.attention.spans:
            absorbed = call.absorb(query, span, key)
            kv = latent.wait() if kv is None else kv
            mixed, lse = call.attention.forward(span, absorbed, kv)
            del absorbed
            value.product(mixed, out[span])
            if call.keep:
                sums.append(lse)
                mixes += [] if weights.a is None else [mixed]
            del mixed
        if call.keep:
            chosen = call.attention.selection
            # The values stand for the kernel's outputs, where no adapter's gradient needs these.
            kept = mixes or [out]
            tensors = (chosen.ids, chosen.counts, *sums, *kept)
            ctx.save_for_backward(query, kv, *weights, *tensors)
            ctx.call = call
        return out

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        call: _Call = ctx.call
        query, kv, *tensors = ctx.saved_tensors
        weights, spans = UpWeights(*tensors[:4]), call.attention.spans
        sums, kept = tensors[6 : 6 + len(spans)], tensors[6 + len(spans) :]
        if weights.a is None:
            kept = [kept[0][span] for span in spans]
        halves, query = call.up.halves(weights, query.dtype), query.detach()
        adapter, dkv = AdapterGradient(call.up, weights), sums[0].new_empty(kv.shape)
        grad_local = None
        for span, lse, mixed in zip(spans, sums, kept, strict=True):
            grad = grad_outputs[0][span]
            absorbed, by_value = _absorbed_gradient(
                call, halves, query, kv, span, lse, mixed, grad, dkv
            )
            if span == spans[-1] and ctx.needs_input_grad[1]:
                grad_local = call.gradient.start(dkv, kv.dtype)  # it runs beside what follows
            adapter.add(call.to_gradient(query, absorbed, span, halves[0]), by_value)
            del absorbed
        return query, grad_local, None, None, None, None, adapter.a, adapter.b


def _absorbed_gradient(
    call: _Call, halves: tuple[Half, Half], query: Tensor, kv: Tensor, span: slice, lse: Tensor,
    mixed: Tensor, grad: Tensor, dkv: Tensor,
) -> tuple[Tensor, LowGradients]:  # fmt: skip
    """That of a span's absorbed queries, and the adapter's by the value half. Adds to dkv. mixed:
    the kernel's outputs, or the values; grad: that of the values."""
    key, value = halves
    grad_mixed = grad.new_empty(*grad.shape[:2], call.attention.value_dim)
    frozen = value.left is None
    low = value.adjoint(grad_mixed if frozen else mixed, grad, grad_mixed)
    delta = row_products(grad if frozen else grad_mixed, mixed, call.attention.backend)
    absorbed = call.absorb(query, span, key)
    pulled, _ = call.attention.backward(span, grad_mixed, absorbed, kv, delta, lse, dkv)
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
        beside=up.heads * (2 * qk + value_dim) * query.element_size(), last=last,
    )  # fmt: skip
    call = _Call(
        up=up, angles=angles, attention=attention, gradient=latent.gradient,
        keep=torch.is_grad_enabled(), rows=options.rows,
    )  # fmt: skip
    return _AbsorbedAttention.apply(query, latent.local, latent, call, *weights)
