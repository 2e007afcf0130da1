"""Attention of every row over the keys that its Selection names, with its gradient.

Keys and values are one tensor, the absorbed form of MLA (DeepSeek-V2): a key is a row of kv, its
value the first value_dim channels of it. A sink (DeepSeek-V4) adds exp(sink[head]) to the softmax
denominator. Causality is the selection's matter and is not checked here.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from fullspan.ops.backend import on_first_call, resolve
from fullspan.ops.options import OpOptions
from fullspan.ops.registration import operator
from fullspan.ops.selection import Selection
from fullspan.ops.sparse_attention import reference
from fullspan.ops.sparse_attention.chunks import Rows, Sizes, choose_rows, span_rows
from fullspan.shapes import Float, Tensor

_TRITON = "fullspan.ops.sparse_attention.triton_backend"
_HOPPER = "fullspan.ops.sparse_attention.hopper_backend"
_LAUNCH = "fullspan.ops.sparse_attention.launch"
_FLASH_MLA = "fullspan.ops.sparse_attention.flash_mla_backend"
_CUDNN = "fullspan.ops.sparse_attention.cudnn_backend"
# The optional backends bring one pass each; hopper's kernels do the other.
_FORWARD = {
    "hopper": on_first_call(_HOPPER, "forward"),
    "triton": on_first_call(_TRITON, "forward"),
    "reference": reference.forward,
    "flash_mla": on_first_call(_FLASH_MLA, "forward"),
    "cudnn": on_first_call(_HOPPER, "forward"),
}
_BACKWARD = {
    "hopper": on_first_call(_HOPPER, "backward"),
    "triton": on_first_call(_TRITON, "backward"),
    "reference": reference.backward,
    "flash_mla": on_first_call(_HOPPER, "backward"),
    "cudnn": on_first_call(_CUDNN, "backward"),
}
_PRODUCTS = dict.fromkeys(_FORWARD, on_first_call(_LAUNCH, "row_products"))
_PRODUCTS["reference"] = reference.row_products
# Where the backward has a plan: the sizes of a call, and its plan.
_PLANNERS = {"hopper": _HOPPER, "triton": _TRITON, "flash_mla": _HOPPER}
_SIZES = {name: on_first_call(module, "sizes") for name, module in _PLANNERS.items()}
_PLAN = {name: on_first_call(module, "plan") for name, module in _PLANNERS.items()}


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
    when options.attention_bytes is too small for one row, or for 16 in the kernels' backward pass.
    """
    assert query.dtype == kv.dtype, (query.dtype, kv.dtype)
    assert 0 < value_dim <= kv.shape[1] == query.shape[2], (query.shape, kv.shape, value_dim)
    assert selection.ids.shape[0] == query.shape[0], (selection.ids.shape, query.shape)
    widths = {"qk": query.shape[2], "value_dim": value_dim, "topk": selection.ids.shape[1]}
    backend = resolve(options, query.device, query.dtype, **widths).sparse_attention
    selected = (selection.ids, selection.counts)
    settings = (scale, value_dim, backend, options.attention_bytes)
    return _sparse_attention(query, kv, *selected, sink, *settings)


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Attention of one selection without autograd, a span of rows at a time, with a resolved
    backend.

    pack, heads, qk, dtype: of kv and of the queries. beside: bytes of a row that the caller holds
    while its span runs, which `workspace` bounds together with what the kernels take. last: the
    backward passes that use the selection end with this one.
    """

    selection: Selection
    pack: int
    heads: int
    qk: int
    value_dim: int
    dtype: torch.dtype
    scale: float
    backend: str
    workspace: int
    beside: int = 0
    last: bool = True
    sink: Tensor | None = None

    @cached_property
    def _sizes(self) -> Sizes | None:
        """None where the backward has no plan."""
        if self.backend not in _SIZES:
            return None
        ids = self.selection.ids
        widths = (self.heads, self.qk, ids.shape[1])
        given = (ids.device, self.dtype, widths, self.value_dim, self.pack, self.beside)
        return _SIZES[self.backend](*given)

    @cached_property
    def _rows(self) -> Rows:
        rows = len(self.selection.counts)
        if self._sizes is None:
            return Rows(0, span_rows(rows, self.beside, self.workspace), 0)
        return choose_rows(self._sizes, rows, self.workspace)

    @property
    def spans(self) -> list[slice]:
        """Which rows go together, in order; one empty span where there are none."""
        rows, span = len(self.selection.counts), self._rows.span
        return [slice(first, min(first + span, rows)) for first in range(0, max(rows, 1), span)]

    def forward(self, span: slice, query: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse of a span's queries, see sparse_attention."""
        ids, counts = self.selection.ids[span], self.selection.counts[span]
        return sparse_attention_forward(query, kv, ids, counts, *self._settings)

    def backward(
        self, span: slice, grad_out: Tensor, query: Tensor, kv: Tensor, delta: Tensor, lse: Tensor,
        dkv: Tensor, *, add: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(dquery like query, dsink [heads] like lse) of a span; the spans come in order. dkv
        [pack, qk], like lse, is written by the first of them, or with `add` added to, and added to
        by the others: ranks can sum theirs in fp32 before it is rounded to kv's dtype. delta: see
        row_products.

        A plan that the selection holds is used, and one made here is left in it for the next layer,
        unless those of all rows take too much of the workspace.
        """
        ids, counts = self.selection.ids[span], self.selection.counts[span]
        given = (grad_out.contiguous(), query, kv, ids, counts, delta, lse, dkv, self._plan(span))
        chunk = self._rows.chunk
        return sparse_attention_backward(*given, chunk, *self._settings, add or span.start > 0)

    @property
    def _settings(self) -> tuple:
        return self.sink, self.scale, self.value_dim, self.backend, self.workspace

    def _plan(self, span: slice) -> list[Tensor]:
        """Of a span, which is a part of its block's; [] where there is none."""
        sizes, chosen, rows = self._sizes, self.selection, self._rows
        whole = len(chosen.counts)
        if sizes is None or whole == 0:
            return []
        first = span.start // rows.block * rows.block
        block, key = slice(first, min(first + rows.block, whole)), (first, rows)
        if key not in chosen.plans:
            ids, counts = chosen.ids[block], chosen.counts[block]
            chosen.plans[key] = _PLAN[self.backend](ids, counts, sizes, rows.chunk)
        plan = chosen.plans[key]
        kept = not self.last and sizes.keeps(whole, rows.chunk, self.workspace)
        if span.stop == block.stop and not kept:
            del chosen.plans[key]
        return list(plan.part(slice(span.start - first, span.stop - first), rows.chunk))


def row_products(
    grad_out: Float[Tensor, "rows heads width"],
    out: Float[Tensor, "rows heads width"],
    backend: str,
) -> Float[Tensor, "rows heads"]:
    """delta of a backward pass: sum over the channels of grad_out * out, in fp32 or wider. The same
    of a linear map's result and its gradient."""
    return _row_products(grad_out.contiguous(), out.contiguous(), backend)


_SETTINGS = "Tensor? sink, float scale, int value_dim, str backend, int workspace_bytes"
_FORWARD_SCHEMA = f"(Tensor query, Tensor kv, Tensor ids, Tensor counts, {_SETTINGS})"
_BACKWARD_SCHEMA = (
    "(Tensor grad_out, Tensor query, Tensor kv, Tensor ids, Tensor counts, Tensor delta, Tensor "
    f"lse, Tensor(a!) dkv, Tensor[] plan, int chunk, {_SETTINGS}, bool add) -> (Tensor, Tensor)"
)


def _results(query, kv, ids, counts, sink, scale, value_dim, backend, workspace):
    """out and lse without values."""
    rows, heads, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty((rows, heads, value_dim)), query.new_empty((rows, heads), dtype=wide)


def _gradients(grad_out, query, kv, ids, counts, delta, lse, *others):
    """dquery and dsink without values."""
    return query.new_empty(query.shape), lse.new_empty(query.shape[1])


@operator(f"sparse_attention_forward{_FORWARD_SCHEMA} -> (Tensor, Tensor)", fake=_results)
def sparse_attention_forward(query, kv, ids, counts, sink, scale, value_dim, backend, workspace):
    """(out, lse) of sparse_attention with a resolved backend, without autograd."""
    return _FORWARD[backend](query, kv, ids, counts, sink, scale, value_dim, workspace)


@operator(f"sparse_attention_backward{_BACKWARD_SCHEMA}", fake=_gradients)
def sparse_attention_backward(
    grad_out, query, kv, ids, counts, delta, lse, dkv, plan, chunk, sink, scale, value_dim, backend,
    workspace, add,
):  # fmt: skip
    """(dquery like query, dsink [heads]) of some rows; dkv [pack, qk], like lse, is overwritten, or
    added to. plan: of these rows, in chunks of `chunk`; []: made here, in spans.
    """
    tensors = (grad_out, query, kv, ids, counts, delta, lse, dkv)
    if plan or backend not in _SIZES or len(query) == 0:
        return _BACKWARD[backend](*tensors, plan, chunk, sink, scale, value_dim, workspace, add)
    call = AttentionCall(
        selection=Selection(ids, counts), pack=len(kv), heads=query.shape[1], qk=query.shape[2],
        value_dim=value_dim, dtype=query.dtype, scale=scale, backend=backend, workspace=workspace,
        sink=sink,
    )  # fmt: skip
    found = []
    for span in call.spans:
        grad, queries, products, sums = (x[span] for x in (grad_out, query, delta, lse))
        found.append(call.backward(span, grad, queries, kv, products, sums, dkv, add=add))
    dqueries, dsinks = zip(*found)
    dquery = torch.cat(dqueries) if len(found) > 1 else dqueries[0]
    return dquery, torch.stack(dsinks).sum(0)


@torch.library.custom_op(
    "fullspan::sparse_attention",
    mutates_args=(),
    schema=f"{_FORWARD_SCHEMA} -> (Tensor, Tensor)",
)
def _sparse_attention(query, kv, ids, counts, sink, scale, value_dim, backend, workspace):
    return _FORWARD[backend](query, kv, ids, counts, sink, scale, value_dim, workspace)


@operator(
    "row_products(Tensor grad_out, Tensor out, str backend) -> Tensor",
    fake=lambda grad_out, out, backend: out.new_empty(
        out.shape[:2], dtype=torch.promote_types(out.dtype, torch.float32)
    ),
)
def _row_products(grad_out, out, backend):
    return _PRODUCTS[backend](grad_out, out)


def _setup_context(ctx, inputs, output):
    query, kv, ids, counts, sink, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, kv, ids, counts, *output, sink)


def _backward(ctx, grad_out, _):
    query, kv, ids, counts, out, lse, sink = ctx.saved_tensors
    dkv = lse.new_empty(kv.shape)
    grad_out, backend = grad_out.contiguous(), ctx.settings[2]
    delta = row_products(grad_out, out, backend)
    given = (grad_out, query, kv, ids, counts, delta, lse, dkv, [], 0, sink, *ctx.settings)
    dquery, dsink = sparse_attention_backward(*given, False)
    dsink = None if sink is None else dsink.to(sink.dtype)
    return dquery, dkv.to(kv.dtype), None, None, dsink, None, None, None, None


_sparse_attention.register_fake(_results)
_sparse_attention.register_autograd(_backward, setup_context=_setup_context)
