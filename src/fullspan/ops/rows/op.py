"""What a layer does to rows beside its products: gather and sum them, gate them, normalise them.

    gather_rows   slots from rows, rows from slots, one order from another, each the adjoint of one
    swiglu        the gated product of an MLP, with a weight for each row where it has one
    rms_norm      with a frozen weight

Each is one operator with its backward: what autograd keeps is what it was given, and no float32
copy of it. Sums are in float32, in one order. See README.md.
"""

import torch

from fullspan.ops.backend import choose, on_first_call
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
    return _gather_rows(x, index, inverse, choose("rows", backend, x.device, x.dtype))


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
    return _swiglu(gate, up, weights, choose("rows", backend, gate.device, gate.dtype))


def rms_norm(
    x: Float[Tensor, "*rows width"],
    weight: Float[Tensor, "width"],
    eps: float,
    *,
    backend: str = "auto",
) -> Float[Tensor, "*rows width"]:
    """x / sqrt(mean(x^2) + eps), rounded to x's dtype, times a weight without a gradient."""
    backend = choose("rows", backend, x.device, x.dtype)
    return _rms_norm(x.reshape(-1, x.shape[-1]), weight, eps, backend)[0].view(x.shape)


@torch.library.custom_op(
    "fullspan::gather_rows",
    mutates_args=(),
    schema="(Tensor x, Tensor index, Tensor inverse, str backend) -> Tensor",
)
def _gather_rows(x, index, inverse, backend):
    return _GATHER[backend](x, index)


@_gather_rows.register_fake
def _(x, index, inverse, backend):
    return x.new_empty(index.shape[0], x.shape[1])


def _gather_context(ctx, inputs, output):
    _, index, inverse, ctx.backend = inputs
    ctx.save_for_backward(index, inverse)


def _gather_backward(ctx, grad):
    index, inverse = ctx.saved_tensors
    return _gather_rows(grad, inverse, index, ctx.backend), None, None, None


_gather_rows.register_autograd(_gather_backward, setup_context=_gather_context)


@torch.library.custom_op(
    "fullspan::swiglu",
    mutates_args=(),
    schema="(Tensor gate, Tensor? up, Tensor? weights, str backend) -> Tensor",
)
def _swiglu(gate, up, weights, backend):
    return _SWIGLU[backend](*_halves(gate, up), weights)


@_swiglu.register_fake
def _(gate, up, weights, backend):
    return torch.empty_like(_halves(gate, up)[0], memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "fullspan::swiglu_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor gate, Tensor? up, Tensor? weights, str backend) "
    "-> (Tensor, Tensor, Tensor)",
)
def _swiglu_backward(grad, gate, up, weights, backend):
    dgate = gate.new_empty(gate.shape)
    dup = gate.new_empty((0,) if up is None else up.shape)
    given = (grad, *_halves(gate, up), weights)
    outs = _halves(dgate, None if up is None else dup)
    return dgate, dup, _SWIGLU_BACKWARD[backend](*given, *outs)


@_swiglu_backward.register_fake
def _(grad, gate, up, weights, backend):
    dup = gate.new_empty((0,) if up is None else up.shape)
    rows = 0 if weights is None else gate.shape[0]
    return gate.new_empty(gate.shape), dup, gate.new_empty(rows, dtype=torch.float32)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    width = gate.shape[1] // 2
    return (gate, up) if up is not None else (gate[:, :width], gate[:, width:])


def _swiglu_context(ctx, inputs, output):
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _swiglu_grads(ctx, grad):
    gate, up, weights = ctx.saved_tensors
    dgate, dup, dweights = _swiglu_backward(grad, gate, up, weights, ctx.backend)
    return dgate, None if up is None else dup, None if weights is None else dweights, None


_swiglu.register_autograd(_swiglu_grads, setup_context=_swiglu_context)


@torch.library.custom_op(
    "fullspan::rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, float eps, str backend) -> (Tensor, Tensor)",
)
def _rms_norm(x, weight, eps, backend):
    return _NORM[backend](x, weight, eps)


@_rms_norm.register_fake
def _(x, weight, eps, backend):
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=wide)


@torch.library.custom_op(
    "fullspan::rms_norm_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor rstd, str backend) -> Tensor",
)
def _rms_norm_backward(grad, x, weight, rstd, backend):
    return _NORM_BACKWARD[backend](grad, x, weight, rstd)


@_rms_norm_backward.register_fake
def _(grad, x, weight, rstd, backend):
    return x.new_empty(x.shape)


def _norm_context(ctx, inputs, output):
    x, weight, _, ctx.backend = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.set_materialize_grads(False)  # none for 1 / rms


def _norm_grads(ctx, grad, _):
    return _rms_norm_backward(grad, *ctx.saved_tensors, ctx.backend), None, None, None


_rms_norm.register_autograd(_norm_grads, setup_context=_norm_context)
