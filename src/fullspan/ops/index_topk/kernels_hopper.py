"""Index scores for Hopper (sm_90a), in Triton's Gluon dialect (Triton 3.6), bf16 or fp8 (e4m3).

Persistent and warp-specialised: one warp brings queries, one brings keys (TMA), and each of NC
consumer warpgroups keeps 128 keys in shared memory and shares the stream of queries, 64 rows of PER
heads at a time: an m64n128 wgmma per head into a fresh accumulator, then tot += (x + |x|) * w / 2,
which is w * relu(x) exactly (FADD takes |x| for free and is faster than FMNMX). In bf16 NC is 3 and
PER 1, and the consumers drift apart, so that one's sums run under another's products. In fp8,
whose products take half the time, NC is 2 and PER 2: a consumer's second product runs under its own
first sum. The epilogue stores the scores, or (GATE) packs the survivors of the row's threshold to
the front of a segment of 128 keys, in key order, by bit counts. Left out: selection and spans
(kernels_select.py, streaming.py), launching (hopper_backend.py). Kernels carry `no_type_check` so
that import hooks which wrap annotated functions leave them to Triton.
"""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Arguments in rows: the formatter would give each of some 30 a line of its own.
# fmt: off

@gluon.jit
@no_type_check
def _popc(x):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True,
                                     pack=1)


@gluon.jit
@no_type_check
def _gate(tot, KS, START, END, TAU, SEGS, NUM, row0, b, col, k0, kend, s_q, s_kv, seg_stride,
          num_stride, BQ: gl.constexpr,
          FP8: gl.constexpr, GATE: gl.constexpr, L: gl.constexpr):
    # tot: fp32 scores of 64 rows and the 128 keys from k0 on; col: first column of their segment.
    # GATE: pack the survivors (score > tau, key in the row's range) to the front of the
    # segment, keys ascending, as
    # (order-preserving score bits << 32 | key), and store their number; otherwise store the
    # scores as they are.
    RL: gl.constexpr = gl.SliceLayout(1, L)
    CL: gl.constexpr = gl.SliceLayout(0, L)
    loc = b * BQ + gl.arange(0, BQ, layout=RL)
    c = gl.arange(0, 128, layout=CL)
    if FP8:
        tot = tot * gl.load(KS + k0 + c, mask=k0 + c < s_kv, other=0.0)[None, :]
    if GATE:
        rm = row0 + loc < s_q
        st = gl.load(START + row0 + loc, mask=rm, other=2147483647)
        en = gl.load(END + row0 + loc, mask=rm, other=0)
        first = gl.maximum(st - k0, 0)
        last = gl.minimum(gl.minimum(gl.where(en > st, en, 0), kend) - k0, 128)
        tau = gl.load(TAU + loc)
        keep = (tot > tau[:, None]) & (c[None, :] >= first[:, None]) & (c[None, :] < last[:, None])
        # place inside the segment by bit counts: no scan, and no change of the accumulator's layout
        kb = keep.to(gl.int32).reshape([BQ, 4, 32])
        L3: gl.constexpr = kb.type.layout
        L2: gl.constexpr = gl.SliceLayout(2, L3)
        lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(0, L3)))[None, :][None, :,
            :]
        wi = gl.arange(0, 4, layout=gl.SliceLayout(0, L2))[None, :]
        words = gl.sum(kb << lane, axis=2)
        pw = _popc(words)
        # byte i: survivors in the words before word i (at most 96)
        packed = gl.sum(pw * (0x01010100 << (8 * wi)), axis=1)
        before = (packed[:, None] >> (8 * wi)) & 255
        pos = before[:, :, None] + _popc(words[:, :, None] & ((1 << lane) - 1))
        bits = (tot + 0.0).to(gl.uint32, bitcast=True)  # + 0.0: no -0.0
        bits = gl.where((bits >> 31) != 0, ~bits, bits | 0x80000000).reshape([BQ, 4,
            32]).to(gl.uint64)
        rr = b * BQ + gl.arange(0, BQ, layout=gl.SliceLayout(1, L2))
        key = (k0 + wi * 32)[:, :, None] + lane
        off = rr.to(gl.int64) * seg_stride + col
        gl.store(SEGS + off[:, None][:, :, None] + pos,
                 ((bits << 32) | key.to(gl.uint64)).to(gl.int64, bitcast=True), mask=kb != 0)
        gl.store(NUM + rr.to(gl.int64) * num_stride + col // 128, gl.sum(pw, axis=1))
    else:
        gl.store(SEGS + loc[:, None].to(gl.int64) * seg_stride + col + c[None, :], tot)


@gluon.jit
@no_type_check
def _reached(tile, T, BASE, BEND, b0, lo, BK: gl.constexpr):
    b = tile // T
    return gl.load(BASE + b0 + b) + lo + (tile % T) * BK < gl.load(BEND + b0 + b)


@gluon.jit
@no_type_check
def _consume(C: gl.constexpr, ksm, qsm, kfull, kempty, qfull, qempty, W, KS, START, END, BASE,
             BEND, TAU, SEGS, NUM, row0, s_q, s_kv,
             lo, span, T, ntiles, seg_stride, num_stride, HI: gl.constexpr, BQ: gl.constexpr,
             NC: gl.constexpr, PER: gl.constexpr, ST: gl.constexpr, KBUF: gl.constexpr,
             FP8: gl.constexpr, GATE: gl.constexpr, KI: gl.constexpr):
    # consumer C owns keys [C * 128, C * 128 + 128) of every tile; all consumers share the
    # stream of queries, PER heads a stage
    BK: gl.constexpr = NC * 128
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
        instr_shape=[16, 128, KI])
    RL: gl.constexpr = gl.SliceLayout(1, L)
    b0 = row0 // BQ
    zero = gl.zeros([BQ, 128], gl.float32, L)
    g = 0
    it = 0
    for tile in range(gl.program_id(0), ntiles, gl.num_programs(0)):
        b = tile // T
        col = (tile % T) * BK + C * 128
        base = gl.load(BASE + b0 + b) + lo
        loc = b * BQ + gl.arange(0, BQ, layout=RL)
        if _reached(tile, T, BASE, BEND, b0, lo, BK):
            rm = row0 + loc < s_q
            wp = W + (row0 + loc).to(gl.int64) * HI
            slot = C * KBUF + it % KBUF
            mbarrier.wait(kfull.index(slot), (it // KBUF) & 1)
            kt = ksm.index(slot).permute((1, 0))
            tot = gl.zeros([BQ, 128], gl.float32, L)
            w = gl.load(wp, mask=rm, other=0.0)
            for h in range(0, HI, PER):
                s = g % ST
                mbarrier.wait(qfull.index(s), (g // ST) & 1)
                acc = warpgroup_mma(qsm.index(PER * s), kt, zero, use_acc=False, is_async=True)
                if PER == 2:
                    second = warpgroup_mma(qsm.index(2 * s + 1), kt, zero, use_acc=False,
                                           is_async=True)
                    w2 = gl.load(wp + h + 1, mask=rm & (h + 1 < HI), other=0.0)
                wn = gl.load(wp + h + PER, mask=rm & (h + PER < HI), other=0.0)
                x = warpgroup_mma_wait(PER - 1, deps=(acc, ))
                if PER == 2:
                    tot += (x + gl.abs(x)) * (w * 0.5)[:, None]
                    x = warpgroup_mma_wait(0, deps=(second, ))
                    w = w2
                gl.thread_barrier()
                mbarrier.arrive(qempty.index(s), count=1)
                # w * relu(x), exactly; FADD runs at twice the rate of FMNMX
                tot += (x + gl.abs(x)) * (w * 0.5)[:, None]
                w = wn
                g += 1
            mbarrier.arrive(kempty.index(slot), count=1)
            it += 1
            _gate(tot, KS, START, END, TAU, SEGS, NUM, row0, b, col, base + col, base + span, s_q,
                  s_kv, seg_stride, num_stride,
                  BQ, FP8, GATE, L)
        else:
            if GATE:
                gl.store(NUM + loc.to(gl.int64) * num_stride + col // 128, gl.zeros([BQ], gl.int32,
                         RL))


@gluon.jit
@no_type_check
def _load_q(qd, qsm, qfull, qempty, BASE, BEND, row0, lo, T, ntiles, HI: gl.constexpr,
            BQ: gl.constexpr, NC: gl.constexpr, PER: gl.constexpr, ST: gl.constexpr):
    DI: gl.constexpr = qd.block_type.shape[1]
    g = 0
    for tile in range(gl.program_id(0), ntiles, gl.num_programs(0)):
        if _reached(tile, T, BASE, BEND, row0 // BQ, lo, NC * 128):
            for h in range(0, HI, PER):
                s = g % ST
                mbarrier.wait(qempty.index(s), ((g // ST) & 1) ^ 1)
                mbarrier.expect(qfull.index(s), PER * qd.block_type.nbytes)
                for x in gl.static_range(PER):  # past the last head come zeros
                    tma.async_copy_global_to_shared(qd, [row0 + (tile // T) * BQ, (h + x) * DI],
                        qfull.index(s), qsm.index(PER * s + x))
                g += 1


@gluon.jit
@no_type_check
def _load_k(kd, ksm, kfull, kempty, BASE, BEND, row0, lo, T, ntiles, BQ: gl.constexpr,
            NC: gl.constexpr,
            KBUF: gl.constexpr):
    it = 0
    for tile in range(gl.program_id(0), ntiles, gl.num_programs(0)):
        if _reached(tile, T, BASE, BEND, row0 // BQ, lo, NC * 128):
            k0 = gl.load(BASE + row0 // BQ + tile // T) + lo + (tile % T) * (NC * 128)
            for c in gl.static_range(NC):
                slot = c * KBUF + it % KBUF
                mbarrier.wait(kempty.index(slot), ((it // KBUF) & 1) ^ 1)
                mbarrier.expect(kfull.index(slot), kd.block_type.nbytes)
                tma.async_copy_global_to_shared(kd, [k0 + c * 128, 0], kfull.index(slot),
                    ksm.index(slot))
            it += 1


@gluon.jit(do_not_specialize=["T", "ntiles"])  # whose multiples of 16 would compile it again
@no_type_check
def score_kernel(qd, kd, W, KS, START, END, BASE, BEND, TAU, SEGS, NUM, row0, s_q, s_kv, lo, span,
                 T, ntiles, seg_stride, num_stride,
                 HI: gl.constexpr, BQ: gl.constexpr, NC: gl.constexpr, PER: gl.constexpr,
                 ST: gl.constexpr, KBUF: gl.constexpr, FP8: gl.constexpr,
                 GATE: gl.constexpr, KI: gl.constexpr, REGS: gl.constexpr):
    """ntiles tiles of BQ rows x NC (2 or 3) * 128 keys, T of them a block of rows. Arguments as of
    kernels_scores.score_kernel.
    """
    DI: gl.constexpr = kd.block_type.shape[1]
    ksm = gl.allocate_shared_memory(kd.dtype, [NC * KBUF, 128, DI], kd.layout)
    qsm = gl.allocate_shared_memory(qd.dtype, [ST * PER, BQ, DI], qd.layout)
    qfull = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    qempty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    kfull = gl.allocate_shared_memory(gl.int64, [NC * KBUF, 1], mbarrier.MBarrierLayout())
    kempty = gl.allocate_shared_memory(gl.int64, [NC * KBUF, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ST):
        mbarrier.init(qfull.index(i), count=1)
        mbarrier.init(qempty.index(i), count=NC)
    for i in gl.static_range(NC * KBUF):
        mbarrier.init(kfull.index(i), count=1)
        mbarrier.init(kempty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    # the tuples are written out: a tuple bound to a name loses its compile-time values
    if NC == 3:
        gl.warp_specialize([
            (_consume, (0, ksm, qsm, kfull, kempty, qfull, qempty, W, KS, START, END, BASE, BEND,
             TAU, SEGS, NUM, row0, s_q, s_kv, lo, span, T, ntiles, seg_stride, num_stride, HI, BQ,
             NC, PER, ST, KBUF, FP8, GATE, KI)),
            (_consume, (1, ksm, qsm, kfull, kempty, qfull, qempty, W, KS, START, END, BASE, BEND,
             TAU, SEGS, NUM, row0, s_q, s_kv, lo, span, T, ntiles, seg_stride, num_stride, HI, BQ,
             NC, PER, ST, KBUF, FP8, GATE, KI)),
            (_consume, (2, ksm, qsm, kfull, kempty, qfull, qempty, W, KS, START, END, BASE, BEND,
             TAU, SEGS, NUM, row0, s_q, s_kv, lo, span, T, ntiles, seg_stride, num_stride, HI, BQ,
             NC, PER, ST, KBUF, FP8, GATE, KI)),
            (_load_q, (qd, qsm, qfull, qempty, BASE, BEND, row0, lo, T, ntiles, HI, BQ, NC, PER,
             ST)),
            (_load_k, (kd, ksm, kfull, kempty, BASE, BEND, row0, lo, T, ntiles, BQ, NC, KBUF)),
        ], [4, 4, 1, 1], [REGS, REGS, 24, 24])
    else:
        gl.warp_specialize([
            (_consume, (0, ksm, qsm, kfull, kempty, qfull, qempty, W, KS, START, END, BASE, BEND,
             TAU, SEGS, NUM, row0, s_q, s_kv, lo, span, T, ntiles, seg_stride, num_stride, HI, BQ,
             NC, PER, ST, KBUF, FP8, GATE, KI)),
            (_consume, (1, ksm, qsm, kfull, kempty, qfull, qempty, W, KS, START, END, BASE, BEND,
             TAU, SEGS, NUM, row0, s_q, s_kv, lo, span, T, ntiles, seg_stride, num_stride, HI, BQ,
             NC, PER, ST, KBUF, FP8, GATE, KI)),
            (_load_q, (qd, qsm, qfull, qempty, BASE, BEND, row0, lo, T, ntiles, HI, BQ, NC, PER,
             ST)),
            (_load_k, (kd, ksm, kfull, kempty, BASE, BEND, row0, lo, T, ntiles, BQ, NC, KBUF)),
        ], [4, 1, 1], [REGS, 24, 24])
