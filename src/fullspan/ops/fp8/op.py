"""Block-scaled FP8 weights: dequantise before use, quantise what is written back.

A weight is float8_e4m3fn [..., rows, cols]; its scale has one float32 for each block of
block[0] x block[1] values, by which they are multiplied (`weight_scale_inv` in the checkpoints of
DeepSeek and GLM). The last block of a row or column may be ragged. See README.md.
"""

import torch

from fullspan.errors import LayoutError
from fullspan.ops.backend import choose, on_first_call
from fullspan.ops.fp8 import reference
from fullspan.ops.fp8.reference import E4M3, quantise, scale_shape
from fullspan.ops.registration import operator
from fullspan.shapes import Float, Float32, Tensor

__all__ = ["E4M3", "dequantise_blocks", "quantise_blocks", "scale_shape"]

Block = tuple[int, int]
_IMPLEMENTATIONS = {
    "triton": on_first_call("fullspan.ops.fp8.triton_backend", "dequantise_into"),
    "reference": reference.dequantise_into,
}
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def dequantise_blocks(
    weight: Float[Tensor, "*experts out in"],
    scale: Float32[Tensor, "*experts out_blocks in_blocks"],
    block: Block,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Float[Tensor, "*experts out in"]:
    """weight * scale of its block, computed in float32 and rounded once. No gradient.

    Args:
        block: rows and columns of a block.
        out: where to write: shape of `weight`, dtype `out_dtype`, any strides. None: a new tensor.
        backend: triton, reference, or auto for the first that can run; all give the same bits.

    Raises:
        BackendError: the backend cannot run here.
        LayoutError: a dtype or the shape of the scale or of `out` does not fit; it gives both.
    """
    _check(weight, scale, block, out_dtype)
    if out is None:
        out = torch.empty(weight.shape, dtype=out_dtype, device=weight.device)
    elif out.shape != weight.shape or out.dtype != out_dtype:
        raise LayoutError(
            f"the workspace is {out.dtype} {list(out.shape)}, but the weight becomes {out_dtype} "
            f"{list(weight.shape)}"
        )
    backend = choose("fp8", backend, weight.device, out_dtype)
    _dequantise(out, weight, scale, block[0], block[1], backend)
    return out


def quantise_blocks(
    weight: Float[Tensor, "*experts out in"], block: Block, *, power_of_two: bool = False
) -> tuple[Float[Tensor, "*experts out in"], Float32[Tensor, "*experts out_blocks in_blocks"]]:
    """e4m3 values and scales whose product is nearest to `weight`: (weight, scale).

    The largest magnitude of a block becomes 448, the largest e4m3; values round to nearest even.
    power_of_two: scales rounded up to a power of two, as checkpoints with scale_fmt ue8m0 have
    them. A value that is not finite gives a scale that is not. No gradient.
    """
    _check_block(block)
    return _quantise(weight.detach(), block[0], block[1], power_of_two)


@operator(
    "dequantise_blocks(Tensor(a!) out, Tensor weight, Tensor scale, int block_rows, "
    "int block_cols, str backend) -> ()",
    fake=lambda *given: None,
)
def _dequantise(out, weight, scale, block_rows, block_cols, backend):
    _IMPLEMENTATIONS[backend](out, weight, scale, (block_rows, block_cols))


@operator(
    "quantise_blocks(Tensor weight, int block_rows, int block_cols, bool power_of_two) "
    "-> (Tensor, Tensor)",
    fake=lambda weight, block_rows, block_cols, power_of_two: (
        weight.new_empty(weight.shape, dtype=E4M3),
        weight.new_empty(scale_shape(weight.shape, (block_rows, block_cols)), dtype=torch.float32),
    ),
)
def _quantise(weight, block_rows, block_cols, power_of_two):
    return quantise(weight, (block_rows, block_cols), power_of_two=power_of_two)


def _check_block(block: Block) -> None:
    if min(block) < 1:
        raise LayoutError(f"a block is {block[0]} x {block[1]}: both must be at least 1")


def _check(weight: Tensor, scale: Tensor, block: Block, out_dtype: torch.dtype) -> None:
    _check_block(block)
    if weight.dtype != E4M3:
        raise LayoutError(f"the weight is {weight.dtype}: only {E4M3} has block scales here")
    if out_dtype not in _OUT_DTYPES:
        names = ", ".join(map(str, _OUT_DTYPES))
        raise LayoutError(f"FP8 weights become one of {names}, not {out_dtype}")
    if scale.shape != (wanted := scale_shape(weight.shape, block)):
        raise LayoutError(
            f"a weight {list(weight.shape)} in blocks of {block[0]} x {block[1]} has a scale "
            f"{list(wanted)}, not {list(scale.shape)}"
        )
