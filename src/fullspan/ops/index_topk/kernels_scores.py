"""Index scores in plain Triton: any NVIDIA GPU from sm_80 on, and Triton's interpreter.

One program scores BQ rows against one segment of SEG keys, head after head. Either it stores the
scores, or (GATE) only those above the row's threshold, packed to the front of the segment in key
order, with their number: places come from bit counts, without atomics, scans or sorts. Left out:
the selection (kernels_select.py), the loop over spans of keys (streaming.py), the Hopper version
(kernels_hopper.py). Kernels carry `no_type_check` so that import hooks which wrap annotated
functions leave them to Triton.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def popcount(x, ASM: tl.constexpr):
    """Set bits of an int32. ASM False: by arithmetic, which the interpreter knows too."""
    if ASM:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


@triton.jit
@no_type_check
def bounds_kernel(START, END, BASE, BEND, rows, BQ: tl.constexpr, SEG: tl.constexpr):
    """First key (a multiple of SEG) and end of the keys that each block of BQ rows reaches; 0 and 0
    where it has none.
    """
    row = tl.program_id(0) * BQ + tl.arange(0, BQ)
    st = tl.load(START + row, mask=row < rows, other=2147483647)
    en = tl.load(END + row, mask=row < rows, other=0)
    last = tl.max(tl.where(en > st, en, 0))
    first = tl.min(tl.where(en > st, st, 2147483647)) // SEG * SEG
    tl.store(BASE + tl.program_id(0), tl.where(last > 0, first, 0))
    tl.store(BEND + tl.program_id(0), last)


@triton.jit
@no_type_check
def _store_survivors(
    tot, START, END, TAU, SEGS, NUM, row0, b, col, k0, kend, rows, seg_stride, num_stride,
    BQ: tl.constexpr, SEG: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Entries of the segment at column `col`: (score bits in order << 32 | key), keys ascending,
    where score > tau.
    """
    words: tl.constexpr = SEG // 32
    loc = b * BQ + tl.arange(0, BQ)
    c = tl.arange(0, SEG)
    rm = row0 + loc < rows
    st = tl.load(START + row0 + loc, mask=rm, other=0)
    en = tl.load(END + row0 + loc, mask=rm, other=0)
    first = tl.maximum(st - k0, 0)
    last = tl.where(en > st, tl.minimum(tl.minimum(en, kend) - k0, SEG), 0)
    tau = tl.load(TAU + loc)
    keep = (tot > tau[:, None]) & (c[None, :] >= first[:, None]) & (c[None, :] < last[:, None])
    kb = tl.reshape(keep.to(tl.int32), (BQ, words, 32))
    lane = tl.arange(0, 32)
    word = tl.sum(kb << lane[None, None, :], 2)
    pw = popcount(word, ASM)
    before = tl.cumsum(pw, 1) - pw
    pos = before[:, :, None] + popcount(word[:, :, None] & ((1 << lane) - 1)[None, None, :], ASM)
    bits = (tot + 0.0).to(tl.uint32, bitcast=True)  # + 0.0: no -0.0
    bits = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    key = (k0 + c)[None, :] + tl.zeros([BQ, SEG], tl.int32)
    entry = ((bits.to(tl.uint64) << 32) | key.to(tl.uint64)).to(tl.int64, bitcast=True)
    at = SEGS + (loc.to(tl.int64) * seg_stride + col)[:, None, None] + pos
    tl.store(at, tl.reshape(entry, (BQ, words, 32)), mask=kb != 0)
    tl.store(NUM + loc.to(tl.int64) * num_stride + col // SEG, tl.sum(pw, 1))


@triton.jit
@no_type_check
def score_kernel(
    QUERY, KEY, WEIGHTS, START, END, BASE, BEND, TAU, SEGS, NUM, row0, rows, pack, lo, span, tiles,
    seg_stride, num_stride, HEADS: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    BQ: tl.constexpr,
    SEG: tl.constexpr, GATE: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program: (block of rows of the slab that starts at row0, segment of the span), the segment
    fastest.

    The span begins `lo` keys after the block's first. SEGS: fp32 scores, or int64 entries with
    GATE.
    """
    b = tl.program_id(0) // tiles
    col = (tl.program_id(0) % tiles) * SEG
    loc = b * BQ + tl.arange(0, BQ)
    begin = tl.load(BASE + row0 // BQ + b) + lo
    k0 = begin + col
    if k0 >= tl.load(BEND + row0 // BQ + b):
        if GATE:
            tl.store(NUM + loc.to(tl.int64) * num_stride + col // SEG, tl.zeros([BQ], tl.int32))
        return
    d = tl.arange(0, DP)
    key = k0 + tl.arange(0, SEG)
    dm = (d < DIM) | (DIM == DP)
    kp = KEY + key.to(tl.int64)[:, None] * DIM + d[None, :]
    k = tl.load(kp, mask=(key < pack)[:, None] & dm[None, :], other=0.0)
    row = row0 + loc
    rm = row < rows
    qp = QUERY + row.to(tl.int64)[:, None] * (HEADS * DIM) + d[None, :]
    wp = WEIGHTS + row.to(tl.int64) * HEADS
    tot = tl.zeros([BQ, SEG], tl.float32)
    for h in tl.range(0, HEADS, num_stages=STAGES):
        q = tl.load(qp + h * DIM, mask=rm[:, None] & dm[None, :], other=0.0)
        w = tl.load(wp + h, mask=rm, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        # (x + |x|) * (w / 2) is w * relu(x) exactly, and faster than a maximum
        tot += (x + tl.abs(x)) * (w * 0.5)[:, None]
    if GATE:
        _store_survivors(
            tot, START, END, TAU, SEGS, NUM, row0, b, col, k0, begin + span, rows, seg_stride,
            num_stride,
            BQ, SEG, ASM,
        )  # fmt: skip
    else:
        c = col + tl.arange(0, SEG)
        tl.store(SEGS + loc.to(tl.int64)[:, None] * seg_stride + c[None, :], tot)
