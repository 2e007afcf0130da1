"""Exact streaming top-k in plain Triton, shared by the `triton` and `hopper` backends.

A row's list holds (order-preserving score bits << 32 | key), keys ascending. The first span of keys
arrives as scores (merge_first_kernel), every later one as the survivors of the row's threshold
(merge_kernel), which are appended; where the list grew past KM it is cut and the threshold raised.
A threshold is a score that at least K keys seen so far reach, so what it drops cannot be among the
K best: a later key that ties with it loses by the tie rule. Left out: scores (kernels_scores.py,
kernels_hopper.py) and launches (streaming.py). Scores must be finite. Kernels carry `no_type_check`
so that import hooks which wrap annotated functions leave them to Triton.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullspan.ops.index_topk.kernels_scores import popcount


@triton.jit
@no_type_check
def _ordered(x):
    """uint32 that orders like the float; -0.0 and 0.0 are one."""
    b = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((b >> 31) != 0, b ^ 0xFFFFFFFF, b | 0x80000000)


@triton.jit
@no_type_check
def _float(k):
    return tl.where((k >> 31) != 0, k & 0x7FFFFFFF, k ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _high(v):
    return (v.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)


@triton.jit
@no_type_check
def _kth(key, ok, total, KM, K: tl.constexpr, ALL: tl.constexpr):
    """(t, need): keep key > t and the first `need` of key == t, by ternary search on the key's
    value.

    At least K are kept, and at most KM unless ties at t exceed that: then exactly K. need == ALL:
    every key >= t.
    """
    lo = tl.min(tl.where(ok, key, 0xFFFFFFFF)).to(tl.uint32)
    hi = (tl.max(key) + 1).to(tl.uint32)
    clo = total
    chi = 0
    go = hi - lo > 1
    while go:
        d = tl.maximum((hi - lo) // 3, 1).to(tl.uint32)
        m1 = lo + d
        m2 = hi - d
        c = tl.sum((key >= m1).to(tl.int32) + ((key >= m2).to(tl.int32) << 16))
        c1 = c & 65535
        c2 = c >> 16
        up = c2 >= K
        mid = c1 >= K
        lo = tl.where(up, m2, tl.where(mid, m1, lo))
        clo = tl.where(up, c2, tl.where(mid, c1, clo))
        chi = tl.where(up, chi, tl.where(mid, c2, c1))
        hi = tl.where(up, hi, tl.where(mid, m2, m1))
        go = (hi - lo > 1) & (clo > KM)
    return lo, tl.where(clo <= KM, ALL, K - chi)


@triton.jit
@no_type_check
def _kth_of_list(best, total, KM, K: tl.constexpr, CAP: tl.constexpr, ALL: tl.constexpr):
    j = tl.arange(0, CAP)
    return _kth(_high(tl.load(best + j, mask=j < total, other=0)), j < total, total, KM, K, ALL)


@triton.jit
@no_type_check
def _places(key, ok, t, need, a, X: tl.constexpr, ALL: tl.constexpr, ASM: tl.constexpr):
    """Order-preserving compaction of X keys: (keep, positions from `a` on, next position, ties
    still needed).
    """
    lane = tl.arange(0, 32)
    below = ((1 << lane) - 1)[None, :]
    kb = tl.reshape(((key >= t) & ok).to(tl.int32), (X // 32, 32))
    if need < ALL:
        e = tl.reshape(((key == t) & ok).to(tl.int32), (X // 32, 32))
        we = tl.sum(e << lane[None, :], 1)
        pe = popcount(we, ASM)
        rank = (tl.cumsum(pe, 0) - pe)[:, None] + popcount(we[:, None] & below, ASM)
        kb = tl.where((e != 0) & (rank >= need), 0, kb)
        need -= tl.minimum(tl.sum(pe), need)
    words = tl.sum(kb << lane[None, :], 1)
    pw = popcount(words, ASM)
    pos = (a + tl.cumsum(pw, 0) - pw)[:, None] + popcount(words[:, None] & below, ASM)
    return tl.reshape(kb, (X,)) != 0, tl.reshape(pos, (X,)), a + tl.sum(pw), need


@triton.jit
@no_type_check
def merge_first_kernel(
    SCORES, START, END, BASE, TAU, BEST, HAVE, row0, span, score_stride, KM, KCAP: tl.constexpr,
    SPAN: tl.constexpr, K: tl.constexpr, BQ: tl.constexpr, PC: tl.constexpr, ALL: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """One program a row: list, length and threshold from the scores of the first span. SPAN: span
    as a power of two.
    """
    loc = tl.program_id(0)
    row = row0 + loc
    base = tl.load(BASE + row // BQ)
    st = tl.load(START + row)
    en = tl.load(END + row)
    a = tl.maximum(st - base, 0)
    b = tl.where(en > st, tl.minimum(en - base, span), 0)
    n = 0
    tau = float("-inf")
    if b > a:
        best = BEST + loc.to(tl.int64) * KCAP
        sc = SCORES + loc.to(tl.int64) * score_stride
        t = tl.full([], 0, tl.uint32)
        need = ALL
        if b - a > KM:
            i = tl.arange(0, SPAN)
            ok = (i >= a) & (i < b)
            key = tl.where(ok, _ordered(tl.load(sc + i, mask=ok, other=0.0)), 0).to(tl.uint32)
            t, need = _kth(key, ok, b - a, KM, K, ALL)
            tau = _float(t)
        for p in range(a // PC * PC, b, PC):
            j = p + tl.arange(0, PC)
            ok = (j >= a) & (j < b)
            key = _ordered(tl.load(sc + j, mask=ok, other=0.0))
            keep, pos, n, need = _places(key, ok, t, need, n, PC, ALL, ASM)
            entry = (key.to(tl.uint64) << 32) | (base + j).to(tl.uint64)
            tl.store(best + pos, entry.to(tl.int64, bitcast=True), mask=keep)
    tl.store(TAU + loc, tau)
    tl.store(HAVE + loc, n)


@triton.jit
@no_type_check
def _append(to, sp, off, c, J: tl.constexpr):
    """The first c[i] entries of every segment i, to off[i] and on."""
    for j0 in range(0, tl.max(c), J):
        j = j0 + tl.arange(0, J)
        ok = j[None, :] < c[:, None]
        v = tl.load(sp[:, None] + j[None, :], mask=ok, other=0)
        tl.store(to + off[:, None] + j[None, :], v, mask=ok)


@triton.jit
@no_type_check
def _compact(best, n, t, need, PC: tl.constexpr, ALL: tl.constexpr, ASM: tl.constexpr):
    """Keep the entries of best[0:n] at or above t, in place; returns their number."""
    a = 0
    for p in range(0, n, PC):
        j = p + tl.arange(0, PC)
        v = tl.load(best + j, mask=j < n, other=0)
        keep, pos, a, need = _places(_high(v), j < n, t, need, a, PC, ALL, ASM)
        tl.debug_barrier()
        tl.store(best + pos, v, mask=keep)
    return a


@triton.jit
@no_type_check
def merge_kernel(
    SEGS, NUM, TAU, BEST, HAVE, segments, seg_stride, num_stride, KM, KCAP: tl.constexpr,
    K: tl.constexpr, SEG: tl.constexpr, TP: tl.constexpr, J: tl.constexpr, PC: tl.constexpr,
    ALL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One program a row: append a span's survivors to its list; where that grew past KM, cut it
    back and raise the row's threshold.

    Survivors that the list has no room for wait until it is cut. KCAP >= KM + SEG: a segment always
    fits.
    """
    loc = tl.program_id(0).to(tl.int64)
    tt = tl.arange(0, TP)
    c = tl.load(NUM + loc * num_stride + tt, mask=tt < segments, other=0)
    n = tl.load(HAVE + loc)
    upto = tl.cumsum(c, 0)
    m = tl.sum(c)
    best = BEST + loc * KCAP
    sp = SEGS + loc * seg_stride + tt * SEG
    done = 0
    go = (m > 0) | (n > KM)
    while go:
        here = tl.where((upto > done) & (upto - done <= KCAP - n), c, 0)
        _append(best + n, sp, upto - c - done, here, J)
        more = tl.sum(here)
        n += more
        done += more
        if n > KM:
            tl.debug_barrier()
            if n <= KCAP // 2:
                t, need = _kth_of_list(best, n, KM, K, KCAP // 2, ALL)
            else:
                t, need = _kth_of_list(best, n, KM, K, KCAP, ALL)
            tl.store(TAU + loc, _float(t))
            n = _compact(best, n, t, need, PC, ALL, ASM)
        go = done < m
    tl.store(HAVE + loc, n)


@triton.jit
@no_type_check
def emit_kernel(
    BEST, HAVE, IDS, COUNTS, row0, KCAP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr
):
    """Ids of a row's list, -1 after them, and their number."""
    loc = tl.program_id(0)
    n = tl.load(HAVE + loc)
    j = tl.arange(0, KP)
    v = tl.load(BEST + loc.to(tl.int64) * KCAP + j, mask=j < n, other=-1)
    tl.store(IDS + (row0 + loc).to(tl.int64) * K + j, v.to(tl.int32), mask=j < K)
    tl.store(COUNTS + row0 + loc, n)
