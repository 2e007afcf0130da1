"""Sparse attention backward in plain Triton, deterministic: no float is ever added by an atomic.

delta_kernel: row sums of out * grad_out. dquery_kernel: gradient of the query; leaves P and dS as
one row of heads per (row, slot). union_kernel and direct_kernel: partial rows of dKV, as the plan
(kernels_plan.py) says; P and dS of each group lie `step` rows further than the slots of the groups
before it have them. segment_kernel: adds the partial rows of each key in the order of the plan.
Left out: launching (triton_backend.py), the Hopper versions of dquery (kernels_hopper_backward.py)
and of the shared keys' partial rows (kernels_hopper_shared.py). Kernels carry `no_type_check` so
that import hooks which wrap annotated functions leave them to Triton.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def delta_kernel(
    OUT, GRAD, DELTA, HEADS: tl.constexpr, DV: tl.constexpr, HB: tl.constexpr, DVP: tl.constexpr
):
    """DELTA[row, head] = sum over the value channels of OUT * GRAD, in fp32."""
    i = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    v = tl.arange(0, DVP)
    ok = (h < HEADS)[:, None] & (v < DV)[None, :]
    at = (i * HEADS + h)[:, None] * DV + v[None, :]
    out = tl.load(OUT + at, mask=ok, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(DELTA + i * HEADS + h, tl.sum(out * grad, 1), mask=h < HEADS)


@triton.jit
@no_type_check
def dquery_kernel(
    QUERY,
    KV,
    IDS,
    COUNTS,
    GRAD,
    LSE,
    DELTA,
    DQUERY,
    PROB,
    DSCORE,
    row0,
    pack,
    scale,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    HP: tl.constexpr,
    HB: tl.constexpr,
    DVP: tl.constexpr,
    DRP: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Row row0 + program_id(0), a tile of heads. PROB and DSCORE are [rows of the chunk * TOPK,
    HP].
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    D: tl.constexpr = DV + DR
    c = tl.program_id(0).to(tl.int64)
    i = c + row0
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    v = tl.arange(0, DVP)
    kk = tl.arange(0, BK)
    hm = (h < HEADS) | (HEADS % HB == 0)
    # `| constant` folds away, and the mask with it, where nothing is padded
    vm = (v < DV) | (DV == DVP)
    qm = hm[:, None] & vm[None, :]
    qp = QUERY + (i * HEADS + h)[:, None] * D
    qn = tl.load(qp + v[None, :], mask=qm, other=0.0)
    grad = tl.load(GRAD + (i * HEADS + h)[:, None] * DV + v[None, :], mask=qm, other=0.0)
    an = tl.zeros([HB, DVP], tl.float32)
    if DRP > 0:
        r = tl.arange(0, DRP)
        rm = (r < DR) | (DR == DRP)
        qrm = hm[:, None] & rm[None, :]
        qr = tl.load(qp + DV + r[None, :], mask=qrm, other=0.0)
        ar = tl.zeros([HB, DRP], tl.float32)
    lse = tl.load(LSE + i * HEADS + h, mask=hm, other=float("inf")) * LOG2E
    delta = tl.load(DELTA + i * HEADS + h, mask=hm, other=0.0)
    n = tl.minimum(tl.load(COUNTS + i), TOPK)
    for t in tl.range(0, n, BK, num_stages=STAGES):
        ids = tl.load(IDS + i * TOPK + t + kk, mask=t + kk < n, other=-1)
        ok = (ids >= 0) & (ids < pack)
        kp = KV + tl.where(ok, ids, 0).to(tl.int64)[:, None] * D
        kn = tl.load(kp + v[None, :], mask=ok[:, None] & vm[None, :], other=0.0)
        s = tl.dot(qn, tl.trans(kn), input_precision=PRECISION)
        if DRP > 0:
            kr = tl.load(kp + DV + r[None, :], mask=ok[:, None] & rm[None, :], other=0.0)
            s = tl.dot(qr, tl.trans(kr), s, input_precision=PRECISION)
        dp = tl.dot(grad, tl.trans(kn), input_precision=PRECISION)
        p = tl.where(ok[None, :], tl.exp2(s * (scale * LOG2E) - lse[:, None]), 0.0)
        ds = (p * (dp - delta[:, None]) * scale).to(kn.dtype)
        at = (c * TOPK + t + kk)[:, None] * HP + h[None, :]
        sm = (t + kk < n)[:, None]
        tl.store(PROB + at, tl.trans(p.to(kn.dtype)), mask=sm)
        tl.store(DSCORE + at, tl.trans(ds), mask=sm)
        an = tl.dot(ds, kn, an, input_precision=PRECISION)
        if DRP > 0:
            ar = tl.dot(ds, kr, ar, input_precision=PRECISION)
    dp_ = DQUERY + (i * HEADS + h)[:, None] * D
    tl.store(dp_ + v[None, :], an.to(DQUERY.dtype.element_ty), mask=qm)
    if DRP > 0:
        tl.store(dp_ + DV + r[None, :], ar.to(DQUERY.dtype.element_ty), mask=qrm)


@triton.jit
@no_type_check
def _partial(
    acc, acr, QUERY, GRAD, PROB, DSCORE, i, tile, slots, ok, c0, r0, HEADS: tl.constexpr,
    DV: tl.constexpr, DR: tl.constexpr, HP: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc, acr += dS^T q + P^T grad over one tile of heads of row i, for `slots` of PROB and
    DSCORE.

    Columns c0 .. c0 + BN of the values, r0 .. r0 + BR of the rope.
    """
    D: tl.constexpr = DV + DR
    h = tile * HB + tl.arange(0, HB)
    at = slots.to(tl.int64)[:, None] * HP + h[None, :]
    s = tl.load(DSCORE + at, mask=ok[:, None], other=0.0)
    p = tl.load(PROB + at, mask=ok[:, None], other=0.0)
    hm = (h < HEADS) | (HEADS % HB == 0)
    cc = c0 + tl.arange(0, BN)
    cm = hm[:, None] & ((cc < DV) | (DV % BN == 0))[None, :]
    qp = QUERY + (i.to(tl.int64) * HEADS + h)[:, None] * D
    gp = GRAD + (i.to(tl.int64) * HEADS + h)[:, None] * DV
    q = tl.load(qp + cc[None, :], mask=cm, other=0.0)
    grad = tl.load(gp + cc[None, :], mask=cm, other=0.0)
    acc = tl.dot(s, q, acc, input_precision=PRECISION)
    if DR > 0:
        cr = r0 + tl.arange(0, BR)
        rm = hm[:, None] & ((cr < D) | (DR % BR == 0))[None, :]
        qr = tl.load(qp + cr[None, :], mask=rm, other=0.0)
        acr = tl.dot(s, qr, acr, input_precision=PRECISION)
    acc = tl.dot(p, grad, acc, input_precision=PRECISION)
    return acc, acr


@triton.jit
@no_type_check
def _store_columns(acc, PART, slots, ok, c0, D: tl.constexpr, N: tl.constexpr, END: tl.constexpr):
    """Columns c0 .. c0 + N of the partial rows at `slots`, those before END."""
    c = c0 + tl.arange(0, N)
    at = PART + slots.to(tl.int64)[:, None] * D + c[None, :]
    tl.store(at, acc.to(PART.dtype.element_ty), mask=ok[:, None] & (c < END)[None, :])


@triton.jit
@no_type_check
def union_kernel(
    QUERY, GRAD, PROB, DSCORE, SLOTS, SHARED, ACTIVE, ACTIVE_COUNT, PART, row0, step,
    HEADS: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr, HP: tl.constexpr, HB: tl.constexpr,
    TOPK: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BM shared keys of one group x BN value columns (and their share of the rope columns), summed
    over the group's rows.

    Program: (group, block of keys, column tile), the column tile fastest. Blocks past the group's
    last have no active row.
    """
    HT: tl.constexpr = HP // HB
    D: tl.constexpr = DV + DR
    pid = tl.program_id(0)
    b = pid // TILES
    active = tl.load(ACTIVE_COUNT + b)
    if active == 0:
        return
    c0 = (pid % TILES) * BN
    r0 = DV + (pid % TILES) * BR
    g = b // BLOCKS
    PROB += g.to(tl.int64) * step * HP
    DSCORE += g.to(tl.int64) * step * HP
    mm = tl.arange(0, BM)
    acc = tl.zeros([BM, BN], tl.float32)
    acr = tl.zeros([BM, BR], tl.float32)
    for e in tl.range(0, active * HT, num_stages=STAGES):
        i = row0 + g * GROUP + tl.load(ACTIVE + b * GROUP + e // HT)
        slots = tl.load(SLOTS + (b.to(tl.int64) * GROUP + e // HT) * BM + mm)
        acc, acr = _partial(
            acc, acr, QUERY, GRAD, PROB, DSCORE, i, e % HT, slots, slots >= 0, c0, r0, HEADS, DV,
            DR, HP, HB, BN, BR, PRECISION,
        )  # fmt: skip
    place = (b % BLOCKS) * BM + mm
    ok = place < tl.load(SHARED + g)
    _store_columns(acc, PART, g * GROUP * TOPK + place, ok, c0, D, BN, DV)
    if DR > 0:
        _store_columns(acr, PART, g * GROUP * TOPK + place, ok, r0, D, BR, D)


@triton.jit
@no_type_check
def direct_kernel(
    QUERY, GRAD, PROB, DSCORE, DIRECT, DIRECT_COUNT, DIRECT_FIRST, MODE, PART, row0, step,
    HEADS: tl.constexpr, TOPK: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr, HP: tl.constexpr,
    HB: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    TILES: tl.constexpr, SKIP_DENSE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One partial row per (row, slot) for keys that few rows of the group share.

    SKIP_DENSE: groups without any shared key (mode 0) are another kernel's work.
    """
    HT: tl.constexpr = HP // HB
    D: tl.constexpr = DV + DR
    pid = tl.program_id(0)
    c = pid // TILES
    n = tl.load(DIRECT_COUNT + c)
    dense = tl.load(MODE + c // GROUP) == 0
    if SKIP_DENSE and dense:
        n = 0
    if n == 0:
        return
    PROB += (c // GROUP).to(tl.int64) * step * HP
    DSCORE += (c // GROUP).to(tl.int64) * step * HP
    first = tl.load(DIRECT_FIRST + c)
    c0 = (pid % TILES) * BN
    r0 = DV + (pid % TILES) * BR
    mm = tl.arange(0, BM)
    for j in tl.range(
        0, n, BM, num_stages=STAGES
    ):  # where there are more tiles of heads, the inner loop is pipelined
        ok = j + mm < n
        slot = tl.load(DIRECT + c.to(tl.int64) * TOPK + j + mm, mask=ok, other=0)
        acc = tl.zeros([BM, BN], tl.float32)
        acr = tl.zeros([BM, BR], tl.float32)
        if HT == 1:
            acc, acr = _partial(
                acc, acr, QUERY, GRAD, PROB, DSCORE, row0 + c, 0, c * TOPK + slot, ok, c0, r0,
                HEADS, DV, DR, HP, HB, BN, BR, PRECISION,
            )  # fmt: skip
        else:
            for tile in tl.range(0, HT, num_stages=STAGES):
                acc, acr = _partial(
                    acc, acr, QUERY, GRAD, PROB, DSCORE, row0 + c, tile, c * TOPK + slot, ok, c0,
                    r0, HEADS, DV, DR, HP, HB, BN, BR, PRECISION,
                )  # fmt: skip
        to = tl.where(dense, c * TOPK + slot, first + j + mm)
        _store_columns(acc, PART, to, ok, c0, D, BN, DV)
        if DR > 0:
            _store_columns(acr, PART, to, ok, r0, D, BR, D)


@triton.jit
@no_type_check
def segment_kernel(
    PART, ORDER, START, DKV, pack, DV: tl.constexpr, DR: tl.constexpr, DVP: tl.constexpr,
    DRP: tl.constexpr, KEYS: tl.constexpr, R: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """KEYS keys a program, one after the other: adds a key's partial rows in the plan's order, R at
    a time.

    ADD: to what DKV already holds, so that keys without partial rows are passed over.
    """
    D: tl.constexpr = DV + DR
    k0 = tl.program_id(0) * KEYS
    last = tl.minimum(k0 + KEYS, pack)
    if ADD and tl.load(START + k0) == tl.load(START + last):
        return
    rr = tl.arange(0, R)
    v = tl.arange(0, DVP)
    vm = (v < DV) | (DV == DVP)
    if DRP > 0:
        r = tl.arange(0, DRP)
        rm = (r < DR) | (DR == DRP)
    for k in range(k0, last):
        a = tl.load(START + k)
        b = tl.load(START + k + 1)
        if (not ADD) or (a < b):
            o = (
                DKV + (k + tl.full([], 0, tl.int64)) * D
            )  # the interpreter's loop variable is a plain int
            acc = tl.zeros([DVP], tl.float32)
            if ADD:
                acc = tl.load(o + v, mask=vm, other=0.0)
            if DRP > 0:
                acr = tl.zeros([DRP], tl.float32)
                if ADD:
                    acr = tl.load(o + DV + r, mask=rm, other=0.0)
            for j in range(a, b, R):
                ok = (j + rr) < b
                row = tl.load(ORDER + j + rr, mask=ok, other=0).to(tl.int64) * D
                x = tl.load(
                    PART + row[:, None] + v[None, :], mask=ok[:, None] & vm[None, :], other=0.0
                )
                acc += tl.sum(x.to(tl.float32), 0)
                if DRP > 0:
                    y = tl.load(
                        PART + row[:, None] + DV + r[None, :],
                        mask=ok[:, None] & rm[None, :],
                        other=0.0,
                    )
                    acr += tl.sum(y.to(tl.float32), 0)
            tl.store(o + v, acc, mask=vm)
            if DRP > 0:
                tl.store(o + DV + r, acr, mask=rm)
