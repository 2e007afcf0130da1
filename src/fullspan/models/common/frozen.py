"""Frozen weights that a checkpoint gives in floating point, or in FP8 with a scale per block.

A projection holds its weight as the checkpoint has it. FP8 values stay FP8 in memory: they become
the dtype of the input just before each use, in forward, recompute and backward, and the copy dies
with the use. It is a transient of the one product and no workspace kept between layers: a CUDA
allocator hands the same block to the next projection, so nothing is saved by holding it, and one
copy at a time (two grouped groups never overlap) is the bound either way, without state that two
streams or two microbatches could share. Autograd keeps the FP8 values, never a copy: the backward
pass makes its own. That is why the products are written here with their adjoints.

Which weights are FP8 is decided when a checkpoint is loaded (checkpoint/quantisation.py).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fullspan.ops.fp8.op import E4M3, dequantise_blocks, scale_shape
from fullspan.shapes import Float, Tensor


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """How the scales of an FP8 weight lie.

    block   rows and columns that share a scale
    parts   equal parts of the rows in each of which blocks begin anew (gate above up has two)
    workspace_bytes   bound on the dequantised experts that exist at once; one always may
    backend   of ops/fp8
    products   what multiplies the routed experts' forward (ops.expert_products)
    """

    block: tuple[int, int]
    parts: int = 1
    workspace_bytes: int = 1 << 32
    backend: str = "auto"
    products: str = "bf16"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scale of a weight [..., rows, cols]."""
        *lead, rows, cols = shape
        blocks, columns = scale_shape((rows // self.parts, cols), self.block)
        return (*lead, self.parts * blocks, columns)


class FrozenWeight(NamedTuple):
    """Values [..., out, in]; scale and layout where they are FP8, None where they are not."""

    values: Tensor
    scale: Tensor | None
    layout: BlockLayout | None

    def experts(self, chosen: slice | int) -> "FrozenWeight":
        """That of some experts, or of one."""
        scale = None if self.scale is None else self.scale[chosen]
        return FrozenWeight(self.values[chosen], scale, self.layout)

    def dense(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The weight in a dtype to compute in, `out` where it is given. Plain weights are given as
        they are.
        """
        if self.scale is None or self.layout is None:
            return self.values
        if out is None:
            out = torch.empty(self.values.shape, dtype=dtype, device=self.values.device)
        layout = self.layout
        values, scale, split = (
            tensor.unflatten(-2, (layout.parts, -1)) for tensor in (self.values, self.scale, out)
        )
        dequantise_blocks(values, scale, layout.block, dtype, split, backend=layout.backend)
        return out


class FrozenProjection(nn.Module):
    """Base of modules with one frozen weight: in floating point, unless `hold_fp8` said otherwise.

    weight [..., out, in] and weight_scale_inv, which is None for a plain weight.
    """

    weight: nn.Parameter
    weight_scale_inv: nn.Parameter | None

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.register_parameter("weight_scale_inv", None)
        self.layout: BlockLayout | None = None

    def hold_fp8(self, layout: BlockLayout) -> None:
        """Make room for FP8 values and their scale in place of the weight, without values yet."""
        shape, device = tuple(self.weight.shape), self.weight.device
        values = torch.empty(shape, dtype=E4M3, device=device)
        scale = torch.empty(layout.scale_shape(shape), dtype=torch.float32, device=device)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        self.layout = layout

    def extra_repr(self) -> str:
        return f"weight={list(self.weight.shape)}"

    @property
    def frozen(self) -> FrozenWeight:
        """The weight as it is held now."""
        return FrozenWeight(self.weight, self.weight_scale_inv, self.layout)


def frozen_linear(x: Float[Tensor, "*rows in"], weight: FrozenWeight) -> Float[Tensor, "*rows out"]:
    """x W^T in x's dtype, differentiable in x."""
    if weight.scale is None:
        return F.linear(x, weight.values)
    return _FrozenLinear.apply(x, *weight)


class _FrozenLinear(torch.autograd.Function):
    """Saves the weight in FP8 and dequantises it once in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scale: Tensor, layout: BlockLayout) -> Tensor:
        ctx.save_for_backward(values, scale)
        ctx.layout = layout
        return F.linear(x, FrozenWeight(values, scale, layout).dense(x.dtype))

    @staticmethod
    @once_differentiable  # which hides the parameters' names from pyright
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        values, scale = ctx.saved_tensors
        dense = FrozenWeight(values, scale, ctx.layout).dense(grad.dtype)
        return torch.matmul(grad, dense), None, None, None
