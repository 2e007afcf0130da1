"""Backend `triton` of sparse attention: tile sizes and launches of the plain Triton kernels.

Runs on any NVIDIA GPU from sm_80 on, and on a CPU inside Triton's interpreter (tests). lse is in natural logarithm, +inf
where a row has no key. Ids of one row must differ (a top-k's do). Deterministic. Left out: autograd and checks (op.py).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton

from fullspan.ops.sparse_attention.kernels_backward import (
    delta_kernel,
    direct_kernel,
    dquery_kernel,
    segment_kernel,
    union_kernel,
)
from fullspan.ops.sparse_attention.kernels_forward import forward_kernel
from fullspan.ops.sparse_attention.plan import BLOCK, GROUP, ChunkPlan, build_plan, chunk_rows, partial_rows
from fullspan.shapes import Float, Float32, Int32, Tensor

LOG2E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of one device class: heads and keys of a tile, column tile of a partial row, stages and warps of each kernel."""

    heads: int
    keys: int
    columns: int
    forward: tuple[int, int]
    dquery: tuple[int, int]
    partial: tuple[int, int]


# by shared memory a block can have: 227 KiB (sm_90, sm_100), 163 KiB (sm_80), 99 KiB (sm_86, sm_89, sm_120)
LARGE = Tiles(heads=64, keys=64, columns=256, forward=(2, 8), dquery=(1, 8), partial=(3, 8))
MIDDLE = Tiles(heads=32, keys=32, columns=128, forward=(2, 8), dquery=(1, 8), partial=(2, 8))
SMALL = Tiles(heads=16, keys=32, columns=128, forward=(1, 4), dquery=(1, 4), partial=(2, 4))
FLOAT32 = Tiles(heads=16, keys=16, columns=64, forward=(1, 4), dquery=(1, 4), partial=(1, 4))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the kernels need to know of a call's widths, as compile-time numbers."""

    heads: int
    topk: int
    value: int
    rope: int
    tiles: Tiles
    precision: str

    @property
    def head_tile(self) -> int:
        return min(self.tiles.heads, max(16, triton.next_power_of_2(self.heads)))

    @property
    def padded_heads(self) -> int:
        return triton.cdiv(self.heads, self.head_tile) * self.head_tile

    @property
    def value_padded(self) -> int:
        return max(16, triton.next_power_of_2(self.value))

    @property
    def rope_padded(self) -> int:
        return max(16, triton.next_power_of_2(self.rope)) if self.rope else 0

    def widths(self) -> dict[str, int]:
        return {"DV": self.value, "DR": self.rope, "DVP": self.value_padded, "DRP": self.rope_padded}

    def columns(self) -> dict[str, int]:
        bn = min(self.tiles.columns, self.value_padded)
        tiles = self.value_padded // bn
        return {"BN": bn, "TILES": tiles, "BR": max(16, self.rope_padded // tiles)}


def tiles_for(device: torch.device, dtype: torch.dtype) -> Tiles:
    """Sizes for a device and input type; the interpreter takes the smallest."""
    if dtype == torch.float32 or device.type != "cuda":
        return FLOAT32
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return LARGE if room >= 220 * 1024 else MIDDLE if room >= 160 * 1024 else SMALL


def shape_of(query: Tensor, topk: int, value_dim: int) -> Shape:
    """The Shape of a call."""
    return Shape(
        heads=query.shape[1],
        topk=topk,
        value=value_dim,
        rope=query.shape[2] - value_dim,
        tiles=tiles_for(query.device, query.dtype),
        precision="ieee" if query.dtype == torch.float32 else "tf32",
    )


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Triton launches on the current device; make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


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
    """out [rows, heads, value_dim] and natural-log lse [rows, heads] of every row over its chosen keys. Needs no workspace."""
    query, kv, ids, counts = (x.contiguous() for x in (query, kv, ids, counts))
    rows, shape = query.shape[0], shape_of(query, ids.shape[1], value_dim)
    out = query.new_empty(rows, shape.heads, value_dim)
    lse = torch.empty(rows, shape.heads, dtype=torch.float32, device=query.device)
    stages, warps = shape.tiles.forward
    if rows:
        with on_device(query):
            forward_kernel[(rows, shape.padded_heads // shape.head_tile)](
                query, kv, ids, counts, lse if sink is None else sink.contiguous(), out, lse,
                kv.shape[0], scale * LOG2E, HEADS=shape.heads, TOPK=shape.topk, **shape.widths(),
                HB=shape.head_tile, BK=shape.tiles.keys, HAS_SINK=sink is not None, STAGES=stages,
                PRECISION=shape.precision, num_warps=warps, num_stages=stages,
            )  # fmt: skip
    return out, lse


def row_products(grad_out: Tensor, out: Tensor, shape: Shape) -> Float32[Tensor, "rows heads"]:
    """sum over the value channels of grad_out * out."""
    rows = out.shape[0]
    delta = torch.empty(rows, shape.heads, dtype=torch.float32, device=out.device)
    hb = shape.head_tile
    delta_kernel[(rows, shape.padded_heads // hb)](
        out, grad_out, delta, HEADS=shape.heads, DV=shape.value, HB=hb, DVP=shape.value_padded, num_warps=8
    )
    return delta


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Float32[Tensor, "heads"]:
    """Gradient of the sink: minus its own probability times delta, summed over rows in a fixed order."""
    return -(torch.exp(sink.float()[None, :] - lse) * delta).sum(0)


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
    grad_out, query, kv, out = (x.contiguous() for x in (grad_out, query, kv, out))
    ids, counts, lse = ids.contiguous(), counts.contiguous(), lse.contiguous()
    rows, pack, shape = query.shape[0], kv.shape[0], shape_of(query, ids.shape[1], value_dim)
    dquery = torch.empty_like(query)
    dkv = torch.empty(kv.shape, dtype=torch.float32, device=kv.device)
    dsink = torch.zeros(shape.heads, dtype=torch.float32, device=query.device)
    if rows == 0 or shape.topk == 0:
        return dquery.zero_(), dkv.zero_(), dsink
    with on_device(query):
        delta = row_products(grad_out, out, shape)
        chunk = chunk_rows(
            rows, shape.topk, pack, query.shape[2], shape.padded_heads, query.element_size(), workspace_bytes,
            compute_units(query.device),
        )  # fmt: skip
        prob = query.new_empty(chunk * shape.topk, shape.padded_heads)
        dscore = torch.empty_like(prob)
        part = query.new_empty(partial_rows(chunk, shape.topk), query.shape[2])
        for first in range(0, rows, chunk):
            here = min(chunk, rows - first)
            plan = build_plan(ids, counts, pack=pack, first=first, rows=here, share=True)
            launch_dquery(grad_out, query, kv, ids, counts, lse, delta, dquery, prob, dscore, plan, scale, shape)
            launch_partials(grad_out, query, prob, dscore, part, plan, shape, skip_dense=False)
            launch_segments(part, dkv, plan, shape, add=first > 0)
        if sink is not None:
            dsink = sink_gradient(sink, lse, delta)
    return dquery, dkv, dsink


def compute_units(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launch_dquery(
    grad_out: Tensor, query: Tensor, kv: Tensor, ids: Tensor, counts: Tensor, lse: Tensor, delta: Tensor,
    dquery: Tensor, prob: Tensor, dscore: Tensor, plan: ChunkPlan, scale: float, shape: Shape,
) -> None:  # fmt: skip
    """Query gradient of a chunk, and its P and dS."""
    stages, warps = shape.tiles.dquery
    dquery_kernel[(plan.rows, shape.padded_heads // shape.head_tile)](
        query, kv, ids, counts, grad_out, lse, delta, dquery, prob, dscore, plan.first, kv.shape[0], scale,
        HEADS=shape.heads, TOPK=shape.topk, HP=shape.padded_heads, HB=shape.head_tile, **shape.widths(),
        BK=shape.tiles.keys, STAGES=stages, PRECISION=shape.precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def launch_partials(
    grad_out: Tensor, query: Tensor, prob: Tensor, dscore: Tensor, part: Tensor, plan: ChunkPlan, shape: Shape,
    *, skip_dense: bool,
) -> None:  # fmt: skip
    """Partial rows of dKV of a chunk. skip_dense: leave the groups that share nothing to another kernel."""
    stages, warps = shape.tiles.partial
    fixed = {"HEADS": shape.heads, "DV": shape.value, "DR": shape.rope, "HP": shape.padded_heads, "HB": shape.head_tile}
    fixed |= {"GROUP": GROUP, "PRECISION": shape.precision}
    columns = shape.columns()
    groups, blocks = plan.slots.shape[:2]
    union_kernel[(groups * blocks * columns["TILES"],)](
        query, grad_out, prob, dscore, plan.slots, plan.active, plan.active_count, part, plan.first,
        plan.rows * shape.topk, part.shape[0], **fixed, **columns, BLOCKS=blocks, BM=BLOCK, STAGES=stages,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    narrow = min(128, columns["BN"])
    tiles = shape.value_padded // narrow
    direct_kernel[(plan.rows * tiles,)](
        query, grad_out, prob, dscore, plan.direct, plan.direct_count, plan.mode, part, plan.first, **fixed,
        TOPK=shape.topk, BM=min(64, 2 * shape.tiles.keys), BN=narrow, TILES=tiles,
        BR=max(16, shape.rope_padded // tiles), SKIP_DENSE=skip_dense, STAGES=stages, num_warps=4,
        num_stages=stages,
    )  # fmt: skip


def launch_segments(part: Tensor, dkv: Tensor, plan: ChunkPlan, shape: Shape, *, add: bool) -> None:
    """Sum the partial rows of every key into dkv, or onto it."""
    segment_kernel[(dkv.shape[0],)](
        part, plan.order, plan.start, dkv, **shape.widths(), R=8, ADD=add, num_warps=2
    )
