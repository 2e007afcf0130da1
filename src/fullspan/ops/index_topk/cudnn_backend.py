"""Backend `cudnn` of index_topk: scores and top-k by the cuDNN frontend's DSA kernels.
Optional, by name only, on sm_90.

Scores of a slab of rows against all keys lie in memory, [rows, pack] in fp32, and its top-k takes
twice as much again; the slab is what the workspace allows. Ranges are no causal offset, so all keys
are scored, those before a row's range become -inf, and its end is the top-k's length. The top-k is
asked for its deterministic order: the lowest id of equal scores, ids ascending, then -1. Up to 64
index heads of width 128, bf16 or e4m3; up to 2048 keys. Left out: checks (op.py).
"""

import torch

from fullspan.errors import BackendError, ConfigError
from fullspan.ops.cudnn import load
from fullspan.shapes import Float, Float32, Int32, Int64, Tensor

HEADS = 32  # the kernels have 32 and 64
MOST_HEADS = 64
KEY_BYTES = 13  # of a score: itself, the top-k's scratch, whether its key is before the range


def index_topk(
    query: Float[Tensor, "rows index_heads index_dim"],
    key: Float[Tensor, "pack index_dim"],
    weights: Float32[Tensor, "rows index_heads"],
    key_start: Int64[Tensor, "rows"],
    key_end: Int64[Tensor, "rows"],
    topk: int,
    workspace_bytes: int,
    key_scale: Float32[Tensor, "pack"] | None = None,
) -> tuple[Int32[Tensor, "rows topk"], Int32[Tensor, "rows"]]:
    """ids (ascending, -1 tail) and counts. key_scale: with fp8 query and key; the scale of the
    query belongs in weights. BackendError: more than 64 heads.
    """
    rows, heads, _ = query.shape
    pack = key.shape[0]
    if heads > MOST_HEADS:
        raise BackendError(
            f"ops.index_topk = 'cudnn' has up to {MOST_HEADS} index heads, not {heads}; name "
            "another backend, or auto"
        )
    ids = query.new_full((rows, topk), -1, dtype=torch.int32)
    if rows == 0 or pack == 0:
        return ids, ids.new_zeros(rows)
    dsa = load()
    query, weights, key = whole_heads(query), whole_heads(weights), key.contiguous()
    step = slab_rows(pack, topk, workspace_bytes)
    with torch.cuda.device(query.device):
        numbers = torch.arange(pack, device=query.device)
        ends = key_end.int()
        everything = ends.new_full((1,), pack)  # the first row's causal offset: all keys are seen
        for first in range(0, rows, step):
            part = slice(first, first + step)
            fp8 = {}
            if key_scale is not None:  # weights in fp32 have the query's scale, which is not read
                scales = {"q_scale": weights[None, part], "k_scale": key_scale[None, :, None]}
                fp8 = {"precision": "fp8", **scales}
            (scores,) = dsa.indexer_forward_wrapper(
                query[None, part], key[None, :, None], weights[None, part], ratio=1,
                q_causal_offsets=everything, **fp8,
            )  # fmt: skip
            scores = scores[0].add_(0.0)  # -0.0 becomes 0.0, which the top-k keeps apart
            scores.masked_fill_(numbers < key_start[part, None], -torch.inf)
            chosen, _ = dsa.indexer_top_k_wrapper(
                scores, ends[part], topk, return_val=False, tie_break=1, deterministic=True
            )
            ids[part] = since(chosen, key_start[part])
            del scores, chosen
    return ids, (ids >= 0).sum(1, dtype=torch.int32)


def since(
    ids: Int32[Tensor, "rows topk"], start: Int64[Tensor, "rows"]
) -> Int32[Tensor, "rows topk"]:
    """Ascending ids, then -1, without those before start."""
    topk = ids.shape[1]
    before = ((ids >= 0) & (ids < start[:, None])).sum(1, keepdim=True)
    at = torch.arange(topk, device=ids.device) + before
    return ids.gather(1, at.clamp(max=topk - 1)).masked_fill_(at >= topk, -1)


def whole_heads(x: Tensor) -> Tensor:
    """x [rows, heads, ...] with heads in multiples of HEADS; the others are zeros."""
    rows, heads, *rest = x.shape
    if heads % HEADS == 0:
        return x.contiguous()
    out = x.new_zeros(rows, heads + -heads % HEADS, *rest)
    out[:, :heads] = x
    return out


def slab_rows(pack: int, topk: int, workspace_bytes: int) -> int:
    """Rows whose scores exist at once; the top-k counts in 32 bits."""
    row = KEY_BYTES * pack + 40 * topk
    if row > workspace_bytes:
        raise ConfigError(
            f"ops.workspace_bytes is {workspace_bytes}; cuDNN's index_topk needs at least {row} "
            f"for a row of {pack} keys"
        )
    rows = min(workspace_bytes // row, max(1, (2**31 - 1) // (2 * pack)))
    return rows // 8 * 8 or rows
