"""Index scores and their exact top-k in plain PyTorch, streamed over blocks of rows and keys.

A score and its key id are packed into one int64 whose order is "higher score first, then lower id".
Packed values are all different, so any exact top-k of them gives the same set: ties need no care,
and block sizes cannot be seen in the result.

Every matrix product has one shape, a full tile of rows against a full tile of keys that starts at a
multiple of TILE_KEYS: libraries round small products differently, and the same row must find the
same scores however the pack is dealt to ranks.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fullspan.errors import ConfigError
from fullspan.ops.fp8.reference import E4M3, E4M3_MAX

EMPTY = torch.iinfo(torch.int64).min
LOW_BITS = (1 << 32) - 1
TILE_KEYS = 256
TILE_SCORES = 1 << 17  # per head and summed, in a tile, to stay in a core's cache
BLOCK_KEYS = 1024  # least keys between two selections, unless the workspace is smaller
QUANTISED = 1 << 22  # elements in fp32 at once
CANDIDATE_BYTES = 48  # score, packed value and what selecting from them takes


def index_topk(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    key_start: Tensor,
    key_end: Tensor,
    topk: int,
    workspace_bytes: int,
    key_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """ids int32 [rows, topk] ascending then -1, counts int32 [rows]. key_scale [pack] multiplies
    the scores of its key."""
    rows = query.shape[0]
    ids = torch.full((rows, topk), -1, dtype=torch.int32, device=query.device)
    block_rows, block_keys = _block(query, topk, workspace_bytes)
    for part in torch.arange(rows, device=query.device).split(block_rows):
        part = part[key_end[part] > key_start[part]]
        if len(part) == 0:
            continue
        start, end = key_start[part, None], key_end[part, None]
        low, high = int(start.min()) // TILE_KEYS * TILE_KEYS, int(end.max())
        best = start.new_full((len(part), topk), EMPTY)
        for first in range(low, high, block_keys):
            last = min(first + block_keys, high)
            score = scores(query[part], key[first:last], weights[part])
            if key_scale is not None:
                score *= key_scale[first:last]
            candidates = torch.cat([best, pack(score, first, start, end)], 1)
            best = candidates.topk(topk, dim=1, sorted=False).values
        ids[part] = unpack(best)
    return ids, (ids >= 0).sum(1, dtype=torch.int32)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., dim] in e4m3, and the fp32 scale [...] that takes the largest magnitude of each
    vector to 448, as DeepSeek-V3.2's indexer has it (without the rotation before it)."""
    values = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows = max(1, QUANTISED * len(x) // max(1, x.numel()))
    for part, to, own in zip(x.split(rows), values.split(rows), scale.split(rows)):
        own.copy_(part.abs().amax(-1)).div_(E4M3_MAX)
        own.masked_fill_(own == 0, 1.0)  # zeros stay zeros
        to.copy_(part / own[..., None])
    return values, scale


def _block(query: Tensor, topk: int, workspace_bytes: int) -> tuple[int, int]:
    """Rows, and keys (whole tiles), between two selections."""
    heads, dim = query.shape[1:]
    tile_rows = _tile_rows(heads)
    row_elements = (heads + 1) * TILE_KEYS + 2 * heads * dim
    tile_bytes = 4 * (tile_rows * row_elements + 2 * TILE_KEYS * dim)
    room = (workspace_bytes - tile_bytes) // CANDIDATE_BYTES
    if room < topk + TILE_KEYS:
        least = tile_bytes + CANDIDATE_BYTES * (topk + TILE_KEYS)
        raise ConfigError(
            f"ops.workspace_bytes is {workspace_bytes}; index_topk with {heads} heads of {dim} and "
            f"topk {topk} needs at least {least}"
        )
    rows = min(tile_rows, room // (topk + TILE_KEYS))
    keys = min(max(4 * topk, BLOCK_KEYS), room // rows - topk)
    return rows, keys // TILE_KEYS * TILE_KEYS


def _tile_rows(heads: int) -> int:
    return max(1, TILE_SCORES // (TILE_KEYS * (heads + 1)))


def scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """sum_h weights[t, h] * relu(query[t, h] . key[s]) in fp32 [rows, keys]; rows up to a tile."""
    rows, heads, _ = query.shape
    missing = _tile_rows(heads) - rows
    query = pad(query.float(), (0, 0, 0, 0, 0, missing)).flatten(0, 1)
    weights = pad(weights.float(), (0, 0, 0, missing))[:, None]
    out = query.new_empty((rows, key.shape[0]))
    for first in range(0, key.shape[0], TILE_KEYS):
        keys = key[first : first + TILE_KEYS].float()
        keys = pad(keys, (0, 0, 0, TILE_KEYS - len(keys)))
        dots = torch.mm(query, keys.T).relu_().view(-1, heads, TILE_KEYS)
        tile = torch.bmm(weights, dots)[:rows, 0]
        out[:, first : first + TILE_KEYS] = tile[:, : key.shape[0] - first]
    return out


def pack(score: Tensor, first: int, start: Tensor, end: Tensor) -> Tensor:
    """One int64 for each score and its key id; EMPTY outside the row's key range [start, end)."""
    bits = (score + 0.0).view(torch.int32)  # + 0.0: -0.0 is 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as int32, in the order of the floats
    ids = torch.arange(first, first + score.shape[1], device=score.device)
    packed = (ordered.long() << 32).add_(LOW_BITS - ids)
    return packed.masked_fill_((ids < start) | (ids >= end), EMPTY)


def unpack(packed: Tensor) -> Tensor:
    """Key ids of packed candidates, int32, ascending along dim 1, then -1."""
    ids = LOW_BITS - (packed & LOW_BITS)
    ids = ids.masked_fill_(packed == EMPTY, LOW_BITS).sort(dim=1).values
    return ids.masked_fill_(ids == LOW_BITS, -1).int()
