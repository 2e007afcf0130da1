"""Which implementation of an op runs, and why. A named backend that cannot run raises; nothing
falls back to another one.

The registry is the dict below: op -> {name: check}, in the order in which "auto" tries them. A
check says why the backend cannot run on a device and dtype, or gives None when it can.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from fullspan.errors import BackendError
from fullspan.ops.options import OpOptions

logger = logging.getLogger(__name__)

Check = Callable[[torch.device, torch.dtype], str | None]


def _check_reference(device: torch.device, dtype: torch.dtype) -> str | None:
    allowed = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return None if dtype in allowed else f"computes in floating point, not in {dtype}"


BACKENDS: dict[str, dict[str, Check]] = {
    "index_topk": {"reference": _check_reference},
    "sparse_attention": {"reference": _check_reference},
}


def resolve(options: OpOptions, device: torch.device, dtype: torch.dtype) -> OpOptions:
    """Options with a backend that runs on device and dtype in place of every "auto".

    Raises BackendError, with every known backend and what is against it, when the named one or all
    of them cannot run.
    """
    chosen = {op: _choose(op, getattr(options, op), device, dtype) for op in BACKENDS}
    return replace(options, **chosen)


@functools.cache  # so that a choice is logged once and costs nothing per layer
def _choose(op: str, wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    verdicts = {name: check(device, dtype) for name, check in BACKENDS[op].items()}
    able = [name for name, refusal in verdicts.items() if refusal is None]
    if wanted == "auto" and able:
        logger.info("%s: %s, the first backend for %s on %s", op, able[0], dtype, device)
        return able[0]
    if wanted in able:
        logger.info("%s: %s, named by ops.%s", op, wanted, op)
        return wanted
    listing = "; ".join(f"{name}: {refusal or 'can run'}" for name, refusal in verdicts.items())
    raise BackendError(f"ops.{op} = {wanted!r} cannot run for {dtype} on {device} ({listing})")
