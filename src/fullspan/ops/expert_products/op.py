"""The products of the routed experts with both operands in FP8, forward only.

The checkpoint's e4m3 weights meet rows that are rounded to e4m3 on the way in. Which numbers these
are, and what the rounding costs, is in README.md; the products with dequantised weights, and every
gradient, are models/common/linear.py's.
"""

from collections.abc import Sequence

from fullspan.errors import ConfigError, LayoutError
from fullspan.ops.backend import on_first_call
from fullspan.ops.expert_products import reference
from fullspan.ops.expert_products.reference import BLOCK, GROUP
from fullspan.ops.fp8.reference import E4M3, scale_shape
from fullspan.ops.registration import operator
from fullspan.shapes import Float, Float32, Int64, Tensor

_IMPLEMENTATIONS = {
    "reference": reference.product,
    "deep_gemm": on_first_call("fullspan.ops.expert_products.deep_gemm_backend", "product"),
    "scaled_grouped_mm": on_first_call("fullspan.ops.expert_products.scaled_backend", "product"),
}
# Bytes that a backend takes for each element of the weights that it is given.
WEIGHT_BYTES = {"reference": 0, "deep_gemm": 0, "scaled_grouped_mm": 1}


def in_fp8(products: str) -> bool:
    """Whether ops.expert_products names one of these, which is never what "auto" takes."""
    return products in _IMPLEMENTATIONS


def check_weight(
    name: str, shape: Sequence[int], block: tuple[int, int] | None, parts: int, products: str
) -> None:
    """Refuse weights that the products cannot take; "bf16" takes all.

    Args:
        name, shape: of a model's tensor [experts, out, in].
        block: rows and columns that share a scale; None for a weight that is not FP8.
        parts: equal parts of the rows in each of which blocks begin anew.
        products: ops.expert_products.

    Raises:
        ConfigError: they are not FP8, or their blocks are not whole ones of 128 x 128.
    """
    *_, rows, cols = shape
    if not in_fp8(products):
        return
    if block is None:
        found = "is not FP8 in this checkpoint"
    elif block != BLOCK or rows % (parts * GROUP) or cols % GROUP:
        found = f"has {parts} x [{rows // parts}, {cols}] in blocks of {block[0]} x {block[1]}"
    else:
        return
    raise ConfigError(
        f"ops.expert_products is {products!r}, which multiplies e4m3 weights in whole blocks of "
        f'{GROUP} x {GROUP}, but {name} {found}: set ops.expert_products = "bf16"'
    )


def expert_product(
    x: Float[Tensor, "slots in"],
    weight: Float[Tensor, "experts out in"],
    scale: Float32[Tensor, "experts out_blocks in_blocks"],
    counts: Int64[Tensor, "experts"],
    *,
    backend: str,
) -> Float[Tensor, "slots out"]:
    """y[s] = round(x[s]) round(weight[e])^T for the expert e of slot s, in x's dtype. No gradient.

    Slots are sorted by expert, counts[e] of them are expert e's; any may be 0. Sums are float32.

    Args:
        weight, scale: e4m3 in blocks of 128 x 128, `out` and `in` multiples of 128.
        backend: reference, deep_gemm or scaled_grouped_mm, of which `ops.backend.choose` knows
            whether they can run.

    Raises:
        LayoutError: dtype or shapes do not fit.
    """
    fits = weight.ndim == 3 and weight.shape[2] == x.shape[1] and counts.shape == weight.shape[:1]
    whole = fits and not weight.shape[1] % GROUP and not weight.shape[2] % GROUP
    if not whole or weight.dtype != E4M3 or scale.shape != scale_shape(weight.shape, BLOCK):
        raise LayoutError(
            f"x {list(x.shape)}, a weight {weight.dtype} {list(weight.shape)}, a scale "
            f"{list(scale.shape)} and counts {list(counts.shape)}: FP8 products take e4m3 weights "
            f"[experts, out, in] in whole blocks of {GROUP} x {GROUP}, x [slots, in]"
        )
    return _expert_product(x.detach(), weight.detach(), scale.detach(), counts, backend)


@operator(
    "expert_product(Tensor x, Tensor weight, Tensor scale, Tensor counts, str backend) -> Tensor",
    fake=lambda x, weight, scale, counts, backend: x.new_empty(x.shape[0], weight.shape[1]),
)
def _expert_product(x, weight, scale, counts, backend):
    if not len(x):
        return x.new_empty(0, weight.shape[1])
    return _IMPLEMENTATIONS[backend](x, weight, scale, counts)
