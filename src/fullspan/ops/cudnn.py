"""The cuDNN frontend's sparse attention kernels, which backends of two ops call."""

import importlib
from typing import Any

from fullspan.errors import BackendError


def load() -> Any:
    """The namespace of the sparse attention kernels; BackendError where it does not import."""
    try:
        return importlib.import_module("cudnn.deepseek_sparse_attention").DSA
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise BackendError(
            f"backend 'cudnn': nvidia-cudnn-frontend does not load: {error}"
        ) from error
