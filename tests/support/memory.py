"""Bytes that a computation allocates on the CPU."""

from collections.abc import Callable

import torch

from fullspan.planning.measure import measure, peak_bytes

__all__ = ["kept_bytes", "peak_bytes"]


def kept_bytes(computation: Callable[[], object]) -> int:
    """The bytes that are still allocated when `computation` has ended, its result alive."""
    return measure(torch.device("cpu"), computation).kept
