"""Backend `hopper` of sparse attention: launches of the Gluon kernels, with the plain Triton ones
where they serve as well.

bf16, 512 value columns, with or without 64 rope columns; heads in tiles of 64 (others are padded,
which copies query and grad_out); any number of slots. lse in natural logarithm, +inf where a row
has no key. Deterministic. Ids of one row must differ (a top-k's do). Left out: autograd and checks
(op.py).
"""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportMissingImports=false

from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from fullspan.ops.sizes import power_of_2
from fullspan.ops.sparse_attention.kernels_hopper_backward import (
    SWIZZLE_64,
    SWIZZLE_128,
    dense_kernel,
    dquery_kernel,
)
from fullspan.ops.sparse_attention.kernels_hopper_forward import forward_kernel, prepare_kernel
from fullspan.ops.sparse_attention.plan import GROUP, Chunk, Plan
from fullspan.ops.sparse_attention.triton_backend import (
    LOG2E,
    Buffers,
    Shape,
    launch_direct,
    launch_segments,
    launch_union,
    on_device,
    plans_of,
    row_products,
    shape_of,
    sink_gradient,
    sizes_of,
)
from fullspan.shapes import Float, Float32, Int32, Tensor

HEADS = 64  # of a tile
BLOCK = 64  # keys of a block
VALUE = 512
ROPE = 64
FORWARD_ROWS = 16384  # whose cleaned ids exist at once, at most


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Cleaned ids of some rows [rows, slots], their counts, and one bit a block of slots that holds
    an empty one.
    """

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
        ids, counts, out.ids, out.limit, out.flags, first, pack, TOPK=topk,
        KP=power_of_2(slots),
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
    """out [rows, heads, value_dim] and natural-log lse [rows, heads] of every row over its chosen
    keys.
    """
    rows, heads, width = query.shape
    tiles = -(-heads // HEADS)
    kv, ids, counts = kv.contiguous(), ids.contiguous(), counts.contiguous()
    query = _tiled(query, tiles)
    out = query.new_empty(rows, tiles * HEADS, VALUE)
    lse = torch.empty(rows, tiles * HEADS, dtype=torch.float32, device=query.device)
    sinks = lse if sink is None else pad(sink.float(), (0, tiles * HEADS - heads))
    with on_device(query):
        units = torch.cuda.get_device_properties(query.device).multi_processor_count
        step = min(FORWARD_ROWS, max(units, workspace_bytes // (4 * ids.shape[1] + 512)))
        for first in range(0, rows, step):
            here = min(step, rows - first)
            ready = prepare(ids, counts, kv.shape[0], first, here)
            part = slice(first, first + here)
            forward_kernel[(min(here * tiles, units),)](
                ready.flags, query[part], kv, ready.ids, ready.limit, sinks, out[part], lse[part],
                scale * LOG2E, here * tiles, K=ready.ids.shape[1], BK=BLOCK, HT=tiles,
                ROPE=width > VALUE,
                WORDS=ready.flags.shape[1], HAS_SINK=sink is not None, num_warps=4, maxnreg=128,
            )  # fmt: skip
    return out[:, :heads].contiguous(), lse[:, :heads].contiguous()


def _rows(x: Tensor, columns: int) -> GluonDescriptor:
    """TMA over 64 rows x `columns` of x, its leading dimensions flattened."""
    layout = SWIZZLE_64 if columns == 32 else SWIZZLE_128
    return GluonDescriptor.from_tensor(x.view(-1, x.shape[-1]), [64, columns], layout.value)


@dataclass(frozen=True)
class Call:
    """Tensors of a backward with whole tiles of heads, their TMA descriptors, which cost the host
    time, and its buffers.
    """

    query: Tensor
    kv: Tensor
    grad_out: Tensor
    lse: Tensor
    delta: Tensor
    buffers: Buffers
    shape: Shape
    scale: float
    to_dquery: tuple[GluonDescriptor, ...]
    to_dense: tuple[GluonDescriptor, ...]
    to_union: tuple[TensorDescriptor, ...]

    @classmethod
    def of(
        cls, query: Tensor, kv: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor,
        dquery: Tensor, chunk: int,
        shape: Shape, scale: float,
    ) -> "Call":  # fmt: skip
        """Allocates the buffers of a chunk."""
        buffers = Buffers.of(query, chunk, shape)
        rope = shape.rope > 0
        narrow = 64 if rope else 128
        prob, dscore, part = (buffers.prob, buffers.dscore, buffers.part)
        columns = shape.columns()

        def tile(x: Tensor, width: int) -> TensorDescriptor:
            return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [HEADS, width])

        return cls(
            query, kv, grad_out, lse, delta, buffers, shape, scale,
            (_rows(query, 128), _rows(query, narrow), _rows(grad_out, 128), _rows(dquery, 128),
             _rows(dquery, narrow), _rows(prob, 64), _rows(dscore, 64)),
            (_rows(query, 256), _rows(query, 32), _rows(grad_out, 256), _rows(prob, 64),
             _rows(dscore, 64),
             _rows(part, 256), _rows(part, 32)),
            (tile(query, columns["BN"]), tile(query, columns["BR"]), tile(grad_out, columns["BN"])),
        )  # fmt: skip


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
    plan: Plan | None = None,
) -> tuple[Float[Tensor, "rows heads qk"], Float32[Tensor, "pack qk"], Float32[Tensor, "heads"]]:
    """Gradients of query (its dtype), kv (fp32) and sink (fp32, zeros without one); same bits on
    every run.

    plan: of all rows with whole blocks of slots, where the caller has it (its chunk then decides
    the memory).
    """
    rows, heads, _ = query.shape
    tiles = -(-heads // HEADS)
    kv, ids, counts = kv.contiguous(), _blocks_of(ids), counts.contiguous()
    query, grad_out, out = (_tiled(x, tiles) for x in (query, grad_out, out))
    lse = pad(lse, (0, tiles * HEADS - heads)).contiguous()
    dquery = torch.empty_like(query)
    dkv = torch.empty(kv.shape, dtype=torch.float32, device=kv.device)
    dsink = torch.zeros(heads, dtype=torch.float32, device=query.device)
    if rows == 0:
        return dquery[:, :heads].contiguous(), dkv.zero_(), dsink
    shape = shape_of(query, ids.shape[1], value_dim)
    with on_device(query):
        delta = row_products(grad_out, out, shape)
        if plan is None:
            plans = plans_of(ids, counts, sizes_of(query, kv, shape), workspace_bytes)
        else:
            plans = iter([plan])
        call = None
        for own in plans:
            call = call or Call.of(query, kv, grad_out, lse, delta, dquery, own.chunk, shape, scale)
            ready = prepare(ids, counts, kv.shape[0], own.first, own.rows)
            for chunk in own.chunks():
                launch_dquery(call, ready, chunk)
                launch_union(grad_out, query, call.buffers, chunk, shape, call.to_union)
                if tiles == 1:
                    launch_dense(call, ready, chunk)
                launch_direct(grad_out, query, call.buffers, chunk, shape, skip_dense=tiles == 1)
                launch_segments(call.buffers, dkv, chunk, shape)
        if sink is not None:
            dsink = sink_gradient(sink, lse[:, :heads], delta[:, :heads])
    return dquery[:, :heads].contiguous(), dkv, dsink


def _blocks_of(ids: Tensor) -> Tensor:
    """ids with whole blocks of slots."""
    missing = -ids.shape[1] % BLOCK
    return pad(ids, (0, missing), value=-1) if missing else ids.contiguous()


def launch_dquery(call: Call, ready: Prepared, chunk: Chunk) -> None:
    """Query gradient of a chunk, and its P and dS. ready: of the chunk's plan."""
    tiles, window = call.query.shape[1] // HEADS, chunk.window
    dquery_kernel[(chunk.rows * tiles,)](
        *call.to_dquery, call.kv, ready.ids[window], ready.limit[window], call.lse, call.delta,
        chunk.first,
        call.scale, call.scale * LOG2E, K=ready.ids.shape[1], HT=tiles, ROPE=call.shape.rope > 0,
        R1=232, R2=32,
        num_warps=4,
    )  # fmt: skip


def launch_dense(call: Call, ready: Prepared, chunk: Chunk) -> None:
    """Partial rows of the groups that share nothing, for 64 heads."""
    window = chunk.window
    dense_kernel[(chunk.rows * 2,)](
        *call.to_dense, ready.limit[window], chunk.plan.mode[chunk.groups], chunk.first,
        K=ready.ids.shape[1], ROPE=call.shape.rope > 0, GROUP=GROUP, R1=224, R2=40, num_warps=4,
    )  # fmt: skip
