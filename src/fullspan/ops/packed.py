"""Where documents lie in a pack: positions and causal key ranges from global row ids.

A pack is a row of documents followed by padding. Everything is computed for the rows at hand in O(rows log docs), so
nothing here depends on how rows are dealt to ranks, and nothing of size pack x pack exists. Holds no tokens or labels.
"""

from dataclasses import dataclass

import torch

from fullspan.errors import LayoutError
from fullspan.shapes import Int64, Tensor


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Document bounds of one pack.

    cu_seqlens: on the CPU; document d covers the rows [cu_seqlens[d], cu_seqlens[d + 1]); rows from cu_seqlens[-1] to
    padded_length are padding. Raises LayoutError when the bounds do not start at 0, do not increase, or do not fit.
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
            got = "empty" if bounds.numel() == 0 else f"starts at {int(bounds[0])}"
            raise LayoutError(f"cu_seqlens {got}; it must start at 0")
        lengths = bounds.diff()
        if bool((lengths <= 0).any()):
            first = int((lengths <= 0).nonzero()[0])
            raise LayoutError(
                f"cu_seqlens goes from {int(bounds[first])} to {int(bounds[first + 1])} at document {first}; "
                "bounds must increase: leave empty documents out"
            )
        if self.padded_length < self.real_length:
            raise LayoutError(
                f"padded_length is {self.padded_length} but the documents end at row {self.real_length}; "
                "it must be at least as long as the documents: raise data.pack_length"
            )

    @property
    def real_length(self) -> int:
        """Rows that belong to a document."""
        return int(self.cu_seqlens[-1])

    @property
    def num_docs(self) -> int:
        """Documents in the pack."""
        return self.cu_seqlens.numel() - 1

    def positions(self, rows: Int64[Tensor, "rows"]) -> Int64[Tensor, "rows"]:
        """Position of each global row inside its own document; 0 on padding."""
        start, real = self._document_start(rows)
        return torch.where(real, rows - start, 0)

    def key_ranges(
        self, rows: Int64[Tensor, "rows"]
    ) -> tuple[Int64[Tensor, "rows"], Int64[Tensor, "rows"]]:
        """Half-open range [document start, own row + 1) of global keys a row may see; (0, 0) on padding."""
        start, real = self._document_start(rows)
        return torch.where(real, start, 0), torch.where(real, rows + 1, 0)

    def _document_start(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """First row of each row's document, and whether the row is real (start is meaningless where not)."""
        if rows.numel() and not (0 <= int(rows.min()) and int(rows.max()) < self.padded_length):
            raise LayoutError(
                f"rows {int(rows.min())}..{int(rows.max())} are outside the pack of {self.padded_length} rows"
            )
        bounds = self.cu_seqlens.to(rows.device)
        document = torch.searchsorted(bounds, rows, right=True) - 1
        return bounds[document], rows < self.real_length
