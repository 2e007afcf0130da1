"""What a computation allocates at most, in all and by place, and on a CPU how many FLOPs it makes.

On a GPU the caching allocator counts. A CPU has no such counter: there the allocator's events come
from PyTorch's profiler, relative to the start, which also counts the FLOPs of matrix products
(2 m n k of every mm, addmm and bmm that runs, those inside of custom ops included). Memory that a
library takes past PyTorch's allocator is in neither.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

# Operators whose FLOPs are counted.
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_MARK = "fullspan at "


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Of one computation; bytes.

    peak       most that was allocated at any one time, above what was allocated before
    kept       what was allocated at its end, above what was before
    before     what was allocated before; None on a CPU
    reserved   most that the caching allocator held, in all; None on a CPU
    flops      None on a GPU
    peaks      as `peak`, while each marked place lasted
    entered    what was allocated when each place was entered first, above what was before
    """

    peak: int
    kept: int
    before: int | None = None
    reserved: int | None = None
    flops: int | None = None
    peaks: Mapping[str, int] = field(default_factory=dict)
    entered: Mapping[str, int] = field(default_factory=dict)


class Meter:
    """Measures computations that mark their places; outside of `measure` a mark costs nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: _Seen | None = None

    def mark(self, place: str) -> None:
        """From here on it is this place."""
        if self._seen is None:
            return
        if self._device.type == "cuda":
            self._count(place)
        else:
            with record_function(_MARK + place):
                pass

    def measure(self, computation: Callable[[], object]) -> Usage:
        """Run it once. What it returns lives until its memory is counted."""
        self._seen = _Seen()
        try:
            return (
                self._on_gpu(computation) if self._device.type == "cuda" else _on_cpu(computation)
            )
        finally:
            self._seen = None

    def _on_gpu(self, computation: Callable[[], object]) -> Usage:
        assert self._seen is not None
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        result = computation()
        self._count("")
        kept = torch.cuda.memory_allocated(self._device) - before
        del result
        seen = self._seen
        return Usage(
            peak=max(seen.peaks.values()) - before,
            kept=kept,
            before=before,
            reserved=seen.reserved,
            peaks={place: peak - before for place, peak in seen.peaks.items() if place},
            entered={place: size - before for place, size in seen.entered.items() if place},
        )

    def _count(self, place: str) -> None:
        """The allocator gives memory out when the host asks for it: no need to wait for the GPU."""
        assert self._seen is not None
        now: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated = now["allocated_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self._device)
        reserved = now["reserved_bytes"]["all"]["peak"]
        self._seen.reserved = max(self._seen.reserved, reserved)
        self._seen.enter(place, peak=allocated["peak"], live=allocated["current"])


@dataclass
class _Seen:
    """place: where it is; peaks and entered: bytes by place, as in Usage."""

    place: str = ""
    reserved: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    entered: dict[str, int] = field(default_factory=dict)

    def enter(self, place: str, *, peak: int, live: int) -> None:
        """peak: since the place before was entered."""
        self.peaks[self.place] = max(self.peaks.get(self.place, 0), peak)
        self.entered.setdefault(place, live)
        self.place = place


def _on_cpu(computation: Callable[[], object]) -> Usage:
    # Not torch.profiler's: that one would make a Python object of every event.
    with profile(
        use_kineto=True, profile_memory=True, record_shapes=True, with_flops=True
    ) as profiler:
        result = computation()
    del result
    assert profiler is not None and profiler.kineto_results is not None
    events = profiler.kineto_results.events()
    # Changes of memory, and the marks between them. The stub lacks nbytes.
    found: list[tuple[int, int, str]] = [
        (e.start_ns(), e.nbytes(), "")  # pyright: ignore[reportAttributeAccessIssue] see above
        for e in events
        if e.name() == "[memory]"
    ]
    assert found, "the profiler saw no allocation"
    found += [
        (e.start_ns(), 0, e.name().removeprefix(_MARK))
        for e in events
        if e.name().startswith(_MARK)
    ]
    seen, live, highest = _Seen(), 0, 0
    for _, change, place in sorted(found, key=lambda event: event[0]):
        if place:
            seen.enter(place, peak=highest, live=live)
            highest = live
        live += change
        highest = max(highest, live)
    seen.enter("", peak=highest, live=live)
    return Usage(
        peak=max(seen.peaks.values()),
        kept=live,
        flops=sum(event.flops() for event in events if event.name() in PRODUCTS),
        peaks={place: peak for place, peak in seen.peaks.items() if place},
        entered={place: size for place, size in seen.entered.items() if place},
    )
