"""Backend `scaled_grouped_mm`: PyTorch's own grouped FP8 product on sm_90.

It takes a scale for each row of the activations and for each output of a weight, so weights with
block scales are rounded once more before each use (README.md: what that costs). Rows need no
padding.
"""

import torch
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from fullspan.ops.expert_products.rounding import round_rows
from fullspan.shapes import Tensor


def product(x: Tensor, weight: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
    """See reference.product_by_row. x bfloat16. Holds as many e4m3 weights again as it is given."""
    values, row_scale = round_rows(x)
    again, out_scale = round_rows(weight.flatten(0, 1), scale.flatten(0, 1))
    return F.scaled_grouped_mm(  # pyright: ignore[reportAttributeAccessIssue] not in its __all__
        values,
        again.view_as(weight).transpose(1, 2),
        row_scale,
        ScalingType.RowWise,
        out_scale.view(weight.shape[:2]),
        ScalingType.RowWise,
        offs=counts.cumsum(0).to(torch.int32),
        output_dtype=x.dtype,
        use_fast_accum=False,  # sums that keep 14 bits are for inference
    )
