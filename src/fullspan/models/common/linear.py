"""Frozen projections: one matrix, and one matrix per expert.

Nothing here is trained, so nothing here draws an initial value (a checkpoint fills the weights) and
a backward pass computes the gradient of the input only. Adapters wrap these modules from outside
(lora/layers.py) and share `grouped_linear`, which also gives the gradient of the weights where they
ask for one. No bias: no supported family has one. Weights may be FP8 with block scales (frozen.py);
experts of those are dequantised a bounded number at a time, or multiplied as they are
(ops/expert_products), forward only. Expert parallelism is not here.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fullspan.errors import LayoutError
from fullspan.models.common.frozen import (
    BlockLayout,
    FrozenProjection,
    FrozenWeight,
    frozen_linear,
)
from fullspan.ops.expert_products.op import WEIGHT_BYTES, expert_product, in_fp8
from fullspan.ops.fp8.op import E4M3
from fullspan.shapes import Float, Float32, Int64, Tensor


class Linear(FrozenProjection):
    """y = x W^T with a frozen weight [out, in] and no bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(out_features, in_features)

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        return frozen_linear(x, self.frozen)


def wide_linear(
    x: Float[Tensor, "rows in"], weight: Float32[Tensor, "out in"]
) -> Float32[Tensor, "rows out"]:
    """x W^T in float32 with a frozen float32 weight, differentiable in x.

    On a GPU, rows in bfloat16 meet the weight as a sum of three bfloat16 numbers, which together
    have its 24 bits: matrix units multiply each without rounding and add up in float32.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        return _SplitLinear.apply(x, weight)
    return F.linear(x.float(), weight)


class _SplitLinear(torch.autograd.Function):
    """The gradient of x is rounded to bfloat16 in the end, so 16 bits of each factor are enough."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        parts = _wide_mm(x, torch.cat(_split(weight, 3)).t())
        return parts.unflatten(1, (3, -1)).sum(1)

    @staticmethod
    @once_differentiable  # which hides the parameters' names from pyright
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        high, low = _split(grads[0], 2)
        first, second = _split(weight, 2)
        factors = torch.cat([high, low, high], 1), torch.cat([first, first, second])
        return torch.mm(*factors), None


def _split(wide: Tensor, terms: int) -> list[Tensor]:
    """bfloat16 numbers whose sum is nearest to float32 ones; the differences are exact."""
    parts = []
    for _ in range(terms):
        parts.append(wide.bfloat16())
        wide = wide - parts[-1]
    return parts


def _wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """A product of bfloat16 matrices in float32; a CPU widens them first."""
    return torch.mm(a, b, torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())


class GroupedLinear(FrozenProjection):
    """One frozen matrix per expert, weight [held experts, out, in]; y = x W_e^T for e's slots.

    held: which of the model's `experts` are here; None: all of them.
    """

    def __init__(
        self, experts: int, in_features: int, out_features: int, *, held: range | None = None
    ) -> None:
        held = range(experts) if held is None else held
        super().__init__(len(held), out_features, in_features)
        self.experts = experts
        self.held = held

    def forward(
        self, x: Float[Tensor, "slots in"], counts: Int64[Tensor, "experts"]
    ) -> Float[Tensor, "slots out"]:
        """x: slots sorted by expert; counts: slots of each expert, summing to the slots of x."""
        return _grouped(x, self.frozen, counts)

    def adjoint(
        self, grad: Float[Tensor, "slots out"], counts: Int64[Tensor, "experts"]
    ) -> Float[Tensor, "slots in"]:
        """The gradient of x from that of the result, without autograd."""
        return _grouped_mm(grad, self.frozen, counts, adjoint=True)


def grouped_linear(
    x: Float[Tensor, "slots in"],
    weight: Float[Tensor, "experts out in"],
    counts: Int64[Tensor, "experts"],
) -> Float[Tensor, "slots out"]:
    """y[s] = weight[e] x[s] for the expert e of slot s; differentiable in x and in weight.

    Slots are sorted by expert and counts[e] of them belong to expert e: any may be 0, and so may
    their sum. Every element of the result and of both gradients is written (an expert without slots
    has a zero weight gradient). FLOPs: 2 * slots * in * out, and as many for each gradient that is
    asked for. Raises LayoutError where counts do not sum to the number of slots (checked on the CPU
    only: on a GPU the check would wait for the device).
    """
    return _grouped(x, FrozenWeight(weight, None, None), counts)


def _grouped(x: Tensor, weight: FrozenWeight, counts: Tensor) -> Tensor:
    if not counts.is_cuda and int(counts.sum()) != x.shape[0]:
        raise LayoutError(
            f"{x.shape[0]} slots, but the experts' counts sum to {int(counts.sum())}; must be equal"
        )
    return _GroupedLinear.apply(x, *weight, counts)


class _GroupedLinear(torch.autograd.Function):
    """Autograd through a loop would add up one full-size weight gradient for every expert."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        scale: Tensor | None,
        layout: BlockLayout | None,
        counts: Tensor,
    ) -> Tensor:
        # x is needed for the weight gradient only: a frozen weight keeps no activation alive.
        ctx.save_for_backward(values, scale, counts, x if values.requires_grad else None)
        ctx.layout = layout
        return _grouped_mm(x, FrozenWeight(values, scale, layout), counts)

    @staticmethod
    @once_differentiable  # which hides the parameters' names from pyright
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (grad,) = grads
        values, scale, counts, x = ctx.saved_tensors
        weight = FrozenWeight(values, scale, ctx.layout)
        want_x, want_weight, *_ = ctx.needs_input_grad
        grad_x = _grouped_mm(grad, weight, counts, adjoint=True) if want_x else None
        grad_weight = _grouped_outer(grad, x, counts) if want_weight else None
        return grad_x, grad_weight, None, None, None


def _grouped_mm(
    x: Tensor, weight: FrozenWeight, counts: Tensor, *, adjoint: bool = False
) -> Tensor:
    """[slots, in], [experts, out, in] -> [slots, out]; adjoint: [slots, out] -> [slots, in]."""
    products = None if adjoint else _products(weight)
    if products or _fused(x, weight.values):
        return _fused_mm(x, weight, counts, adjoint, products)
    out = x.new_empty(x.shape[0], weight.values.shape[2 if adjoint else 1])
    space = None if weight.scale is None else x.new_empty(weight.values.shape[1:])
    for expert, start, end in _spans(counts):
        matrix = weight.experts(expert).dense(x.dtype, space)
        torch.mm(x[start:end], matrix if adjoint else matrix.t(), out=out[start:end])
    return out


def _fused_mm(
    x: Tensor, weight: FrozenWeight, counts: Tensor, adjoint: bool, products: str | None = None
) -> Tensor:
    """One kernel for all experts, or one for as many FP8 experts as the workspace holds. More than
    one such group needs the counts on the host.
    """
    experts, out_width, in_width = weight.values.shape
    group = experts
    item = WEIGHT_BYTES[products] if products else x.dtype.itemsize
    if weight.layout is not None and item:
        held = weight.layout.workspace_bytes // (out_width * in_width * item)
        group = max(1, min(experts, held))
    if group == experts:
        return _one_kernel(x, weight, counts, adjoint, products)
    out = x.new_empty(x.shape[0], in_width if adjoint else out_width)
    space = None if products else x.new_empty(group, out_width, in_width)
    sizes, start = counts.tolist(), 0  # asked for once
    for first in range(0, experts, group):
        chosen = slice(first, first + group)
        end = start + sum(sizes[chosen])
        if start < end:
            room = None if space is None else space[: len(sizes[chosen])]
            part = weight.experts(chosen)
            rows, own = x[start:end], counts[chosen]
            out[start:end] = _one_kernel(rows, part, own, adjoint, products, room)
        start = end
    return out


def _products(weight: FrozenWeight) -> str | None:
    """What multiplies FP8 values forward as they are, None where they are dequantised."""
    products = None if weight.layout is None else weight.layout.products
    return products if products and in_fp8(products) else None


def _one_kernel(
    x: Tensor, weight: FrozenWeight, counts: Tensor, adjoint: bool, products: str | None,
    space: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if products and weight.scale is not None:
        return expert_product(x, weight.values, weight.scale, counts, backend=products)
    dense = weight.dense(x.dtype, space)
    offsets = counts.cumsum(0).to(torch.int32)
    matrices = dense if adjoint else dense.transpose(1, 2)
    return F.grouped_mm(x.contiguous(), matrices, offs=offsets)


def _grouped_outer(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """[slots, out], [slots, in] -> [experts, out, in]: sum over each expert's slots of grad x^T."""
    if _fused(x, grad):
        offsets = counts.cumsum(0).to(torch.int32)
        product = F.grouped_mm(grad.contiguous().t(), x.contiguous(), offs=offsets)
        return product.masked_fill_((counts == 0)[:, None, None], 0)
    out = x.new_zeros(counts.shape[0], grad.shape[1], x.shape[1])
    for expert, start, end in _spans(counts):
        torch.mm(grad[start:end].t(), x[start:end], out=out[expert])
    return out


def _spans(counts: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first slot, end slot) of every expert that has slots, in unbounded integers."""
    spans, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            spans.append((expert, start, start + count))
        start += count
    return spans


def _fused(*operands: Tensor) -> bool:
    """Whether grouped_mm takes these: bf16 on CUDA (or FP8, which becomes it), widths that are
    multiples of 16 bytes.

    It is one kernel and never waits for the device; the loop (a CPU, fp32, a LoRA rank that is no
    multiple of 8) copies the counts to the host first. The two differ by the order of their sums.
    """
    return all(
        operand.is_cuda
        and operand.dtype in (torch.bfloat16, E4M3)
        and operand.shape[0] > 0
        and all(size % 8 == 0 for size in operand.shape[1:])
        for operand in operands
    )
