"""The plan of the backward: from the ids alone, which partial rows of dKV exist and in which order
each key adds its own.

Rows go in chunks, and a chunk in groups of GROUP neighbours. A key that at least half of a group's
rows chose is *shared*: its gradient is summed over the group in registers and becomes one partial
row. Any other (row, key) pair is *direct*: one partial row of its own. The partial rows of a group
lie in the slots of its rows: those of its shared keys first, then the direct ones of each row; in a
group that shares nothing each pair has its own slot.
Four kernels, no sort of the pairs, and no atomic but a bitwise OR, so every run gives the same
bits:

mark      TABLE[group, key] = which rows of the group chose the key (one bit a row)
share     per group: which keys are shared, ordered by their bits so that blocks of keys skip rows;
          the key's place replaces its bits in TABLE
columns   per key and chunk, over the groups: the partial rows before each group's; COUNT[chunk,
          key]
place     per (row, slot): a place in the order of its key, the slots of shared blocks, the direct
          list

A word of TABLE holds, from bit 0: 16 bits of rows, or the place among the shared keys; bit 16:
shared; 15 bits of partial rows of the same key before the group. Ids of one row must differ. Left
out: sizes and memory (plan.py). Kernels carry `no_type_check` so that import hooks which wrap
annotated functions leave them to Triton.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _popcount16(x):
    """Set bits among the lowest 16, by arithmetic that the interpreter knows too."""
    x = x & 0xFFFF
    x = x - ((x >> 1) & 0x5555)
    x = (x & 0x3333) + ((x >> 2) & 0x3333)
    x = (x + (x >> 4)) & 0x0F0F
    return (x + (x >> 8)) & 0x1F


@triton.jit
@no_type_check
def _either(a, b):
    return a | b


@triton.jit
@no_type_check
def _ids(IDS, COUNTS, row, live, pack, TOPK: tl.constexpr, KP: tl.constexpr):
    """Ids of a row and which of them count."""
    j = tl.arange(0, KP)
    n = tl.minimum(tl.load(COUNTS + row, mask=live, other=0), TOPK)
    ids = tl.load(IDS + row.to(tl.int64) * TOPK + j, mask=live & (j < n), other=-1)
    return ids, (ids >= 0) & (ids < pack)


@triton.jit
@no_type_check
def mark_kernel(
    IDS, COUNTS, TABLE, row0, pack, TOPK: tl.constexpr, KP: tl.constexpr, GROUP: tl.constexpr
):
    """One program a row of the chunk."""
    c = tl.program_id(0)
    ids, ok = _ids(IDS, COUNTS, row0 + c, True, pack, TOPK, KP)
    at = TABLE + (c // GROUP).to(tl.int64) * pack + tl.where(ok, ids, 0)
    bit = tl.full([KP], 1, tl.int32) << (c % GROUP)
    tl.atomic_or(at, bit, mask=ok, sem="relaxed")


@triton.jit
@no_type_check
def _pairs(IDS, COUNTS, TABLE, g, q0, row0, rows, pack, TOPK: tl.constexpr, KP: tl.constexpr,
           GROUP: tl.constexpr,
           QB: tl.constexpr):  # fmt: skip
    """The pairs of QB rows of group g from its row q0 on, flat: row in its group, slot, id, whether
    it counts, its bits.
    """
    e = tl.arange(0, QB * KP)
    q = q0 + e // KP
    j = e % KP
    c = g * GROUP + q
    n = tl.minimum(tl.load(COUNTS + row0 + c, mask=c < rows, other=0), TOPK)
    ids = tl.load(IDS + (row0 + c).to(tl.int64) * TOPK + j, mask=(c < rows) & (j < n), other=-1)
    ok = (ids >= 0) & (ids < pack)
    at = TABLE + g.to(tl.int64) * pack + tl.where(ok, ids, 0)
    return q, j, ids, ok, tl.load(at, mask=ok, other=0)


@triton.jit
@no_type_check
def share_kernel(
    IDS, COUNTS, TABLE, MODE, LIST, SHARED, ACTIVE, ACTIVE_COUNT, ACTIVE_BITS, DIRECT_FIRST, row0,
    rows, chunk, pack,
    TOPK: tl.constexpr, KP: tl.constexpr, GROUP: tl.constexpr, QB: tl.constexpr,
    SHARE: tl.constexpr,
    FEW: tl.constexpr, DENSE: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """One program a group. MODE: 0 no shared key, 1 keys of at least SHARE rows, 2 every key.

    FEW: fewer direct pairs than this a row make every key shared. DENSE: a greater share of direct
    pairs makes every pair direct. WIDTH: keys that half of the rows chose are never more (2 * KP);
    a group with more than BLOCKS * BM shares nothing. LIST: scratch [2, WIDTH]. SHARED: number of
    shared keys. DIRECT_FIRST: where each row's direct partial rows begin. QB rows are looked at
    together.
    """
    g = tl.program_id(0)
    tally = tl.zeros([QB * KP], tl.int32)  # four sums of 8 bits
    for q0 in range(0, GROUP, QB):
        q, j, ids, ok, bits = _pairs(
            IDS, COUNTS, TABLE, g, q0, row0, rows, pack, TOPK, KP, GROUP, QB
        )
        first = (ok & ((bits & ((1 << q) - 1)) == 0)).to(tl.int32)
        many = (_popcount16(bits) >= SHARE).to(tl.int32)
        live = ok.to(tl.int32)
        tally += live + (first << 8) + ((first & many) << 16) + ((live & (1 - many)) << 24)
    pairs = tl.sum(tally & 255)
    distinct = tl.sum((tally >> 8) & 255)
    shared = tl.sum((tally >> 16) & 255)
    lone = tl.sum((tally >> 24) & 255)
    mode = tl.where((lone < FEW * GROUP) & (distinct <= BLOCKS * BM), 2, 1)
    none = (lone > pairs * DENSE) | (shared + lone == 0) | (shared > BLOCKS * BM) | (SHARE > GROUP)
    mode = tl.where(none, 0, mode)
    tl.store(MODE + g, mode)
    tl.store(SHARED + g, tl.where(mode == 0, 0, tl.where(mode == 1, shared, distinct)))
    least = tl.where(mode == 2, 1, SHARE)
    most: tl.constexpr = WIDTH // BM
    at_b = tl.arange(0, most)
    b = g * BLOCKS + at_b
    bm = at_b < BLOCKS
    if mode == 0:
        tl.store(ACTIVE_COUNT + b, tl.zeros([most], tl.int32), mask=bm)
        return
    # the shared keys, in the order of their first row and slot
    keys = LIST + g.to(tl.int64) * (2 * WIDTH)
    n = 0
    to = ((g * GROUP) % chunk) * TOPK + tl.where(mode == 1, shared, distinct)
    for q0 in range(0, GROUP, QB):
        q, j, ids, ok, bits = _pairs(
            IDS, COUNTS, TABLE, g, q0, row0, rows, pack, TOPK, KP, GROUP, QB
        )
        many = _popcount16(bits) >= least
        take = ok & ((bits & ((1 << q) - 1)) == 0) & many
        direct = (ok & (many == 0)).to(tl.int32)
        both = tl.cumsum(take.to(tl.int32) + (direct << 16), 0)
        at = n + (both & 0xFFFF) - 1
        tl.store(keys + at, ids, mask=take)
        tl.store(keys + WIDTH + at, bits, mask=take)
        row = g * GROUP + q
        tl.store(DIRECT_FIRST + row, to + (both >> 16) - direct, mask=(j == 0) & (row < rows))
        n += tl.sum(take.to(tl.int32))
        to += tl.sum(direct)
    tl.debug_barrier()
    # order them by their bits; the index keeps equal ones apart, and 15 bits of it fit below 16
    # bits of rows
    w = tl.arange(0, WIDTH)
    bits = tl.load(keys + WIDTH + w, mask=w < n, other=0)
    packed = tl.sort(tl.where(w < n, (bits << 15) | w, 0x7FFFFFFF))
    live = packed != 0x7FFFFFFF
    source = packed & 0x7FFF
    key = tl.load(keys + source, mask=live, other=0)
    tl.store(TABLE + g.to(tl.int64) * pack + key, w | (1 << 16), mask=live)
    # rows that have a key in each block
    some = tl.reduce(tl.reshape(tl.where(live, packed >> 15, 0), (most, BM)), 1, _either)
    own = tl.arange(0, GROUP)
    has = (((some[:, None] >> own[None, :]) & 1) != 0) & bm[:, None]
    rank = _popcount16(some[:, None] & ((1 << own[None, :]) - 1))
    tl.store(
        ACTIVE + b[:, None] * GROUP + rank, tl.broadcast_to(own[None, :], (most, GROUP)), mask=has
    )
    tl.store(ACTIVE_COUNT + b, _popcount16(some), mask=bm)
    tl.store(ACTIVE_BITS + b, some, mask=bm)


@triton.jit
@no_type_check
def columns_kernel(TABLE, COUNT, groups, per_chunk, pack, GB: tl.constexpr, BK: tl.constexpr):
    """Program: (block of BK keys, chunk of per_chunk groups). Partial rows before each group's, GB
    groups at a time.
    """
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    km = k < pack
    begin = tl.program_id(1) * per_chunk
    end = tl.minimum(begin + per_chunk, groups)
    before = tl.zeros([BK], tl.int32)
    for g0 in range(begin, end, GB):
        g = g0 + tl.arange(0, GB)
        at = TABLE + g.to(tl.int64)[:, None] * pack + k[None, :]
        ok = (g < end)[:, None] & km[None, :]
        word = tl.load(at, mask=ok, other=0)
        own = tl.where((word >> 16) != 0, 1, _popcount16(word))
        upto = tl.cumsum(own, 0)
        tl.store(at, word | ((before[None, :] + upto - own) << 17), mask=ok & (word != 0))
        before += tl.sum(own, 0)
    tl.store(COUNT + tl.program_id(1).to(tl.int64) * pack + k, before, mask=km)


@triton.jit
@no_type_check
def place_kernel(
    IDS, COUNTS, TABLE, MODE, ACTIVE_BITS, DIRECT_FIRST, START, ORDER, SLOTS, DIRECT, DIRECT_COUNT,
    row0, chunk, pack,
    TOPK: tl.constexpr, KP: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """One program a row c of the plan, with the slots (c % chunk) * TOPK + j."""
    c = tl.program_id(0)
    g = c // GROUP
    q = c % GROUP
    j = tl.arange(0, KP)
    ids, ok = _ids(IDS, COUNTS, row0 + c, True, pack, TOPK, KP)
    key = tl.where(ok, ids, 0)
    word = tl.load(TABLE + g.to(tl.int64) * pack + key, mask=ok, other=0)
    start = tl.load(START + (c // chunk).to(tl.int64) * pack + key, mask=ok, other=0)
    start += (word >> 17) & 0x7FFF
    slot = (c % chunk) * TOPK + j
    shared = ok & (((word >> 16) & 1) != 0)
    place = word & 0xFFFF
    block = g.to(tl.int64) * BLOCKS + place // BM
    active = tl.load(ACTIVE_BITS + block, mask=shared, other=0)
    rank = _popcount16(active & ((1 << q) - 1))
    tl.store(SLOTS + (block * GROUP + rank) * BM + place % BM, slot, mask=shared)
    direct = ok & (shared == 0)
    lower = _popcount16(word & ((1 << q) - 1))
    upto = tl.cumsum(direct.to(tl.int32), 0)
    # every row that has a shared key names the same partial row at the same place
    own = tl.where(tl.load(MODE + g) == 0, slot, tl.load(DIRECT_FIRST + c) + upto - 1)
    part = tl.where(shared, ((g * GROUP) % chunk) * TOPK + place, own)
    tl.store(ORDER + start + tl.where(direct, lower, 0), part, mask=ok)
    tl.store(DIRECT + c.to(tl.int64) * TOPK + upto - 1, j, mask=direct)
    tl.store(DIRECT_COUNT + c, tl.sum(direct.to(tl.int32)))
