"""What a rank sends and when, and where its host waits for values: recorded while a real step runs.

Collectives are seen below PyTorch's Python API, as operators, so that no call can pass unseen,
whoever makes it. An event's place is the function of the package that caused it.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fullspan
from fullspan.parallel.collectives import PendingTensor
from fullspan.parallel.shard import WeightStore

_PACKAGE = str(Path(fullspan.__file__).parent)
_COMPUTE = ("mm", "bmm", "addmm")
# Operators whose result's shape or value the host needs, on a GPU too.
_SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "equal")
_HOST_COPIES = ("tolist", "numpy", "cpu")  # methods that no operator shows on a CPU


@dataclass(frozen=True)
class Event:
    """kind: start (of a collective), wait, sync or op. received: bytes from other ranks; of an
    all-reduce, those of a ring. phase: pass and unit of the model, "" outside."""

    kind: str
    what: str
    place: str = ""
    received: int = 0
    phase: tuple[str, int] = ("", -1)


class Wire(TorchDispatchMode):
    """Records events between `with` and its end; `follow` tells it where the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.phase = ("", -1)
        self.most_units_whole = 0
        self._gathered: list[StorageWeakRef] = []
        self._replaced: list[tuple[type, str, Any]] = []

    def follow(self, model: nn.Module) -> None:
        """Note pass and unit from now on."""
        model.weights = _FollowedWeights(model.weights, self)

    def __enter__(self) -> "Wire":
        for name in _HOST_COPIES:
            self._observe(torch.Tensor, name, "sync")
        self._observe(PendingTensor, "wait", "wait")
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        for owner, name, original in self._replaced:
            setattr(owner, name, original)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, rest = func.name().partition("::")
        name = rest.split(".")[0]
        if namespace == "c10d":
            self._record("start", name, _received(name, args))
            if self.events[-1].place == "shard.ShardedWeights._start":
                self._count_units(args[0])
        elif namespace == "fullspan" or name in _COMPUTE:
            self._record("op", name)
        elif name in _SYNCS or _needs_host(name, func, args, kwargs or {}):
            self._record("sync", name)
        return func(*args, **(kwargs or {}))

    def _record(self, kind: str, what: str, received: int = 0) -> None:
        place = "" if kind == "op" else _place()
        if not place.startswith("ops/"):
            self.events.append(Event(kind, what, place, received, self.phase))

    def _observe(self, owner: type, name: str, kind: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def observed(*args: Any, **kwargs: Any) -> Any:
            self._record(kind, name)
            return original(*args, **kwargs)

        self._replaced.append((owner, name, original))
        setattr(owner, name, observed)

    def _count_units(self, gathered: torch.Tensor) -> None:
        live = [unit for unit in self._gathered if not unit.expired()]
        self._gathered = [*live, StorageWeakRef(gathered.untyped_storage())]
        self.most_units_whole = max(self.most_units_whole, len(self._gathered))


class _FollowedWeights(WeightStore):
    """A WeightStore that tells a Wire what runs."""

    def __init__(self, inner: WeightStore, wire: Wire) -> None:
        self._inner, self._wire = inner, wire

    def run(self, unit: int, module: nn.Module, *args: Any, backward: bool = False) -> Any:
        self._wire.phase = ("recompute" if backward else "forward", unit)
        out = self._inner.run(unit, module, *args, backward=backward)
        if backward:  # until the next unit, its gradients are computed
            self._wire.phase = ("backward", unit)
        return out


def _received(name: str, args: Any) -> int:
    """Bytes that a rank gets from the others in a collective."""
    if name == "_allgather_base_":
        return args[0].nbytes - args[1].nbytes
    if name == "_reduce_scatter_base_":
        return args[1].nbytes - args[0].nbytes
    group = dist.ProcessGroup.unbox(args[2] if name == "alltoall_base_" else args[1])
    size = group.size()
    if name == "allreduce_":
        return sum(2 * tensor.nbytes * (size - 1) // size for tensor in args[0])
    assert name == "alltoall_base_", f"{name} is not expected in a step"
    out, rows = args[0], args[3]
    own = rows[group.rank()] if rows else len(out) // size
    return out.nbytes - own * out[:1].numel() * out.itemsize if len(out) else 0


def _needs_host(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Indexing by a mask, and repeats of a size that nobody told."""
    if name in ("index", "index_put_", "index_put"):
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None


def _place() -> str:
    """Module and function of the package that called; collectives.py stands for its caller. What
    is inside an op starts with ops/."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if str(path).startswith(_PACKAGE) and path.stem != "collectives":
            inside = "ops/" if path.is_relative_to(Path(_PACKAGE, "ops")) else ""
            return f"{inside}{path.stem}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "test"
