"""Backend `hopper` of sparse attention: launches of the Gluon kernels, with the plain Triton ones where they serve as well.

bf16, 512 value columns, with or without 64 rope columns; heads in tiles of 64 (others are padded, which copies query and
grad_out); any number of slots. lse in natural logarithm, +inf where a row has no key. Deterministic. Ids of one row must
differ (a top-k's do). Left out: autograd and checks (op.py).
"""

from dataclasses import dataclass

import torch
import triton
from torch.nn.functional import pad
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fullspan.ops.sparse_attention.kernels_hopper_backward import SWIZZLE_64, SWIZZLE_128, dense_kernel, dquery_kernel
from fullspan.ops.sparse_attention.kernels_hopper_forward import forward_kernel, prepare_kernel
from fullspan.ops.sparse_attention.plan import GROUP, ChunkPlan, build_plan, chunk_rows, partial_rows
from fullspan.ops.sparse_attention.triton_backend import (
    LOG2E,
    Shape,
    compute_units,
    launch_partials,
    launch_segments,
    on_device,
    row_products,
    shape_of,
    sink_gradient,
)
from fullspan.shapes import Float, Float32, Int32, Tensor

HEADS = 64  # of a tile
BLOCK = 64  # keys of a block
VALUE = 512
ROPE = 64
FORWARD_ROWS = 16384  # rows whose cleaned ids exist at once


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Cleaned ids of some rows [rows, slots], their counts, and one bit a block of slots that holds an empty one."""

    ids: Int32[Tensor, "rows slots"]
    limit: Int32[Tensor, "rows"]
    flags: Int32[Tensor, "rows words"]


def prepare(ids: Tensor, counts: Tensor, pack: int, first: int, rows: int) -> Prepared:
    """Prepared ids of rows [first, first + rows)."""
    topk = ids.shape[1]
    slots = -(-topk // BLOCK) * BLOCK
    words = -(-slots // (32 * BLOCK))
    out = Prepared(
        ids=ids.new_empty(rows, slots), limit=ids.new_empty(rows), flags=ids.new_empty(rows, words)
    )
    prepare_kernel[(rows,)](
        ids, counts, out.ids, out.limit, out.flags, first, pack, TOPK=topk, KP=triton.next_power_of_2(slots),
        KC=slots, WORDS=words, num_warps=4,
    )  # fmt: skip
    return out


def _tiled(x: Tensor, tiles: int) -> Tensor:
    """x [rows, heads, width] with heads padded to whole tiles, contiguous."""
    missing = tiles * HEADS - x.shape[1]
    return pad(x, (0, 0, 0, missing)) if missing else x.contiguous()


def forward(
    query: Float[Tensor, "rows heads qk"],
    kv: Float[Tensor, "pack qk"],
    ids: Int32[Tensor, "rows topk"],
    counts: Int32[Tensor, "rows"],
    sink: Float[Tensor, "heads"] | None,
    scale: float,
    value_dim: int,
    workspace_bytes: int,
) -> tuple[Float[Tensor, "rows heads value"], Float32[Tensor, "rows heads"]]:
    """out [rows, heads, value_dim] and natural-log lse [rows, heads] of every row over its chosen keys."""
    rows, heads, width = query.shape
    tiles = -(-heads // HEADS)
    kv, ids, counts = kv.contiguous(), ids.contiguous(), counts.contiguous()
    query = _tiled(query, tiles)
    out = query.new_empty(rows, tiles * HEADS, VALUE)
    lse = torch.empty(rows, tiles * HEADS, dtype=torch.float32, device=query.device)
    sinks = lse if sink is None else pad(sink.float(), (0, tiles * HEADS - heads))
    with on_device(query):
        units = compute_units(query.device)
        for first in range(0, rows, FORWARD_ROWS):
            here = min(FORWARD_ROWS, rows - first)
            ready = prepare(ids, counts, kv.shape[0], first, here)
            part = slice(first, first + here)
            forward_kernel[(min(here * tiles, units),)](
                ready.flags, query[part], kv, ready.ids, ready.limit, sinks, out[part], lse[part],
                scale * LOG2E, here * tiles, K=ready.ids.shape[1], BK=BLOCK, HT=tiles, ROPE=width > VALUE,
                WORDS=ready.flags.shape[1], HAS_SINK=sink is not None, num_warps=4, maxnreg=128,
            )  # fmt: skip
    return out[:, :heads].contiguous(), lse[:, :heads].contiguous()


def _rows(x: Tensor, columns: int) -> TensorDescriptor:
    """TMA over 64 rows x `columns` of x, its leading dimensions flattened."""
    layout = SWIZZLE_64 if columns == 32 else SWIZZLE_128
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [64, columns], layout.value)


def backward(
    grad_out: Float[Tensor, "rows heads value"],
    query: Float[Tensor, "rows heads qk"],
    kv: Float[Tensor, "pack qk"],
    ids: Int32[Tensor, "rows topk"],
    counts: Int32[Tensor, "rows"],
    out: Float[Tensor, "rows heads value"],
    lse: Float32[Tensor, "rows heads"],
    sink: Float[Tensor, "heads"] | None,
    scale: float,
    value_dim: int,
    workspace_bytes: int,
) -> tuple[Float[Tensor, "rows heads qk"], Float32[Tensor, "pack qk"], Float32[Tensor, "heads"]]:
    """Gradients of query (its dtype), kv (fp32) and sink (fp32, zeros without one); same bits on every run."""
    rows, heads, width = query.shape
    tiles = -(-heads // HEADS)
    kv, ids, counts = kv.contiguous(), ids.contiguous(), counts.contiguous()
    query, grad_out, out = (_tiled(x, tiles) for x in (query, grad_out, out))
    lse = pad(lse, (0, tiles * HEADS - heads)).contiguous()
    dquery = torch.empty_like(query)
    dkv = torch.empty(kv.shape, dtype=torch.float32, device=kv.device)
    dsink = torch.zeros(heads, dtype=torch.float32, device=query.device)
    if rows == 0:
        return dquery, dkv.zero_(), dsink
    slots = -(-ids.shape[1] // BLOCK) * BLOCK
    shape = shape_of(query, slots, value_dim)
    with on_device(query):
        delta = row_products(grad_out, out, shape)
        chunk = chunk_rows(
            rows, slots, kv.shape[0], width, tiles * HEADS, 2, workspace_bytes, compute_units(query.device)
        )
        prob = query.new_empty(chunk * slots, tiles * HEADS)
        dscore = torch.empty_like(prob)
        part = query.new_empty(partial_rows(chunk, slots), width)
        for first in range(0, rows, chunk):
            here = min(chunk, rows - first)
            ready = prepare(ids, counts, kv.shape[0], first, here)
            # the cleaned ids are the chunk's own, so its plan counts rows from 0
            plan = build_plan(ready.ids, ready.limit, pack=kv.shape[0], first=0, rows=here, share=True)
            window = slice(first, first + here)
            launch_dquery(
                grad_out[window], query[window], kv, ready, lse[window], delta[window], dquery[window], prob, dscore, scale
            )
            if tiles == 1:
                launch_dense(grad_out[window], query[window], ready, prob, dscore, part, plan)
            launch_partials(grad_out[window], query[window], prob, dscore, part, plan, shape, skip_dense=tiles == 1)
            launch_segments(part, dkv, plan, shape, add=first > 0)
        if sink is not None:
            dsink = sink_gradient(sink, lse[:, :heads], delta[:, :heads])
    return dquery[:, :heads].contiguous(), dkv, dsink


def launch_dquery(
    grad_out: Tensor, query: Tensor, kv: Tensor, ready: Prepared, lse: Tensor, delta: Tensor, dquery: Tensor,
    prob: Tensor, dscore: Tensor, scale: float,
) -> None:  # fmt: skip
    """Query gradient of a chunk, and its P and dS."""
    rows, heads, width = query.shape
    tiles, rope = heads // HEADS, width > VALUE
    narrow = (query, 64) if rope else (query, 128)
    dquery_kernel[(rows * tiles,)](
        _rows(query, 128), _rows(*narrow), _rows(grad_out, 128), _rows(dquery, 128), _rows(dquery, narrow[1]),
        _rows(prob, 64), _rows(dscore, 64), kv, ready.ids, ready.limit, lse, delta, 0, scale, scale * LOG2E,
        K=ready.ids.shape[1], HT=tiles, ROPE=rope, R1=232, R2=32, num_warps=4,
    )  # fmt: skip


def launch_dense(
    grad_out: Tensor, query: Tensor, ready: Prepared, prob: Tensor, dscore: Tensor, part: Tensor, plan: ChunkPlan
) -> None:
    """Partial rows of the groups that share nothing, for 64 heads."""
    items, rope = query.shape[0] * 2, query.shape[2] > VALUE
    dense_kernel[(min(items, compute_units(query.device)),)](
        _rows(query, 256), _rows(query, 32), _rows(grad_out, 256), _rows(prob, 64), _rows(dscore, 64),
        _rows(part, 256), _rows(part, 32), ready.limit, plan.mode, items, 0, K=ready.ids.shape[1], ROPE=rope,
        GROUP=GROUP, R1=224, R2=40, num_warps=4,
    )  # fmt: skip
