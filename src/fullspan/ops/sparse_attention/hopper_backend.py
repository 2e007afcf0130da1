"""Backend `hopper` of sparse attention: launches of the Gluon kernels, with the plain Triton ones
where they serve as well.

bf16, 512 value columns, with or without 64 rope columns; heads in tiles of 64 (others are padded,
which copies query and grad_out); any number of slots. lse in natural logarithm, +inf where a row
has no key. Deterministic. Ids of one row must differ (a top-k's do). Left out: autograd and checks
(op.py), what `triton` shares (launch.py).
"""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportMissingImports=false

import functools
from dataclasses import dataclass
from math import gcd

import torch
from torch.nn.functional import pad
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fullspan.ops.sizes import power_of_2
from fullspan.ops.sparse_attention import launch
from fullspan.ops.sparse_attention.chunks import GROUP, HOPPER_BLOCK
from fullspan.ops.sparse_attention.kernels_hopper_backward import (
    SWIZZLE_128,
    dquery_kernel,
)
from fullspan.ops.sparse_attention.kernels_hopper_forward import forward_kernel, prepare_kernel
from fullspan.ops.sparse_attention.kernels_hopper_shared import TILES, shared_kernel
from fullspan.ops.sparse_attention.launch import (
    LOG2E,
    Call,
    Kernels,
    launch_direct,
    multiprocessors,
    on_device,
)
from fullspan.ops.sparse_attention.plan import Chunk
from fullspan.shapes import Float, Float32, Int32, Tensor

HEADS = 64  # of a tile
BLOCK = 64  # keys of a block
VALUE = 512
FORWARD_ROWS = 16384  # whose cleaned ids exist at once, at most


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Cleaned ids of some rows [rows, slots], their counts, and one bit a block of slots that holds
    an empty one.
    """

    ids: Int32[Tensor, "rows slots"]
    limit: Int32[Tensor, "rows"]
    flags: Int32[Tensor, "rows words"]


def prepare(ids: Tensor, counts: Tensor, pack: int) -> Prepared:
    """Prepared ids."""
    rows, topk = ids.shape
    slots = -(-topk // BLOCK) * BLOCK
    words = -(-slots // (32 * BLOCK))
    out = Prepared(
        ids=ids.new_empty(rows, slots), limit=ids.new_empty(rows), flags=ids.new_empty(rows, words)
    )
    prepare_kernel[(rows,)](
        ids, counts, out.ids, out.limit, out.flags, 0, pack, TOPK=topk, KP=power_of_2(slots),
        KC=slots, WORDS=words, num_warps=4,
    )  # fmt: skip
    return out


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
    query = launch.whole(query, 1, HEADS)
    out = query.new_empty(rows, tiles * HEADS, VALUE)
    lse = torch.empty(rows, tiles * HEADS, dtype=torch.float32, device=query.device)
    sinks = lse if sink is None else pad(sink.float(), (0, tiles * HEADS - heads))
    with on_device(query):
        units = multiprocessors(query.device)
        step = min(FORWARD_ROWS, max(units, workspace_bytes // (4 * ids.shape[1] + 512)))
        for first in range(0, rows, step):
            here = min(step, rows - first)
            part = slice(first, first + here)
            ready = prepare(ids[part], counts[part], kv.shape[0])
            forward_kernel[(min(here * tiles, units),)](
                ready.flags, query[part], kv, ready.ids, ready.limit, sinks, out[part], lse[part],
                scale * LOG2E, here * tiles, K=ready.ids.shape[1], BK=BLOCK, HT=tiles,
                ROPE=width > VALUE, WORDS=ready.flags.shape[1], HAS_SINK=sink is not None,
                num_warps=4, maxnreg=128,
            )  # fmt: skip
    return out[:, :heads].contiguous(), lse[:, :heads].contiguous()


def _rows(x: Tensor, columns: int) -> TensorDescriptor:
    """TMA over 64 rows x `columns` of x, its leading dimensions flattened."""
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [64, columns], SWIZZLE_128.value)


class HopperKernels(Kernels):
    """The passes of a backward, see launch.Kernels. TMA descriptors cost the host time: they are
    made once a call.
    """

    heads = HEADS
    slots = BLOCK
    fused = HEADS
    block = HOPPER_BLOCK

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.ready = prepare(call.ids, call.counts, call.kv.shape[0])
        self.tiles = call.query.shape[1] // HEADS
        query, grad, dquery = call.query, call.grad_out, call.dquery
        narrow = 64 if call.shape.rope else 128
        self.to_dquery = (
            _rows(query, 128), _rows(query, narrow), _rows(grad, 128), _rows(dquery, 128),
            _rows(dquery, narrow), _rows(call.prob, 64), _rows(call.dscore, 64),
        )  # fmt: skip
        self.to_shared = tuple(_rows(x, wide) for x in (query, grad) for wide in (128, 64))

    def dquery(self, chunk: Chunk) -> None:
        """See launch.Kernels."""
        call, ready, window = self.call, self.ready, chunk.window
        for fuse in (False, True)[: 2 if self.tiles == 1 else 1]:
            dquery_kernel[(chunk.rows * self.tiles,)](
                *self.to_dquery, call.kv, ready.ids[window], ready.limit[window], call.lse,
                call.delta, chunk.plan.mode[chunk.groups], call.part, chunk.at, call.step,
                call.scale, call.scale * LOG2E, K=ready.ids.shape[1], HT=self.tiles,
                ROPE=call.shape.rope > 0, GROUP=GROUP, FUSE=fuse, R1=232, R2=32, num_warps=4,
            )  # fmt: skip

    def partials(self, chunk: Chunk) -> None:
        """See launch.Kernels."""
        call = self.call
        plan, groups = chunk.plan, chunk.groups
        blocks = plan.slots.shape[1]
        items = (groups.stop - groups.start) * blocks * TILES.value
        # No common divisor: each program meets as many of a group's last blocks, which are empty.
        units = multiprocessors(call.query.device)
        while gcd(units, blocks * TILES.value) > 1:
            units -= 1
        shared_kernel[(min(items, units),)](
            *self.to_shared, call.prob, call.dscore, plan.slots[groups], plan.shared[groups],
            plan.active[groups], plan.active_count[groups], call.part, chunk.at, call.step, items,
            D=call.query.shape[2], HT=self.tiles, TOPK=call.shape.topk, GROUP=GROUP,
            BLOCKS=blocks, R1=224, R2=56, num_warps=4,
        )  # fmt: skip
        launch_direct(call, chunk, skip_dense=self.tiles == 1)


backward = functools.partial(launch.backward, HopperKernels)
sizes = functools.partial(launch.sizes_of, HopperKernels)
plan = functools.partial(launch.make_plan, HopperKernels)
