"""Rotary position embedding (Su et al. 2021) in both channel conventions, with the frequencies of
YaRN (Peng et al. 2023).

Angles are computed for the positions at hand, never as a table sized by the context. In fp32 the
numbers are those of transformers, bit for bit. It leaves out the other scalings (linear, dynamic,
longrope): no family here uses them.
"""

import math

import torch

from fullspan.errors import ConfigError
from fullspan.ops.backend import choose, on_first_call
from fullspan.ops.registration import operator
from fullspan.ops.rope import reference
from fullspan.ops.rope.yarn import Yarn, yarn_mscale
from fullspan.shapes import Float, Float32, Int64, Tensor

_ROTATE = {
    "triton": on_first_call("fullspan.ops.rope.triton_backend", "rotate"),
    "reference": reference.rotate,
}


def inverse_frequencies(
    rope_dim: int, theta: float, yarn: Yarn | None = None
) -> tuple[Float32[Tensor, "half"], float]:
    """Radians per position of each channel pair, and the factor on cos and sin (1.0 without yarn).

    Raises ConfigError when rope_dim is no positive even number.
    """
    if rope_dim < 2 or rope_dim % 2:
        raise ConfigError(f"the rotary width is {rope_dim}; it must be a positive even number")
    wavelengths = theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
    if yarn is None:
        return 1.0 / wavelengths, 1.0
    kept = 1 - _interpolated(rope_dim, theta, yarn)
    inv_freq = 1.0 / (yarn.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return inv_freq, _attention_factor(yarn)


def _interpolated(rope_dim: int, theta: float, yarn: Yarn) -> Tensor:
    """How far each pair is interpolated: 0 where it turns often in the pretraining context."""

    def pair_that_turns(times: float) -> float:
        wavelength = yarn.original_max_position / (times * 2 * math.pi)
        return (rope_dim * math.log(wavelength)) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(rope_dim // 2, dtype=torch.float32)
    return ((pairs - low) / (high - low)).clamp(0, 1)


def _attention_factor(yarn: Yarn) -> float:
    if yarn.attention_factor is not None:
        return float(yarn.attention_factor)
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return yarn_mscale(yarn.factor, 1.0)


def rope_angles(
    positions: Int64[Tensor, "rows"], inv_freq: Float32[Tensor, "half"], attention_factor: float
) -> tuple[Float32[Tensor, "rows half"], Float32[Tensor, "rows half"]]:
    """cos and sin of position * inv_freq, times attention_factor, for the positions at hand."""
    angles = positions[:, None].float() * inv_freq
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def apply_rope(
    x: Float[Tensor, "rows *heads rope"],
    cos: Float[Tensor, "rows half"],
    sin: Float[Tensor, "rows half"],
    *,
    interleaved: bool,
    backend: str = "auto",
) -> Float[Tensor, "rows *heads rope"]:
    """Turn the channel pairs of x, [rows, rope] or [rows, heads, rope], by the angle of their row.

    interleaved: the pairs are neighbours (2i, 2i + 1), and stay so in the output; if not, they are
    (i, i + rope/2). Computed in the wider of the dtypes of x and cos, rounded once to that of x.
    x need not be contiguous. No gradient reaches cos and sin. backend: triton, reference, or auto
    (ops.rows).
    """
    angles = (x.shape[0], x.shape[-1] // 2)
    assert x.shape[-1] % 2 == 0 and cos.shape == sin.shape == angles, (x.shape, cos.shape)
    return _rope(x, cos, sin, interleaved, False, choose("rows", backend, x.device, x.dtype))


def rope_into(
    x: Float[Tensor, "rows *heads rope"],
    cos: Float[Tensor, "rows half"],
    sin: Float[Tensor, "rows half"],
    out: Float[Tensor, "rows *heads rope"],
    *,
    interleaved: bool,
    inverse: bool = False,
    backend: str = "auto",
) -> None:
    """`apply_rope`, or with `inverse` its adjoint, written into a tensor of x's dtype whose
    channels are neighbours; it may be x. Without autograd.
    """
    assert x.dtype == out.dtype, (x.dtype, out.dtype)
    backend = choose("rows", backend, x.device, x.dtype)
    _rope_into(out, x, cos, sin, interleaved, inverse, backend)


@operator(
    "rope_into(Tensor(a!) out, Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse, "
    "str backend) -> ()",
    fake=lambda *given: None,
)
def _rope_into(out, x, cos, sin, interleaved, inverse, backend):
    _ROTATE[backend](x, cos, sin, interleaved, inverse, out)


@torch.library.custom_op(
    "fullspan::rope",
    mutates_args=(),
    schema="(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse, str backend) "
    "-> Tensor",
)
def _rope(x, cos, sin, interleaved, inverse, backend):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _ROTATE[backend](x, cos, sin, interleaved, inverse, out)
    return out


@_rope.register_fake
def _(x, cos, sin, interleaved, inverse, backend):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    _, cos, sin, ctx.interleaved, ctx.inverse, ctx.backend = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, grad):
    cos, sin = ctx.saved_tensors
    turned = _rope(grad, cos, sin, ctx.interleaved, not ctx.inverse, ctx.backend)
    return turned, None, None, None, None, None


_rope.register_autograd(_backward, setup_context=_setup_context)
