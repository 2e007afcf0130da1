"""The gated MLP of dense layers and shared experts."""

from torch import nn

from fullspan.models.common.linear import Linear
from fullspan.ops.rows.op import swiglu
from fullspan.shapes import Float, Tensor


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

    backend = "auto"  # of ops/rows

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def forward(self, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        gated = swiglu(self.gate_proj(x), self.up_proj(x), backend=self.backend)
        return self.down_proj(gated)
