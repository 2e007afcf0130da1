"""Backend `flash_mla` of sparse attention: the forward pass by FlashMLA's sparse prefill operator.
Optional, by name only, on sm_90; `hopper` does the backward pass.

What differs at the border (FlashMLA's csrc/api/sparse_fwd.h, csrc/sm90/prefill/sparse): 64 or 128
heads, slots in multiples of 128, a sink that scales the output and is not in lse, and an lse whose
base depends on the release: 2 in sglang-kernel 0.4.4, as measured on an H200. A row without keys
gets out 0 from the kernel. Left out: autograd and checks (op.py).
"""

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import pad

from fullspan.errors import BackendError
from fullspan.ops.backend import FLASH_MLA
from fullspan.ops.sparse_attention.launch import whole
from fullspan.shapes import Float, Float32, Int32, Tensor

HEADS = 64
MOST_HEADS = 128
SLOTS = 128
NAMED = "ops.sparse_attention = 'flash_mla'"

# (q, kv [pack, 1, qk], ids [rows, 1, slots], scale, value_dim, sink, counts) -> out, maxima, lse
Operator = Callable[..., tuple[Tensor, Tensor, Tensor]]


def forward(
    query: Float[Tensor, "rows heads qk"],
    kv: Float[Tensor, "pack qk"],
    ids: Int32[Tensor, "rows topk"],
    counts: Int32[Tensor, "rows"],
    sink: Float[Tensor, "heads"] | None,
    scale: float,
    value_dim: int,
    workspace_bytes: int,
) -> tuple[Float[Tensor, "rows heads value"], Float32[Tensor, "rows heads"]]:
    """out and natural-log lse of every row over its chosen keys. Holds cleaned ids, and a padded
    copy of the query where heads are neither 64 nor 128. BackendError: more than 128 heads.
    """
    rows, heads, _ = query.shape
    if heads > MOST_HEADS:
        raise BackendError(
            f"{NAMED} has 64 or 128 heads, not {heads}; name another backend, or auto"
        )
    missing = -heads % HEADS
    sinks = None if sink is None else pad(sink.float(), (0, missing))
    query, kv = whole(query, 1, HEADS), kv.contiguous()
    step = (2**31 - 1) // (ids.shape[1] + SLOTS)  # the kernel counts slots in 32 bits
    if rows <= step:
        out, lse = _call(query, kv, ids, counts, sinks, scale, value_dim)
    else:
        given = zip(*(x.split(step) for x in (query, ids, counts)))
        found = [_call(q, kv, i, c, sinks, scale, value_dim) for q, i, c in given]
        out, lse = (torch.cat(parts) for parts in zip(*found))
    return out[:, :heads].contiguous(), lse[:, :heads].contiguous()


def _call(query, kv, ids, counts, sink, scale, value_dim) -> tuple[Tensor, Tensor]:
    if len(query) == 0:
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        return query.new_empty(*query.shape[:2], value_dim), lse
    slots, lengths = clean(ids, counts), counts.clamp(0, ids.shape[1])
    given = (query, kv[:, None], slots[:, None], scale, value_dim, sink, lengths)
    out, _, lse = load()(*given)
    return out, natural(lse, lse_unit(query.device), slots, sink)


def clean(
    ids: Int32[Tensor, "rows topk"], counts: Int32[Tensor, "rows"]
) -> Int32[Tensor, "rows slots"]:
    """ids with -1 in every empty slot, in whole multiples of SLOTS."""
    slots = torch.arange(ids.shape[1], device=ids.device)
    filled = ids.masked_fill(slots >= counts[:, None], -1)
    return whole(filled, 1, SLOTS, -1)


def natural(
    lse: Float32[Tensor, "rows heads"],
    unit: float,
    slots: Int32[Tensor, "rows slots"],
    sink: Float[Tensor, "heads"] | None,
) -> Float32[Tensor, "rows heads"]:
    """The op's lse: natural, the sink in it, +inf where a row has no key. slots: cleaned ids."""
    lse = lse * unit
    if sink is not None:
        lse = torch.logaddexp(lse, sink.to(lse.dtype))
    return lse.masked_fill((slots < 0).all(1, keepdim=True), torch.inf)


@functools.cache
def lse_unit(device: torch.device) -> float:
    """What makes the operator's lse natural, measured once: that of SLOTS scores of 0."""
    query = torch.zeros(1, HEADS, 576, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(1, 1, SLOTS, dtype=torch.int32, device=device)
    _, _, lse = load()(query, query[:, :1], ids, 1.0, 512, None, ids[0, 0, :1] + SLOTS)
    return unit_of(float(lse[0, 0]))


def unit_of(found: float) -> float:
    """1 or log 2, by what the operator gave for log SLOTS."""
    for unit in (1.0, math.log(2)):
        if math.isclose(found * unit, math.log(SLOTS), rel_tol=1e-3):
            return unit
    raise BackendError(
        f"{NAMED}: its lse of {SLOTS} equal scores is {found}, neither {math.log(SLOTS):.3f} nor "
        f"{math.log2(SLOTS):.3f}; this release is not known, name another backend"
    )


@functools.cache
def load() -> Operator:
    """The operator: of a bare flashmla_ops library on the path, of flash_mla, or of sgl_kernel,
    whose other libraries stay out."""
    name = next(name for name in FLASH_MLA if importlib.util.find_spec(name))
    try:
        if name == "flash_mla":
            return importlib.import_module(name).flash_mla_sparse_fwd
        torch.ops.load_library(_library(name))
        return torch.ops.sgl_kernel.sparse_prefill_fwd
    except (ImportError, OSError, AttributeError, IndexError) as error:
        raise BackendError(f"{NAMED}: {name} does not load: {error}") from error


def _library(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    if spec.submodule_search_locations is None:
        return str(spec.origin)
    folder = Path(spec.submodule_search_locations[0])
    return str(sorted(folder.glob("flashmla_ops*.so"))[0])
