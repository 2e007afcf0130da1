"""The DSA lightning indexer (DeepSeek-V3.2, section 2.1): the keys of each row with the highest index scores, exactly.

Not differentiable: the indexer is frozen. Projections, norms, rotation and the scale of the weights are the model's.
"""

import torch

from fullspan.ops.backend import OpOptions, resolve
from fullspan.ops.index_topk import reference
from fullspan.ops.selection import Selection
from fullspan.shapes import Float, Float32, Int64, Tensor

IMPLEMENTATIONS = {"reference": reference.index_topk}


def index_topk(
    query: Float[Tensor, "rows index_heads index_dim"],
    key: Float[Tensor, "pack index_dim"],
    weights: Float32[Tensor, "rows index_heads"],
    key_start: Int64[Tensor, "rows"],
    key_end: Int64[Tensor, "rows"],
    *,
    topk: int,
    options: OpOptions,
) -> Selection:
    """The topk keys of [key_start, key_end) with the highest score, ids ascending, -1 after them.

    score(t, s) = sum_h weights[t, h] * relu(query[t, h] . key[s]) in fp32; of equal scores the lowest id wins. Keys
    outside a row's range are never chosen, whatever they hold; an empty range gives no id. Temporaries stay within
    options.workspace_bytes for any number of keys. Raises BackendError when the named backend cannot run.
    """
    assert topk > 0, topk
    backend = resolve(options, query.device, query.dtype).index_topk
    ids, counts = _index_topk(
        query.detach(),
        key.detach(),
        weights.detach(),
        key_start,
        key_end,
        topk,
        backend,
        options.workspace_bytes,
    )
    return Selection(ids, counts)


@torch.library.custom_op(
    "fullspan::index_topk",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor weights, Tensor key_start, Tensor key_end, int topk, "
    "str backend, int workspace_bytes) -> (Tensor, Tensor)",
)
def _index_topk(query, key, weights, key_start, key_end, topk, backend, workspace_bytes):
    return IMPLEMENTATIONS[backend](query, key, weights, key_start, key_end, topk, workspace_bytes)


@_index_topk.register_fake
def _(query, key, weights, key_start, key_end, topk, backend, workspace_bytes):
    rows = query.shape[0]
    return query.new_empty((rows, topk), dtype=torch.int32), query.new_empty(
        rows, dtype=torch.int32
    )
