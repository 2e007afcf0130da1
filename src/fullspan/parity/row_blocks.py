"""Matrix products on blocks of equally many rows, however many rows there are.

A library picks the kernel of a product by its shape, and another kernel may sum in another order:
in bfloat16 a row then rounds differently with 4,096 rows beside it than with 8,192. A near tie of
the router or the indexer turns that into another expert or key, and a model of random weights
carries it on. What is left of a comparison in bfloat16 then says more about rounding than about the
split. Inside RowBlocks every product of many rows runs as products of one and the same shape, so
that a row's bits do not depend on the split, and what still differs is the split's doing.

Left out: products inside custom ops and of experts' slots. Their kernels treat rows one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fullspan.shapes import Tensor

_aten = torch.ops.aten
# Product -> dimension of the first operand, and of the result, that holds the rows.
_PRODUCTS: dict[Any, int] = {_aten.mm.default: 0, _aten.bmm.default: 1}


class RowBlocks(TorchDispatchMode):
    """Within it, products whose rows are a multiple of `rows` run `rows` at a time, in forward and
    backward. Dimensions that only look like rows (of weights) may be cut too: the values are those
    of the whole product, up to its rounding."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _aten.addmm.out and not args[1].shape[0] % self.rows:
            return self._added(*args, **(kwargs or {}))
        dim = _PRODUCTS.get(func)
        if dim is None or args[0].shape[dim] <= self.rows or args[0].shape[dim] % self.rows:
            return func(*args, **(kwargs or {}))
        first, *others = args
        parts: list[Tensor] = [func(part, *others) for part in first.split(self.rows, dim)]
        return torch.cat(parts, dim)

    def _added(self, given: Tensor, first: Tensor, second: Tensor, *, out: Tensor) -> Tensor:
        """A product that is added to a tensor, written into one (lora/layers.py)."""
        parts = (tensor.split(self.rows) for tensor in (given, first, out))
        for part, rows, into in zip(*parts, strict=True):
            torch.addmm(part, rows, second, out=into)
        return out
