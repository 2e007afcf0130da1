"""Frozen norms: statistics in float32, weights as the checkpoint has them."""

import torch
from torch import nn

from fullspan.ops.rows.op import rms_norm
from fullspan.shapes import Float, Tensor


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, rounded to x's dtype before the
    weight (Llama).
    """

    backend = "auto"  # of ops/rows

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        return rms_norm(x, self.weight, self.eps, backend=self.backend)


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias in float32 (the indexer's key norm), result in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        normed = nn.functional.layer_norm(
            x.float(), self.weight.shape, self.weight.float(), self.bias.float(), self.eps
        )
        return normed.to(x.dtype)
