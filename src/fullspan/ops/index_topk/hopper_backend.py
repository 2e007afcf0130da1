"""Backend `hopper` of index_topk: launches of the Gluon scores below the shared streaming
selection.

Index heads of width 128, bf16, or fp8 (e4m3) with a scale per key; any number of heads.
Bit-repeatable. Left out: checks (op.py).
"""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportMissingImports=false

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fullspan.ops.index_topk.kernels_hopper import score_kernel
from fullspan.ops.index_topk.streaming import BQ, FIRST_SPAN, SEG, Ranges, Span, stream_topk
from fullspan.shapes import Float, Float32, Int32, Int64, Tensor

WIDTH = 128  # of an index head
# warpgroups with SEG keys each, heads of a stage, stages of queries, key buffers of each warpgroup,
# registers of its threads, depth of a wgmma
BF16 = {"NC": 3, "PER": 1, "ST": 6, "KBUF": 1, "REGS": 160, "KI": 16}
FP8 = {"NC": 2, "PER": 2, "ST": 6, "KBUF": 2, "REGS": 232, "KI": 32}


def _tiles(x: Tensor, rows: int) -> TensorDescriptor:
    """TMA over `rows` x WIDTH of x."""
    kind = gl.float8e4nv if x.element_size() == 1 else gl.bfloat16
    layout: Any = gl.NVMMASharedLayout.get_default_for([rows, WIDTH], kind)
    return TensorDescriptor.from_tensor(x, [rows, WIDTH], layout)


def index_topk(
    query: Float[Tensor, "rows index_heads index_dim"],
    key: Float[Tensor, "pack index_dim"],
    weights: Float32[Tensor, "rows index_heads"],
    key_start: Int64[Tensor, "rows"],
    key_end: Int64[Tensor, "rows"],
    topk: int,
    workspace_bytes: int,
    key_scale: Float32[Tensor, "pack"] | None = None,
    first: int = FIRST_SPAN,
) -> tuple[Int32[Tensor, "rows topk"], Int32[Tensor, "rows"]]:
    """ids (ascending, -1 tail) and counts. key_scale: with fp8 query and key; the scale of the
    query belongs in weights.
    """
    query, key, weights = query.contiguous(), key.contiguous(), weights.contiguous()
    rows, heads, dim = query.shape
    pack, fp8 = key.shape[0], key_scale is not None
    if rows == 0 or pack == 0:
        return query.new_full((rows, topk), -1, dtype=torch.int32), query.new_zeros(
            rows, dtype=torch.int32
        )
    tuned = FP8 if fp8 else BF16
    unit = SEG * tuned["NC"]
    queries = _tiles(query.view(rows, heads * dim), BQ)
    keys = _tiles(key, SEG)
    programs = torch.cuda.get_device_properties(query.device).multi_processor_count
    scales = weights if key_scale is None else key_scale.contiguous()

    def score(span: Span, ranges: Ranges, tau: Tensor, out: Tensor, numbers: Tensor) -> None:
        tiles = span.keys // unit
        total = tiles * -(-span.rows // BQ)
        score_kernel[(min(programs, total),)](
            queries, keys, weights, scales, ranges.start, ranges.end, ranges.base,
            ranges.block_end, tau, out,
            numbers, span.row0, rows, pack, span.lo, span.keys, tiles, total, out.stride(0),
            numbers.stride(0),
            HI=heads, BQ=BQ, FP8=fp8, GATE=span.gate, **tuned, num_warps=4,
        )  # fmt: skip

    with torch.cuda.device(query.device):
        return stream_topk(
            key_start, key_end, pack=pack, topk=topk, workspace_bytes=workspace_bytes,
            unit=unit, score=score, first=first,
        )  # fmt: skip
