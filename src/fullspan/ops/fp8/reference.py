"""Block-scaled e4m3 in plain PyTorch: the CPU product path and what kernels are tested against.

Strips of whole block rows are worked on one after the other, so the float32 copy that the
arithmetic needs is bounded, whatever the size of the weight. Ragged last blocks are ordinary: a
scale is repeated over its block's columns and cut to the width, and a strip that ends with the
weight is short.
"""

from collections.abc import Iterator
from itertools import product

import torch

from fullspan.shapes import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0  # the largest finite value of float8_e4m3fn (Micikevicius et al. 2022)
_STRIP_ELEMENTS = 1 << 22  # of float32 at once: 16 MiB


def dequantise_into(out: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
    """out = weight * scale of its block, in float32, rounded once to the dtype of `out`.

    weight, out [..., rows, cols]; scale [..., ceil(rows / block rows), ceil(cols / block cols)].
    """
    for place in _matrices(weight):
        for strip, blocks in _strips(weight.shape[-2:], block):
            out[place][strip] = _times(weight[place][strip], scale[place][blocks], block)


def quantise(
    weight: Tensor, block: tuple[int, int], *, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """The e4m3 weight and the float32 scale that takes the largest value of a block to 448."""
    shape = scale_shape(weight.shape, block)
    scale = torch.empty(shape, dtype=torch.float32, device=weight.device)
    quantised = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    for place in _matrices(weight):
        for strip, blocks in _strips(weight.shape[-2:], block):
            own = _scales(weight[place][strip], block, power_of_two=power_of_two)
            scale[place][blocks] = own
            wide = _times(weight[place][strip], own.reciprocal(), block)
            quantised[place][strip] = wide.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
            del wide  # before the next strip's
    return quantised, scale


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scale of a weight [..., rows, cols]."""
    *lead, rows, cols = shape
    return (*lead, -(-rows // block[0]), -(-cols // block[1]))


def _matrices(weight: Tensor) -> Iterator[tuple[int, ...]]:
    """The index of every matrix in the leading dimensions."""
    return product(*map(range, weight.shape[:-2]))


def _strips(shape: tuple[int, ...], block: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """Runs of rows of bounded size that begin with a block, and their runs of block rows."""
    rows, cols = shape
    blocks = max(1, _STRIP_ELEMENTS // max(1, block[0] * cols))
    for first in range(0, rows, blocks * block[0]):
        start = first // block[0]
        last = min(first + blocks * block[0], rows)
        yield slice(first, last), slice(start, start + -(-(last - first) // block[0]))


def _times(strip: Tensor, factor: Tensor, block: tuple[int, int]) -> Tensor:
    """Each value of a strip times the factor [block rows, block columns] of its block, float32."""
    wide = strip.to(torch.float32, copy=True)
    wide_factor = factor.repeat_interleave(block[1], dim=1)[:, : wide.shape[1]]
    whole = wide.shape[0] // block[0]
    wide[: whole * block[0]].unflatten(0, (whole, block[0])).mul_(wide_factor[:whole, None])
    wide[whole * block[0] :].mul_(wide_factor[whole:])
    return wide


def _scales(strip: Tensor, block: tuple[int, int], *, power_of_two: bool) -> Tensor:
    """Largest magnitude of each block over 448. A block of zeros gets 1: it stays zero."""
    rows, cols = scale_shape(strip.shape, block)
    padded = strip.new_zeros(rows * block[0], cols * block[1], dtype=torch.float32)
    padded[: strip.shape[0], : strip.shape[1]] = strip.abs()
    largest = padded.unflatten(1, (cols, block[1])).unflatten(0, (rows, block[0])).amax((1, 3))
    # By a tensor: for a number PyTorch on a GPU multiplies by its rounded reciprocal. Normal
    # numbers only: the reciprocal of a smaller one is infinite.
    scale = (largest / largest.new_full((), E4M3_MAX)).clamp_(min=torch.finfo(torch.float32).tiny)
    if power_of_two:
        scale = torch.exp2(scale.log2().ceil())
    return scale.masked_fill_(largest == 0, 1.0)
