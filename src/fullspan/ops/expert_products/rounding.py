"""Launches of the rounding kernel: activations in place or spread over padded experts, and block
scaled weights again by row.

Runs on NVIDIA GPUs from sm_89 on, and on a CPU inside Triton's interpreter (tests). Left out:
checks (op.py).
"""

# A kernel is launched by an index, with options beside its own arguments: pyright knows neither.
# pyright: reportCallIssue=false, reportIndexIssue=false

from contextlib import nullcontext
from typing import NamedTuple

import torch

from fullspan.ops.expert_products.kernels import round_rows_kernel
from fullspan.ops.expert_products.reference import GROUP
from fullspan.ops.fp8.reference import E4M3
from fullspan.ops.sizes import power_of_2
from fullspan.shapes import Tensor


class Spread(NamedTuple):
    """Rows rounded where a grouped product wants them; what is padding has no values.

    values [padded, width] e4m3; scale [padded, width / 128] with the rows side by side; expert
    [padded] int32, -1 for padding; place [slots]: where each row is.
    """

    values: Tensor
    scale: Tensor
    expert: Tensor
    place: Tensor


def padded_rows(slots: int, experts: int, align: int) -> int:
    """Upper bound on the rows when each expert's begin at a multiple of `align`, itself one."""
    return -(-(slots + min(slots, experts) * (align - 1)) // align) * align


def spread_rows(x: Tensor, counts: Tensor, align: int) -> Spread:
    """Round rows, sorted by expert, with a scale for each 128 columns. The host waits for nothing:
    the number of padded rows is the upper bound.
    """
    (slots, width), experts = x.shape, len(counts)
    rows = padded_rows(slots, experts, align)
    ends = torch.stack([counts, (counts + align - 1) // align * align]).cumsum(1)
    first = torch.nn.functional.pad(ends, (1, 0))
    out = Spread(
        values=x.new_empty(rows, width, dtype=E4M3),
        scale=x.new_empty(width // GROUP, rows, dtype=torch.float32).t(),
        expert=x.new_empty(rows, dtype=torch.int32),
        place=x.new_empty(slots, dtype=torch.int64),
    )
    _launch(x, x, first[0], first[1], *out, experts=experts)
    return out


def round_rows(x: Tensor, block_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """e4m3 rows and a scale for each, float32 [rows].

    block_scale: [rows / 128, width / 128], which multiplies x where it is e4m3.
    """
    values = x.new_empty(x.shape, dtype=E4M3)
    scale = x.new_empty(len(x), 1, dtype=torch.float32)
    given = x if block_scale is None else block_scale
    _launch(x, given, x, x, values, scale, x, x, scaled=block_scale is not None)
    return values, scale[:, 0]


def _launch(
    x: Tensor, block_scale: Tensor, first: Tensor, first_padded: Tensor, values: Tensor,
    scale: Tensor, expert: Tensor, place: Tensor, *, experts: int = 0, scaled: bool = False,
) -> None:  # fmt: skip
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = values.shape
    groups = power_of_2(width // GROUP)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        round_rows_kernel[(rows,)](
            x, block_scale, first, first_padded, values, scale, expert, place,
            x.stride(0), *scale.stride(), width, experts,
            GROUPS=groups, EXPERTS=power_of_2(experts or 1),
            WHOLE=not experts, SCALED=scaled, PADDED=bool(experts),
            num_warps=min(16, max(1, groups // 8)),
        )  # fmt: skip
