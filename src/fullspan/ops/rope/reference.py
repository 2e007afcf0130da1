"""Rotary position in plain PyTorch: pairs of channels turned by an angle, in fp32 or wider."""

from torch import Tensor


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool, out: Tensor
) -> None:
    """x [rows, ..., rope] turned by the angles of cos and sin [rows, rope/2], or turned back."""
    half = x.shape[-1] // 2
    shape = (x.shape[0], *(1,) * (x.dim() - 2), half)
    cos, sin = cos.view(shape), sin.view(shape)
    if inverse:
        sin = -sin
    first, second = _pairs(x, interleaved)
    out_first, out_second = _pairs(out, interleaved)
    turned = first * cos - second * sin, second * cos + first * sin  # before x, which may be out
    out_first.copy_(turned[0])
    out_second.copy_(turned[1])


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the two channels of every pair: neighbours, or channel i and i + rope/2."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
