"""What the op tests share: packs, selections, memory as allocated, a dense attention."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from fullspan.ops.packed import PackedLayout
from fullspan.ops.selection import Selection


def layout(lengths: list[int], padding: int = 0) -> PackedLayout:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return PackedLayout(cu_seqlens=bounds, padded_length=int(bounds[-1]) + padding)


def ranges(lengths: list[int], padding: int = 0) -> tuple[Tensor, Tensor]:
    """key_start and key_end of every row of a pack."""
    pack = layout(lengths, padding)
    return pack.key_ranges(torch.arange(pack.padded_length))


def selection(rows: list[list[int]], counts: list[int] | None = None) -> Selection:
    """Rows of ids, filled up with -1; counts default to the length of each row."""
    width = max(1, *map(len, rows))
    ids = torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)
    counts = [len(row) for row in rows] if counts is None else counts
    return Selection(ids, torch.tensor(counts, dtype=torch.int32))


def random_selection(rows: int, keys: int, topk: int, seed: int = 0) -> Selection:
    """Each row has a random set of at most topk keys; the first row has none, the last one topk."""
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for row in range(rows):
        size = int(torch.randint(0, topk + 1, (), generator=generator))
        size = 0 if row == 0 else topk if row == rows - 1 else size
        chosen.append(sorted(torch.randperm(keys, generator=generator)[:size].tolist()))
    return selection(chosen)


def dense_attention(
    query: Tensor, kv: Tensor, chosen: Selection, scale: float, value_dim: int, sink: Tensor | None
) -> Tensor:
    """The same function over all keys with a mask, for autograd; 0 on rows without keys."""
    rows, heads, _ = query.shape
    slot = torch.arange(chosen.ids.shape[1])
    filled = (chosen.ids >= 0) & (slot < chosen.counts[:, None])
    mask = torch.zeros(rows, kv.shape[0], dtype=torch.bool)
    row, slot = filled.nonzero(as_tuple=True)
    mask[row, chosen.ids[row, slot].long()] = True
    logits = torch.einsum("thd,sd->ths", query, kv) * scale
    logits = logits.masked_fill(~mask[:, None], torch.finfo(logits.dtype).min)
    if sink is not None:
        logits = torch.cat([logits, sink[None, :, None].expand(rows, heads, 1)], 2)
    probs = logits.softmax(2)[..., : kv.shape[0]] * mask[:, None]
    return torch.einsum("ths,sd->thd", probs, kv[:, :value_dim])


def allocations(run: Callable[[], object]) -> tuple[int, int]:
    """Peak of the bytes that run holds at once, and its largest single allocation, as allocated."""
    with profile(use_kineto=True, profile_memory=True) as record:
        run()
    events = [e for e in record.kineto_results.events() if e.name() == "[memory]"]
    held = peak = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak, largest = max(peak, held), max(largest, event.nbytes())
    return peak, largest


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)
