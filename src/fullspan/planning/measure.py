"""What a computation allocates at most, and on a CPU how many FLOPs it makes.

On a GPU the caching allocator counts. A CPU has no such counter: there the allocator's events come
from PyTorch's profiler, relative to the start, which also counts the FLOPs of matrix products
(2 m n k of every mm, addmm and bmm that runs, those inside of custom ops included). Memory that a
library takes past PyTorch's allocator is in neither.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

# Operators whose FLOPs are counted.
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Of one computation; bytes.

    peak       most that was allocated at any one time, above what was allocated before
    kept       what was allocated at its end, above what was before
    before     what was allocated before; None on a CPU
    reserved   most that the caching allocator held, in all; None on a CPU
    flops      None on a GPU
    """

    peak: int
    kept: int
    before: int | None = None
    reserved: int | None = None
    flops: int | None = None


def measure(device: torch.device, computation: Callable[[], object]) -> Usage:
    """Run it once. What it returns lives until its memory is counted."""
    return _on_gpu(device, computation) if device.type == "cuda" else _on_cpu(computation)


def peak_bytes(computation: Callable[[], object]) -> int:
    """`measure` on the CPU, the peak alone."""
    return _on_cpu(computation).peak


def _on_gpu(device: torch.device, computation: Callable[[], object]) -> Usage:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = computation()
    torch.cuda.synchronize(device)
    kept = torch.cuda.memory_allocated(device) - before
    del result
    return Usage(
        peak=torch.cuda.max_memory_allocated(device) - before,
        kept=kept,
        before=before,
        reserved=torch.cuda.max_memory_reserved(device),
    )


def _on_cpu(computation: Callable[[], object]) -> Usage:
    with profile(
        activities=[ProfilerActivity.CPU],
        profile_memory=True,
        acc_events=True,
        record_shapes=True,
        with_flops=True,
    ) as profiler:
        result = computation()
    del result
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    assert memory, "the profiler saw no allocation"
    # The stub lacks nbytes.
    changes = [(e.start_ns(), e.nbytes()) for e in memory]  # pyright: ignore[reportAttributeAccessIssue] see above
    live = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        live += change
        peak = max(peak, live)
    flops = sum(event.flops() for event in events if event.name() in PRODUCTS)
    return Usage(peak=peak, kept=live, flops=flops)
