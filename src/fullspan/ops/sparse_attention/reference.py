"""Attention over selected keys in plain PyTorch, forward and backward, in blocks of rows.

Only keys that a row selected are ever read: an empty slot points at another key of its row with probability zero, and a row
without keys takes no part. Arithmetic in fp32 or wider.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fullspan.errors import ConfigError


def forward(
    query: Tensor,
    kv: Tensor,
    ids: Tensor,
    counts: Tensor,
    sink: Tensor | None,
    scale: float,
    value_dim: int,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor]:
    """out [rows, heads, value_dim] in query's dtype; lse [rows, heads] in fp32 or wider, +inf on rows without keys."""
    rows, heads, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros((rows, heads, value_dim), dtype=query.dtype, device=query.device)
    lse = torch.full((rows, heads), torch.inf, dtype=wide, device=query.device)
    for part, slots, empty in _blocks(query, kv, ids, counts, workspace_bytes):
        keys = _gather(kv, slots, wide)
        logits = _logits(query[part].to(wide), keys, empty, scale)
        peak = logits.amax(2, keepdim=True)
        if sink is not None:
            peak = torch.maximum(peak, sink.to(wide)[:, None])
        weights = logits.sub_(peak).exp_()
        total = weights.sum(2, keepdim=True)
        if sink is not None:
            total += (sink.to(wide)[:, None] - peak).exp()
        out[part] = torch.bmm(weights, keys[..., :value_dim]).div_(total).to(query.dtype)
        lse[part] = (peak + total.log()).squeeze(2)
    return out, lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    kv: Tensor,
    ids: Tensor,
    counts: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    scale: float,
    value_dim: int,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dquery in query's dtype; dkv [pack, qk] and dsink [heads] in fp32 or wider."""
    wide = lse.dtype
    dquery = torch.zeros_like(query)
    dkv = torch.zeros(kv.shape, dtype=wide, device=kv.device)
    dsink = torch.zeros(query.shape[1], dtype=wide, device=query.device)
    for part, slots, empty in _blocks(query, kv, ids, counts, workspace_bytes):
        keys = _gather(kv, slots, wide)
        block_query, block_grad = query[part].to(wide), grad_out[part].to(wide)
        probs = _logits(block_query, keys, empty, scale).sub_(lse[part, :, None]).exp_()
        mean = (out[part].to(wide) * block_grad).sum(2)
        dlogits = torch.bmm(block_grad, keys[..., :value_dim].mT)
        dlogits.sub_(mean[..., None]).mul_(probs).mul_(scale)
        dquery[part] = torch.bmm(dlogits, keys).to(query.dtype)
        dkeys = torch.bmm(dlogits.mT, block_query)
        dkeys[..., :value_dim] += torch.bmm(probs.mT, block_grad)
        _accumulate(dkv, slots, dkeys)
        if sink is not None:
            dsink -= ((sink.to(wide) - lse[part]).exp() * mean).sum(0)
    return dquery, dkv, dsink


def _blocks(
    query: Tensor, kv: Tensor, ids: Tensor, counts: Tensor, workspace_bytes: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Blocks of rows that have keys: row numbers [n], ids [n, width] without gaps, which slots are empty [n, width]."""
    heads, topk = query.shape[1], ids.shape[1]
    row_bytes = 4 * topk * (5 * kv.shape[1] + 5 * heads)
    block = workspace_bytes // row_bytes
    if block == 0:
        raise ConfigError(
            f"ops.workspace_bytes is {workspace_bytes}, less than the {row_bytes} that one row of sparse attention "
            f"needs ({topk} keys of width {kv.shape[1]}, {heads} heads)"
        )
    empty = (ids < 0) | (torch.arange(topk, device=ids.device) >= counts[:, None])
    spare = ids.masked_fill(empty, -1).amax(1, keepdim=True)
    for part in (spare[:, 0] >= 0).nonzero()[:, 0].split(block):
        yield part, torch.where(empty[part], spare[part], ids[part]), empty[part]


def _gather(kv: Tensor, slots: Tensor, wide: torch.dtype) -> Tensor:
    return kv.index_select(0, slots.flatten()).to(wide).view(*slots.shape, kv.shape[1])


def _logits(query: Tensor, keys: Tensor, empty: Tensor, scale: float) -> Tensor:
    return torch.bmm(query, keys.mT).mul_(scale).masked_fill_(empty[:, None], -torch.inf)


def _accumulate(dkv: Tensor, slots: Tensor, dkeys: Tensor) -> None:
    """dkv[slots] += dkeys, always in the same order."""
    if dkv.is_cuda:
        dkv.index_put_((slots.flatten(),), dkeys.flatten(0, 1), accumulate=True)
    else:
        dkv.index_add_(0, slots.flatten(), dkeys.flatten(0, 1))
