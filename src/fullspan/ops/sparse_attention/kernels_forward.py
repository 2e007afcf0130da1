"""Sparse attention forward in plain Triton: any NVIDIA GPU from sm_80 on, and Triton's interpreter.

One program computes one row for one tile of heads: it gathers the row's keys by id, block after
block, with an online softmax in base 2. Queries and outputs pass the L2 cache once and shall not
drive out keys, which other rows gather too: the hints are worth 11 %. Left out: launching and tile
sizes (triton_backend.py), the Hopper version (kernels_hopper_forward.py). Kernels carry
`no_type_check` so that import hooks which wrap annotated functions leave them to Triton.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def forward_kernel(
    QUERY,
    KV,
    IDS,
    COUNTS,
    SINK,
    OUT,
    LSE,
    pack,
    scale_log2,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    HB: tl.constexpr,
    DVP: tl.constexpr,
    DRP: tl.constexpr,
    BK: tl.constexpr,
    HAS_SINK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Row program_id(0), heads [HB * program_id(1), ...). DVP, DRP: DV, DR padded to a power of two
    (DRP 0: no rope).
    """
    LN2: tl.constexpr = 0.6931471805599453
    LOG2E: tl.constexpr = 1.4426950408889634
    D: tl.constexpr = DV + DR
    i = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    v = tl.arange(0, DVP)
    kk = tl.arange(0, BK)
    # `| constant` folds away, and the mask with it, where nothing is padded
    vm = (v < DV) | (DV == DVP)
    hm = (h < HEADS) | (HEADS % HB == 0)
    qp = QUERY + (i * HEADS + h)[:, None] * D
    qn = tl.load(
        qp + v[None, :], mask=hm[:, None] & vm[None, :], other=0.0, eviction_policy="evict_first"
    )
    if DRP > 0:
        r = tl.arange(0, DRP)
        rm = (r < DR) | (DR == DRP)
        qr = tl.load(qp + DV + r[None, :], mask=hm[:, None] & rm[None, :], other=0.0)
    n = tl.minimum(tl.load(COUNTS + i), TOPK)
    m = tl.full([HB], -1e30, tl.float32)
    total = tl.zeros([HB], tl.float32)
    acc = tl.zeros([HB, DVP], tl.float32)
    # ids are a block ahead, so that the addresses of a gather never wait for them
    ahead = tl.load(IDS + i * TOPK + kk, mask=kk < n, other=-1)
    for t in tl.range(0, n, BK, num_stages=STAGES):
        ids = ahead
        ahead = tl.load(IDS + i * TOPK + t + BK + kk, mask=t + BK + kk < n, other=-1)
        ok = (ids >= 0) & (ids < pack)
        kp = KV + tl.where(ok, ids, 0).to(tl.int64)[:, None] * D
        # the mask keeps rows that no id selects out: row 0 may hold anything
        keep = ok[:, None] & vm[None, :]
        kn = tl.load(kp + v[None, :], mask=keep, other=0.0, eviction_policy="evict_last")
        s = tl.dot(qn, tl.trans(kn), input_precision=PRECISION)
        if DRP > 0:
            keep = ok[:, None] & rm[None, :]
            kr = tl.load(kp + DV + r[None, :], mask=keep, other=0.0, eviction_policy="evict_last")
            s = tl.dot(qr, tl.trans(kr), s, input_precision=PRECISION)
        s = tl.where(ok[None, :], s * scale_log2, float("-inf"))
        mn = tl.maximum(m, tl.max(s, 1))  # finite: m starts so
        a = tl.exp2(m - mn)
        p = tl.exp2(s - mn[:, None])
        total = total * a + tl.sum(p, 1)
        acc = acc * a[:, None]
        acc = tl.dot(p.to(kn.dtype), kn, acc, input_precision=PRECISION)
        m = mn
    empty = total == 0.0  # such a row takes no part, sink or not
    if HAS_SINK:
        sink = tl.load(SINK + h, mask=hm, other=0.0).to(tl.float32) * LOG2E
        mn = tl.maximum(m, sink)
        a = tl.exp2(m - mn)
        total = total * a + tl.exp2(sink - mn)
        acc = acc * a[:, None]
        m = mn
    ls = tl.where(empty, 1.0, total)
    op = OUT + (i * HEADS + h)[:, None] * DV + v[None, :]
    tl.store(
        op,
        tl.where(empty[:, None], 0.0, acc / ls[:, None]).to(OUT.dtype.element_ty),
        mask=hm[:, None] & vm[None, :],
        eviction_policy="evict_first",
    )
    # +inf on a row without keys makes exp(s - lse) vanish in the backward
    lse = tl.where(empty, float("inf"), (m + tl.log2(ls)) * LN2)
    tl.store(LSE + i * HEADS + h, lse, mask=hm)
