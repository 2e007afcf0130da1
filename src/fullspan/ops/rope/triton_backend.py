"""Backend `triton` of the rotary position: one launch a tensor."""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false

from contextlib import nullcontext

import torch
from torch import Tensor

from fullspan.ops.rope.kernels import turn_kernel
from fullspan.ops.sizes import ceil_div, power_of_2


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool, out: Tensor
) -> None:
    """x [rows, rope] or [rows, heads, rope] turned by the angles of cos and sin, or turned back,
    into out. Strides may be any but for the last dimension's, which is copied where it is not 1.
    """
    if x.dim() == 2:
        x, out = x[:, None], out[:, None]
    x = x if x.stride(2) == 1 else x.contiguous()
    assert out.stride(2) == 1, out.stride()
    rows, heads, rope = x.shape
    block = min(64, power_of_2(heads))
    if rows == 0:
        return
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        turn_kernel[(rows, ceil_div(heads, block))](
            x, cos.float().contiguous(), sin.float().contiguous(), out, x.stride(0), x.stride(1),
            out.stride(0), out.stride(1), heads, HALF=rope // 2, HP=power_of_2(rope // 2),
            HB=block, INTERLEAVED=interleaved, INVERSE=inverse, num_warps=4,
        )  # fmt: skip
