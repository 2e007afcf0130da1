"""Sparse attention forward for Hopper (sm_90a), in Triton's Gluon dialect (Triton 3.6).

One persistent program a multiprocessor, four warpgroups, each program walking (row, 64 heads) with
a stride:

* two scorers, for even and odd blocks of 64 keys: fetch their own block's rows with cp.async into
  their own shared buffer as its parts are freed, S = Q K^T, online softmax in base 2, P to shared
  memory;
* two valuers, each owning half of the value columns: O += P V, and free the block's buffer half by
  half.

Signals are mbarriers; the running maximum travels from scorer to scorer through shared memory.
Shared memory: Q 72 KiB, two key blocks 144 KiB. The maximum is only raised when a row exceeds it by
2^8, so O is almost never rescaled (exact: P, the sum and lse use the same reference).
prepare_kernel first replaces empty slots by the complement of an id that the row did select, so
that nothing but selected keys is ever fetched, and writes which blocks hold an empty slot, so that
full blocks mask nothing. Widths: 512 value columns, with or without 64 rope columns; heads in tiles
of 64. No fence.proxy.async separates the cp.async writes of a block from the wgmma reads of it: the
mbarrier orders them, as in Triton's own pipelines; five fences a block cost 2-3 %. Left out:
launching (hopper_backend.py). Kernels carry `no_type_check` so that import hooks which wrap
annotated functions leave them to Triton.
"""

from typing import no_type_check

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Arguments in rows: the formatter would give each of some 30 a line of its own.
# fmt: off

@triton.jit
@no_type_check
def prepare_kernel(
    IDS, COUNTS, CLEAN, LIMIT, FLAGS, row0, pack, TOPK: tl.constexpr, KP: tl.constexpr,
    KC: tl.constexpr, WORDS: tl.constexpr
):
    """One row: CLEAN [KC ids], an id or the complement of one of the row's ids where a slot is
    empty (any order is kept).

    LIMIT: the row's count, 0 where it has no id. FLAGS: bit t of WORDS words is set where block t
    of 64 slots holds an empty one. KP: power of two from KC on.
    """
    c = tl.program_id(0)
    i = (row0 + c).to(tl.int64)
    j = tl.arange(0, KP)
    n = tl.minimum(tl.load(COUNTS + i), TOPK)
    ids = tl.load(IDS + i * TOPK + j, mask=j < n, other=-1)
    ok = (ids >= 0) & (ids < pack)
    some = tl.max(tl.where(ok, ids, -1))
    tl.store(CLEAN + c.to(tl.int64) * KC + j, tl.where(ok, ids, -1 - tl.maximum(some, 0)),
             mask=j < KC)
    tl.store(LIMIT + c, tl.where(some < 0, 0, n))
    bad = tl.max(tl.reshape(tl.where(ok, 0, 1), (KP // 64, 64)), 1)
    t = tl.arange(0, KP // 64)
    for w in tl.static_range(WORDS):
        tl.store(FLAGS + c * WORDS + w, tl.sum(tl.where(t // 32 == w, bad << (t % 32), 0)))


@gluon.jit
@no_type_check
def opaque_zero(x):
    # a zero that the compiler cannot hoist: without it some 140 loop-invariant wgmma
    # descriptors and addresses are kept, and spilled
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False,
                                     pack=1)


@gluon.jit
@no_type_check
def scorer(FLAGS, Q, KV, IDS, COUNT, SINK, LSE, qn, qr, kn, kr, alpha, mx, raised, lx, linv, full,
           empty, pfull, mfull, qfull,
           qempty, lxfull, lxempty, lfull, lempty, S, scale_log2, U: gl.constexpr, K: gl.constexpr,
           BK: gl.constexpr,
           HT: gl.constexpr, ROPE: gl.constexpr, WORDS: gl.constexpr, HAS_SINK: gl.constexpr):
    """Key blocks of parity U: fetches them, scores them, hands P over."""
    D: gl.constexpr = 576 if ROPE else 512
    LN2: gl.constexpr = 0.6931471805599453
    LOG2E: gl.constexpr = 1.4426950408889634
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
        instr_shape=[16, BK, 16])
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    h = gl.arange(0, 64, layout=RL)
    kk = gl.arange(0, BK, layout=gl.SliceLayout(0, SL))
    rows = gl.arange(0, BK, layout=gl.SliceLayout(1, L))
    qrow = U * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, L))
    cols = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    step = gl.num_programs(0)
    b0 = 0                                    # key blocks of the queries before this one
    k = 0                                     # queries before this one
    i0 = gl.program_id(0)
    n = gl.load(COUNT + i0 // HT)
    # ids of the next block to fetch
    g = gl.load(IDS + (i0 // HT).to(gl.int64) * K + gl.minimum(U, K // BK - 1) * BK + rows)
    for i in range(i0, S, step):
        nb = (n + BK - 1) // BK
        flags = gl.load(FLAGS + i // HT * WORDS)
        ib = IDS + (i // HT).to(gl.int64) * K
        inext = gl.minimum(i + step, S - 1)
        nnext = gl.load(COUNT + inext // HT)
        mbarrier.wait(qempty, (k & 1) ^ 1)    # each scorer fetches half of the heads
        qp = Q + i.to(gl.int64) * (64 * D) + qrow[:, None] * D + cols[None, :]
        for x in gl.static_range(2):
            for c in gl.static_range(4):
                async_copy.async_copy_global_to_shared(
                    qn[c].index(0).slice(U * 32, 32, dim=0).slice(x * 64, 64, dim=1),
                        qp + (c * 128 + x * 64))
        if ROPE:
            async_copy.async_copy_global_to_shared(qr.slice(U * 32, 32, dim=0), qp + 512)
        async_copy.mbarrier_arrive(qfull, increment_count=False)
        mbarrier.wait(qfull, k & 1)
        if ROPE:
            # the rope part of Q stays in registers
            rq = qr.load(gl.DotOperandLayout(0, SL, 2))
        m = gl.full([64], -1e30, gl.float32, layout=RL)
        a = gl.full([64], 0.0, gl.float32, layout=RL)
        total = gl.full([64], 0.0, gl.float32, layout=RL)
        for t in range((b0 ^ U) & 1, nb, 2):
            ph = ((b0 + t) >> 1) & 1
            z = opaque_zero(t)
            u = z + U
            p = KV + (g ^ (g >> 31)).to(gl.int64)[:, None] * D + cols[None, :]
            # columns 0-255, then 256-575: the order in which the valuers free them
            for j in gl.static_range(2):
                mbarrier.wait(empty[j].index(u), ph ^ 1)
                for x in gl.static_range(2):
                    for c in gl.static_range(2 * j, 2 * j + 2):
                        async_copy.async_copy_global_to_shared(kn[c].index(u).slice(x * 64, 64,
                            dim=1),
                                                               p + (c * 128 + x * 64))
                    if ROPE and j + x == 2:
                        async_copy.async_copy_global_to_shared(kr.index(u), p + 512)
                    async_copy.mbarrier_arrive(full[2 * j + x].index(u), increment_count=False)
            g = gl.load(ib + gl.minimum(t + 2, K // BK - 1) * BK + rows)
            acc = gl.full([64, BK], 0.0, gl.float32, layout=SL)
            for j in gl.static_range(2):
                for x in gl.static_range(2):
                    mbarrier.wait(full[2 * j + x].index(u), ph)
                    for c in gl.static_range(2 * j, 2 * j + 2):
                        acc = warpgroup_mma(qn[c].index(z).slice(x * 64, 64, dim=1),
                                            kn[c].index(u).slice(x * 64, 64, dim=1).permute((1,
                                            0)), acc,
                                            use_acc=(c + x > 0), is_async=True)
            if ROPE:
                acc = warpgroup_mma(rq, kr.index(u).permute((1, 0)), acc, is_async=True)
            s = warpgroup_mma_wait(0, deps=[acc])
            if WORDS > 1:
                flags = gl.load(FLAGS + i // HT * WORDS + t // 32)
            if ((flags >> (t % 32)) & 1) != 0:
                ids = gl.load(ib + opaque_zero(t) + t * BK + kk)
                s = gl.where((ids >= 0)[None, :], s, float("-inf"))
            mn = gl.max(s, 1) * scale_log2
            mp = m
            if t > 0:
                mbarrier.wait(mfull.index(1 - U), ((b0 + t - 1) >> 1) & 1)
                mp = mx[1 - U].load(RL)
            up = mn > mp + 8.0
            mn = gl.where(up, mn, mp)
            a = gl.exp2(mp - mn)
            mx[U].store(mn)
            alpha.index(U).store(a)
            mbarrier.arrive(mfull.index(U), count=1)
            # one flag a warp
            raised.index(U).store(gl.max(gl.reshape(up.to(gl.int32), [4, 16]), 1))
            p = gl.exp2(s * scale_log2 - mn[:, None])
            kr.index(u).store(p.to(gl.bfloat16))
            fence_async_shared()
            mbarrier.arrive(pfull.index(U), count=1)
            total = total * gl.exp2(m - mn) + gl.sum(p, 1)
            m = mn
        mbarrier.arrive(qempty, count=1)
        b0 += nb
        n = nnext
        g = gl.load(IDS + (inext // HT).to(gl.int64) * K + gl.minimum((b0 ^ U) & 1,
                    K // BK - 1) * BK + rows)
        # the scorer without the last block hands its sum to the other
        if ((b0 - 1) & 1) != U:
            mbarrier.wait(lxempty, (k & 1) ^ 1)
            lx.store(total)
            mbarrier.arrive(lxfull, count=1)
        else:
            mbarrier.wait(lxfull, k & 1)
            lt = total + lx.load(RL) * a
            mbarrier.arrive(lxempty, count=1)
            none = lt == 0.0
            if HAS_SINK:
                sk = gl.load(SINK + (i % HT) * 64 + h) * LOG2E
                mm = gl.maximum(m, sk)
                a = gl.exp2(m - mm)
                lt = lt * a + gl.exp2(sk - mm)
            else:
                mm = m
                a = gl.full([64], 1.0, gl.float32, layout=RL)
            ls = gl.where(none, 1.0, lt)
            mbarrier.wait(lempty, (k & 1) ^ 1)
            linv.store(gl.where(none, 0.0, a / ls))
            mbarrier.arrive(lfull, count=1)
            gl.store(LSE + i.to(gl.int64) * 64 + h, gl.where(none, float("inf"),
                     (mm + gl.log2(ls)) * LN2))
        k += 1


@gluon.jit
@no_type_check
def valuer(COUNT, OUT, kn, kr, alpha, raised, linv, empty, pfull, lfull, lempty, S, W: gl.constexpr,
           BK: gl.constexpr, HT: gl.constexpr):
    """Value columns 128 W + (0..127) and 256 + 128 W + (0..127) of every key block."""
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
        instr_shape=[16, 128, 16])
    FL: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    h = gl.arange(0, 64, layout=gl.SliceLayout(1, OL))
    dv = gl.arange(0, 128, layout=gl.SliceLayout(0, OL))
    b = 0
    k = 0
    for i in range(gl.program_id(0), S, gl.num_programs(0)):
        n = gl.load(COUNT + i // HT)
        acc0 = gl.full([64, 128], 0.0, gl.float32, layout=OL)
        acc1 = gl.full([64, 128], 0.0, gl.float32, layout=OL)
        for t in range(0, n, BK):
            u = b & 1
            mbarrier.wait(pfull.index(u), (b >> 1) & 1)
            if gl.max(raised.index(u).load(FL), 0) != 0:
                a = alpha.index(u).load(gl.SliceLayout(1, OL))
                acc0 = acc0 * a[:, None]
                acc1 = acc1 * a[:, None]
            p = kr.index(u)
            t0 = warpgroup_mma(p, kn[W].index(u), acc0, is_async=True)
            t1 = warpgroup_mma(p, kn[W + 2].index(u), acc1, is_async=True)
            acc0 = warpgroup_mma_wait(1, deps=[t0])
            mbarrier.arrive(empty[0].index(u), count=1)
            acc1 = warpgroup_mma_wait(0, deps=[t1])
            mbarrier.arrive(empty[1].index(u), count=1)
            b += 1
        mbarrier.wait(lfull, k & 1)
        r = linv.load(gl.SliceLayout(1, OL))
        mbarrier.arrive(lempty, count=1)
        op = OUT + i.to(gl.int64) * (64 * 512) + h[:, None] * 512 + dv[None, :] + W * 128
        gl.store(op, (acc0 * r[:, None]).to(gl.bfloat16))
        gl.store(op + 256, (acc1 * r[:, None]).to(gl.bfloat16))
        k += 1


@gluon.jit
@no_type_check
def barriers(n: gl.constexpr, count: gl.constexpr):
    x = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(n):
        mbarrier.init(x.index(j), count=count)
    return x


@gluon.jit
@no_type_check
def forward_kernel(FLAGS, Q, KV, IDS, COUNT, SINK, OUT, LSE, scale_log2, S, K: gl.constexpr,
                   BK: gl.constexpr, HT: gl.constexpr,
                   ROPE: gl.constexpr, WORDS: gl.constexpr, HAS_SINK: gl.constexpr):
    """S (row, 64 heads) pairs, HT of them a row, K slots a row as prepare_kernel leaves them."""
    T: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    V: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BF: gl.constexpr = gl.bfloat16
    FP: gl.constexpr = gl.float32
    # separate allocations a column chunk: the compiler puts a warpgroup barrier between
    # accesses to one allocation
    qn = (gl.allocate_shared_memory(BF, [1, 64, 128], T), gl.allocate_shared_memory(BF, [1, 64,
          128], T),
          gl.allocate_shared_memory(BF, [1, 64, 128], T), gl.allocate_shared_memory(BF, [1, 64,
              128], T))
    qr = gl.allocate_shared_memory(BF, [64, 64], T)
    kn = (gl.allocate_shared_memory(BF, [2, BK, 128], T), gl.allocate_shared_memory(BF, [2, BK,
          128], T),
          gl.allocate_shared_memory(BF, [2, BK, 128], T), gl.allocate_shared_memory(BF, [2, BK,
              128], T))
    kr = gl.allocate_shared_memory(BF, [2, BK, 64], T)                 # rope columns, then P
    alpha = gl.allocate_shared_memory(FP, [2, 64], V)
    mx = (gl.allocate_shared_memory(FP, [64], V), gl.allocate_shared_memory(FP, [64], V))
    raised = gl.allocate_shared_memory(gl.int32, [2, 4], V)
    lx = gl.allocate_shared_memory(FP, [64], V)
    linv = gl.allocate_shared_memory(FP, [64], V)
    full = (barriers(2, 128), barriers(2, 128), barriers(2, 128), barriers(2, 128))
    empty = (barriers(2, 2), barriers(2, 2))
    pfull = barriers(2, 1)
    mfull = barriers(2, 1)
    qfull = barriers(1, 256).index(0)
    qempty = barriers(1, 2).index(0)
    lxfull = barriers(1, 1).index(0)
    lxempty = barriers(1, 1).index(0)
    lfull = barriers(1, 1).index(0)
    lempty = barriers(1, 2).index(0)
    fence_async_shared()
    gl.warp_specialize([
        (valuer, (COUNT, OUT, kn, kr, alpha, raised, linv, empty, pfull, lfull, lempty, S, 0, BK,
        HT)),
        (valuer, (COUNT, OUT, kn, kr, alpha, raised, linv, empty, pfull, lfull, lempty, S, 1, BK,
        HT)),
        (scorer, (FLAGS, Q, KV, IDS, COUNT, SINK, LSE, qn, qr, kn, kr, alpha, mx, raised, lx, linv,
         full, empty, pfull, mfull,
                  qfull, qempty, lxfull, lxempty, lfull, lempty, S, scale_log2, 0, K, BK, HT, ROPE,
                  WORDS, HAS_SINK)),
        (scorer, (FLAGS, Q, KV, IDS, COUNT, SINK, LSE, qn, qr, kn, kr, alpha, mx, raised, lx, linv,
         full, empty, pfull, mfull,
                  qfull, qempty, lxfull, lxempty, lfull, lempty, S, scale_log2, 1, K, BK, HT, ROPE,
                  WORDS, HAS_SINK)),
    ], [4, 4, 4], [160, 96, 96])
