"""Rounding of rows to e4m3 in Triton, in one launch: where a row goes among the experts' padded
rows, its scales, its values. A program has a whole row where the row has one scale. Otherwise it
has some columns of several rows, as their scales lie side by side: stored one by one they are 4
bytes of a sector of 32 that other programs write to at the same time. Arithmetic: fp8/README.md,
`quantise`.

Kernels carry `no_type_check` so that import hooks which wrap annotated functions leave them to
Triton.
"""

from typing import no_type_check

import triton
import triton.language as tl

_TINY = tl.constexpr(2.0**-126)  # the smallest normal float32: the reciprocal of less is infinite
_LARGEST = tl.constexpr(448.0)  # of e4m3
_GROUP = tl.constexpr(128)


@triton.jit
@no_type_check
def round_rows_kernel(
    X, BLOCK_SCALE, COUNTS, OUT, SCALE, EXPERT, PLACE,
    x_row, scale_row, scale_group, width, experts,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr,
    ALIGN: tl.constexpr, WHOLE: tl.constexpr, SCALED: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """OUT[i] * SCALE[i] is a row of X, with a scale for each 128 columns (WHOLE: for the row). A
    program has GROUPS times 128 columns, of PARTS such parts, of ROWS rows.

    SCALED: X is e4m3 itself, BLOCK_SCALE [rows / 128, width / 128] multiplies it.
    PADDED: COUNTS[e] rows of X are expert e's and begin at a multiple of ALIGN in OUT, itself one
    of ROWS; EXPERT[i] is the expert of row i of OUT, -1 where it is padding and is not written;
    PLACE[row of X] is i. Otherwise row i of OUT is row i of X.
    """
    line = tl.arange(0, ROWS * GROUPS)
    first = tl.program_id(0).to(tl.int64) // PARTS * ROWS
    i = first + line % ROWS
    group = tl.program_id(0) % PARTS * GROUPS + line // ROWS
    row = i
    known = group * _GROUP < width
    if PADDED:
        e = tl.arange(0, EXPERTS)
        count = tl.load(COUNTS + e, mask=e < experts, other=0).to(tl.int32)
        room = (count + ALIGN - 1) // ALIGN * ALIGN
        expert = tl.sum((tl.cumsum(room, 0) <= first).to(tl.int32), 0)  # behind those that end
        row = i - tl.sum(tl.where(e < expert, room - count, 0), 0)
        used = row < tl.sum(tl.where(e <= expert, count, 0), 0)
        tl.store(EXPERT + i, tl.where(used, expert, -1), mask=group == 0)
        tl.store(PLACE + row, i, mask=used & (group == 0))
        known = known & used
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    wide = tl.load(X + row[:, None] * x_row + column, mask=known[:, None], other=0.0).to(tl.float32)
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
    tl.store(OUT + i[:, None] * width + column, value.to(OUT.dtype.element_ty), mask=known[:, None])
    if WHOLE:
        known = known & (group == 0)
    tl.store(SCALE + i * scale_row + group * scale_group, scale, mask=known)
