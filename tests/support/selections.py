"""Inputs for sparse attention and index top-k that are hard to get right, and plain PyTorch to
measure errors against.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fullspan.ops.sparse_attention import reference

EDGE_COUNTS = (0, 1, 63, 64, 65, 127, 128, 129, 2047)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One call of sparse attention with its output gradient."""

    query: Tensor
    kv: Tensor
    ids: Tensor
    counts: Tensor
    sink: Tensor | None
    grad: Tensor
    scale: float
    value_dim: int

    def to(self, dtype: torch.dtype) -> "Attention":
        """The same with floating tensors of another type."""
        sink = None if self.sink is None else self.sink.to(dtype)
        return Attention(
            query=self.query.to(dtype),
            kv=self.kv.to(dtype),
            ids=self.ids,
            counts=self.counts,
            sink=sink,
            grad=self.grad.to(dtype),
            scale=self.scale,
            value_dim=self.value_dim,
        )


def make_attention(
    *,
    rows: int,
    heads: int,
    value: int,
    rope: int,
    pack: int,
    topk: int,
    pool: int | None = None,
    counts: tuple[int, ...] | None = None,
    sink: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Attention:
    """Random ids in random slots, with holes; keys that no row selects hold NaN.

    pool: rows draw from this many keys, 16 rows together from one pool (default: from all). counts:
    ids of rows, repeated (default: as many as fit). Every row with at least 2 ids has key 3. Slots
    past the count hold an id that must be ignored.
    """
    rng = torch.Generator().manual_seed(seed)
    width = value + rope
    ids = torch.full((rows, topk), -1, dtype=torch.int32)
    limits = torch.zeros(rows, dtype=torch.int32)
    span = pack if pool is None else min(pool, pack)
    for row in range(rows):
        if row % 16 == 0:
            members = torch.randperm(pack, generator=rng)[:span]
        number = min(topk if counts is None else counts[row % len(counts)], topk, span)
        chosen = members[torch.randperm(span, generator=rng)[:number]]
        if number > 1 and 3 not in chosen:
            chosen[0] = 3
        # every other row keeps its ids in front, the others scatter them among all slots
        at = torch.arange(number) if row % 2 else torch.randperm(topk, generator=rng)[:number]
        ids[row, at] = chosen.int()
        limits[row] = number if row % 2 else topk
        if row % 2:
            ids[row, number:] = int(torch.randint(pack, (), generator=rng))
    kv = torch.randn(pack, width, generator=rng)
    live = (torch.arange(topk) < limits[:, None]) & (ids >= 0)
    unused = torch.ones(pack, dtype=torch.bool)
    unused[ids[live].long()] = False
    kv[unused] = float("nan")
    query = torch.randn(rows, heads, width, generator=rng)
    grad = torch.randn(rows, heads, value, generator=rng)
    sinks = torch.randn(heads, generator=rng) if sink else None
    return Attention(
        query=query.to(device, dtype),
        kv=kv.to(device, dtype),
        ids=ids.to(device),
        counts=limits.to(device),
        sink=None if sinks is None else sinks.to(device, dtype),
        grad=grad.to(device, dtype),
        scale=width**-0.5,
        value_dim=value,
    )


def exact(case: Attention) -> tuple[Tensor, ...]:
    """out, lse, dquery, dkv, dsink in float64."""
    wide = case.to(torch.float64)
    inputs = (wide.query, wide.kv, wide.ids, wide.counts)
    settings = (wide.sink, wide.scale, wide.value_dim, 1 << 32)
    out, lse = reference.forward(*inputs, *settings)
    dkv = torch.empty_like(wide.kv)
    delta = reference.row_products(wide.grad, out)
    given = (wide.grad, *inputs, delta, lse, dkv, (), 0, *settings, False)
    dquery, dsink = reference.backward(*given)
    return out, lse, dquery, dkv, dsink


def plain(case: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """out, dquery, dkv as plain PyTorch computes them in the case's own type, by autograd, over a
    gathered copy of the keys.
    """
    query = case.query.detach().requires_grad_()
    kv = case.kv.detach().requires_grad_()
    slots = torch.arange(case.ids.shape[1], device=case.ids.device)
    empty = (case.ids < 0) | (slots >= case.counts[:, None])
    some = case.ids.masked_fill(empty, -1).amax(1, keepdim=True)
    at = torch.where(empty, some, case.ids)
    live = some[:, 0] >= 0
    keys = kv[at[live].long()]
    scores = torch.einsum("thd,tkd->thk", query[live], keys) * case.scale
    scores = scores.masked_fill(empty[live][:, None], float("-inf"))
    if case.sink is not None:
        extra = case.sink[None, :, None].expand(scores.shape[0], -1, 1)
        scores = torch.cat([scores, extra], 2)
    probs = torch.softmax(scores.float(), 2).to(query.dtype)[..., : at.shape[1]]
    out = query.new_zeros(query.shape[0], query.shape[1], case.value_dim)
    out = out.index_put(
        (live.nonzero()[:, 0],), torch.einsum("thk,tkv->thv", probs, keys[..., : case.value_dim])
    )
    dquery, dkv = torch.autograd.grad(out, (query, kv), case.grad)
    return out.detach(), dquery, dkv


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2 error."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))
