"""LoRA (Hu et al. 2021, arXiv 2106.09685) around frozen projections: y = W x + alpha / r * B (A x).

A wrapper holds the frozen module as `.base` and owns `.lora_a` and `.lora_b`. These are float32
whatever the model's dtype and are cast to the input's dtype at use; `device` says where they live.
A is Kaiming-uniform (a = sqrt 5, so within 1 / sqrt(fan in), as PEFT draws it) and B is zero, so a
fresh adapter changes nothing. No product B A is ever formed, and the change is added to the base's
fresh output in place. No dropout, no bias, no variants such as DoRA.
"""

from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fullspan.models.common.frozen import BlockLayout, FrozenProjection, FrozenWeight
from fullspan.models.common.linear import GroupedLinear, Linear, grouped_linear
from fullspan.models.dsa.absorbed import UpProjection, UpWeights
from fullspan.models.dsa.attention import KVUpProjection
from fullspan.shapes import Float, Float32, Int64, Tensor

Base = TypeVar("Base", bound=FrozenProjection)


class LoRAModule(nn.Module, Generic[Base]):
    """Base of the wrappers: `base`, the scale alpha / r of its change, lora_a and lora_b.

    device: where the adapter lives; None: where the base's weight does. A weight may have no
    storage (on meta): sharded ones come when they are gathered, those of `export` never do.
    """

    def __init__(
        self,
        base: Base,
        *,
        r: int,
        alpha: float,
        generator: torch.Generator,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / r
        own = base.weight.device
        home = device or (torch.device("cpu") if own.type == "meta" else own)
        *experts, out_width, in_width = base.weight.shape
        self.lora_a = nn.Parameter(self._drawn((r, in_width), generator).to(home))
        self.lora_b = nn.Parameter(torch.zeros(*experts, out_width, r, device=home))

    def _drawn(self, shape: tuple[int, ...], generator: torch.Generator) -> Float32[Tensor, "..."]:
        """lora_a, drawn on the CPU by a CPU generator: the same bits on every device and rank."""
        bound = shape[-1] ** -0.5
        values = torch.empty(shape, dtype=torch.float32)
        return values.uniform_(-bound, bound, generator=generator)


class LoRALinear(LoRAModule[Linear]):
    """Around `Linear`: lora_a [rank, in], lora_b [out, rank]."""

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        rows = x.reshape(-1, x.shape[-1])
        out = _LoRALinear.apply(rows, self.lora_a, self.lora_b, self.scale, *self.base.frozen)
        return out.view(*x.shape[:-1], out.shape[-1])


class _LoRALinear(torch.autograd.Function):
    """Both products in one autograd function. The adapter's is added in place to the base's output,
    and likewise in the gradient of x; autograd would make a tensor of each and add them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, scale: float,
        values: Tensor, block_scale: Tensor | None, layout: BlockLayout | None,
    ) -> Tensor:  # fmt: skip
        wide, a, b = a.dtype, a.to(x.dtype), b.to(x.dtype)
        low = F.linear(x, a).mul_(scale)
        out = F.linear(x, FrozenWeight(values, block_scale, layout).dense(x.dtype))
        # a is for the gradient of x alone.
        ctx.save_for_backward(
            x, a if ctx.needs_input_grad[0] else None, b, low, values, block_scale
        )
        ctx.layout, ctx.scale, ctx.wide = layout, scale, wide
        return torch.addmm(out, low, b.t(), out=out)

    @staticmethod
    @once_differentiable  # which hides the parameters' names from pyright
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor, None, None, None, None]:
        (grad,) = grads
        x, a, b, low, values, block_scale = ctx.saved_tensors
        low_grad = torch.mm(grad, b).mul_(ctx.scale)
        of_a, of_b = (torch.mm(g.t(), y).to(ctx.wide) for g, y in ((low_grad, x), (grad, low)))
        of_x = None
        if a is not None:
            of_x = torch.mm(grad, FrozenWeight(values, block_scale, ctx.layout).dense(x.dtype))
            torch.addmm(of_x, low_grad, a, out=of_x)
        return of_x, of_a, of_b, None, None, None, None


class LoRAGroupedLinear(LoRAModule[GroupedLinear]):
    """Around `GroupedLinear`: lora_a [experts, rank, in], lora_b [experts, out, rank]."""

    def _drawn(self, shape: tuple[int, ...], generator: torch.Generator) -> Float32[Tensor, "..."]:
        """For all of the model's experts, so that the values do not depend on who holds which."""
        held = self.base.held
        drawn = super()._drawn((self.base.experts, *shape), generator)
        return drawn[held.start : held.stop].clone()

    def forward(
        self, x: Float[Tensor, "slots in"], counts: Int64[Tensor, "experts"]
    ) -> Float[Tensor, "slots out"]:
        """As the base: x sorted by expert, counts[e] of its slots belong to expert e."""
        low = grouped_linear(x, self.lora_a.to(x.dtype), counts) * self.scale
        return self.base(x, counts).add_(grouped_linear(low, self.lora_b.to(x.dtype), counts))


class LoRAKVUpProjection(LoRAModule[KVUpProjection]):
    """Around `KVUpProjection`: lora_a [rank, latent], lora_b [heads * (nope + value), rank].

    The rows of lora_b are laid out as the weight's, so each head h has a key part B_k[h]
    [nope, rank] and a value part B_v[h] [value, rank]. Attention never multiplies by the whole
    matrix (it is absorbed into the query and the output), so the low-rank term is added on both
    sides: A^T B_k[h]^T q and B_v[h] A o, through the rank.
    """

    def parts(self) -> tuple[UpProjection, UpWeights]:
        """Those of the base, with the adapter."""
        up, weights = self.base.parts()
        return replace(up, scale=self.scale), weights._replace(a=self.lora_a, b=self.lora_b)
