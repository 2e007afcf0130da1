"""What the kernel backends share: sizes of a call, and the backward pass over kernels that each
backend brings.

Deterministic: nothing is added by a float atomic, and the order of every sum is the plan's. Left
out: autograd and checks (op.py), the forward pass.
"""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from fullspan.ops.sizes import ceil_div, power_of_2
from fullspan.ops.sparse_attention.chunks import BLOCK, GROUP, Sizes
from fullspan.ops.sparse_attention.kernels_backward import (
    delta_kernel,
    direct_kernel,
    segment_kernel,
    union_kernel,
)
from fullspan.ops.sparse_attention.plan import Chunk, Plan, build_plan
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
            "HB": self.head_tile, "TOPK": self.topk, "GROUP": GROUP, "PRECISION": self.precision,
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


def shape_of(device: torch.device, dtype: torch.dtype, sizes: Sequence[int], value: int) -> Shape:
    """The Shape of a call. sizes: heads, qk, topk."""
    heads, qk, topk = sizes
    return Shape(
        heads=heads,
        topk=topk,
        value=value,
        rope=qk - value,
        tiles=tiles_for(device, dtype),
        precision="ieee" if dtype == torch.float32 else "tf32",
    )


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Triton launches on the current device; make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 in the interpreter."""
    cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1


@dataclass(frozen=True, kw_only=True)
class Call:
    """Tensors of a backward pass, contiguous, with heads and slots as its kernels want them.

    lse, delta [rows, heads]: delta sums grad_out * out over the value channels. prob, dscore
    [at least slots of a chunk, padded heads] and part [slots of a chunk, qk]: P, dS and partial
    rows of the chunk at hand. step: rows of P between two groups beyond their slots.
    """

    query: Float[Tensor, "rows heads qk"]
    kv: Float[Tensor, "pack qk"]
    ids: Int32[Tensor, "rows topk"]
    counts: Int32[Tensor, "rows"]
    grad_out: Float[Tensor, "rows heads value"]
    lse: Float32[Tensor, "rows heads"]
    delta: Float32[Tensor, "rows heads"]
    dquery: Float[Tensor, "rows heads qk"]
    prob: Tensor
    dscore: Tensor
    part: Tensor
    step: int
    shape: Shape
    scale: float


class Kernels(ABC):
    """What a backend computes its own way, for one call. heads, slots: it wants multiples of.
    fused: the padded heads with which it needs no P and dS of groups that share nothing. block:
    shared keys of a block.
    """

    heads: int
    slots: int
    fused: int = 0
    block: int = BLOCK

    def __init__(self, call: Call) -> None:
        self.call = call

    @abstractmethod
    def dquery(self, chunk: Chunk) -> None:
        """Query gradient of a chunk, and its P and dS."""

    @abstractmethod
    def partials(self, chunk: Chunk) -> None:
        """Partial rows of a chunk, from its P and dS."""


def sizes_of(
    kernels: type[Kernels], device: torch.device, dtype: torch.dtype, widths: Sequence[int],
    value: int, pack: int, beside: int,
) -> Sizes:  # fmt: skip
    """Sizes of a call, see chunks.Sizes. widths: heads, qk, topk, before they are padded."""
    heads, qk, topk = widths
    heads, topk = (ceil_div(n, m) * m for n, m in ((heads, kernels.heads), (topk, kernels.slots)))
    shape = shape_of(device, dtype, (heads, qk, topk), value)
    return Sizes(
        topk=topk, pack=pack, qk=qk, heads=shape.padded_heads, itemsize=dtype.itemsize,
        units=multiprocessors(device), tiles=shape.padded_heads // shape.head_tile, beside=beside,
        fused=shape.padded_heads == kernels.fused, block=kernels.block,
    )  # fmt: skip


def make_plan(
    kernels: type[Kernels], ids: Tensor, counts: Tensor, sizes: Sizes, chunk: int
) -> Plan:
    """The plan of ids as a backend wants them."""
    with on_device(ids):
        return build_plan(whole(ids, 1, kernels.slots, -1), counts.contiguous(), sizes, chunk)


def backward(
    kernels: type[Kernels],
    grad_out: Float[Tensor, "rows heads value"],
    query: Float[Tensor, "rows heads qk"],
    kv: Float[Tensor, "pack qk"],
    ids: Int32[Tensor, "rows topk"],
    counts: Int32[Tensor, "rows"],
    delta: Float32[Tensor, "rows heads"],
    lse: Float32[Tensor, "rows heads"],
    dkv: Float32[Tensor, "pack qk"],
    plan: Sequence[Tensor],
    chunk: int,
    sink: Float[Tensor, "heads"] | None,
    scale: float,
    value_dim: int,
    workspace_bytes: int,
    add: bool,
) -> tuple[Float[Tensor, "rows heads qk"], Float32[Tensor, "heads"]]:
    """Gradients of query (its dtype) and sink (fp32, zeros without one); that of kv is written to
    dkv, or added to it. Same bits on every run.

    plan: a Plan of all rows in chunks of `chunk`, which decide the memory.
    """
    rows, heads, _ = query.shape
    dsink = torch.zeros(heads, dtype=torch.float32, device=query.device)
    if rows == 0:
        if not add:
            dkv.zero_()
        return torch.empty_like(query), dsink
    tensors = (query, grad_out, delta, lse)
    query, grad_out, delta, lse = (whole(x, 1, kernels.heads) for x in tensors)
    ids, counts = whole(ids, 1, kernels.slots, -1), counts.contiguous()
    shape = shape_of(query.device, query.dtype, (*query.shape[1:], ids.shape[1]), value_dim)
    with on_device(query):
        chunks = Plan(*plan).chunks(chunk)
        call = Call(
            query=query, kv=kv.contiguous(), ids=ids, counts=counts, grad_out=grad_out, lse=lse,
            delta=delta, dquery=torch.empty_like(query), shape=shape, scale=scale,
            **_buffers(query, chunks[0].rows, shape, shape.padded_heads == kernels.fused),
        )  # fmt: skip
        own = kernels(call)
        for part in chunks:
            own.dquery(part)
            own.partials(part)
            _add_up(call, part, dkv, add or part.at > 0)
        if sink is not None:
            dsink = sink_gradient(sink, call.lse[:, :heads], call.delta[:, :heads])
    return call.dquery[:, :heads].contiguous(), dsink


def sink_gradient(
    sink: Float[Tensor, "heads"],
    lse: Float[Tensor, "rows heads"],
    delta: Float[Tensor, "rows heads"],
) -> Float[Tensor, "heads"]:
    """Minus its own probability times delta, summed over rows in a fixed order."""
    return -(torch.exp(sink.to(lse.dtype) - lse) * delta).sum(0)


def _buffers(query: Tensor, rows: int, shape: Shape, fused: bool) -> dict[str, Any]:
    """prob, dscore, part and step of a Call whose chunks have so many rows at most.

    fused: P and dS are the last slots of their group's partial rows. A group that shares keys never
    needs these: of its pairs at most a quarter is direct (plan.DENSE_FUSED), its shared keys are
    fewer than 3 / 16 of its pairs, and P and dS take 2 * 64 of 512 or more columns.
    """
    heads, group = shape.padded_heads, GROUP * shape.topk
    slots = ceil_div(rows, GROUP) * group
    part = query.new_empty(slots, query.shape[2])
    if not fused:
        prob, dscore = (query.new_empty(slots, heads) for _ in range(2))
        return {"prob": prob, "dscore": dscore, "part": part, "step": 0}
    each = query.shape[2] // heads
    narrow = part.view(-1, heads)
    prob, dscore = narrow[(each - 2) * group :], narrow[(each - 1) * group :]
    return {"prob": prob, "dscore": dscore, "part": part, "step": (each - 1) * group}


def whole(x: Tensor, dim: int, multiple: int, value: float = 0.0) -> Tensor:
    """x with whole multiples along a dimension, contiguous; x itself where it is so already, which
    torch's pad would copy."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x.contiguous()
    return pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing), value=value).contiguous()


def row_products(grad_out: Tensor, out: Tensor) -> Float32[Tensor, "rows heads"]:
    """See op.row_products."""
    rows, heads, width = out.shape
    delta = torch.empty(rows, heads, dtype=torch.float32, device=out.device)
    tile = min(16, power_of_2(heads))
    if rows:
        with on_device(out):
            delta_kernel[(rows, ceil_div(heads, tile))](
                out, grad_out, delta, HEADS=heads, DV=width, HB=tile, DVP=power_of_2(width),
                num_warps=4,
            )  # fmt: skip
    return delta


def launch_union(call: Call, chunk: Chunk) -> None:
    """Partial rows of the shared keys."""
    shape, plan, groups = call.shape, chunk.plan, chunk.groups
    stages, warps = shape.tiles.partial
    columns, (_, blocks, _, keys) = shape.columns(), plan.slots.shape
    union_kernel[((groups.stop - groups.start) * blocks * columns["TILES"],)](
        call.query, call.grad_out, call.prob, call.dscore, plan.slots[groups],
        plan.shared[groups], plan.active[groups], plan.active_count[groups], call.part, chunk.at,
        call.step, **shape.fixed(), **columns, BLOCKS=blocks, BM=keys, STAGES=stages,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def launch_direct(call: Call, chunk: Chunk, *, skip_dense: bool) -> None:
    """Partial rows of the direct pairs. skip_dense: leave the groups that share nothing to another
    kernel.
    """
    shape, plan, window = call.shape, chunk.plan, chunk.window
    stages = shape.tiles.partial[0]
    narrow = min(128, shape.columns()["BN"])
    tiles = shape.value_padded // narrow
    direct_kernel[(chunk.rows * tiles,)](
        call.query, call.grad_out, call.prob, call.dscore, plan.direct[window],
        plan.direct_count[window], plan.direct_first[window], plan.mode[chunk.groups], call.part,
        chunk.at, call.step, **shape.fixed(), BM=min(64, 2 * shape.tiles.keys), BN=narrow,
        BR=max(16, shape.rope_padded // tiles), TILES=tiles, SKIP_DENSE=skip_dense, STAGES=stages,
        num_warps=4, num_stages=stages,
    )  # fmt: skip


def _add_up(call: Call, chunk: Chunk, dkv: Tensor, add: bool) -> None:
    """Sum the partial rows of every key into dkv, or onto it."""
    pack = len(dkv)
    keys, rows = (2, 4) if add else (1, 8)  # to add, most keys have few rows or none
    segment_kernel[(ceil_div(pack, keys),)](
        call.part, chunk.plan.order, chunk.start, dkv, pack, **call.shape.widths(), KEYS=keys,
        R=rows, ADD=add, num_warps=2,
    )  # fmt: skip
