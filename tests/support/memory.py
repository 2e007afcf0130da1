"""Bytes that a computation allocates on the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile

from fullspan.planning.measure import PRODUCTS, Meter, Usage


def measure(computation: Callable[[], object]) -> Usage:
    """Of one computation on the CPU."""
    return Meter(torch.device("cpu")).measure(computation)


def peak_bytes(computation: Callable[[], object]) -> int:
    """The most that was allocated at any one time."""
    return measure(computation).peak


def kept_bytes(computation: Callable[[], object]) -> int:
    """The bytes that are still allocated when `computation` has ended, its result alive."""
    return measure(computation).kept


def peak_and_flops(computation: Callable[[], object]) -> tuple[int, int]:
    """As `measure`, without what gloo allocates: it copies what it gathers and scatters, for a time
    that depends on its threads, and NCCL does not."""
    profiler = profile(use_kineto=True, profile_memory=True, record_shapes=True, with_flops=True)
    with profiler:
        computation()
    results = profiler.kineto_results
    assert results is not None
    live: dict[int, int] = {}
    total = peak = 0
    copies: set[int] = set()
    events = sorted(_allocations(results.experimental_event_tree()), key=lambda event: event[0])
    for _, pointer, size, inside in events:
        # What a thread of gloo frees last is not recorded: it shows when its address is used again.
        total -= live.pop(pointer, 0)
        copies.discard(pointer)
        if size > 0 and inside:
            copies.add(pointer)
        elif size > 0:
            live[pointer] = size
            total += size
            peak = max(peak, total)
    flops = sum(event.flops() for event in results.events() if event.name() in PRODUCTS)
    return peak, flops


def _allocations(roots: list[Any]) -> Iterator[tuple[int, int, int, bool]]:
    """(time, address, bytes, whether inside of a collective) of every change."""
    nodes = [(root, False) for root in roots]
    while nodes:
        node, inside = nodes.pop()
        if node.tag == _EventType.Allocation:
            change = node.extra_fields
            yield node.start_time_ns, change.ptr, change.alloc_size, inside
        inside = inside or node.name.startswith(("c10d::", "gloo:"))
        nodes += [(child, inside) for child in node.children]
