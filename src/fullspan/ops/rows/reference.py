"""Gathered sums, gated products and norms in plain PyTorch: the CPU product path and what kernels
are tested against.

Arithmetic is in float32 (float64 for float64), a bounded strip of rows at a time.
"""

from collections.abc import Iterator

import torch

from fullspan.shapes import Tensor

_STRIP_ELEMENTS = 1 << 14  # of float32 at once: 64 KiB


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """out[i] = sum over j of x[index[i, j]], in that order."""
    out = x.new_empty(len(index), x.shape[1])
    for rows in _strips(out):
        first, *rest = index[rows].unbind(1)
        total = _wide(x[first])
        for place in rest:
            total += x[place]
        out[rows] = total
    return out


def swiglu(gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
    """silu(gate) * up, times the weight of the row."""
    out = gate.new_empty(gate.shape)
    for rows in _strips(out):
        wide = _wide(gate[rows])
        wide = (wide.sigmoid() * wide).mul_(up[rows])
        out[rows] = wide if weights is None else wide.mul_(weights[rows, None])
    return out


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, dgate: Tensor, dup: Tensor
) -> Tensor:
    """Writes the gradients of gate and up; returns that of the weights (float32), or nothing."""
    dweights = gate.new_empty(0 if weights is None else len(gate), dtype=torch.float32)
    for rows in _strips(gate):
        wide, above, back = _wide(gate[rows]), _wide(up[rows]), _wide(grad[rows])
        sigmoid = wide.sigmoid()
        silu = wide * sigmoid
        if weights is not None:
            dweights[rows] = (back * silu * above).sum(1)
            back = back * weights[rows, None]
        dup[rows] = back * silu
        dgate[rows] = back * above * sigmoid * (1 + wide * (1 - sigmoid))
    return dweights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x), rounded to x's dtype, times the weight; and 1 / rms(x) of each row, float32."""
    out, rstd = x.new_empty(x.shape), x.new_empty(len(x), dtype=_wide(x[:0]).dtype)
    for rows in _strips(out):
        wide = _wide(x[rows])
        rstd[rows] = torch.rsqrt(wide.square().mean(1) + eps)
        out[rows] = weight * (wide * rstd[rows, None]).to(x.dtype)
    return out, rstd


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """The gradient of x."""
    out = x.new_empty(x.shape)
    for rows in _strips(out):
        normed = _wide(x[rows]) * rstd[rows, None]
        back = _wide(grad[rows]) * weight
        back -= normed * (back * normed).mean(1, keepdim=True)
        out[rows] = back.mul_(rstd[rows, None])
    return out


def _strips(rows: Tensor) -> Iterator[slice]:
    """Runs of rows of bounded size."""
    step = max(1, _STRIP_ELEMENTS // max(1, rows.shape[1]))
    for first in range(0, len(rows), step):
        yield slice(first, first + step)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
