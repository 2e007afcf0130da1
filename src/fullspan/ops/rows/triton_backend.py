"""Backend `triton` of rows: launches of one program a row.

Runs on NVIDIA GPUs from sm_80 on, and on a CPU inside Triton's interpreter (tests). Left out:
checks (op.py). Rows may have any stride, values in a row must be neighbours.
"""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false

from contextlib import nullcontext
from typing import Any

import torch

from fullspan.ops.rows import kernels
from fullspan.ops.sizes import power_of_2
from fullspan.shapes import Tensor

_BLOCK = 2048  # columns at once, where a row need not be whole


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """See reference."""
    x, index = _dense(x), index.contiguous()
    out = x.new_empty(len(index), x.shape[1])
    _launch(kernels.gather_rows_kernel, out, x, index, out, x.stride(0), COUNT=index.shape[1])
    return out


def swiglu(gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
    """See reference."""
    gate, up = _dense(gate), _dense(up)
    out = gate.new_empty(gate.shape)
    tensors = (gate, up, out if weights is None else weights.contiguous(), out)
    rows = (gate.stride(0), up.stride(0))
    _launch(kernels.swiglu_kernel, out, *tensors, *rows, WEIGHTED=weights is not None)
    return out


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, dgate: Tensor, dup: Tensor
) -> Tensor:
    """See reference."""
    grad, gate, up = _dense(grad), _dense(gate), _dense(up)
    dweights = gate.new_empty(0 if weights is None else len(gate), dtype=torch.float32)
    tensors = (grad, gate, up, dgate if weights is None else weights.contiguous(), dgate, dup)
    rows = [t.stride(0) for t in (grad, gate, up, dgate, dup)]
    weighted = weights is not None
    kernel = kernels.swiglu_backward_kernel
    _launch(kernel, gate, *tensors, dweights, *rows, WEIGHTED=weighted)
    return dweights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See reference."""
    x = _dense(x)
    out, rstd = x.new_empty(x.shape), x.new_empty(len(x), dtype=torch.float32)
    _launch(kernels.rms_norm_kernel, x, x, weight, out, rstd, x.stride(0), eps, whole=True)
    return out, rstd


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """See reference."""
    grad, x = _dense(grad), _dense(x)
    out = x.new_empty(x.shape)
    tensors = (grad, x, weight, rstd, out)
    kernel = kernels.rms_norm_backward_kernel
    _launch(kernel, x, *tensors, grad.stride(0), x.stride(0), whole=True)
    return out


def _launch(kernel: Any, like: Tensor, *arguments: Any, whole: bool = False, **fixed: Any) -> None:
    """One program for each row of `like`. whole: the columns of a row are in registers at once."""
    rows, width = like.shape
    if not rows or not width:
        return
    block = power_of_2(width) if whole else min(_BLOCK, power_of_2(width))
    warps = min(16, max(1, block // (1024 if whole else 256)))
    with torch.cuda.device(like.device) if like.is_cuda else nullcontext():
        kernel[(rows,)](*arguments, WIDTH=width, BLOCK=block, num_warps=warps, **fixed)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
