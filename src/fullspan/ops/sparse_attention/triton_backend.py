"""Backend `triton` of sparse attention: tile sizes and launches of the plain Triton kernels.

Runs on any NVIDIA GPU from sm_80 on, and on a CPU inside Triton's interpreter (tests). lse is in
natural logarithm, +inf where a row has no key. Ids of one row must differ (a top-k's do).
Deterministic. Left out: autograd and checks (op.py).
"""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fullspan.ops.sizes import ceil_div, power_of_2
from fullspan.ops.sparse_attention.kernels_backward import (
    delta_kernel,
    direct_kernel,
    dquery_kernel,
    segment_kernel,
    union_kernel,
)
from fullspan.ops.sparse_attention.kernels_forward import forward_kernel
from fullspan.ops.sparse_attention.plan import (
    BLOCK,
    GROUP,
    Chunk,
    Plan,
    Sizes,
    build_plan,
    choose_rows,
)
from fullspan.shapes import Float, Float32, Int32, Tensor

LOG2E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of one device class: heads and keys of a tile, column tile of a partial row, stages and
    warps of each kernel.
    """

    heads: int
    keys: int
    columns: int
    forward: tuple[int, int]
    dquery: tuple[int, int]
    partial: tuple[int, int]


# by shared memory that a block can have: 227 KiB (sm_90; sm_100, where a pipeline takes more),
# 163 KiB (sm_80), 99 KiB (sm_86, sm_89, sm_120). Measured on sm_90 alone.
LARGE = Tiles(heads=64, keys=64, columns=256, forward=(2, 8), dquery=(1, 8), partial=(3, 8))
LARGE_SM100 = Tiles(heads=64, keys=64, columns=256, forward=(1, 8), dquery=(1, 8), partial=(3, 8))
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
        return min(self.tiles.heads, max(16, power_of_2(self.heads)))

    @property
    def padded_heads(self) -> int:
        return ceil_div(self.heads, self.head_tile) * self.head_tile

    @property
    def value_padded(self) -> int:
        return max(16, power_of_2(self.value))

    @property
    def rope_padded(self) -> int:
        return max(16, power_of_2(self.rope)) if self.rope else 0

    def widths(self) -> dict[str, int]:
        return {
            "DV": self.value,
            "DR": self.rope,
            "DVP": self.value_padded,
            "DRP": self.rope_padded,
        }

    def fixed(self) -> dict[str, int | str]:
        """What the kernels of partial rows share."""
        return {
            "HEADS": self.heads, "DV": self.value, "DR": self.rope, "HP": self.padded_heads,
            "HB": self.head_tile, "GROUP": GROUP, "PRECISION": self.precision,
        }  # fmt: skip

    def columns(self) -> dict[str, int]:
        bn = min(self.tiles.columns, self.value_padded)
        tiles = self.value_padded // bn
        return {"BN": bn, "TILES": tiles, "BR": max(16, self.rope_padded // tiles)}


def tiles_for(device: torch.device, dtype: torch.dtype) -> Tiles:
    """Sizes for a device and input type; the interpreter takes the smallest."""
    if dtype == torch.float32 or device.type != "cuda":
        return FLOAT32
    properties = torch.cuda.get_device_properties(device)
    return device_tiles(properties.shared_memory_per_block_optin, properties.major)


def device_tiles(shared: int, major: int) -> Tiles:
    """Sizes for a half-precision call where a block can have `shared` bytes of shared memory."""
    if shared >= 220 * 1024:
        return LARGE if major < 10 else LARGE_SM100
    return MIDDLE if shared >= 160 * 1024 else SMALL


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
    """out [rows, heads, value_dim] and natural-log lse [rows, heads] of every row over its chosen
    keys. Needs no workspace.
    """
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
        out,
        grad_out,
        delta,
        HEADS=shape.heads,
        DV=shape.value,
        HB=hb,
        DVP=shape.value_padded,
        num_warps=8,
    )
    return delta


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Float32[Tensor, "heads"]:
    """Gradient of the sink: minus its own probability times delta, summed over rows in a fixed
    order.
    """
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
    plan: Plan | None = None,
) -> tuple[Float[Tensor, "rows heads qk"], Float32[Tensor, "pack qk"], Float32[Tensor, "heads"]]:
    """Gradients of query (its dtype), kv (fp32) and sink (fp32, zeros without one); same bits on
    every run.

    plan: of all rows, where the caller has it already (its chunk then decides the memory).
    """
    grad_out, query, kv, out = (x.contiguous() for x in (grad_out, query, kv, out))
    ids, counts, lse = ids.contiguous(), counts.contiguous(), lse.contiguous()
    rows, shape = query.shape[0], shape_of(query, ids.shape[1], value_dim)
    dquery = torch.empty_like(query)
    dkv = torch.empty(kv.shape, dtype=torch.float32, device=kv.device)
    dsink = torch.zeros(shape.heads, dtype=torch.float32, device=query.device)
    if rows == 0:
        return dquery, dkv.zero_(), dsink
    with on_device(query):
        delta = row_products(grad_out, out, shape)
        if plan is None:
            plans = plans_of(ids, counts, sizes_of(query, kv, shape), workspace_bytes)
        else:
            plans = iter([plan])
        buffers = None
        for own in plans:
            buffers = buffers or Buffers.of(query, own.chunk, shape)
            for chunk in own.chunks():
                launch_dquery(
                    grad_out,
                    query,
                    kv,
                    ids,
                    counts,
                    lse,
                    delta,
                    dquery,
                    buffers,
                    chunk,
                    scale,
                    shape,
                )
                launch_union(grad_out, query, buffers, chunk, shape)
                launch_direct(grad_out, query, buffers, chunk, shape, skip_dense=False)
                launch_segments(buffers, dkv, chunk, shape)
        if sink is not None:
            dsink = sink_gradient(sink, lse, delta)
    return dquery, dkv, dsink


@dataclass(frozen=True)
class Buffers:
    """P and dS [chunk * topk, padded heads] of a chunk, and its partial rows [chunk * topk, qk]."""

    prob: Tensor
    dscore: Tensor
    part: Tensor

    @classmethod
    def of(cls, query: Tensor, chunk: int, shape: Shape) -> "Buffers":
        """Room for a chunk of rows."""
        slots, heads = chunk * shape.topk, shape.padded_heads
        new = query.new_empty
        return cls(new(slots, heads), new(slots, heads), new(slots, query.shape[2]))


def sizes_of(query: Tensor, kv: Tensor, shape: Shape) -> Sizes:
    """Sizes of a call."""
    cuda = query.device.type == "cuda"
    units = torch.cuda.get_device_properties(query.device).multi_processor_count if cuda else 1
    return Sizes(
        topk=shape.topk, pack=kv.shape[0], qk=query.shape[2], heads=shape.padded_heads,
        itemsize=query.element_size(), units=units, tiles=shape.padded_heads // shape.head_tile,
    )  # fmt: skip


def plans_of(ids: Tensor, counts: Tensor, sizes: Sizes, workspace: int) -> Iterator[Plan]:
    """Plans of all rows, one after the other, in the workspace."""
    rows = ids.shape[0]
    span, chunk = choose_rows(sizes, rows, workspace)
    for first in range(0, rows, span):
        here = min(span, rows - first)
        yield build_plan(ids, counts, pack=sizes.pack, first=first, rows=here, chunk=chunk)


def launch_dquery(
    grad_out: Tensor, query: Tensor, kv: Tensor, ids: Tensor, counts: Tensor, lse: Tensor,
    delta: Tensor,
    dquery: Tensor, buffers: Buffers, chunk: Chunk, scale: float, shape: Shape,
) -> None:  # fmt: skip
    """Query gradient of a chunk, and its P and dS."""
    stages, warps = shape.tiles.dquery
    dquery_kernel[(chunk.rows, shape.padded_heads // shape.head_tile)](
        query, kv, ids, counts, grad_out, lse, delta, dquery, buffers.prob, buffers.dscore,
        chunk.first,
        kv.shape[0], scale, HEADS=shape.heads, TOPK=shape.topk, HP=shape.padded_heads,
        HB=shape.head_tile,
        **shape.widths(), BK=shape.tiles.keys, STAGES=stages, PRECISION=shape.precision,
        num_warps=warps,
        num_stages=stages,
    )  # fmt: skip


def launch_union(
    grad_out: Tensor, query: Tensor, buffers: Buffers, chunk: Chunk, shape: Shape,
    descriptors: tuple[Any, ...] | None = None,
) -> None:  # fmt: skip
    """Partial rows of the shared keys. descriptors: TMA over query's values, its rope and grad_out
    instead.
    """
    stages, warps = shape.tiles.partial
    columns, plan, groups = shape.columns(), chunk.plan, chunk.groups
    blocks = plan.slots.shape[1]
    union_kernel[((groups.stop - groups.start) * blocks * columns["TILES"],)](
        *(descriptors or (query, query, grad_out)), buffers.prob, buffers.dscore,
        plan.slots[groups],
        plan.leader[groups], plan.active[groups], plan.active_count[groups], buffers.part,
        chunk.first,
        **shape.fixed(), **columns, BLOCKS=blocks, BM=BLOCK, TMA=descriptors is not None,
        STAGES=stages,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def launch_direct(
    grad_out: Tensor,
    query: Tensor,
    buffers: Buffers,
    chunk: Chunk,
    shape: Shape,
    *,
    skip_dense: bool,
) -> None:
    """Partial rows of the direct pairs. skip_dense: leave the groups that share nothing to another
    kernel.
    """
    stages = shape.tiles.partial[0]
    plan, window = chunk.plan, chunk.window
    narrow = min(128, shape.columns()["BN"])
    tiles = shape.value_padded // narrow
    direct_kernel[(chunk.rows * tiles,)](
        query, grad_out, buffers.prob, buffers.dscore, plan.direct[window],
            plan.direct_count[window],
        plan.mode[chunk.groups], buffers.part, chunk.first, **shape.fixed(), TOPK=shape.topk,
        BM=min(64, 2 * shape.tiles.keys),
        BN=narrow, BR=max(16, shape.rope_padded // tiles), TILES=tiles, SKIP_DENSE=skip_dense,
        STAGES=stages,
        num_warps=4, num_stages=stages,
    )  # fmt: skip


def launch_segments(buffers: Buffers, dkv: Tensor, chunk: Chunk, shape: Shape) -> None:
    """Sum the partial rows of every key into dkv, or, after the call's first chunk, onto it."""
    pack, add = dkv.shape[0], chunk.first > 0
    keys = 8 if add else 1  # after the first chunk most keys have nothing to add
    segment_kernel[(ceil_div(pack, keys),)](
        buffers.part, chunk.plan.order, chunk.start(pack), dkv, pack, **shape.widths(), KEYS=keys,
        R=8, ADD=add,
        num_warps=2,
    )  # fmt: skip
