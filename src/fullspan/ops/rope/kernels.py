"""Rotary position in one Triton kernel: read, turn in float32, round, write, whatever the strides.

Left out: launching (triton_backend.py). Kernels carry `no_type_check` so that import hooks which
wrap annotated functions leave them to Triton.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def turn_kernel(
    X, COS, SIN, OUT, x_row, x_head, out_row, out_head, heads,
    HALF: tl.constexpr, HP: tl.constexpr, HB: tl.constexpr, INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """Row program_id(0), heads [HB * program_id(1), ...). HP: HALF padded to a power of two. The
    last dimensions of X and OUT are contiguous; COS and SIN are [rows, HALF] in float32.
    """
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    i = tl.arange(0, HP)
    cos = tl.load(COS + row * HALF + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(SIN + row * HALF + i, mask=i < HALF, other=0.0)[None, :]
    if INVERSE:
        sin = -sin
    x = X + row * x_row + h.to(tl.int64)[:, None] * x_head
    out = OUT + row * out_row + h.to(tl.int64)[:, None] * out_head
    hm = (h < heads)[:, None]
    if INTERLEAVED:
        j = tl.arange(0, 2 * HP)
        ok = hm & (j < 2 * HALF)[None, :]
        both = tl.load(x + j[None, :], mask=ok, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (HB, HP, 2)))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        turned = tl.reshape(turned, (HB, 2 * HP))
        tl.store(out + j[None, :], turned.to(OUT.dtype.element_ty), mask=ok)
    else:
        ok = hm & (i < HALF)[None, :]
        first = tl.load(x + i[None, :], mask=ok, other=0.0).to(tl.float32)
        second = tl.load(x + HALF + i[None, :], mask=ok, other=0.0).to(tl.float32)
        one, other = first * cos - second * sin, second * cos + first * sin
        tl.store(out + i[None, :], one.to(OUT.dtype.element_ty), mask=ok)
        tl.store(out + HALF + i[None, :], other.to(OUT.dtype.element_ty), mask=ok)
