"""Attention over selected keys in plain PyTorch, forward and backward, in blocks of rows.

A block gathers the keys of its rows; the rest is two batched products forward and four backward,
in fp32 or wider. Only keys that a row selected are ever read: an empty slot points at another key
of its row with probability zero, and a row without keys takes no part. Rows are grouped by how many
slots they use, so that the first rows of a document do not pay for topk, and so that (with heads in
multiples of four) the bits of a row do not depend on its neighbours.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fullspan.errors import ConfigError
from fullspan.ops.sparse_attention.chunks import beside_span, least_budget

LEAST_WIDTH = 64
CPU_BLOCK_BYTES = 8 << 20  # a larger block only leaves the cache
ID_BYTES = 64  # a slot's id, its copies and what sorting them takes


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
    """out [rows, heads, value_dim] like query; lse [rows, heads] in fp32 or wider."""
    rows, heads, width = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros((rows, heads, value_dim), dtype=query.dtype, device=query.device)
    lse = torch.full((rows, heads), torch.inf, dtype=wide, device=query.device)
    slot_bytes = _gathered_bytes(kv, wide) + wide.itemsize * heads
    block = _block_slots(ids, slot_bytes, 4 * wide.itemsize * heads * width, workspace_bytes)
    keys, logits = (lse.new_empty(block * size) for size in (width, heads))
    for part, slots, empty in _blocks(ids, counts, block):
        _gather(kv, slots, keys)
        _logits(query[part].to(wide) * scale, keys, empty, logits)
        peak = logits.amax(2, keepdim=True)
        if sink is not None:
            peak = torch.maximum(peak, sink.to(wide)[:, None])
        weights = logits.sub_(peak).exp_()
        total = weights.sum(2, keepdim=True)
        if sink is not None:
            total += (sink.to(wide)[:, None] - peak).exp_()
        out[part] = torch.bmm(weights, keys[..., :value_dim]).div_(total).to(out.dtype)
        lse[part] = total.log_().add_(peak).squeeze(2)
    return out, lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    kv: Tensor,
    ids: Tensor,
    counts: Tensor,
    delta: Tensor,
    lse: Tensor,
    dkv: Tensor,
    plan: Sequence[Tensor],
    chunk: int,
    sink: Tensor | None,
    scale: float,
    value_dim: int,
    workspace_bytes: int,
    add: bool,
) -> tuple[Tensor, Tensor]:
    """dquery like query, dsink [heads] in fp32 or wider; dkv [pack, qk], like dsink, is written or
    added to. There is no plan here."""
    assert not plan
    wide, heads, width = lse.dtype, query.shape[1], kv.shape[1]
    dquery = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    live = lse.new_zeros(lse.shape)  # delta where a row has a key
    if not add:
        dkv.zero_()
    slot_bytes = _gathered_bytes(kv, wide) + wide.itemsize * (width + 4 * heads)
    block = _block_slots(ids, slot_bytes, 10 * wide.itemsize * heads * width, workspace_bytes)
    keys, dkeys, probs, dprobs, both = (
        lse.new_empty(block * size) for size in (width, width, heads, heads, 2 * heads)
    )
    for part, slots, empty in _blocks(ids, counts, block):
        _gather(kv, slots, keys)
        scaled, pull = query[part].to(wide) * scale, grad_out[part].to(wide)
        _logits(scaled, keys, empty, probs)
        probs.sub_(lse[part, :, None]).exp_()
        live[part] = mean = delta[part]
        _bmm(pull, keys[..., :value_dim].mT, dprobs)
        dlogits = dprobs.sub_(mean[..., None]).mul_(probs)
        dquery[part] = torch.bmm(dlogits, keys).mul_(scale).to(dquery.dtype)
        # As a key and as a value in one product: [dlogits; probs].T @ [query; grad_out, 0].
        torch.cat([dlogits, probs], 1, out=both.resize_(len(part), 2 * heads, slots.shape[1]))
        _bmm(both.mT, torch.cat([scaled, pad(pull, (0, width - value_dim))], 1), dkeys)
        _scatter_add(dkv, slots.flatten(), dkeys.flatten(0, 1))
    if sink is None:
        return dquery, lse.new_zeros(heads)
    return dquery, -((sink.to(wide) - lse).exp_() * live).sum(0)


def row_products(grad_out: Tensor, out: Tensor) -> Tensor:
    """sum over the last dimension of grad_out * out, [rows, heads] in fp32 or wider."""
    wide = torch.promote_types(out.dtype, torch.float32)
    delta = out.new_empty(out.shape[:2], dtype=wide)
    rows = max(1, CPU_BLOCK_BYTES // max(1, 2 * wide.itemsize * out[:1].numel()))
    for part, grad, sums in zip(out.split(rows), grad_out.split(rows), delta.split(rows)):
        torch.sum(part.to(wide) * grad, 2, out=sums)
    return delta


def _block_slots(ids: Tensor, slot_bytes: int, row_bytes: int, workspace_bytes: int) -> int:
    """Slots in a block, where the caller holds so many bytes for each slot and row of it."""
    rows, topk = ids.shape
    slot_bytes += ID_BYTES
    least, room = row_bytes + topk * slot_bytes, beside_span(workspace_bytes)
    if room < least:
        raise ConfigError(
            f"ops.attention_bytes is {workspace_bytes}; sparse attention over {topk} keys needs at "
            f"least {least_budget(least)}, for one row"
        )
    budget = room if ids.is_cuda else min(room, CPU_BLOCK_BYTES)
    slots = budget // (slot_bytes + row_bytes // min(topk, LEAST_WIDTH))
    return min(max(slots, topk), rows * topk)


def _blocks(
    ids: Tensor, counts: Tensor, block_slots: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Row numbers [n], key ids without gaps [n, slots] and which of the slots are empty [n, slots].

    Every row that has a key is in one block. A block is as wide as the next power of two above the
    counts of its rows, and n * slots is at most block_slots.
    """
    topk = ids.shape[1]
    widths = [1 << n for n in range(32) if LEAST_WIDTH <= 1 << n < topk] + [topk]
    group = torch.bucketize(counts.clamp(max=topk), torch.tensor(widths, device=counts.device))
    for number, width in enumerate(widths):
        rows = ((group == number) & (counts > 0)).nonzero()[:, 0]
        for part in rows.split(max(1, block_slots // width)):
            slots = ids[part, :width].long()
            empty = torch.arange(width, device=ids.device) >= counts[part, None]
            slots.masked_fill_(empty.logical_or_(slots < 0), -1)
            spare = slots.amax(1, keepdim=True)
            part, slots, empty, spare = (x[spare[:, 0] >= 0] for x in (part, slots, empty, spare))
            if len(part):
                yield part, torch.where(empty, spare, slots), empty


def _gathered_bytes(kv: Tensor, wide: torch.dtype) -> int:
    """Bytes for a gathered key: as it is stored, and widened where that is another dtype."""
    return kv.shape[1] * (wide.itemsize + (0 if kv.dtype == wide else kv.itemsize))


def _gather(kv: Tensor, slots: Tensor, keys: Tensor) -> None:
    """keys [n, slots, qk] = kv[slots], widened."""
    keys.resize_(slots.numel(), kv.shape[1])
    if kv.dtype == keys.dtype:
        torch.index_select(kv, 0, slots.flatten(), out=keys)
    else:
        keys.copy_(kv.index_select(0, slots.flatten()))
    keys.resize_(*slots.shape, kv.shape[1])


def _logits(scaled: Tensor, keys: Tensor, empty: Tensor, logits: Tensor) -> None:
    """logits [n, heads, slots] = scaled . keys, -inf on empty slots."""
    _bmm(scaled, keys.mT, logits)
    if bool(empty.any()):
        logits.masked_fill_(empty[:, None], -torch.inf)


def _bmm(left: Tensor, right: Tensor, into: Tensor) -> None:
    """Batched product into a scratch tensor, as fresh pages for every block would cost as much."""
    torch.bmm(left, right, out=into.resize_(*left.shape[:2], right.shape[2]))


def _scatter_add(dkv: Tensor, slots: Tensor, dkeys: Tensor) -> None:
    """dkv[slots] += dkeys, adding in slot order on every run."""
    if dkv.is_cuda:
        dkv.index_put_((slots,), dkeys, accumulate=True)  # sorts; scatter_add_ would be atomic
    else:
        dkv.scatter_add_(0, slots[:, None].expand(-1, dkv.shape[1]), dkeys)
