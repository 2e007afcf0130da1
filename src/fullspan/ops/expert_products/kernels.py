"""Rounding of rows to e4m3 in Triton, a program a row: where a row goes among the experts' padded
rows, its scales, its values, in one launch. Arithmetic: fp8/README.md, `quantise`.

Kernels carry `no_type_check` so that import hooks which wrap annotated functions leave them to
Triton.
"""

from typing import no_type_check

import triton
import triton.language as tl

_TINY = tl.constexpr(2.0**-126)  # the smallest normal float32: the reciprocal of less is infinite
_LARGEST = tl.constexpr(448.0)  # of e4m3
_BEYOND = tl.constexpr((1 << 63) - 1)
_GROUP = tl.constexpr(128)


@triton.jit
@no_type_check
def round_rows_kernel(
    X, BLOCK_SCALE, FIRST, FIRST_PADDED, OUT, SCALE, EXPERT, PLACE,
    x_row, scale_row, scale_group, width, experts,
    GROUPS: tl.constexpr, EXPERTS: tl.constexpr,
    WHOLE: tl.constexpr, SCALED: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """OUT[i] * SCALE[i] is a row of X, with a scale for each 128 columns (WHOLE: for the row).

    SCALED: X is e4m3 itself, BLOCK_SCALE [rows / 128, width / 128] multiplies it.
    PADDED: expert e's rows are FIRST[e] .. FIRST[e + 1] of X and begin at FIRST_PADDED[e] of OUT;
    EXPERT[i] is the expert of row i of OUT, -1 where it is padding and is not written; PLACE[row of
    X] is i. Otherwise row i of OUT is row i of X.
    """
    i = tl.program_id(0).to(tl.int64)
    row = i
    used = i >= 0
    if PADDED:
        e = tl.arange(0, EXPERTS)
        first = tl.load(FIRST_PADDED + e, mask=e < experts, other=_BEYOND)
        expert = tl.sum((first <= i).to(tl.int32), 0) - 1  # the last of those that begin there
        row = i - tl.load(FIRST_PADDED + expert) + tl.load(FIRST + expert)
        used = row < tl.load(FIRST + expert + 1)
        tl.store(EXPERT + i, tl.where(used, expert, -1))
        tl.store(PLACE + row, i, mask=used)
    group = tl.arange(0, GROUPS)
    known = (group * _GROUP < width) & used
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    wide = tl.load(X + row * x_row + column, mask=known[:, None], other=0.0).to(tl.float32)
    if SCALED:
        block = BLOCK_SCALE + row // _GROUP * (width // _GROUP) + group
        wide = wide * tl.load(block, mask=known, other=0.0)[:, None]
    largest = tl.max(tl.abs(wide), 1)
    if WHOLE:
        largest = tl.zeros_like(largest) + tl.max(largest, 0)
    scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, _LARGEST, tl.float32)), _TINY)
    scale = tl.where(largest == 0, 1.0, scale)
    # At most 448 and the error of two roundings, which rounds to 448: no clamp, which hides NaN.
    value = wide * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    tl.store(OUT + i * width + column, value.to(OUT.dtype.element_ty), mask=known[:, None])
    if WHOLE:
        known = known & (group == 0)
    tl.store(SCALE + i * scale_row + group * scale_group, scale, mask=known)
