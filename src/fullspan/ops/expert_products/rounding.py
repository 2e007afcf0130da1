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
from fullspan.ops.sizes import ceil_div, power_of_2
from fullspan.shapes import Tensor

ROWS = 8  # of float32 scales that are stored together: a sector of 32 bytes


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
    return ceil_div(slots + min(slots, experts) * (align - 1), align) * align


def spread_rows(x: Tensor, counts: Tensor, align: int) -> Spread:
    """Round rows, sorted by expert, with a scale for each 128 columns. The host waits for nothing:
    the number of padded rows is the upper bound. align: a multiple of ROWS.
    """
    (slots, width), rows = x.shape, padded_rows(len(x), len(counts), align)
    out = Spread(
        values=x.new_empty(rows, width, dtype=E4M3),
        scale=x.new_empty(width // GROUP, rows, dtype=torch.float32).t(),
        expert=x.new_empty(rows, dtype=torch.int32),
        place=x.new_empty(slots, dtype=torch.int64),
    )
    _launch(x, x, counts.contiguous(), *out, align=align)
    return out


def round_rows(x: Tensor, block_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """e4m3 rows and a scale for each, float32 [rows].

    block_scale: [rows / 128, width / 128], which multiplies x where it is e4m3.
    """
    values = x.new_empty(x.shape, dtype=E4M3)
    scale = x.new_empty(len(x), 1, dtype=torch.float32)
    given = x if block_scale is None else block_scale
    _launch(x, given, x, values, scale, x, x, scaled=block_scale is not None)
    return values, scale[:, 0]


def _launch(
    x: Tensor, block_scale: Tensor, counts: Tensor, values: Tensor, scale: Tensor, expert: Tensor,
    place: Tensor, *, align: int = 0, scaled: bool = False,
) -> None:  # fmt: skip
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = values.shape
    groups = width // GROUP
    held, together = (power_of_2(groups), 1) if not align else (min(8, power_of_2(groups)), ROWS)
    parts, experts = ceil_div(groups, held), len(counts)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        round_rows_kernel[(rows // together * parts,)](
            x, block_scale, counts, values, scale, expert, place,
            x.stride(0), *scale.stride(), width, experts,
            ROWS=together, GROUPS=held, PARTS=parts, EXPERTS=power_of_2(experts) if align else 1,
            ALIGN=align, WHOLE=not align, SCALED=scaled, PADDED=bool(align),
            num_warps=min(16, max(1, held * together // 8)),
        )  # fmt: skip
