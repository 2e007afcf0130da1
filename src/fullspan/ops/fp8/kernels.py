"""Block dequantise in Triton: a program for each tile of a block, so that its scale is one number.

The conversion of e4m3 is the hardware's, from sm_89 on. Kernels carry `no_type_check` so that
import hooks which wrap annotated functions leave them to Triton.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def dequantise_kernel(
    WEIGHT, SCALE, OUT, rows, cols, row_tiles, col_tiles, inner,
    w_outer, w_inner, w_row, w_col, s_outer, s_inner, s_row, s_col, o_outer, o_inner, o_row, o_col,
    BR: tl.constexpr, BC: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    """OUT[a, b, i, j] = WEIGHT[a, b, i, j] * SCALE[a, b, i // BR, j // BC], b below `inner`.

    Program: (matrix, row tile, column tile), the last fastest; tiles of TR x TC begin with a block.
    """
    tile = tl.program_id(0)
    col_tile = tile % col_tiles
    row_tile = tile // col_tiles % row_tiles
    matrix = (tile // col_tiles // row_tiles).to(tl.int64)
    a, b = matrix // inner, matrix % inner
    block_row, block_col = row_tile // tl.cdiv(BR, TR), col_tile // tl.cdiv(BC, TC)
    i = row_tile % tl.cdiv(BR, TR) * TR + tl.arange(0, TR)
    j = col_tile % tl.cdiv(BC, TC) * TC + tl.arange(0, TC)
    row, col = block_row * BR + i, block_col * BC + j
    row_mask, col_mask = row < rows, col < cols
    if BR % TR != 0:
        row_mask = row_mask & (i < BR)
    if BC % TC != 0:
        col_mask = col_mask & (j < BC)
    mask = row_mask[:, None] & col_mask[None, :]
    row, col = row.to(tl.int64)[:, None], col.to(tl.int64)[None, :]
    scale = tl.load(SCALE + a * s_outer + b * s_inner + block_row.to(tl.int64) * s_row
                    + block_col.to(tl.int64) * s_col)  # fmt: skip
    at = WEIGHT + a * w_outer + b * w_inner + row * w_row + col * w_col
    wide = tl.load(at, mask=mask, other=0.0).to(tl.float32) * scale
    at = OUT + a * o_outer + b * o_inner + row * o_row + col * o_col
    tl.store(at, wide.to(OUT.dtype.element_ty), mask=mask)
