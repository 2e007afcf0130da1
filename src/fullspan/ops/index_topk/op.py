"""The lightning indexer of DeepSeek-V3.2 (its report, section 2.1): for each row the keys with the
highest index scores, exactly.

It leaves out what the model does: projections, norms, rotation, the scale of the weights. It is not
differentiable, as the indexer is frozen.
"""

import torch

from fullspan.errors import ConfigError
from fullspan.ops.backend import on_first_call, resolve
from fullspan.ops.index_topk import reference
from fullspan.ops.options import OpOptions
from fullspan.ops.registration import operator
from fullspan.ops.selection import Selection
from fullspan.shapes import Float, Float32, Int64, Tensor

_IMPLEMENTATIONS = {
    "hopper": on_first_call("fullspan.ops.index_topk.hopper_backend", "index_topk"),
    "triton": on_first_call("fullspan.ops.index_topk.triton_backend", "index_topk"),
    "reference": reference.index_topk,
    "cudnn": on_first_call("fullspan.ops.index_topk.cudnn_backend", "index_topk"),
}


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
    """The topk keys of [key_start, key_end) with the highest scores, ids ascending, then -1.

    score(t, s) = sum_h weights[t, h] * relu(query[t, h] . key[s]) in fp32; of equal scores the
    lowest id wins. Keys outside a row's range are not chosen, whatever they hold; an empty range
    gives no id. With options.index_scores "fp8" query and key are rounded by
    `reference.quantise` first, and their scales multiply in fp32. Temporaries stay within
    options.workspace_bytes whatever the number of keys. Raises BackendError when the named backend
    cannot run here, ConfigError when the workspace is too small for one row.
    """
    assert topk > 0, topk
    widths = {"index_dim": query.shape[2], "topk": topk}
    backend = resolve(options, query.device, query.dtype, **widths).index_topk
    query, key, weights, scale = query.detach(), key.detach(), weights.detach(), None
    room = options.workspace_bytes
    if options.index_scores == "fp8":
        copies = sum(x.numel() + 8 * x[..., 0].numel() for x in (query, key))
        room -= copies
        if room <= 0:
            raise ConfigError(
                f"ops.workspace_bytes is {options.workspace_bytes}; the fp8 copies of the "
                f"indexer's queries and keys take {copies} of it"
            )
        query, query_scale = reference.quantise(query)
        key, scale = reference.quantise(key)
        weights = weights * query_scale
    tensors = (query, key, weights, key_start, key_end)
    return Selection(*_index_topk(*tensors, topk, backend, room, scale))


@operator(
    "index_topk(Tensor query, Tensor key, Tensor weights, Tensor key_start, Tensor key_end, "
    "int topk, str backend, int workspace_bytes, Tensor? key_scale=None) -> (Tensor, Tensor)",
    fake=lambda query, key, weights, key_start, key_end, topk, *given: (
        query.new_empty((query.shape[0], topk), dtype=torch.int32),
        query.new_empty(query.shape[0], dtype=torch.int32),
    ),
)
def _index_topk(query, key, weights, key_start, key_end, topk, backend, workspace, key_scale=None):
    scale = () if key_scale is None else (key_scale,)  # `triton` knows none
    run = _IMPLEMENTATIONS[backend]
    return run(query, key, weights, key_start, key_end, topk, workspace, *scale)
