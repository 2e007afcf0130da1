"""Index scores and their exact top-k in plain PyTorch, streamed over blocks of rows and keys.

A score and its key id are packed into one int64 whose order is "higher score first, then lower id". Packed values are all
different, so any exact top-k of them gives the same set: ties need no care, and neither the block size nor the order of the
blocks can be seen in the result.
"""

import torch
from torch import Tensor

EMPTY = torch.iinfo(torch.int64).min
LOW_BITS = (1 << 32) - 1
TILE_KEYS = 512
TILE_SCORES = 1 << 18
BYTES_PER_CANDIDATE = 40


def index_topk(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    key_start: Tensor,
    key_end: Tensor,
    topk: int,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor]:
    """ids int32 [rows, topk] ascending then -1, counts int32 [rows]."""
    rows = query.shape[0]
    ids = torch.full((rows, topk), -1, dtype=torch.int32, device=query.device)
    block_keys = TILE_KEYS * max(1, 4 * topk // TILE_KEYS)
    block_rows = max(1, workspace_bytes // (BYTES_PER_CANDIDATE * (topk + block_keys)))
    for first in range(0, rows, block_rows):
        part = slice(first, first + block_rows)
        start, end = key_start[part], key_end[part]
        live = end > start
        if not bool(live.any()):
            continue
        low, high = int(start[live].min()), int(end[live].max())
        best = torch.full((start.numel(), topk), EMPTY, dtype=torch.int64, device=query.device)
        for key_first in range(low - low % TILE_KEYS, high, block_keys):
            keys = key[key_first : min(key_first + block_keys, high)]
            ranked = pack(scores(query[part], keys, weights[part]), key_first, start, end)
            best = torch.cat([best, ranked], 1).topk(topk, dim=1, sorted=False).values
        ids[part] = unpack(best)
    return ids, (ids >= 0).sum(1, dtype=torch.int32)


def scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """sum_h weights[t, h] * relu(query[t, h] . key[s]) in fp32, [rows, keys]."""
    rows, heads, _ = query.shape
    out = torch.empty((rows, key.shape[0]), dtype=torch.float32, device=query.device)
    tile_rows = max(1, TILE_SCORES // (TILE_KEYS * heads))
    for t in range(0, rows, tile_rows):
        tile_query = query[t : t + tile_rows].flatten(0, 1).float()
        tile_weights = weights[t : t + tile_rows, None]
        for s in range(0, key.shape[0], TILE_KEYS):
            dots = tile_query @ key[s : s + TILE_KEYS].float().T
            dots = dots.relu_().view(-1, heads, dots.shape[1])
            out[t : t + tile_rows, s : s + TILE_KEYS] = torch.bmm(tile_weights, dots).squeeze(1)
    return out


def pack(score: Tensor, key_first: int, start: Tensor, end: Tensor) -> Tensor:
    """One int64 for each score and its key id; EMPTY outside the row's key range [start, end)."""
    bits = score.add_(0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(key_first, key_first + score.shape[1], device=score.device)
    packed = (ordered.long() << 32) + (LOW_BITS - ids)
    return packed.masked_fill_((ids < start[:, None]) | (ids >= end[:, None]), EMPTY)


def unpack(packed: Tensor) -> Tensor:
    """Key ids of packed candidates, int32, ascending along dim 1, then -1."""
    ids = LOW_BITS - (packed & LOW_BITS)
    ids = ids.masked_fill_(packed == EMPTY, LOW_BITS).sort(dim=1).values
    return ids.masked_fill_(ids == LOW_BITS, -1).int()
