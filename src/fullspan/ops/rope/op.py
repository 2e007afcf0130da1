"""Rotary position embedding (Su et al. 2021) in both channel conventions, with YaRN (Peng et al. 2023) frequencies.

Angles are computed for the positions at hand, never as a table sized by the context. The numbers agree bit for bit with
transformers' `modeling_rope_utils` in fp32. Other scalings (linear, dynamic, longrope) are left out: no family uses them.
"""

import math
from dataclasses import dataclass

import torch

from fullspan.errors import ConfigError
from fullspan.ops.rope.reference import rotate
from fullspan.shapes import Float, Float32, Int64, Tensor


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN context extension. attention_factor None: derived from factor, mscale and mscale_all_dim."""

    factor: float | int
    original_max_position: int
    beta_fast: float | int = 32.0
    beta_slow: float | int = 1.0
    mscale: float | int | None = None
    mscale_all_dim: float | int | None = None
    attention_factor: float | int | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_max_position < 1:
            raise ConfigError(
                f"yarn has factor {self.factor} over {self.original_max_position} positions; both must be at least 1"
            )


def inverse_frequencies(
    rope_dim: int, theta: float | int, yarn: Yarn | None = None
) -> tuple[Float32[Tensor, "half"], float]:
    """Radians per position of each channel pair [rope_dim / 2], and the factor on cos and sin (1.0 without yarn)."""
    if rope_dim < 2 or rope_dim % 2:
        raise ConfigError(f"the rotary width is {rope_dim}; it must be a positive even number")
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32, device="cpu") / rope_dim
    wavelengths = theta**exponents
    if yarn is None:
        return 1.0 / wavelengths, 1.0
    keep = 1 - _interpolation_ramp(rope_dim, theta, yarn)
    inv_freq = 1.0 / (yarn.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep
    return inv_freq, _attention_factor(yarn)


def _interpolation_ramp(rope_dim: int, theta: float | int, yarn: Yarn) -> Tensor:
    """0 where a pair turns often enough to be left alone, 1 where it is fully interpolated."""

    def pair_that_turns(turns: float) -> float:
        positions_per_radian = yarn.original_max_position / (turns * 2 * math.pi)
        return rope_dim * math.log(positions_per_radian) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(rope_dim // 2, dtype=torch.float32, device="cpu")
    return ((pairs - low) / (high - low)).clamp(0, 1)


def _attention_factor(yarn: Yarn) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return yarn_mscale(yarn.factor, 1.0)


def yarn_mscale(factor: float | int, mscale: float | int) -> float:
    """Growth of the attention temperature with the context: 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_angles(
    positions: Int64[Tensor, "rows"],
    inv_freq: Float32[Tensor, "half"],
    attention_factor: float | int,
) -> tuple[Float32[Tensor, "rows half"], Float32[Tensor, "rows half"]]:
    """cos and sin [rows, rope/2] of the positions at hand, in fp32, times attention_factor."""
    angles = positions[:, None].float() * inv_freq.to(positions.device)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def apply_rope(
    x: Float[Tensor, "rows *heads rope"],
    cos: Float[Tensor, "rows half"],
    sin: Float[Tensor, "rows half"],
    *,
    interleaved: bool,
) -> Float[Tensor, "rows *heads rope"]:
    """Turn the channel pairs of x [rows, rope] or [rows, heads, rope] by the row's angles.

    interleaved: pairs are neighbours (2i, 2i + 1), and stay so in the output; otherwise (i, i + rope/2).
    Arithmetic in the wider of x's and cos's dtype; same dtype as x out. No gradient reaches cos and sin.
    """
    half = (x.shape[0], x.shape[-1] // 2)
    assert x.shape[-1] % 2 == 0 and cos.shape == half and sin.shape == half, (x.shape, cos.shape)
    return _rope(x, cos, sin, interleaved, False)


@torch.library.custom_op(
    "fullspan::rope",
    mutates_args=(),
    schema="(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> Tensor",
)
def _rope(x, cos, sin, interleaved, inverse):
    return rotate(x, cos, sin, interleaved, inverse)


@_rope.register_fake
def _(x, cos, sin, interleaved, inverse):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, grad):
    cos, sin = ctx.saved_tensors
    return _rope(grad, cos, sin, ctx.interleaved, not ctx.inverse), None, None, None, None


_rope.register_autograd(_backward, setup_context=_setup_context)
