"""Attention of every row over the keys that its Selection names, with its gradient.

Keys and values are one tensor (the absorbed form of MLA, DeepSeek-V2): a key is a whole row of kv, its value the first
value_dim channels. An optional sink adds exp(sink[head]) to the softmax denominator (DeepSeek-V4). Causality is not checked
here: a row attends to what was selected.
"""

import torch

from fullspan.ops.backend import OpOptions, resolve
from fullspan.ops.selection import Selection
from fullspan.ops.sparse_attention import reference
from fullspan.shapes import Float, Tensor

FORWARD = {"reference": reference.forward}
BACKWARD = {"reference": reference.backward}


def sparse_attention(
    query: Float[Tensor, "rows heads qk"],
    kv: Float[Tensor, "pack qk"],
    selection: Selection,
    *,
    scale: float,
    value_dim: int,
    sink: Float[Tensor, "heads"] | None = None,
    options: OpOptions,
) -> tuple[Float[Tensor, "rows heads value"], Float[Tensor, "rows heads"]]:
    """out = softmax(scale * query . kv[ids]) @ kv[ids, :value_dim], and lse = natural log of the denominator.

    A slot at or past the row's count, or holding -1, is empty wherever it lies, and is never read. A row without keys
    gives out 0, lse +inf (so that exp(s - lse) vanishes) and gradient 0. lse carries no gradient; it is fp32.
    Raises BackendError when the named backend cannot run and ConfigError when options.workspace_bytes holds no row.
    """
    assert 0 < value_dim <= kv.shape[1] == query.shape[2], (query.shape, kv.shape, value_dim)
    assert selection.ids.shape[0] == query.shape[0], (selection.ids.shape, query.shape)
    backend = resolve(options, query.device, query.dtype).sparse_attention
    return _sparse_attention(
        query,
        kv,
        selection.ids,
        selection.counts,
        sink,
        scale,
        value_dim,
        backend,
        options.workspace_bytes,
    )


_SCHEMA = (
    "Tensor query, Tensor kv, Tensor ids, Tensor counts, {}Tensor? sink, float scale, int value_dim, str backend, "
    "int workspace_bytes"
)


@torch.library.custom_op(
    "fullspan::sparse_attention_forward",
    mutates_args=(),
    schema=f"({_SCHEMA.format('')}) -> (Tensor, Tensor)",
)
def sparse_attention_forward(
    query, kv, ids, counts, sink, scale, value_dim, backend, workspace_bytes
):
    """(out, lse) without autograd; arguments as of sparse_attention."""
    return FORWARD[backend](query, kv, ids, counts, sink, scale, value_dim, workspace_bytes)


@torch.library.custom_op(
    "fullspan::sparse_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, {_SCHEMA.format('Tensor out, Tensor lse, ')}) -> (Tensor, Tensor, Tensor)",
)
def sparse_attention_backward(
    grad_out, query, kv, ids, counts, out, lse, sink, scale, value_dim, backend, workspace_bytes
):
    """(dquery in query's dtype, dkv [pack, qk] and dsink [heads] in fp32): dkv is left wide to be reduced over ranks."""
    return BACKWARD[backend](
        grad_out, query, kv, ids, counts, out, lse, sink, scale, value_dim, workspace_bytes
    )


@torch.library.custom_op(
    "fullspan::sparse_attention",
    mutates_args=(),
    schema=f"({_SCHEMA.format('')}) -> (Tensor, Tensor)",
)
def _sparse_attention(query, kv, ids, counts, sink, scale, value_dim, backend, workspace_bytes):
    return sparse_attention_forward(
        query, kv, ids, counts, sink, scale, value_dim, backend, workspace_bytes
    )


def _wide(tensor):
    return torch.promote_types(tensor.dtype, torch.float32)


@sparse_attention_forward.register_fake
@_sparse_attention.register_fake
def _(query, kv, ids, counts, sink, scale, value_dim, backend, workspace_bytes):
    rows, heads, _ = query.shape
    return query.new_empty((rows, heads, value_dim)), query.new_empty(
        (rows, heads), dtype=_wide(query)
    )


@sparse_attention_backward.register_fake
def _(grad_out, query, kv, ids, counts, out, lse, sink, scale, value_dim, backend, workspace_bytes):
    return (
        torch.empty_like(query),
        kv.new_empty(kv.shape, dtype=lse.dtype),
        query.new_empty(query.shape[1], dtype=lse.dtype),
    )


def _setup_context(ctx, inputs, output):
    query, kv, ids, counts, sink, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, kv, ids, counts, *output, sink)


def _backward(ctx, grad_out, _):
    query, kv, ids, counts, out, lse, sink = ctx.saved_tensors
    dquery, dkv, dsink = sparse_attention_backward(
        grad_out, query, kv, ids, counts, out, lse, sink, *ctx.settings
    )
    dsink = None if sink is None else dsink.to(sink.dtype)
    return dquery, dkv.to(kv.dtype), None, None, dsink, None, None, None, None


_sparse_attention.register_autograd(_backward, setup_context=_setup_context)
