"""Partial rows of shared keys for Hopper (sm_90a), in Triton's Gluon dialect (Triton 3.6).

dKV[key] = sum over the rows and heads of a group of dS q + P g: for each row of the group one
product [256 keys, 64 heads] x [64 heads, 192 columns] with dS and q, and one with P and g: 8.9
bytes from L2 for 1000 FLOPs, where tiles of 128 x 288 need 11.5. 4096 rows of 2048 overlapping ids
take 2.82 ms on an H200, in plain Triton 2.94.

A persistent program a multiprocessor walks (group, block of 256 keys, three tiles of 192 columns).
Four producer warps fill a ring of four halves of a row, (dS, q) or (P, g): rows of dS and P by
cp.async at the slots that the plan lists, zeros where the row did not choose the key; q and g by
TMA, which gives zeros past the end of a row. Two consumer warpgroups take 128 keys each. Sums are
in the order of the rows, so the bits are those of the plain kernel. Left out: launching
(hopper_backend.py). Kernels carry `no_type_check` so that import hooks which wrap annotated
functions leave them to Triton.
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

from fullspan.ops.sparse_attention.chunks import HOPPER_BLOCK
from fullspan.ops.sparse_attention.kernels_hopper_backward import SWIZZLE_128

# Arguments in rows: the formatter would give each of some 30 a line of its own.
# fmt: off

KEYS = gl.constexpr(HOPPER_BLOCK)  # half of them a consumer's
COLUMNS = gl.constexpr(192)  # of a tile: 128 and 64, as shapes are powers of two
TILES = gl.constexpr(3)
RING = gl.constexpr(4)  # halves of a row


@gluon.jit
@no_type_check
def _fetch(QD, QXD, GD, GXD, PROB, DSCORE, SLOTS, ACTIVE, ACTIVE_COUNT, s, q, qx, full, empty,
           row0, step, items, HT: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr):
    """Producer warps."""
    HP: gl.constexpr = HT * 64
    CP: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, 128, gl.SliceLayout(1, CP))
    h = gl.arange(0, 64, gl.SliceLayout(0, CP))
    n = 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        b = w // TILES
        c0 = w % TILES * COLUMNS
        g = b // BLOCKS
        turns = gl.load(ACTIVE_COUNT + b) * HT
        base = g.to(gl.int64) * step * HP
        slots = SLOTS + b.to(gl.int64) * (GROUP * KEYS) + r
        at0 = gl.load(slots, mask=r < turns * KEYS, other=-1)
        at1 = gl.load(slots + 128, mask=r < turns * KEYS, other=-1)
        for e in range(turns):
            row = (row0 + g * GROUP + gl.load(ACTIVE + b * GROUP + e // HT)) * HP + e % HT * 64
            # int32: choose_rows keeps a chunk's slots times heads below 2^31
            o0 = (at0 * HP + e % HT * 64)[:, None] + h[None, :]
            o1 = (at1 * HP + e % HT * 64)[:, None] + h[None, :]
            ok0 = (at0 >= 0)[:, None]
            ok1 = (at1 >= 0)[:, None]
            more = r < (turns - e - 1) * KEYS
            at0 = gl.load(slots + (e + 1) // HT * KEYS, mask=more, other=-1)
            at1 = gl.load(slots + (e + 1) // HT * KEYS + 128, mask=more, other=-1)
            for half in gl.static_range(2):
                k = n % RING
                mbarrier.wait(empty.index(k), ((n // RING) & 1) ^ 1)
                mbarrier.expect(full.index(k), 64 * COLUMNS * 2)
                wide = QD if half == 0 else GD
                more_wide = QXD if half == 0 else GXD
                p = (DSCORE if half == 0 else PROB) + base
                tma.async_copy_global_to_shared(wide, [row, c0], full.index(k), q.index(k))
                tma.async_copy_global_to_shared(more_wide, [row, c0 + 128], full.index(k),
                                                qx.index(k))
                async_copy.async_copy_global_to_shared(s.index(2 * k), p + o0, mask=ok0)
                async_copy.async_copy_global_to_shared(s.index(2 * k + 1), p + o1, mask=ok1)
                async_copy.mbarrier_arrive(full.index(k), increment_count=False)
                n += 1


@gluon.jit
@no_type_check
def _sum(U: gl.constexpr, SHARED, ACTIVE_COUNT, PART, s, q, qx, full, empty, items,
         D: gl.constexpr, HT: gl.constexpr, TOPK: gl.constexpr, GROUP: gl.constexpr,
         BLOCKS: gl.constexpr):
    """Consumer U: keys 128 U .. 128 U + 127 of every block."""
    MW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    MX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    n = 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        b = w // TILES
        c0 = w % TILES * COLUMNS
        g = b // BLOCKS
        halves = gl.load(ACTIVE_COUNT + b) * (2 * HT)
        if halves > 0:
            a = gl.zeros([128, 128], gl.float32, MW)
            x = gl.zeros([128, 64], gl.float32, MX)
            for _ in range(halves):
                k = n % RING
                mbarrier.wait(full.index(k), (n // RING) & 1)
                fence_async_shared()
                a = warpgroup_mma(s.index(2 * k + U), q.index(k), a, is_async=True)
                x = warpgroup_mma(s.index(2 * k + U), qx.index(k), x, is_async=True)
                a, x = warpgroup_mma_wait(0, deps=(a, x))
                gl.thread_barrier()
                mbarrier.arrive(empty.index(k), count=1)
                n += 1
            first = b % BLOCKS * KEYS + U * 128
            left = gl.load(SHARED + g) - first
            into = PART + (g * GROUP * TOPK + first).to(gl.int64) * D + c0
            j = gl.arange(0, 128, gl.SliceLayout(1, MW))
            c = gl.arange(0, 128, gl.SliceLayout(0, MW))
            at = into + j[:, None] * D + c[None, :]
            gl.store(at, a.to(gl.bfloat16), mask=(j < left)[:, None])
            j = gl.arange(0, 128, gl.SliceLayout(1, MX))
            c = gl.arange(128, 192, gl.SliceLayout(0, MX))
            at = into + j[:, None] * D + c[None, :]
            gl.store(at, x.to(gl.bfloat16), mask=((j < left) & (c0 + 128 < D))[:, None])


@gluon.jit(do_not_specialize=["items"])
@no_type_check
def shared_kernel(QD, QXD, GD, GXD, PROB, DSCORE, SLOTS, SHARED, ACTIVE, ACTIVE_COUNT, PART, row0,
                  step, items, D: gl.constexpr, HT: gl.constexpr, TOPK: gl.constexpr,
                  GROUP: gl.constexpr, BLOCKS: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr):
    """items: (group, block, tile) of a chunk, the tile fastest. Arguments as of
    kernels_backward.union_kernel; QD, GD: TMA over [64 heads, 128 columns] of the query and the
    gradient; QXD, GXD: over 64 columns.
    """
    s = gl.allocate_shared_memory(gl.bfloat16, [2 * RING, 128, 64], SWIZZLE_128)
    q = gl.allocate_shared_memory(gl.bfloat16, [RING, 64, 128], SWIZZLE_128)
    qx = gl.allocate_shared_memory(gl.bfloat16, [RING, 64, 64], SWIZZLE_128)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(RING):
        mbarrier.init(full.index(k), count=129)  # the threads that copy, and the one that expects
        mbarrier.init(empty.index(k), count=2)
    fence_async_shared()
    gl.thread_barrier()
    # the tuples are written out: a tuple bound to a name loses its compile-time values
    gl.warp_specialize([
        (_sum, (0, SHARED, ACTIVE_COUNT, PART, s, q, qx, full, empty, items, D, HT, TOPK, GROUP,
         BLOCKS)),
        (_sum, (1, SHARED, ACTIVE_COUNT, PART, s, q, qx, full, empty, items, D, HT, TOPK, GROUP,
         BLOCKS)),
        (_fetch, (QD, QXD, GD, GXD, PROB, DSCORE, SLOTS, ACTIVE, ACTIVE_COUNT, s, q, qx, full,
         empty, row0, step, items, HT, GROUP, BLOCKS)),
    ], [4, 4], [R1, R2])
