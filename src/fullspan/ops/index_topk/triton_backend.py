"""Backend `triton` of index_topk: launches of the plain Triton scores below the shared streaming
selection.

Runs on any NVIDIA GPU from sm_80 on, and on a CPU inside Triton's interpreter (tests).
Bit-repeatable. Left out: checks (op.py).
"""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false

from contextlib import nullcontext

import torch

from fullspan.ops.index_topk.kernels_scores import score_kernel
from fullspan.ops.index_topk.streaming import BQ, FIRST_SPAN, SEG, Ranges, Span, stream_topk
from fullspan.ops.sizes import ceil_div, power_of_2
from fullspan.shapes import Float, Float32, Int32, Int64, Tensor


def index_topk(
    query: Float[Tensor, "rows index_heads index_dim"],
    key: Float[Tensor, "pack index_dim"],
    weights: Float32[Tensor, "rows index_heads"],
    key_start: Int64[Tensor, "rows"],
    key_end: Int64[Tensor, "rows"],
    topk: int,
    workspace_bytes: int,
    first: int = FIRST_SPAN,
) -> tuple[Int32[Tensor, "rows topk"], Int32[Tensor, "rows"]]:
    """ids (ascending, -1 tail) and counts. first: keys whose scores are stored whole (a tuning
    knob).
    """
    query, key, weights = query.contiguous(), key.contiguous(), weights.contiguous()
    rows, heads, dim = query.shape
    wide = query.dtype == torch.float32
    stages = 1 if wide else 3

    def score(span: Span, ranges: Ranges, tau: Tensor, out: Tensor, numbers: Tensor) -> None:
        tiles = span.keys // SEG
        score_kernel[(ceil_div(span.rows, BQ) * tiles,)](
            query, key, weights, ranges.start, ranges.end, ranges.base, ranges.block_end, tau, out,
            numbers,
            span.row0, rows, key.shape[0], span.lo, span.keys, tiles, out.stride(0),
                numbers.stride(0),
            HEADS=heads, DIM=dim, DP=max(16, power_of_2(dim)), BQ=BQ, SEG=SEG,
            GATE=span.gate,
            ASM=query.is_cuda, PRECISION="ieee" if wide else "tf32", STAGES=stages, num_warps=4,
            num_stages=stages,
        )  # fmt: skip

    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        return stream_topk(
            key_start, key_end, pack=key.shape[0], topk=topk, workspace_bytes=workspace_bytes,
            unit=SEG,
            score=score, first=first,
        )  # fmt: skip
