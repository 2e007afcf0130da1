"""Backend `triton` of sparse attention: launches of the plain Triton kernels.

Runs on any NVIDIA GPU from sm_80 on, and on a CPU inside Triton's interpreter (tests). lse is in
natural logarithm, +inf where a row has no key. Ids of one row must differ (a top-k's do).
Deterministic. Left out: autograd and checks (op.py), what `hopper` shares (launch.py).
"""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false

import functools

import torch

from fullspan.ops.sparse_attention import launch
from fullspan.ops.sparse_attention.kernels_backward import dquery_kernel
from fullspan.ops.sparse_attention.kernels_forward import forward_kernel
from fullspan.ops.sparse_attention.launch import (
    LOG2E,
    Kernels,
    launch_direct,
    launch_union,
    on_device,
    shape_of,
)
from fullspan.ops.sparse_attention.plan import Chunk
from fullspan.shapes import Float, Float32, Int32, Tensor


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
    rows, heads, qk = query.shape
    shape = shape_of(query.device, query.dtype, (heads, qk, ids.shape[1]), value_dim)
    out = query.new_empty(rows, heads, value_dim)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=query.device)
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


class PlainKernels(Kernels):
    """The passes of a backward, see launch.Kernels."""

    heads = 1
    slots = 1

    def dquery(self, chunk: Chunk) -> None:
        """See launch.Kernels."""
        call, shape = self.call, self.call.shape
        stages, warps = shape.tiles.dquery
        dquery_kernel[(chunk.rows, shape.padded_heads // shape.head_tile)](
            call.query, call.kv, call.ids, call.counts, call.grad_out, call.lse, call.delta,
            call.dquery, call.prob, call.dscore, chunk.at, call.kv.shape[0], call.scale,
            HEADS=shape.heads, TOPK=shape.topk, HP=shape.padded_heads, HB=shape.head_tile,
            **shape.widths(), BK=shape.tiles.keys, STAGES=stages, PRECISION=shape.precision,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def partials(self, chunk: Chunk) -> None:
        """See launch.Kernels."""
        launch_union(self.call, chunk)
        launch_direct(self.call, chunk, skip_dense=False)


backward = functools.partial(launch.backward, PlainKernels)
sizes = functools.partial(launch.sizes_of, PlainKernels)
plan = functools.partial(launch.make_plan, PlainKernels)
