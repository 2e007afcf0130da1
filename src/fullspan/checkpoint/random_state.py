"""The states of the random generators of a process, as byte tensors that a checkpoint can hold.

PyTorch's (CPU and the current GPU), Python's and NumPy's global ones. Written as JSON where PyTorch
has no byte form, so that reading them back runs no code from the file.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states() -> dict[str, Tensor]:
    """The states of this process's generators, {generator: bytes as uint8}."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    key = numpy_state["state"]["key"].tolist()
    numpy_json = {**numpy_state, "state": {**numpy_state["state"], "key": key}}
    states = {
        "torch": torch.get_rng_state(),
        "python": _to_bytes(random.getstate()),
        "numpy": _to_bytes(numpy_json),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, Tensor]) -> None:
    """Puts back what `random_states` gave; generators that are not among `states` stay."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        version, values, gauss = _from_bytes(states["python"])
        random.setstate((version, tuple(values), gauss))
    if "numpy" in states:
        state = _from_bytes(states["numpy"])
        state["state"]["key"] = np.array(state["state"]["key"], dtype=np.uint32)
        np.random.set_state(state)
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))
