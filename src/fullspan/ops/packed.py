"""Where documents lie in a pack: positions and causal key ranges from global row ids.

A pack is a row of documents followed by padding. Everything is computed for the rows at hand, in
O(rows log docs), so nothing here depends on how rows are dealt to ranks, and nothing of size
pack x pack exists. Holds no tokens and no labels.
"""

from dataclasses import dataclass

import torch

from fullspan.errors import LayoutError
from fullspan.shapes import Int64, Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLayout:
    """Document bounds of one pack.

    cu_seqlens: on the CPU; document d covers the rows [cu_seqlens[d], cu_seqlens[d + 1]). Rows from
    cu_seqlens[-1] to padded_length are padding; [0] alone is a pack of padding only.
    Raises LayoutError when the bounds do not start at 0, do not increase, or do not fit.
    """

    cu_seqlens: Int64[Tensor, "bounds"]
    padded_length: int

    def __post_init__(self) -> None:
        bounds = self.cu_seqlens
        if bounds.dtype != torch.int64 or bounds.dim() != 1 or bounds.device.type != "cpu":
            raise LayoutError(
                f"cu_seqlens is {bounds.dtype} of shape {tuple(bounds.shape)} on {bounds.device}; "
                "it must be a one-dimensional int64 tensor on the CPU"
            )
        if bounds.numel() == 0 or bounds[0] != 0:
            got = f"starts at {int(bounds[0])}" if bounds.numel() else "is empty"
            raise LayoutError(f"cu_seqlens {got}; it must start at 0")
        for document in (bounds.diff() <= 0).nonzero()[:1, 0].tolist():
            raise LayoutError(
                f"cu_seqlens goes from {int(bounds[document])} to {int(bounds[document + 1])} at "
                f"document {document}; bounds must increase: leave empty documents out"
            )
        if self.padded_length < self.real_length:
            raise LayoutError(
                f"the documents of a pack end at row {self.real_length}, past its padded length "
                f"of {self.padded_length}; shorten them or raise data.pack_length"
            )

    @property
    def real_length(self) -> int:
        """Rows that belong to a document."""
        return int(self.cu_seqlens[-1])

    def positions(self, rows: Int64[Tensor, "rows"]) -> Int64[Tensor, "rows"]:
        """Position of each global row inside its own document; 0 on padding."""
        start, real = self._document_start(rows)
        return torch.where(real, rows - start, 0)

    def key_ranges(
        self, rows: Int64[Tensor, "rows"]
    ) -> tuple[Int64[Tensor, "rows"], Int64[Tensor, "rows"]]:
        """The global keys [document start, own row + 1) that a row may see; (0, 0) on padding."""
        start, real = self._document_start(rows)
        return torch.where(real, start, 0), torch.where(real, rows + 1, 0)

    def _document_start(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """First row of each row's document (any number on padding), and whether the row is real."""
        inside = (rows >= 0) & (rows < self.padded_length)
        assert bool(inside.all()), f"rows outside a pack of {self.padded_length}: {rows[~inside]}"
        bounds = self.cu_seqlens.to(rows.device)
        document = torch.searchsorted(bounds, rows, right=True) - 1
        return bounds[document], rows < self.real_length
