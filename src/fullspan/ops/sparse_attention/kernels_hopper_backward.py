"""Sparse attention backward for Hopper (sm_90a), in Triton's Gluon dialect (Triton 3.6): query
gradient, and partial rows of the groups that share no key.

dquery_kernel, one (row, 64 heads) a program: warpgroup 0 computes S^T = K q^T, P and half of dQ;
warpgroup 1 dP^T = V dO^T, dS and the other half with the rope columns; four producer warps gather K
with cp.async into five column chunks, each refilled as soon as its last product is done. P and dS
leave as rows of heads, one per (row, slot), by TMA. With FUSE they do not leave: q, dO, P and dS
are in shared memory, so both warpgroups make the partial rows of dKV of their columns from them.
Ids come from kernels_hopper_forward.prepare_kernel, so only selected keys are fetched. Widths: 512
value columns, with or without 64 rope columns. `t >> 20` is a zero that the compiler does not know:
matrix descriptors are then neither hoisted nor spilled. Left out: the partial rows of shared keys
(kernels_hopper_shared.py), the direct ones and the sum of all (kernels_backward.py serves both
backends), launching (hopper_backend.py). Kernels carry `no_type_check` so that import hooks which
wrap annotated functions leave them to Triton.
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


def _quad_transpose() -> str:
    """PTX: 4 x 4 transposes of pairs of words among four lanes, each with 8 words: word = half of
    a row + 2 * tile of 8 columns."""
    lines = ["{ .reg .pred p, q; .reg .b32 l, s, r;", "mov.u32 l, %laneid;"]
    for bit, predicate in ((1, "p"), (2, "q")):
        lines += [f"and.b32 s, l, {bit};", f"setp.ne.u32 {predicate}, s, 0;"]
    lines += [f"mov.b32 ${i}, ${8 + i};" for i in range(8)]
    for mask, odd, pairs in ((1, "p", ((0, 2), (4, 6))), (2, "q", ((0, 4), (2, 6)))):
        for x, y in ((a + half, b + half) for a, b in pairs for half in range(2)):
            lines += [f"selp.b32 s, ${x}, ${y}, {odd};",
                      f"shfl.sync.bfly.b32 r, s, {mask}, 0x1f, 0xffffffff;",
                      f"selp.b32 ${x}, r, ${x}, {odd};", f"selp.b32 ${y}, ${y}, r, {odd};"]
    return "\n".join([*lines, "}"])


QUAD = gl.constexpr(_quad_transpose())
QUAD_REGISTERS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))


@gluon.jit
@no_type_check
def _store_rows(PART, row0, n, c0, g, z0, N: gl.constexpr, D: gl.constexpr):
    """Columns c0 .. c0 + N of 64 partial rows from row0 on, the first n of them, from the registers
    of a product. After an exchange among four lanes each holds 16 bytes of a row, the four a whole
    64: full sectors, and no shared memory, of which none is left.
    """
    OL: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]] + ([[0, 64]] if N == 128 else []),
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, N])
    r = gl.arange(0, 64, gl.SliceLayout(1, OL)) + z0
    c = gl.arange(0, N, gl.SliceLayout(0, OL))
    v = gl.inline_asm_elementwise(QUAD, QUAD_REGISTERS, [g.to(gl.bfloat16)], dtype=gl.bfloat16,
                                  is_pure=False, pack=16)
    v = v.reshape([64, N // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, N])
    v = gl.convert_layout(v, OL)
    base = PART + (row0.to(gl.int64) * D + c0)
    gl.store(base + ((r * D)[:, None] + c[None, :]), v, mask=(r < n)[:, None])


@gluon.jit
@no_type_check
def _dq_scores(DQD, DQRD, PD, SD, idb, n, LSEp, DLp, row0, prow0, pcol, scale, scale_log2, q, qr,
               do, k, kr, ps, ds,
               qbar, full, free, pfull, dsfull, pfree, KV, PART, part0, K: gl.constexpr,
               ROPE: gl.constexpr, FUSE: gl.constexpr):
    """Warpgroup 0: S^T, P (to shared and global memory), dQ columns 0-255, and of dKV with FUSE."""
    ML: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    MW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    D: gl.constexpr = 576 if ROPE else 512
    hs = gl.arange(0, 64, gl.SliceLayout(0, ML))
    km = gl.arange(0, 64, gl.SliceLayout(1, ML))
    lse = gl.load(LSEp + hs) * 1.4426950408889634
    a0 = gl.zeros([64, 128], gl.float32, MW)
    a1 = gl.zeros([64, 128], gl.float32, MW)
    mbarrier.wait(qbar, 0)
    ph = 0
    for t in range(0, n, 64):
        # always 0, but unknown to the compiler: matrix descriptors are not hoisted and
        # spilled
        z0 = t >> 20
        zf = z0 if FUSE else 0
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
        if FUSE:  # the other warpgroup's partial rows of the block before are done with P
            mbarrier.wait(pfree, ph ^ 1)
        gl.thread_barrier()
        ps.index(zf).store(p.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(pfull)
        if not FUSE:
            tma.async_copy_shared_to_global(PD, [prow0 + t, pcol], ps.index(zf))
        mbarrier.wait(dsfull, ph)
        a0 = warpgroup_mma(ds.index(zf).permute((1, 0)), k.index(0 + z0), a0, is_async=True)
        a1 = warpgroup_mma(ds.index(zf).permute((1, 0)), k.index(1 + z0), a1, is_async=True)
        a0 = warpgroup_mma_wait(1, deps=(a0,))
        gl.thread_barrier()
        mbarrier.arrive(free.index(0))
        a1 = warpgroup_mma_wait(0, deps=(a1,))
        gl.thread_barrier()
        mbarrier.arrive(free.index(1))
        if FUSE:
            for x in gl.static_range(2):
                zw = gl.zeros([64, 128], gl.float32, MW)
                g = warpgroup_mma(ds.index(z0), q.index(x + z0), zw, use_acc=False, is_async=True)
                g = warpgroup_mma(ps.index(z0), do.index(x + z0), g, is_async=True)
                g = warpgroup_mma_wait(0, deps=(g,))
                _store_rows(PART, part0 + t, n - t, x * 128, g, z0, 128, D)
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
               qbar, full, free, pfull, dsfull, pfree, KV, PART, part0, K: gl.constexpr,
               ROPE: gl.constexpr, FUSE: gl.constexpr):
    """Warpgroup 1: dP^T, dS (to shared and global memory), dQ columns 256-511 and the rope columns,
    and of dKV with FUSE.
    """
    ML: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    MW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    D: gl.constexpr = 576 if ROPE else 512
    hs = gl.arange(0, 64, gl.SliceLayout(0, ML))
    dl = gl.load(DLp + hs)
    a2 = gl.zeros([64, 128], gl.float32, MW)
    a3 = gl.zeros([64, 128], gl.float32, MW)
    if ROPE:
        ar = gl.zeros([64, 64], gl.float32, ML)
    mbarrier.wait(qbar, 0)
    ph = 0
    for t in range(0, n, 64):
        z0 = t >> 20
        zf = z0 if FUSE else 0
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
        p = ps.index(zf).load(ML).to(gl.float32)
        dsv = gl.where(p != 0.0, p * dp, 0.0)
        gl.thread_barrier()
        ds.index(zf).store(dsv.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(dsfull)
        if not FUSE:
            tma.async_copy_shared_to_global(SD, [prow0 + t, pcol], ds.index(zf))
        if ROPE:
            mbarrier.wait(full.index(4), ph)
            fence_async_shared()
        a2 = warpgroup_mma(ds.index(zf).permute((1, 0)), k.index(2 + z0), a2, is_async=True)
        a3 = warpgroup_mma(ds.index(zf).permute((1, 0)), k.index(3 + z0), a3, is_async=True)
        if ROPE:
            ar = warpgroup_mma(ds.index(zf).permute((1, 0)), kr, ar, is_async=True)
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
        if FUSE:
            if ROPE:
                zw = gl.zeros([64, 64], gl.float32, ML)
                g = warpgroup_mma(ds.index(z0), qr, zw, use_acc=False, is_async=True)
                g = warpgroup_mma_wait(0, deps=(g,))
                _store_rows(PART, part0 + t, n - t, 512, g, z0, 64, D)
            for x in gl.static_range(4):  # 64 columns each: registers are short here
                zw = gl.zeros([64, 64], gl.float32, ML)
                qx = q.index(2 + x // 2 + z0).slice(x % 2 * 64, 64, dim=1)
                dox = do.index(2 + x // 2 + z0).slice(x % 2 * 64, 64, dim=1)
                g = warpgroup_mma(ds.index(z0), qx, zw, use_acc=False, is_async=True)
                g = warpgroup_mma(ps.index(z0), dox, g, is_async=True)
                g = warpgroup_mma_wait(0, deps=(g,))
                if x == 3:
                    gl.thread_barrier()
                    mbarrier.arrive(pfree)
                _store_rows(PART, part0 + t, n - t, 256 + x * 64, g, z0, 64, D)
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
               qbar, full, free, pfull, dsfull, pfree, KV, PART, part0, K: gl.constexpr,
               ROPE: gl.constexpr, FUSE: gl.constexpr):
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
def dquery_kernel(QD, QRD, DOD, DQD, DQRD, PD, SD, KV, IDS, LIMIT, LSE, DELTA, MODE, PART, q0, step,
                  scale, scale_log2, K: gl.constexpr, HT: gl.constexpr, ROPE: gl.constexpr,
                  GROUP: gl.constexpr, FUSE: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr):
    """dQ of row q0 + c and 64 of its heads, HT tiles of heads a row; P and dS as [slot of the
    chunk, head] rows, `step` more from each group to the next.

    HT 1: only rows of groups that share keys; with FUSE the others, and their partial rows, one per
    slot.
    """
    c = gl.program_id(0) // HT
    tile = gl.program_id(0) % HT
    if HT == 1:
        mode = gl.load(MODE + c // GROUP)
        if (mode == 0) != FUSE:
            return
    row0 = ((q0 + c) * HT + tile) * 64
    q = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLE_128)
    qr = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLE_128)
    do = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLE_128)
    k = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], SWIZZLE_128)
    kr = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLE_128)
    ps = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SWIZZLE_128)
    ds = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SWIZZLE_128)
    qbar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    pfull = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dsfull = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    pfree = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    mbarrier.init(qbar, count=1)
    mbarrier.init(pfull, count=1)
    mbarrier.init(dsfull, count=1)
    mbarrier.init(pfree, count=1)
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
    prow0 = c * K + c // GROUP * step
    # the tuples are written out: a tuple bound to a name loses its compile-time values
    gl.warp_specialize([
        (_dq_scores, (DQD, DQRD, PD, SD, idb, n, lsep, dlp, row0, prow0, tile * 64, scale,
         scale_log2, q, qr, do, k, kr, ps, ds, qbar, full, free, pfull, dsfull, pfree, KV, PART,
         c * K, K, ROPE, FUSE)),
        (_dq_ds, (DQD, DQRD, PD, SD, idb, n, lsep, dlp, row0, prow0, tile * 64, scale, scale_log2,
         q, qr, do, k, kr, ps, ds, qbar, full, free, pfull, dsfull, pfree, KV, PART, c * K, K, ROPE,
         FUSE)),
        (_dq_gather, (DQD, DQRD, PD, SD, idb, n, lsep, dlp, row0, prow0, tile * 64, scale,
         scale_log2, q, qr, do, k, kr, ps, ds, qbar, full, free, pfull, dsfull, pfree, KV, PART,
         c * K, K, ROPE, FUSE)),
    ], [4, 4], [R1, R2])
