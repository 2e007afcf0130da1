"""Where a model's frozen weights are when a part of it runs: all of them on every rank, or spread
evenly over ranks, gathered one unit ahead of use and dropped after it.

A unit is what runs as one: the embedding, a layer, the head. Spread weights are laid out one
after the other as bytes, whatever their dtypes, and rank r of N holds the r-th N-th of them:
resident bytes fall as 1 / N. One all-gather brings a unit together; its tensors are then views, so
nothing is copied. While a unit runs, the gather of the next layer (in the backward pass, of the one
before) is under way: at most two layers are whole at a time, or the embedding and a layer, or the
head.

The weights are handed to the module for the one call (`torch.func.functional_call`); the module
itself keeps parameters without storage. Autograd graphs hold what they need of a gathered unit, and
with recompute that is never longer than the unit's own backward pass.

FSDP2 is not used. It shards every parameter along dim 0, so that a gathered unit has to be copied
out into a second buffer; its hooks expect the backward pass of a module where here is one autograd
node that calls the layer again; and it is built around gradients, of which frozen weights have
none. Routed experts are not here but in expert.py: they are never gathered.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from fullspan.ops.sizes import round_up
from fullspan.parallel.collectives import PendingTensor, start_all_gather_rows
from fullspan.parallel.config import ALIGNMENT
from fullspan.parallel.group import Group
from fullspan.shapes import Tensor


class WeightStore(ABC):
    """Runs units of a model with their weights at hand."""

    @abstractmethod
    def run(self, unit: int, module: nn.Module, *args: Any, backward: bool = False) -> Any:
        """`module(*args)` with the weights of `unit`, counted in the order of the forward pass.

        backward: the call is a recompute, so the unit before this one comes next.
        """


class ResidentWeights(WeightStore):
    """Every rank holds all weights in the modules themselves."""

    def run(self, unit: int, module: nn.Module, *args: Any, backward: bool = False) -> Any:
        return module(*args)


@dataclass(frozen=True)
class FlatTensor:
    """A tensor's place in the bytes of its unit."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.offset + prod(self.shape) * self.dtype.itemsize


class FlatUnit:
    """The weights of one unit as bytes, of which this rank holds `shard`.

    Args:
        tensors: shape and dtype by name.
        rank, size: this rank's place among those that share the unit.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        *,
        rank: int,
        size: int,
        device: torch.device,
    ) -> None:
        self.tensors: dict[str, FlatTensor] = {}
        end = 0
        for name, (shape, dtype) in tensors.items():
            self.tensors[name] = FlatTensor(round_up(end, ALIGNMENT), shape, dtype)
            end = self.tensors[name].end
        self.share = round_up(end, ALIGNMENT * size) // size
        self.start = rank * self.share
        self.shard = torch.zeros(self.share, dtype=torch.uint8, device=device)

    def wanted(self, name: str) -> tuple[int, int]:
        """The run of the tensor's elements, flattened, that this rank holds; empty where start is
        not below end."""
        tensor = self.tensors[name]
        first = max(self.start, tensor.offset) - tensor.offset
        last = min(self.start + self.share, tensor.end) - tensor.offset
        return first // tensor.dtype.itemsize, last // tensor.dtype.itemsize

    def store(self, name: str, elements: Tensor) -> None:
        """Keep the elements that `wanted` named, in the tensor's dtype."""
        tensor = self.tensors[name]
        first, _ = self.wanted(name)
        at = tensor.offset + first * tensor.dtype.itemsize - self.start
        data = elements.to(device=self.shard.device, dtype=tensor.dtype).contiguous()
        data = data.view(torch.uint8)
        self.shard[at : at + data.numel()] = data

    def views(self, gathered: Tensor) -> dict[str, Tensor]:
        """The whole tensors inside the gathered bytes."""
        return {
            name: gathered[tensor.offset : tensor.end].view(tensor.dtype).view(tensor.shape)
            for name, tensor in self.tensors.items()
        }


class ShardedWeights(WeightStore):
    """A WeightStore over FlatUnits in the order of the forward pass.

    Args:
        parameters: for each unit, the module parameters (without storage) by the unit's names.
    """

    def __init__(
        self,
        units: Sequence[FlatUnit],
        parameters: Sequence[Mapping[str, nn.Parameter]],
        group: Group | None,
    ) -> None:
        self.units = units
        self._parameters = parameters
        self._group = group
        self._names: dict[int, dict[str, str]] = {}
        self._ahead: dict[int, PendingTensor] = {}

    def run(self, unit: int, module: nn.Module, *args: Any, backward: bool = False) -> Any:
        """See WeightStore."""
        pending = self._ahead.pop(unit, None) or self._start(unit)
        gathered = pending.wait()
        following = unit - 1 if backward else unit + 1
        self._ahead.clear()
        # Embedding and head are as large as ten layers: not there while another unit runs.
        if 0 < following < len(self.units) - 1:
            self._ahead[following] = self._start(following)
        views = self.units[unit].views(gathered)
        names = self._module_names(unit, module)
        return functional_call(module, {names[n]: view for n, view in views.items()}, args)

    def _start(self, unit: int) -> PendingTensor:
        return start_all_gather_rows(
            self.units[unit].shard, self._group, f"frozen weights, unit {unit}"
        )

    def _module_names(self, unit: int, module: nn.Module) -> dict[str, str]:
        """Names inside the module now: adapters that wrap a projection lengthen them."""
        if unit not in self._names:
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            wanted = self._parameters[unit].items()
            self._names[unit] = {name: names[id(parameter)] for name, parameter in wanted}
        return self._names[unit]
