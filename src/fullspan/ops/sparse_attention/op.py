"""Attention of every row over the keys that its Selection names, with its gradient.

Keys and values are one tensor, the absorbed form of MLA (DeepSeek-V2): a key is a row of kv, its
value the first value_dim channels of it. A sink (DeepSeek-V4) adds exp(sink[head]) to the softmax
denominator. Causality is the selection's matter and is not checked here.
"""

import torch

from fullspan.ops.backend import on_first_call, resolve
from fullspan.ops.options import OpOptions
from fullspan.ops.selection import Selection
from fullspan.ops.sparse_attention import reference
from fullspan.ops.sparse_attention.chunks import choose_rows
from fullspan.shapes import Float, Tensor

_TRITON = "fullspan.ops.sparse_attention.triton_backend"
_HOPPER = "fullspan.ops.sparse_attention.hopper_backend"
_FORWARD = {
    "hopper": on_first_call(_HOPPER, "forward"),
    "triton": on_first_call(_TRITON, "forward"),
    "reference": reference.forward,
}
_BACKWARD = {
    "hopper": on_first_call(_HOPPER, "backward"),
    "triton": on_first_call(_TRITON, "backward"),
    "reference": reference.backward,
}
# Where the backward has a plan: the sizes of a call, and its plan.
_SIZES = {"hopper": on_first_call(_HOPPER, "sizes"), "triton": on_first_call(_TRITON, "sizes")}
_PLAN = {"hopper": on_first_call(_HOPPER, "plan"), "triton": on_first_call(_TRITON, "plan")}
KEPT_SHARE = 4  # plans are kept for the next layer where all of a selection's take 1 / this of the
# workspace


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
    """softmax(scale * query . kv[ids]) @ kv[ids, :value_dim], and the log of its denominator.

    A slot is empty where its id is -1 or where it is not below the row's count, wherever it lies;
    empty slots are never read. A row names a key at most once. A row without keys gives out 0, lse
    +inf (so that exp(s - lse) vanishes, sink or not) and no gradient. lse is natural, fp32 or
    wider, without gradient. Raises BackendError when the named backend cannot run here, ConfigError
    when options.workspace_bytes is too small for one row.
    """
    assert query.dtype == kv.dtype, (query.dtype, kv.dtype)
    assert 0 < value_dim <= kv.shape[1] == query.shape[2], (query.shape, kv.shape, value_dim)
    assert selection.ids.shape[0] == query.shape[0], (selection.ids.shape, query.shape)
    widths = {"qk": query.shape[2], "value_dim": value_dim, "topk": selection.ids.shape[1]}
    backend = resolve(options, query.device, query.dtype, **widths).sparse_attention
    selected = (selection.ids, selection.counts)
    settings = (scale, value_dim, backend, options.workspace_bytes)
    return _sparse_attention(query, kv, *selected, sink, *settings)


def sparse_attention_gradients(
    grad_out: Float[Tensor, "rows heads value"],
    query: Float[Tensor, "rows heads qk"],
    kv: Float[Tensor, "pack qk"],
    selection: Selection,
    out: Float[Tensor, "rows heads value"],
    lse: Float[Tensor, "rows heads"],
    sink: Float[Tensor, "heads"] | None,
    scale: float,
    value_dim: int,
    backend: str,
    workspace: int,
) -> tuple[Tensor, Float[Tensor, "pack qk"], Float[Tensor, "heads"]]:
    """(dquery like query, dkv [pack, qk], dsink [heads]); the last two like lse, fp32 or wider.

    dkv is not rounded to kv's dtype here, so that ranks can sum theirs in fp32 before. Plans that
    the selection holds are used, and those made here are left in it for the next layer, unless they
    take too much of the workspace.
    """
    rows, topk = selection.ids.shape
    dkv = lse.new_empty(kv.shape)
    span, chunk, sizes = rows, 0, None
    if backend in _SIZES:
        sizes = _SIZES[backend](query, len(kv), topk, value_dim, 0)
        span, chunk = choose_rows(sizes, rows, workspace)
    found = []
    for first in range(0, max(rows, 1), max(span, 1)):
        part = slice(first, first + span)
        plan = ()
        if sizes is not None and rows:
            key = (first, span, chunk)
            plan = selection.plans.get(key)
            if plan is None:
                plan = _PLAN[backend](selection.ids[part], selection.counts[part], sizes, chunk)
                if sizes.kept_bytes(rows, chunk) <= workspace // KEPT_SHARE:
                    selection.plans[key] = plan
        tensors = (grad_out, query, selection.ids, selection.counts, out, lse)
        grad, queries, ids, counts, outs, sums = (x[part] for x in tensors)
        found.append(
            sparse_attention_backward(
                grad, queries, kv, ids, counts, outs, sums, dkv, list(plan), sink, scale, value_dim,
                backend, workspace, first > 0,
            )
        )  # fmt: skip
    dqueries, dsinks = zip(*found)
    if len(found) == 1:
        return dqueries[0], dkv, dsinks[0]
    return torch.cat(dqueries), dkv, torch.stack(dsinks).sum(0)


_SETTINGS = "Tensor? sink, float scale, int value_dim, str backend, int workspace_bytes"
_FORWARD_SCHEMA = f"(Tensor query, Tensor kv, Tensor ids, Tensor counts, {_SETTINGS})"
_BACKWARD_SCHEMA = (
    "(Tensor grad_out, Tensor query, Tensor kv, Tensor ids, Tensor counts, Tensor out, Tensor lse, "
    f"Tensor(a!) dkv, Tensor[] plan, {_SETTINGS}, bool add) -> (Tensor, Tensor)"
)


@torch.library.custom_op(
    "fullspan::sparse_attention_forward",
    mutates_args=(),
    schema=f"{_FORWARD_SCHEMA} -> (Tensor, Tensor)",
)
def sparse_attention_forward(query, kv, ids, counts, sink, scale, value_dim, backend, workspace):
    """(out, lse) of sparse_attention with a resolved backend, without autograd."""
    return _FORWARD[backend](query, kv, ids, counts, sink, scale, value_dim, workspace)


@torch.library.custom_op(
    "fullspan::sparse_attention_backward", mutates_args=("dkv",), schema=_BACKWARD_SCHEMA
)
def sparse_attention_backward(
    grad_out, query, kv, ids, counts, out, lse, dkv, plan, sink, scale, value_dim, backend,
    workspace, add,
):  # fmt: skip
    """(dquery like query, dsink [heads]) of some rows; dkv [pack, qk], like lse, is overwritten, or
    added to. plan: of these rows, in the chunks that it was made for; []: made here.
    """
    run = _BACKWARD[backend]
    settings = (sink, scale, value_dim, workspace, add)
    return run(grad_out, query, kv, ids, counts, out, lse, dkv, plan, *settings)


@torch.library.custom_op(
    "fullspan::sparse_attention",
    mutates_args=(),
    schema=f"{_FORWARD_SCHEMA} -> (Tensor, Tensor)",
)
def _sparse_attention(query, kv, ids, counts, sink, scale, value_dim, backend, workspace):
    return _FORWARD[backend](query, kv, ids, counts, sink, scale, value_dim, workspace)


@sparse_attention_forward.register_fake
@_sparse_attention.register_fake
def _(query, kv, ids, counts, sink, scale, value_dim, backend, workspace):
    rows, heads, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty((rows, heads, value_dim)), query.new_empty((rows, heads), dtype=wide)


@sparse_attention_backward.register_fake
def _(grad_out, query, kv, ids, counts, out, lse, dkv, plan, sink, scale, value_dim, backend,
      workspace, add):  # fmt: skip
    return query.new_empty(query.shape), lse.new_empty(query.shape[1])


def _setup_context(ctx, inputs, output):
    query, kv, ids, counts, sink, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, kv, ids, counts, *output, sink)


def _backward(ctx, grad_out, _):
    query, kv, ids, counts, out, lse, sink = ctx.saved_tensors
    dquery, dkv, dsink = sparse_attention_gradients(
        grad_out, query, kv, Selection(ids, counts), out, lse, sink, *ctx.settings
    )
    dsink = None if sink is None else dsink.to(sink.dtype)
    return dquery, dkv.to(kv.dtype), None, None, dsink, None, None, None, None


_sparse_attention.register_autograd(_backward, setup_context=_setup_context)
