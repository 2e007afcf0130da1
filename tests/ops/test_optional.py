"""The optional backends without their packages: what they refuse, and the arithmetic of their
borders, which is ours, against `reference`.
"""

import importlib.metadata
import logging
import math
import re

import pytest
import torch

from fullspan.errors import BackendError, ConfigError
from fullspan.ops import backend
from fullspan.ops.backend import resolve
from fullspan.ops.index_topk import cudnn_backend as cudnn_index
from fullspan.ops.index_topk import reference as reference_index
from fullspan.ops.options import OpOptions
from fullspan.ops.sparse_attention import cudnn_backend, flash_mla_backend, reference
from tests.support.selections import EDGE_COUNTS, error, exact, make_attention

GPU = torch.device("cuda")
NAMES = [("sparse_attention", "flash_mla"), ("sparse_attention", "cudnn"), ("index_topk", "cudnn")]
GIB = 1 << 30


@pytest.fixture
def hopper(monkeypatch):
    """With the answers of a Hopper machine in place of this one's; packages: name -> version."""
    packages = {"triton": "3.6.0"}

    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(backend.importlib.util, "find_spec", packages.get)
    monkeypatch.setattr(backend.importlib.metadata, "version", version)
    backend.choose.cache_clear()
    yield packages
    backend.choose.cache_clear()


@pytest.mark.parametrize(("op", "name"), NAMES)
def test_a_missing_package_is_named_with_how_to_get_it(hopper, op, name):
    with pytest.raises(
        BackendError,
        match=rf"^ops.{op} = '{name}' cannot run for torch.bfloat16 on cuda \([^\n]*{name}: needs "
        r"[^\n]* is not here: pip install [^\n]* \(docs/benchmarks.md\)\)$",
    ):
        resolve(OpOptions(**{op: name}), GPU, torch.bfloat16)


def test_an_old_cudnn_frontend_is_refused(hopper):
    hopper["nvidia-cudnn-frontend"] = "1.31.2"
    for op in ("sparse_attention", "index_topk"):
        with pytest.raises(BackendError, match=r"frontend 1.32 or newer, not 1.31.2: pip install"):
            resolve(OpOptions(**{op: "cudnn"}), GPU, torch.bfloat16)
    hopper["nvidia-cudnn-frontend"] = "1.100.0"
    chosen = resolve(OpOptions(index_topk="cudnn"), GPU, torch.bfloat16, index_dim=128, topk=2048)
    assert chosen.index_topk == "cudnn"


def test_what_the_optional_kernels_are_made_for(hopper):
    hopper.update({"nvidia-cudnn-frontend": "1.32.0", "flash_mla": "1"})
    for op, name, widths, reason in (
        ("sparse_attention", "flash_mla", {"qk": 40}, "needs qk 576 or 512, not 40"),
        ("sparse_attention", "cudnn", {"qk": 40}, "needs qk 576 or 512, not 40"),
        ("index_topk", "cudnn", {"index_dim": 64}, "needs index_dim 128, not 64"),
        ("index_topk", "cudnn", {"topk": 4096}, "chooses 2048 keys a row at most, not 4096"),
    ):
        with pytest.raises(BackendError, match=rf"{name}: {reason}"):
            resolve(OpOptions(**{op: name}), GPU, torch.bfloat16, **widths)
    del hopper["triton"]  # cuDNN's indexer needs none
    assert backend.choose("index_topk", "cudnn", GPU, torch.bfloat16) == "cudnn"
    assert backend.choose("index_topk", "cudnn", GPU, backend.E4M3) == "cudnn"


@pytest.mark.parametrize(("op", "name"), NAMES)
def test_auto_never_takes_an_optional_one_and_the_log_warns_of_bits(
    hopper, caplog, monkeypatch, op, name
):
    hopper.update({"nvidia-cudnn-frontend": "1.32.0", "flashmla_ops": "1"})
    with caplog.at_level(logging.INFO, logger="fullspan"):
        assert getattr(resolve(OpOptions(), GPU, torch.bfloat16), op) == "hopper"
        assert not any(name in record.message for record in caplog.records)
        with monkeypatch.context() as patch:
            patch.setitem(backend.BACKENDS, op, dict(reversed(backend.BACKENDS[op].items())))
            backend.choose.cache_clear()
            assert backend.choose(op, "auto", GPU, torch.bfloat16) == "reference"
        caplog.clear()
        assert backend.choose(op, name, GPU, torch.bfloat16) == name
    (record,) = caplog.records
    warned = (op, name) == backend.UNREPEATABLE
    assert record.levelno == (logging.WARNING if warned else logging.INFO)
    assert ("from run to run" in record.message) == warned


def test_cudnn_refuses_deterministic_algorithms():
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn_backend.refuse_determinism()
    torch.use_deterministic_algorithms(True)
    with pytest.raises(
        BackendError,
        match=r"^ops.sparse_attention = 'cudnn' adds by float atomics, and "
        r"torch.use_deterministic_algorithms\(True\) is set: name hopper or auto, [^\n]*$",
    ):
        cudnn_backend.refuse_determinism()


def test_too_many_heads_are_refused():
    case = make_attention(rows=2, heads=129, value=32, rope=8, pack=9, topk=4)
    given = (case.query, case.kv, case.ids, case.counts, None, 1.0, 32, GIB)
    with pytest.raises(BackendError, match=r"has 64 or 128 heads, not 129; name another backend"):
        flash_mla_backend.forward(*given)
    query, zero = torch.zeros(2, 65, 128), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(BackendError, match=r"has up to 64 index heads, not 65; name another"):
        cudnn_index.index_topk(query, query[:, 0], query[..., 0], zero, zero, 4, GIB)


@pytest.mark.parametrize("topk", [100, 128, 2048])
def test_cleaned_slots_hold_the_keys_of_a_row_and_nothing_else(topk):
    case = make_attention(
        rows=40, heads=2, value=8, rope=4, pack=3000, topk=topk, counts=EDGE_COUNTS
    )
    slots = flash_mla_backend.clean(case.ids, case.counts)
    assert slots.shape[1] % flash_mla_backend.SLOTS == 0 and slots.shape[1] >= topk
    for row, ids, count in zip(slots, case.ids, case.counts):
        assert torch.equal(row[row >= 0], ids[:count][ids[:count] >= 0])


@pytest.mark.parametrize("base", [math.e, 2])
@pytest.mark.parametrize("sink", [False, True])
def test_an_lse_of_either_base_becomes_the_natural_one_with_the_sink(base, sink):
    """From an lse without the sink, as the operator has it, and whatever it has for empty rows."""
    case = make_attention(
        rows=18, heads=4, value=8, rope=4, pack=70, topk=64, counts=(0, 1, 63), sink=sink
    )
    settings = (case.scale, case.value_dim, GIB)
    inputs = (case.query, case.kv, case.ids, case.counts)
    want = reference.forward(*inputs, case.sink, *settings)[1]
    bare = reference.forward(*inputs, None, *settings)[1]
    given = (bare / math.log(base)).masked_fill(bare.isinf(), torch.nan)
    unit = flash_mla_backend.unit_of(math.log(flash_mla_backend.SLOTS, base))
    slots = flash_mla_backend.clean(case.ids, case.counts)
    got = flash_mla_backend.natural(given, unit, slots, case.sink)
    assert want.isinf().any()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("found", [math.nan, math.inf, 0.0, math.log10(128)])
def test_an_lse_of_another_base_is_refused(found):
    with pytest.raises(BackendError, match=r"its lse of 128 equal scores is [^\n]*, neither 4.852"):
        flash_mla_backend.unit_of(found)


@pytest.mark.parametrize("size", [1.0, 1e-17])
def test_what_stands_for_the_outputs_has_their_products(size):
    """Also of gradients whose squares are small, and where a row's are 0."""
    case = make_attention(rows=30, heads=8, value=512, rope=64, pack=300, topk=64, seed=3)
    out = exact(case)[0]
    grad = (case.grad * size).bfloat16()
    grad[4] = 0
    want = reference.row_products(grad.double(), out)
    stand = cudnn_backend.outputs_of(grad, want.float())
    assert stand.dtype == torch.bfloat16 and stand.isfinite().all() and not stand[4].any()
    mine = error(reference.row_products(grad.double(), stand.double()), want)
    theirs = error(reference.row_products(grad.double(), out.bfloat16().double()), want)
    assert mine < theirs
    grad[7, 3, 5] = torch.nan
    assert cudnn_backend.outputs_of(grad, want.float())[7, 3].isnan().any()


def test_the_kernel_with_the_sink_in_lse_needs_no_sink():
    """dquery and dkv from lse with the sink and none given, and the sink's own gradient."""
    from fullspan.ops.sparse_attention.launch import sink_gradient

    case = make_attention(
        rows=20, heads=4, value=16, rope=4, pack=90, topk=65, counts=(0, 1, 64, 65), sink=True
    )
    out, lse, dquery, dkv, dsink = exact(case)
    wide = case.to(torch.float64)
    delta = reference.row_products(wide.grad, out)
    stand = cudnn_backend.outputs_of(wide.grad, delta)
    products = reference.row_products(wide.grad, stand)
    found = torch.empty_like(dkv)
    given = (wide.grad, wide.query, wide.kv, wide.ids, wide.counts, products, lse, found, (), 0)
    mine, _ = reference.backward(*given, None, case.scale, case.value_dim, GIB, False)
    torch.testing.assert_close(mine, dquery)
    torch.testing.assert_close(found, dkv)
    torch.testing.assert_close(sink_gradient(wide.sink, lse, delta), dsink)


def test_parts_of_a_backward_stay_within_the_workspace():
    """GLM-5.2's rows: one call within 4 GiB; parts within less; one line where not one row fits."""
    query = torch.empty(4096, 64, 576, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(131072, 576, dtype=torch.bfloat16, device="meta")
    pack = kv.numel() * 6
    assert cudnn_backend.part_rows(query, kv, 512, 4 * GIB) >= 4096
    rows = cudnn_backend.part_rows(query, kv, 512, GIB)
    assert rows > 0 and pack + rows * 64 * (2 * 512 + 8) <= GIB // 4 * 3
    assert cudnn_backend.part_rows(query, kv, 512, 1 << 50) * 64 * 576 < 2**31
    assert cudnn_backend.part_rows(query[:, :12], kv, 512, GIB) < rows
    with pytest.raises(ConfigError, match=r"^ops.attention_bytes is 1048576; cuDNN's ") as caught:
        cudnn_backend.part_rows(query, kv, 512, 1 << 20)
    said = re.search(r"needs at least (\d+) for 131072 keys$", str(caught.value))
    assert said and cudnn_backend.part_rows(query, kv, 512, int(said[1])) == 1
    with pytest.raises(ConfigError):
        cudnn_backend.part_rows(query, kv, 512, int(said[1]) - 4)


def test_slabs_of_scores_stay_within_the_workspace():
    rows = cudnn_index.slab_rows(131072, 2048, GIB)
    assert rows % 8 == 0 and 13 * 131072 * rows <= GIB
    assert cudnn_index.slab_rows(1 << 20, 2048, 1 << 45) * 2 * (1 << 20) < 2**31
    assert cudnn_index.slab_rows(1 << 20, 2048, 14 << 20) == 1
    with pytest.raises(ConfigError, match=r"^ops.workspace_bytes is 1048576; cuDNN's [^\n]*$"):
        cudnn_index.slab_rows(1 << 20, 2048, 1 << 20)


def test_ids_before_the_range_go_and_the_rest_moves_up():
    """As the op cuts a top-k over [0, end): keys before the start came last, by their score of
    -inf, and fill up rows with fewer keys than slots."""
    rows, pack, heads, topk = 60, 90, 4, 16
    query, key = torch.randn(rows, heads, 128), torch.randn(pack, 128)
    weights = torch.randn(rows, heads)
    start, end = torch.randint(0, pack, (2, rows)).sort(0).values
    start[:3], end[:3] = torch.tensor([0, 5, 80]), torch.tensor([0, 5, 85])
    want = reference_index.index_topk(query, key, weights, start, end, topk, GIB)[0]
    assert ((want >= 0).sum(1) < topk).any() and (start > 0).any()
    scores = torch.einsum("thd,sd->ths", query, key).relu().mul(weights[..., None]).sum(1)
    scores.masked_fill_(torch.arange(pack) < start[:, None], -torch.inf)
    for row in range(rows):
        best = scores[row, : end[row]].argsort(descending=True, stable=True)[:topk].sort().values
        ids = torch.full((1, topk), -1, dtype=torch.int32)
        ids[0, : len(best)] = best.int()
        assert torch.equal(cudnn_index.since(ids, start[row, None])[0], want[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_index_heads_are_filled_up_with_zeros(dtype):
    query = torch.randn(5, 33, 128).to(dtype)
    wide = cudnn_index.whole_heads(query).float()
    assert wide.shape == (5, 64, 128) and not wide[:, 33:].any()
    assert torch.equal(wide[:, :33], query.float())
    assert cudnn_index.whole_heads(query[:, :32]).shape[1] == 32
