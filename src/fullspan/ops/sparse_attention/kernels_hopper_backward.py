"""Sparse attention backward for Hopper (sm_90a), in Triton's Gluon dialect (Triton 3.6): query
gradient, dense partial rows.

dquery_kernel, one (row, 64 heads) a program: warpgroup 0 computes S^T = K q^T, P and half of dQ;
warpgroup 1 dP^T = V dO^T, dS and the other half with the rope columns; four producer warps gather K
with cp.async into five column chunks, each refilled as soon as its last product is done. P and dS
leave as rows of heads, one per (row, slot), by TMA. dense_kernel, for groups that share no key: one
partial row of dKV per slot; P and dS by TMA, two warpgroups in turn. Ids come from
kernels_hopper_forward.prepare_kernel, so only selected keys are fetched. Widths: 512 value columns,
with or without 64 rope columns. `t >> 20` is a zero that the compiler does not know: matrix
descriptors are then neither hoisted nor spilled. Left out: the shared and direct partial rows and
their sum (kernels_backward.py serves both backends), launching (hopper_backend.py). Kernels carry
`no_type_check` so that import hooks which wrap annotated functions leave them to Triton.
"""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Arguments in rows: the formatter would give each of some 30 a line of its own.
# fmt: off

SWIZZLE_128 = gl.constexpr(gl.NVMMASharedLayout(128, 16))
SWIZZLE_64 = gl.constexpr(gl.NVMMASharedLayout(64, 16))
STAGES = gl.constexpr(4)  # tiles of P and dS in flight in dense_kernel


@gluon.jit
@no_type_check
def _dq_scores(DQD, DQRD, PD, SD, idb, n, LSEp, DLp, row0, prow0, pcol, scale, scale_log2, q, qr,
               do, k, kr, ps, ds,
               qbar, full, free, pfull, dsfull, KV, K: gl.constexpr, ROPE: gl.constexpr):
    """Warpgroup 0: S^T, P (to shared and global memory), dQ columns 0-255."""
    ML: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    MW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    hs = gl.arange(0, 64, gl.SliceLayout(0, ML))
    km = gl.arange(0, 64, gl.SliceLayout(1, ML))
    lse = gl.load(LSEp + hs) * 1.4426950408889634
    a0 = gl.zeros([64, 128], gl.float32, MW)
    a1 = gl.zeros([64, 128], gl.float32, MW)
    dst = ds.permute((1, 0))
    mbarrier.wait(qbar, 0)
    ph = 0
    for t in range(0, n, 64):
        # always 0, but unknown to the compiler: matrix descriptors are not hoisted and
        # spilled
        z0 = t >> 20
        idm = gl.load(idb + t + km)
        mbarrier.wait(full.index(0), ph)
        fence_async_shared()
        z = gl.zeros([64, 64], gl.float32, ML)
        s = warpgroup_mma(k.index(0 + z0), q.index(0 + z0).permute((1, 0)), z, use_acc=False,
                          is_async=True)
        mbarrier.wait(full.index(2), ph)
        fence_async_shared()
        s = warpgroup_mma(k.index(2 + z0), q.index(2 + z0).permute((1, 0)), s, is_async=True)
        mbarrier.wait(full.index(1), ph)
        fence_async_shared()
        s = warpgroup_mma(k.index(1 + z0), q.index(1 + z0).permute((1, 0)), s, is_async=True)
        mbarrier.wait(full.index(3), ph)
        fence_async_shared()
        s = warpgroup_mma(k.index(3 + z0), q.index(3 + z0).permute((1, 0)), s, is_async=True)
        if ROPE:
            mbarrier.wait(full.index(4), ph)
            fence_async_shared()
            s = warpgroup_mma(kr, qr.permute((1, 0)), s, is_async=True)
        tma.store_wait(0)
        s = warpgroup_mma_wait(0, deps=(s,))
        p = gl.where((idm >= 0)[:, None], gl.exp2(s * scale_log2 - lse[None, :]), 0.0)
        gl.thread_barrier()
        ps.store(p.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(pfull)
        tma.async_copy_shared_to_global(PD, [prow0 + t, pcol], ps)
        mbarrier.wait(dsfull, ph)
        a0 = warpgroup_mma(dst, k.index(0 + z0), a0, is_async=True)
        a1 = warpgroup_mma(dst, k.index(1 + z0), a1, is_async=True)
        a0 = warpgroup_mma_wait(1, deps=(a0,))
        gl.thread_barrier()
        mbarrier.arrive(free.index(0))
        a1 = warpgroup_mma_wait(0, deps=(a1,))
        gl.thread_barrier()
        mbarrier.arrive(free.index(1))
        ph ^= 1
    q.index(0).store(a0.to(gl.bfloat16))
    q.index(1).store(a1.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(DQD, [row0, 0], q.index(0))
    tma.async_copy_shared_to_global(DQD, [row0, 128], q.index(1))
    tma.store_wait(0)


@gluon.jit
@no_type_check
def _dq_ds(DQD, DQRD, PD, SD, idb, n, LSEp, DLp, row0, prow0, pcol, scale, scale_log2, q, qr, do,
           k, kr, ps, ds,
               qbar, full, free, pfull, dsfull, KV, K: gl.constexpr, ROPE: gl.constexpr):
    """Warpgroup 1: dP^T, dS (to shared and global memory), dQ columns 256-511 and the rope columns.
    """
    ML: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    MW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    hs = gl.arange(0, 64, gl.SliceLayout(0, ML))
    dl = gl.load(DLp + hs)
    a2 = gl.zeros([64, 128], gl.float32, MW)
    a3 = gl.zeros([64, 128], gl.float32, MW)
    if ROPE:
        ar = gl.zeros([64, 64], gl.float32, ML)
    dst = ds.permute((1, 0))
    mbarrier.wait(qbar, 0)
    ph = 0
    for t in range(0, n, 64):
        z0 = t >> 20
        # all value chunks are there; starting behind the scores hides P under the dP
        # products
        mbarrier.wait(full.index(3), ph)
        fence_async_shared()
        z = gl.zeros([64, 64], gl.float32, ML)
        dp = warpgroup_mma(k.index(0 + z0), do.index(0 + z0).permute((1, 0)), z, use_acc=False,
                           is_async=True)
        dp = warpgroup_mma(k.index(2 + z0), do.index(2 + z0).permute((1, 0)), dp, is_async=True)
        dp = warpgroup_mma(k.index(1 + z0), do.index(1 + z0).permute((1, 0)), dp, is_async=True)
        dp = warpgroup_mma(k.index(3 + z0), do.index(3 + z0).permute((1, 0)), dp, is_async=True)
        tma.store_wait(0)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        dp = (dp - dl[None, :]) * scale
        mbarrier.wait(pfull, ph)
        p = ps.load(ML).to(gl.float32)
        dsv = gl.where(p != 0.0, p * dp, 0.0)
        gl.thread_barrier()
        ds.store(dsv.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(dsfull)
        tma.async_copy_shared_to_global(SD, [prow0 + t, pcol], ds)
        if ROPE:
            mbarrier.wait(full.index(4), ph)
            fence_async_shared()
        a2 = warpgroup_mma(dst, k.index(2 + z0), a2, is_async=True)
        a3 = warpgroup_mma(dst, k.index(3 + z0), a3, is_async=True)
        if ROPE:
            ar = warpgroup_mma(dst, kr, ar, is_async=True)
        a2 = warpgroup_mma_wait(2 if ROPE else 1, deps=(a2,))
        gl.thread_barrier()
        mbarrier.arrive(free.index(2))
        a3 = warpgroup_mma_wait(1 if ROPE else 0, deps=(a3,))
        gl.thread_barrier()
        mbarrier.arrive(free.index(3))
        if ROPE:
            ar = warpgroup_mma_wait(0, deps=(ar,))
            gl.thread_barrier()
            mbarrier.arrive(free.index(4))
        ph ^= 1
    q.index(2).store(a2.to(gl.bfloat16))
    q.index(3).store(a3.to(gl.bfloat16))
    if ROPE:
        qr.store(ar.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(DQD, [row0, 256], q.index(2))
    tma.async_copy_shared_to_global(DQD, [row0, 384], q.index(3))
    if ROPE:
        tma.async_copy_shared_to_global(DQRD, [row0, 512], qr)
    tma.store_wait(0)


@gluon.jit
@no_type_check
def _dq_gather(DQD, DQRD, PD, SD, idb, n, LSEp, DLp, row0, prow0, pcol, scale, scale_log2, q, qr,
               do, k, kr, ps, ds,
               qbar, full, free, pfull, dsfull, KV, K: gl.constexpr, ROPE: gl.constexpr):
    """Producer warps: rows of K in five column chunks; `full` counts the 128 threads whose copies
    have landed, `free` the last product.
    """
    CP: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    kc = gl.arange(0, 64, gl.SliceLayout(1, CP))
    ca = gl.arange(0, 128, gl.SliceLayout(0, CP))
    cr = gl.arange(0, 64, gl.SliceLayout(0, CP))
    D: gl.constexpr = 576 if ROPE else 512
    ids = gl.load(idb + kc)
    ph = 1
    for t in range(0, n, 64):
        o = ((ids ^ (ids >> 31)).to(gl.int64) * D)[:, None]
        p = KV + o + ca[None, :]
        ids = gl.load(idb + t + 64 + kc, mask=t + 64 + kc < K, other=0)
        mbarrier.wait(free.index(0), ph)
        async_copy.async_copy_global_to_shared(k.index(0), p)
        async_copy.mbarrier_arrive(full.index(0), increment_count=False)
        mbarrier.wait(free.index(2), ph)
        async_copy.async_copy_global_to_shared(k.index(2), p + 256)
        async_copy.mbarrier_arrive(full.index(2), increment_count=False)
        mbarrier.wait(free.index(1), ph)
        async_copy.async_copy_global_to_shared(k.index(1), p + 128)
        async_copy.mbarrier_arrive(full.index(1), increment_count=False)
        mbarrier.wait(free.index(3), ph)
        async_copy.async_copy_global_to_shared(k.index(3), p + 384)
        async_copy.mbarrier_arrive(full.index(3), increment_count=False)
        if ROPE:
            mbarrier.wait(free.index(4), ph)
            async_copy.async_copy_global_to_shared(kr, KV + o + cr[None, :] + 512)
            async_copy.mbarrier_arrive(full.index(4), increment_count=False)
        ph ^= 1


@gluon.jit
@no_type_check
def dquery_kernel(QD, QRD, DOD, DQD, DQRD, PD, SD, KV, IDS, LIMIT, LSE, DELTA, q0, scale,
                  scale_log2, K: gl.constexpr,
                  HT: gl.constexpr, ROPE: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr):
    """dQ of row q0 + c and 64 of its heads, HT tiles of heads a row; P and dS as [slot of the
    chunk, head] rows.
    """
    c = gl.program_id(0) // HT
    tile = gl.program_id(0) % HT
    row0 = ((q0 + c) * HT + tile) * 64
    q = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLE_128)
    qr = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLE_128)
    do = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLE_128)
    k = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLE_128)
    kr = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLE_128)
    ps = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLE_128)
    ds = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLE_128)
    qbar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    pfull = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dsfull = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    mbarrier.init(qbar, count=1)
    mbarrier.init(pfull, count=1)
    mbarrier.init(dsfull, count=1)
    for b in gl.static_range(5):
        mbarrier.init(full.index(b), count=128)
        mbarrier.init(free.index(b), count=1)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.expect(qbar, 64 * (512 + 512 + (64 if ROPE else 0)) * 2)
    for b in gl.static_range(4):
        tma.async_copy_global_to_shared(QD, [row0, b * 128], qbar, q.index(b))
        tma.async_copy_global_to_shared(DOD, [row0, b * 128], qbar, do.index(b))
    if ROPE:
        tma.async_copy_global_to_shared(QRD, [row0, 512], qbar, qr)
    n = gl.load(LIMIT + c)
    idb = IDS + c.to(gl.int64) * K
    lsep = LSE + row0.to(gl.int64)
    dlp = DELTA + row0.to(gl.int64)
    gl.warp_specialize([
        (_dq_scores, (DQD, DQRD, PD, SD, idb, n, lsep, dlp, row0, c * K, tile * 64, scale,
         scale_log2, q, qr, do, k, kr, ps, ds,
                      qbar, full, free, pfull, dsfull, KV, K, ROPE)),
        (_dq_ds, (DQD, DQRD, PD, SD, idb, n, lsep, dlp, row0, c * K, tile * 64, scale, scale_log2,
         q, qr, do, k, kr, ps, ds,
                  qbar, full, free, pfull, dsfull, KV, K, ROPE)),
        (_dq_gather, (DQD, DQRD, PD, SD, idb, n, lsep, dlp, row0, c * K, tile * 64, scale,
         scale_log2, q, qr, do, k, kr, ps, ds,
                      qbar, full, free, pfull, dsfull, KV, K, ROPE)),
    ], [4, 4], [R1, R2])


@gluon.jit
@no_type_check
def _dense_math(OD, ORD, n, row0, half, q, qr, do, pp, ss, o, orr, qbar, full, free,
                WG: gl.constexpr, ROPE: gl.constexpr):
    """Warpgroup WG takes every second block of 64 slots."""
    MW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    MR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    for t in range(WG * 64, n, 128):
        j = t // 64
        st = j % STAGES
        z = gl.zeros([64, 256], gl.float32, MW)
        mbarrier.wait(qbar, 0)
        mbarrier.wait(full.index(st), (j // STAGES) & 1)
        g = warpgroup_mma(ss.index(st), q, z, use_acc=False, is_async=True)
        if ROPE:
            zr = gl.zeros([64, 32], gl.float32, MR)
            gr = warpgroup_mma(ss.index(st), qr, zr, use_acc=False, is_async=True)
        g = warpgroup_mma(pp.index(st), do, g, is_async=True)
        tma.store_wait(0)
        gl.thread_barrier()
        if ROPE:
            g, gr = warpgroup_mma_wait(0, deps=(g, gr))
        else:
            g = warpgroup_mma_wait(0, deps=(g,))
        gl.thread_barrier()
        mbarrier.arrive(free.index(st))
        o.index(WG).store(g.to(gl.bfloat16))
        if ROPE:
            orr.index(WG).store(gr.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(OD, [row0 + t, half * 256], o.index(WG))
        if ROPE:
            tma.async_copy_shared_to_global(ORD, [row0 + t, 512 + half * 32], orr.index(WG))
    tma.store_wait(0)


@gluon.jit
@no_type_check
def _dense_load(PD, SD, n, row0, pp, ss, full, free):
    """One warp: P and dS tiles by TMA into a ring."""
    for t in range(0, n, 64):
        j = t // 64
        st = j % STAGES
        mbarrier.wait(free.index(st), ((j // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(st), 64 * 64 * 2 * 2)
        tma.async_copy_global_to_shared(SD, [row0 + t, 0], full.index(st), ss.index(st))
        tma.async_copy_global_to_shared(PD, [row0 + t, 0], full.index(st), pp.index(st))


@gluon.jit
@no_type_check
def dense_kernel(QD, QRD, DOD, PD, SD, OD, ORD, LIMIT, MODE, q0, K: gl.constexpr,
                 ROPE: gl.constexpr, GROUP: gl.constexpr,
                 R1: gl.constexpr, R2: gl.constexpr):
    """One partial row per slot of a row whose group shares nothing, 64 heads. Program: (row of the
    chunk, column half).
    """
    c = gl.program_id(0) // 2
    half = gl.program_id(0) % 2
    q = gl.allocate_shared_memory(gl.bfloat16, [64, 256], SWIZZLE_128)
    do = gl.allocate_shared_memory(gl.bfloat16, [64, 256], SWIZZLE_128)
    qr = gl.allocate_shared_memory(gl.bfloat16, [64, 32], SWIZZLE_64)
    pp = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], SWIZZLE_128)
    ss = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], SWIZZLE_128)
    o = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], SWIZZLE_128)
    orr = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 32], SWIZZLE_64)
    qbar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(qbar, count=1)
    for b in gl.static_range(STAGES):
        mbarrier.init(full.index(b), count=1)
        mbarrier.init(free.index(b), count=1)
    fence_async_shared()
    gl.thread_barrier()
    n = gl.where(gl.load(MODE + c // GROUP) == 0, gl.load(LIMIT + c), 0)
    if n > 0:
        i = (c + q0) * 64
        mbarrier.expect(qbar, 64 * (256 + 256 + (32 if ROPE else 0)) * 2)
        tma.async_copy_global_to_shared(QD, [i, half * 256], qbar, q)
        tma.async_copy_global_to_shared(DOD, [i, half * 256], qbar, do)
        if ROPE:
            tma.async_copy_global_to_shared(QRD, [i, 512 + half * 32], qbar, qr)
    # the tuples are written out: a tuple bound to a name loses its compile-time values
    gl.warp_specialize([
        (_dense_math, (OD, ORD, n, c * K, half, q, qr, do, pp, ss, o, orr, qbar, full, free,
         gl.constexpr(0), ROPE)),
        (_dense_math, (OD, ORD, n, c * K, half, q, qr, do, pp, ss, o, orr, qbar, full, free,
         gl.constexpr(1), ROPE)),
        (_dense_load, (PD, SD, n, c * K, pp, ss, full, free)),
    ], [4, 1], [R1, R2])
