"""Which implementation of an op runs, and why. A backend that is named and cannot run raises; nothing falls back.

The registry is the dict below: op -> {name: check}, in the order in which "auto" tries them. A check says why the
backend cannot run on a device and dtype, or returns None when it can.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fullspan.errors import BackendError, ConfigError

logger = logging.getLogger(__name__)

Check = Callable[[torch.device, torch.dtype], str | None]


def _reference_check(device: torch.device, dtype: torch.dtype) -> str | None:
    allowed = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return None if dtype in allowed else f"computes floating point, not {dtype}"


BACKENDS: dict[str, dict[str, Check]] = {
    "index_topk": {"reference": _reference_check},
    "sparse_attention": {"reference": _reference_check},
}


@dataclass(frozen=True, kw_only=True)
class OpOptions:
    """The [ops] section.

    index_topk, sparse_attention: backend name, or "auto" for the first that can run.
    workspace_bytes: bound on the temporaries of index_topk and of sparse_attention, each on its own.
    loss_chunk_rows: rows whose logits over the vocabulary exist at once.
    deterministic: same bits on every run; backends that cannot do that are refused.
    """

    index_topk: str = "auto"
    sparse_attention: str = "auto"
    workspace_bytes: int = 1 << 30
    loss_chunk_rows: int = 1024
    deterministic: bool = True

    def __post_init__(self) -> None:
        for op in BACKENDS:
            name = getattr(self, op)
            if name != "auto" and name not in BACKENDS[op]:
                known = ", ".join(["auto", *BACKENDS[op]])
                raise BackendError(f"ops.{op} is {name!r}; known backends: {known}")
        for setting, least in (("workspace_bytes", 1 << 20), ("loss_chunk_rows", 1)):
            value = getattr(self, setting)
            if value < least:
                raise ConfigError(f"ops.{setting} is {value}; it must be at least {least}")


def resolve(options: OpOptions, device: torch.device, dtype: torch.dtype) -> OpOptions:
    """Options with a backend that can run on device and dtype in place of every "auto".

    Raises BackendError that lists the known backends with reasons when a named one, or every one, cannot run.
    """
    return replace(
        options, **{op: _choose(op, getattr(options, op), device, dtype) for op in BACKENDS}
    )


@functools.cache
def _choose(op: str, wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """Cached, so that a choice is logged once a process and costs nothing per layer."""
    verdicts = {name: check(device, dtype) for name, check in BACKENDS[op].items()}
    able = [name for name, refusal in verdicts.items() if refusal is None]
    if wanted == "auto" and able:
        logger.info("%s: %s, the first backend that runs on %s with %s", op, able[0], device, dtype)
        return able[0]
    if wanted in able:
        logger.info("%s: %s, as ops.%s names it", op, wanted, op)
        return wanted
    listing = "; ".join(f"{name}: {refusal or 'can run'}" for name, refusal in verdicts.items())
    raise BackendError(f"ops.{op} = {wanted!r} cannot run on {device} with {dtype} ({listing})")
