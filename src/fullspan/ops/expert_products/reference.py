"""Products of the routed experts with rounded operands in plain PyTorch: the numerics, on any
device.

One expert at a time is held in float32, with its rows.
"""

import torch

from fullspan.ops.fp8.reference import E4M3, dequantise_into, quantise
from fullspan.shapes import Tensor

GROUP = 128  # columns of an activation, and rows and columns of a weight, that share a scale
BLOCK = (GROUP, GROUP)


def product(x: Tensor, weight: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
    """Rows with a scale for each 128 columns, the weight as it is: what `deep_gemm` computes."""
    return _product(x, weight, scale, counts, by_row=False)


def product_by_row(x: Tensor, weight: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
    """Rows and rows of the weight with a scale each: what `scaled_grouped_mm` computes."""
    return _product(x, weight, scale, counts, by_row=True)


def rounded(x: Tensor, group: int) -> Tensor:
    """float32 of a matrix whose rows were rounded to e4m3 with a scale for each `group` columns."""
    block = (1, group)
    return _wide(*quantise(x, block, power_of_two=False), block)


def _product(x: Tensor, weight: Tensor, scale: Tensor, counts: Tensor, *, by_row: bool) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    group = x.shape[1] if by_row else GROUP
    ends = counts.cumsum(0).tolist()
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start == end:
            continue
        wide = _wide(weight[expert], scale[expert], BLOCK)
        if by_row:
            wide = rounded(wide, group)
        out[start:end] = rounded(x[start:end], group) @ wide.t()
    return out


def _wide(values: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    assert values.dtype == E4M3, values.dtype
    wide = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    dequantise_into(wide, values, scale, block)
    return wide
