"""Where a model's frozen weights are when a part of it runs.

A model runs each of its units (embedding, every layer, head) through a WeightStore, so that weights
which are spread over ranks can be brought together just before use. ResidentWeights, the default,
holds everything all the time. Spreading them is parallel/shard.py's.
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


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
