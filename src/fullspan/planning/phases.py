"""Where the time and the memory of a step go: marks at the borders of the model's parts, through
hooks.

A mark says what begins; a part lasts until the next mark. On a GPU a mark is an event in the
stream, so what is counted is the GPU's time with its waits for the host; on a CPU it is the clock.
A pass begins with the first mark of it:

    forward     of all units; with recompute it keeps nothing
    recompute   the second forward of a layer, in the backward pass
    backward    from the first gradient that arrives at a part's output
    step        gradients' norm and the optimizer

Forward marks come from modules' hooks, backward ones from hooks of the tensors that modules return.
So in a mixture of experts the backward of the routed experts ends with the shared expert's, which
runs last. What has no mark of its own (norms, residuals, embedding) is "other".
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from fullspan.models.common.mlp import GatedMLP
from fullspan.models.common.moe import GroupedExperts, MixtureOfExperts
from fullspan.models.dsa.attention import Indexer, SparseLatentAttention
from fullspan.models.dsa.model import DsaForCausalLM, LanguageModelHead
from fullspan.parallel.loopback import Traffic, Transfer
from fullspan.parallel.shard import WeightStore
from fullspan.planning.measure import Meter
from fullspan.shapes import Tensor

PARTS = (
    "attention", "indexer", "experts", "dense", "head", "weights", "other", "loopback", "update",
)  # fmt: skip
PASSES = ("forward", "recompute", "backward", "step")

Place = tuple[str, str]  # part, pass
# Where the memory of a step can peak; each of them grows evenly with the rows.
STAGES = ("forward", "head", "recompute", "backward", "update")
KEPT_AT = ("head", "backward")  # what is allocated when this begins, the forward pass left
_OF_MODULE: dict[type[nn.Module], str] = {
    SparseLatentAttention: "attention",
    Indexer: "indexer",
    MixtureOfExperts: "experts",
    GroupedExperts: "experts",
    GatedMLP: "dense",
    LanguageModelHead: "head",
}


def named(place: Place) -> str:
    """As a Meter calls it."""
    return " ".join(place)


def stages(peaks: Mapping[str, int]) -> dict[str, int]:
    """The peaks of a Usage by stage."""
    found: dict[str, int] = {}
    for place, peak in peaks.items():
        part, which = place.split(" ")
        stage = {"step": "update"}.get(which, which)
        if part == "head" and which == "forward":
            stage = "head"
        found[stage] = max(found.get(stage, 0), peak)
    return found


class Timeline:
    """Marks of one device between `start` and `stop`; outside they cost nothing. meter: gets every
    mark, too."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self._device, self._meter = device, meter
        self._marks: list[tuple[Any, Place]] = []
        self._running = False
        self.place: Place = ("other", "forward")

    def start(self) -> None:
        self._marks, self._running = [], True
        self.enter("other", "forward")

    def enter(self, part: str, which: str | None = None) -> None:
        """From here on it is this part; of the pass that was, unless another is named."""
        self.place = (part, which or self.place[1])
        self._meter.mark(named(self.place))
        if self._running:
            self._marks.append((self._now(), self.place))

    def stop(self) -> dict[Place, float]:
        """Seconds by part and pass."""
        end, self._running = self._now(), False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: dict[Place, float] = defaultdict(float)
        times = [*(mark for mark, _ in self._marks), end]
        for (_, place), first, last in zip(self._marks, times, times[1:], strict=False):
            seconds[place] += self._between(first, last)
        return dict(seconds)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1e3 if self._device.type == "cuda" else last - first


class TimedTraffic(Traffic):
    """Exchanges of the loopback group, as a part of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline, self._before = timeline, timeline.place

    def begin(self, transfer: Transfer) -> None:
        """See Traffic."""
        super().begin(transfer)
        self._before = self._timeline.place
        self._timeline.enter("loopback")

    def end(self) -> None:
        """See Traffic."""
        self._timeline.enter(*self._before)


class _TimedWeights(WeightStore):
    """A WeightStore that says which pass runs, and when weights are brought together."""

    def __init__(self, inner: WeightStore, timeline: Timeline) -> None:
        self._inner, self._timeline = inner, timeline

    def run(self, unit: int, module: nn.Module, *args: Any, backward: bool = False) -> Any:
        """See WeightStore."""
        self._timeline.enter("weights", "recompute" if backward else "forward")
        return self._inner.run(unit, module, *args, backward=backward)


def follow(model: DsaForCausalLM, timeline: Timeline) -> None:
    """Let `model` mark its parts on the timeline from now on."""
    model.weights = _TimedWeights(model.weights, timeline)
    for unit in model.units:
        unit.register_forward_pre_hook(lambda module, given: timeline.enter("other"))
    for module in model.modules():
        part = _OF_MODULE.get(type(module))
        if part is not None:
            stack: list[str] = []
            module.register_forward_pre_hook(partial(_begin, timeline, part, stack))
            module.register_forward_hook(partial(_end, timeline, part, stack))


def _begin(timeline: Timeline, part: str, stack: list[str], module: nn.Module, given: Any) -> None:
    stack.append(timeline.place[0])
    timeline.enter(part)


def _end(
    timeline: Timeline, part: str, stack: list[str], module: nn.Module, given: Any, out: Any
) -> None:
    timeline.enter(stack.pop())
    first = out[0] if isinstance(out, tuple) else out
    if isinstance(first, Tensor) and first.requires_grad:
        first.register_hook(partial(_gradient, timeline, part))


def _gradient(timeline: Timeline, part: str, gradient: Tensor) -> None:
    timeline.enter(part, "backward")


def medians(runs: Sequence[Mapping[Place, float]]) -> dict[Place, float]:
    """Of the seconds of several steps, for each part and pass."""
    places = dict.fromkeys(place for run in runs for place in run)
    return {place: median(run.get(place, 0.0) for run in runs) for place in places}
