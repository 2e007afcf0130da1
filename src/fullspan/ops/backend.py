"""Which implementation of an op runs, and why. A named backend that cannot run raises; nothing
falls back to another one.

The registry is the dict below: op -> {name: check}, in the order in which "auto" tries them. A
check says why the backend cannot run on a device and dtype, or gives None when it can.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fullspan.errors import BackendError, ConfigError

logger = logging.getLogger(__name__)

Check = Callable[[torch.device, torch.dtype], str | None]


def _check_reference(device: torch.device, dtype: torch.dtype) -> str | None:
    allowed = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return None if dtype in allowed else f"computes in floating point, not in {dtype}"


BACKENDS: dict[str, dict[str, Check]] = {
    "index_topk": {"reference": _check_reference},
    "sparse_attention": {"reference": _check_reference},
}


@dataclass(frozen=True, kw_only=True)
class OpOptions:
    """The [ops] section.

    index_topk, sparse_attention: name of a backend, or "auto" for the first that can run.
    workspace_bytes: bound on the temporaries of index_topk, and on those of sparse_attention.
    loss_chunk_rows: rows whose logits over the vocabulary exist at once.
    deterministic: the same bits on every run. The reference gives them either way.
    """

    index_topk: str = "auto"
    sparse_attention: str = "auto"
    workspace_bytes: int = 1 << 30
    loss_chunk_rows: int = 1024
    deterministic: bool = True

    def __post_init__(self) -> None:
        for op, backends in BACKENDS.items():
            name = getattr(self, op)
            if name not in ("auto", *backends):
                known = ", ".join(("auto", *backends))
                raise BackendError(f"ops.{op} is {name!r}; it can be one of: {known}")
        for setting, least in (("workspace_bytes", 1 << 20), ("loss_chunk_rows", 1)):
            value = getattr(self, setting)
            if value < least:
                raise ConfigError(f"ops.{setting} is {value}; it must be at least {least}")


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
