"""Backend `triton` of fp8: one launch for all matrices of a weight.

Runs on NVIDIA GPUs from sm_89 on, and on a CPU inside Triton's interpreter (tests; it reads e4m3's
NaN as 480). Left out: checks (op.py).
"""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false

from contextlib import nullcontext

import torch

from fullspan.ops.fp8.kernels import dequantise_kernel
from fullspan.ops.sizes import ceil_div, power_of_2
from fullspan.shapes import Tensor

_TILE = 128  # at most, in each direction: 16 KiB of e4m3


def dequantise_into(out: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
    """As reference.dequantise_into, to the bit."""
    if weight.ndim > 4:  # the kernel knows two leading dimensions
        for each in zip(out, weight, scale, strict=True):
            dequantise_into(*each, block)
        return
    if not weight.numel():
        return
    out, weight, scale = (t[(None,) * (4 - t.ndim)] for t in (out, weight, scale))
    outer, inner, rows, cols = weight.shape
    tile = [min(_TILE, power_of_2(size)) for size in block]
    row_tiles, col_tiles = (
        blocks * ceil_div(size, side) for blocks, size, side in zip(scale.shape[2:], block, tile)
    )
    with torch.cuda.device(weight.device) if weight.is_cuda else nullcontext():
        dequantise_kernel[(outer * inner * row_tiles * col_tiles,)](
            weight, scale, out, rows, cols, row_tiles, col_tiles, inner,
            *weight.stride(), *scale.stride(), *out.stride(),
            BR=block[0], BC=block[1], TR=tile[0], TC=tile[1], num_warps=8,
        )  # fmt: skip
