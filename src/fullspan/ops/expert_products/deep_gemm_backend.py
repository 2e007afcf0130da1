"""Backend `deep_gemm`: the grouped FP8 product of DeepGEMM on sm_90.

m_grouped_fp8_gemm_nt_contiguous wants every expert's rows to begin at a multiple of 128, names each
row's expert (-1: padding, which it leaves out, block by block), takes the scales of rows transposed
and those of weights as the checkpoint has them, and adds up in float32 every 128 columns. Its
kernels are compiled by nvcc when they are first called, for the widths of a weight, and kept on
disk. Sources: deepseek-ai/DeepGEMM (MIT), csrc/apis/gemm.hpp, layout.hpp and
include/deep_gemm/scheduler/gemm.cuh; sgl-project's fork, sgl-deep-gemm on PyPI (Apache-2.0).
"""

import importlib

from fullspan.ops.expert_products.rounding import spread_rows
from fullspan.shapes import Tensor


def product(x: Tensor, weight: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
    """See reference.product. x bfloat16."""
    library = importlib.import_module("deep_gemm")
    rows = spread_rows(x, counts, library.get_mk_alignment_for_contiguous_layout())
    place = rows.place
    padded = x.new_empty(len(rows.values), weight.shape[1])
    library.m_grouped_fp8_gemm_nt_contiguous(
        (rows.values, rows.scale), (weight, scale), padded, rows.expert
    )
    del rows  # before the outputs exist twice
    return padded.index_select(0, place)
