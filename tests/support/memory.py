"""Peak bytes of a computation on the CPU, from PyTorch's allocator (through its profiler)."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(computation: Callable[[], object]) -> int:
    """The most bytes that were allocated by `computation` and not yet freed at any one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        computation()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    assert events, "the profiler saw no allocation"
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def kept_bytes(computation: Callable[[], object]) -> int:
    """The bytes that are still allocated when `computation` has ended, its result alive."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = computation()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    del result
    return sum(event.nbytes() for event in events if event.name() == "[memory]")
