"""What a layer does to rows beside its products: gather and sum them, gate them, normalise them.

    gather_rows   slots from rows, rows from slots, one order from another, each the adjoint of one
    swiglu        the gated product of an MLP, with a weight for each row where it has one
    rms_norm      with a frozen weight

Each is one autograd function: what it keeps is what it was given, and no float32 copy of it. Sums
are in float32, in one order. See README.md.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fullspan.ops.backend import choose, on_first_call
from fullspan.ops.registration import operator
from fullspan.ops.rows import reference
from fullspan.shapes import Float, Float32, Int64, Tensor


def _implementations(name: str) -> dict:
    return {
        "triton": on_first_call("fullspan.ops.rows.triton_backend", name),
        "reference": getattr(reference, name),
    }


_GATHER = _implementations("gather_rows")
_SWIGLU, _SWIGLU_BACKWARD = map(_implementations, ("swiglu", "swiglu_backward"))
_NORM, _NORM_BACKWARD = map(_implementations, ("rms_norm", "rms_norm_backward"))


def gather_rows(
    x: Float[Tensor, "rows width"],
    index: Int64[Tensor, "out count"],
    inverse: Int64[Tensor, "rows times"],
    *,
    backend: str = "auto",
) -> Float[Tensor, "out width"]:
    """out[i] = sum over j of x[index[i, j]], rounded once; one or more indices a row.

    inverse: for each row of x the rows of the result that it is part of: all of them, each once.
    So the gradient of x is `gather_rows(grad, inverse, index)`. Neither is checked.
    """
    return _GatherRows.apply(x, index, inverse, choose("rows", backend, x.device, x.dtype))


def swiglu(
    gate: Float[Tensor, "rows width"],
    up: Float[Tensor, "rows inner"] | None = None,
    weights: Float32[Tensor, "rows"] | None = None,
    *,
    backend: str = "auto",
) -> Float[Tensor, "rows inner"]:
    """silu(gate) * up * weights (SwiGLU, Shazeer 2020), rounded once.

    up: None where `gate` has both side by side, gate first.
    """
    return _Swiglu.apply(gate, up, weights, choose("rows", backend, gate.device, gate.dtype))


def rms_norm(
    x: Float[Tensor, "*rows width"],
    weight: Float[Tensor, "width"],
    eps: float,
    *,
    backend: str = "auto",
) -> Float[Tensor, "*rows width"]:
    """x / sqrt(mean(x^2) + eps), rounded to x's dtype, times a weight without a gradient."""
    backend = choose("rows", backend, x.device, x.dtype)
    return _RMSNorm.apply(x.reshape(-1, x.shape[-1]), weight, eps, backend).view(x.shape)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.backend = backend
        return _gather_rows(x, index, backend)

    @staticmethod
    @once_differentiable  # which hides the parameters' names from pyright
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, inverse = ctx.saved_tensors
        return _gather_rows(grads[0], inverse, ctx.backend), None, None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor | None, weights: Tensor | None, backend: str
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        ctx.backend = backend
        return _swiglu(gate, up, weights, backend)

    @staticmethod
    @once_differentiable  # which hides the parameters' names from pyright
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up, weights = ctx.saved_tensors
        dgate, dup, dweights = _swiglu_backward(grads[0], gate, up, weights, ctx.backend)
        return dgate, None if up is None else dup, None if weights is None else dweights, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, backend: str) -> Tensor:
        out, rstd = _rms_norm(x, weight, eps, backend)
        ctx.save_for_backward(x, weight, rstd)
        ctx.backend = backend
        return out

    @staticmethod
    @once_differentiable  # which hides the parameters' names from pyright
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _rms_norm_backward(grads[0], *ctx.saved_tensors, ctx.backend), None, None, None


@operator(
    "gather_rows(Tensor x, Tensor index, str backend) -> Tensor",
    fake=lambda x, index, backend: x.new_empty(index.shape[0], x.shape[1]),
)
def _gather_rows(x, index, backend):
    return _GATHER[backend](x, index)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    width = gate.shape[1] // 2
    return (gate, up) if up is not None else (gate[:, :width], gate[:, width:])


@operator(
    "swiglu(Tensor gate, Tensor? up, Tensor? weights, str backend) -> Tensor",
    fake=lambda gate, up, weights, backend: gate.new_empty(_halves(gate, up)[0].shape),
)
def _swiglu(gate, up, weights, backend):
    return _SWIGLU[backend](*_halves(gate, up), weights)


def _gradients_like(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Space for both; without `up` both are in the first."""
    return gate.new_empty(gate.shape), gate.new_empty((0,) if up is None else up.shape)


@operator(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor? up, Tensor? weights, str backend) "
    "-> (Tensor, Tensor, Tensor)",
    fake=lambda grad, gate, up, weights, backend: (
        *_gradients_like(gate, up),
        gate.new_empty(0 if weights is None else gate.shape[0], dtype=torch.float32),
    ),
)
def _swiglu_backward(grad, gate, up, weights, backend):
    dgate, dup = _gradients_like(gate, up)
    outs = _halves(dgate, None if up is None else dup)
    dweights = _SWIGLU_BACKWARD[backend](grad, *_halves(gate, up), weights, *outs)
    return dgate, dup, dweights


@operator(
    "rms_norm(Tensor x, Tensor weight, float eps, str backend) -> (Tensor, Tensor)",
    fake=lambda x, weight, eps, backend: (
        x.new_empty(x.shape),
        x.new_empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32)),
    ),
)
def _rms_norm(x, weight, eps, backend):
    return _NORM[backend](x, weight, eps)


@operator(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd, str backend) -> Tensor",
    fake=lambda grad, x, weight, rstd, backend: x.new_empty(x.shape),
)
def _rms_norm_backward(grad, x, weight, rstd, backend):
    return _NORM_BACKWARD[backend](grad, x, weight, rstd)
