"""Backend `cudnn` of sparse attention: the backward pass by the cuDNN frontend's DSA kernel.
Optional, by name only, on sm_90; `hopper` does the forward pass.

Not deterministic: the kernel adds dkv up by float atomics. It gives dkv in bf16, where other
backends leave fp32, so what is summed over parts of the rows and over ranks is rounded before. At
the border (cudnn/deepseek_sparse_attention/sparse_attention_backward of 1.32.0): natural lse; empty
slots -1 or past the count; a sink of -inf stands for none, as lse has the sink in it already; heads
are padded to multiples of 64. Of the outputs it needs their products with grad_out alone, which are
what callers keep. Left out: autograd and checks (op.py).
"""

from collections.abc import Sequence

import torch

from fullspan.errors import BackendError, ConfigError
from fullspan.ops.cudnn import load
from fullspan.ops.sparse_attention.chunks import beside_span, least_budget
from fullspan.ops.sparse_attention.launch import on_device, sink_gradient, whole
from fullspan.shapes import Float, Float32, Int32, Tensor

HEADS = 64
NAMED = "ops.sparse_attention = 'cudnn'"


def backward(
    grad_out: Float[Tensor, "rows heads value"],
    query: Float[Tensor, "rows heads qk"],
    kv: Float[Tensor, "pack qk"],
    ids: Int32[Tensor, "rows topk"],
    counts: Int32[Tensor, "rows"],
    delta: Float32[Tensor, "rows heads"],
    lse: Float32[Tensor, "rows heads"],
    dkv: Float32[Tensor, "pack qk"],
    plan: Sequence[Tensor],
    chunk: int,
    sink: Float[Tensor, "heads"] | None,
    scale: float,
    value_dim: int,
    workspace_bytes: int,
    add: bool,
) -> tuple[Float[Tensor, "rows heads qk"], Float32[Tensor, "heads"]]:
    """Gradients of query (its dtype) and sink (fp32, zeros without one); that of kv is written to
    dkv, or added to it. There is no plan here. BackendError: PyTorch was asked for deterministic
    algorithms.
    """
    assert not plan
    refuse_determinism()
    dsa = load()
    rows, heads, _ = query.shape
    step = part_rows(query, kv, value_dim, workspace_bytes)
    found = []
    if rows == 0 and not add:
        dkv.zero_()
    with on_device(query):
        kv, ids = kv.contiguous(), ids.contiguous()
        none = query.new_full((heads + -heads % HEADS,), -torch.inf, dtype=torch.float32)
        for first in range(0, rows, step):
            part = slice(first, first + step)
            given = (x[part] for x in (query, grad_out, delta, lse))
            queries, grads, products, sums = (whole(x, 1, HEADS) for x in given)
            dqueries, dkeys, _ = dsa.sparse_attention_backward_wrapper(
                queries, kv, outputs_of(grads, products), grads, sums, none, ids[part],
                softmax_scale=scale, topk_length=counts[part].clamp(0, ids.shape[1]),
            )  # fmt: skip
            found.append(dqueries[:, :heads])
            if add or first > 0:
                dkv.add_(dkeys)
            else:
                dkv.copy_(dkeys)
    dquery = found[0] if len(found) == 1 else torch.cat([query[:0], *found])
    dsink = lse.new_zeros(heads) if sink is None else sink_gradient(sink, lse, delta)
    return dquery.contiguous(), dsink


def outputs_of(
    grad_out: Float[Tensor, "rows heads value"], delta: Float[Tensor, "rows heads"]
) -> Float[Tensor, "rows heads value"]:
    """A tensor whose products with grad_out sum to delta: the part of the outputs along grad_out.
    Its rounding moves delta by less than that of the outputs themselves would. delta is taken for 0
    where the squares of grad_out vanish in fp32, below about 1e-19.
    """
    wide = torch.promote_types(grad_out.dtype, torch.float32)
    norm = torch.linalg.vector_norm(grad_out, dim=2, dtype=wide)
    share = torch.where(norm > 0, delta / norm.square(), 0.0)
    return torch.mul(grad_out, share[..., None], out=torch.empty_like(grad_out))


def part_rows(query: Tensor, kv: Tensor, value_dim: int, workspace_bytes: int) -> int:
    """Rows of one call within three quarters of the workspace, as the caller's span may take one:
    fp32 and bf16 dkv of the whole pack, then by row what stands for the outputs, padded copies, and
    the kernel's two sums a head. The kernel's addresses are of 32 bits.
    """
    heads, width = query.shape[1:]
    padded, room = heads + -heads % HEADS, beside_span(workspace_bytes)
    copies = 0 if heads == padded else 2 * width + value_dim
    row = padded * (query.element_size() * (value_dim + copies) + 8)
    pack = (kv.shape[0] + HEADS) * width * (4 + query.element_size())
    if pack + row > room:
        raise ConfigError(
            f"ops.attention_bytes is {workspace_bytes}; cuDNN's backward of sparse attention needs "
            f"at least {least_budget(pack + row)} for {kv.shape[0]} keys"
        )
    return min((room - pack) // row, (2**31 - 1) // (padded * width))


def refuse_determinism() -> None:
    """BackendError where PyTorch must use deterministic algorithms (and not merely warn)."""
    asked = torch.are_deterministic_algorithms_enabled()
    if asked and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise BackendError(
            f"{NAMED} adds by float atomics, and torch.use_deterministic_algorithms(True) is set: "
            "name hopper or auto, whose bits repeat, or take that back"
        )
