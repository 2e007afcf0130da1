"""Runs Triton kernels on a CPU, where tests/conftest.py has asked for its interpreter. Skips the
importing tests without Triton.

On a machine with an NVIDIA GPU nothing changes: kernels are compiled there.
"""

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"

pytest.importorskip("triton")

from triton.runtime import interpreter  # noqa: E402  once it is known to be there

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor, scope):
    """Triton 3.6 takes int() of one-element arrays for loop bounds; NumPy from 2.4 on refuses those
    that have a dimension.
    """
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_and_index
