"""The `triton` and `hopper` backends on a GPU: errors against float64, edge cases, repeatability,
addresses past 2^31.
"""

import pytest
import torch

from tests.support.selections import EDGE_COUNTS, Attention, error, exact, make_attention, plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

GIB = 1 << 30
DEVICE = torch.device("cuda")


def usable(backend: str) -> bool:
    from fullspan.ops.backend import BACKENDS

    return BACKENDS["sparse_attention"][backend](DEVICE, torch.bfloat16, {}) is None


@pytest.fixture(params=["triton", "hopper"])
def backend(request) -> str:
    if not usable(request.param):
        pytest.skip(f"{request.param} cannot run here")
    return request.param


def run(case: Attention, backend: str, workspace: int = GIB) -> tuple[torch.Tensor, ...]:
    """out, lse, dquery, dkv, dsink through the ops."""
    from fullspan.ops.sparse_attention.op import (
        row_products,
        sparse_attention_backward,
        sparse_attention_forward,
    )

    inputs = (case.query, case.kv, case.ids, case.counts)
    settings = (case.sink, case.scale, case.value_dim, backend, workspace)
    out, lse = sparse_attention_forward(*inputs, *settings)
    dkv = torch.full(case.kv.shape, torch.nan, device="cuda")
    delta = row_products(case.grad, out, backend)
    given = (case.grad, *inputs, delta, lse, dkv, [], 0, *settings, False)
    dquery, dsink = sparse_attention_backward(*given)
    return out, lse, dquery, dkv, dsink


def check(case: Attention, backend: str, workspace: int = GIB, *, repeat: int = 5) -> None:
    """No worse than plain PyTorch in bfloat16, plus 10 %; nothing but selected keys read; the same
    bits twice, of the first `repeat` results.
    """
    got, want, rounded = run(case, backend, workspace), exact(case), plain(case)
    again = run(case, backend, workspace)
    assert torch.equal(got[1].isinf(), want[1].isinf())
    finite = ~want[1].isinf()
    assert not got[0][~finite].any() and not got[2][~finite].any()
    names = ("out", "dquery", "dkv")
    for name, mine, true, theirs in zip(names, (got[0], *got[2:4]), (want[0], *want[2:4]), rounded):
        assert mine.isfinite().all(), name
        mine_off, theirs_off = error(mine, true), error(theirs, true)
        assert mine_off <= 1.1 * theirs_off, (name, mine_off, theirs_off)
    assert (got[1] - want[1])[finite].abs().max() < 1e-3
    if case.sink is not None:
        assert error(got[4], want[4]) < 1e-2
    for first, second in zip(got[:repeat], again):
        assert torch.equal(first, second)


def case_of(**given) -> Attention:
    shape = {"rows": 40, "heads": 64, "value": 512, "rope": 64, "pack": 3000, "topk": 512}
    return make_attention(**{**shape, "dtype": torch.bfloat16, "device": "cuda", **given})


@pytest.mark.parametrize("heads", [12, 24, 48, 64, 128])
def test_head_counts(backend, heads):
    check(case_of(heads=heads, pool=700, sink=heads != 64), backend)


@pytest.mark.parametrize("heads", [64, 128])
def test_without_rope(backend, heads):
    check(case_of(heads=heads, rope=0, sink=heads == 64), backend)


def test_edge_counts(backend):
    check(case_of(topk=2048, counts=EDGE_COUNTS, pack=5000), backend)


def test_more_slots_than_keys(backend):
    check(case_of(topk=2048, pack=300), backend)


def test_topk_that_is_no_multiple_of_a_block(backend):
    check(case_of(topk=100, counts=(100, 64, 65, 99)), backend)


def test_topk_past_one_word_of_flags(backend):
    check(case_of(rows=20, topk=2500, pack=4000, counts=(2500, 2100, 3)), backend)


@pytest.mark.parametrize("pool", [None, 2560])
def test_full_rows_far_apart_and_close(backend, pool):
    check(case_of(rows=70, topk=2048, pack=60000, pool=pool), backend)


@pytest.mark.parametrize("direct", [1024, 256])
def test_some_of_the_keys_shared(backend, direct):
    """Shared and direct keys in one group: so many of the 2048 ids from anywhere, the others from
    one pool. `hopper` shares none where half are direct.
    """
    near = case_of(rows=64, topk=2048 - direct, pack=60000, pool=(2048 - direct) * 9 // 8)
    far = case_of(rows=64, topk=direct, pack=60000, seed=1)
    ids = torch.cat([near.ids, far.ids], 1)
    filled = [
        torch.arange(part.ids.shape[1], device="cuda") < part.counts[:, None]
        for part in (near, far)
    ]
    live = torch.cat(filled, 1) & (ids >= 0)
    ids = torch.where(live, ids, -1)
    order = ids.sort(dim=1, stable=True)
    twice = torch.zeros_like(live)
    twice[:, 1:] = order.values[:, 1:] == order.values[:, :-1]
    ids = ids.masked_fill(torch.zeros_like(live).scatter(1, order.indices, twice), -1)
    case = Attention(
        query=near.query,
        kv=torch.where(near.kv.isnan(), far.kv, near.kv),
        ids=ids,
        counts=torch.full_like(near.counts, 2048),
        sink=None,
        grad=near.grad,
        scale=near.scale,
        value_dim=512,
    )
    check(case, backend)


def test_chunks_of_rows(backend):
    """A workspace of a few groups, whose bounds are not the whole call's."""
    from fullspan.ops.sparse_attention.chunks import Sizes, choose_rows

    fused = backend == "hopper"
    sizes = Sizes(topk=512, pack=3000, qk=576, heads=64, itemsize=2, units=132, fused=fused)
    workspace = 50 << 20
    assert choose_rows(sizes, 300, workspace).chunk < 100
    case = case_of(rows=300, pool=700)
    check(case, backend, workspace)
    whole, parts = run(case, backend), run(case, backend, workspace)
    assert torch.equal(whole[2], parts[2])
    assert error(parts[3], whole[3]) < 2e-3


@pytest.mark.parametrize("heads", [4, 20])
def test_narrow_widths(heads):
    check(case_of(heads=heads, value=32, rope=8, topk=48, pack=200), "triton")


def test_float32(monkeypatch):
    case = case_of(heads=4, value=32, rope=16, topk=48, pack=200, dtype=torch.float32, sink=True)
    got, want = run(case, "triton"), exact(case)
    for name, mine, true in zip(("out", "lse", "dquery", "dkv", "dsink"), got, want):
        assert error(mine[~mine.isinf()], true[~true.isinf()]) < 2e-6, name


def test_more_than_two_to_the_31_elements(backend):
    """Queries and outputs whose offsets pass 2^31: the last rows equal a call of their own."""
    rows, tail = 60000, 64
    rng = torch.Generator(device="cuda").manual_seed(0)
    query = torch.empty(rows, 64, 576, dtype=torch.bfloat16, device="cuda").normal_(generator=rng)
    kv = torch.empty(4096, 576, dtype=torch.bfloat16, device="cuda").normal_(generator=rng)
    ids = torch.rand(rows, 256, generator=rng, device="cuda").topk(64).indices.int()
    counts = torch.full((rows,), 64, dtype=torch.int32, device="cuda")
    grad = torch.empty(rows, 64, 512, dtype=torch.bfloat16, device="cuda").normal_(generator=rng)
    assert query.numel() > 2**31

    def call(part: slice) -> tuple[torch.Tensor, ...]:
        shape = {"kv": kv, "sink": None, "scale": 0.04, "value_dim": 512}
        rows_of = {
            "query": query[part],
            "ids": ids[part],
            "counts": counts[part],
            "grad": grad[part],
        }
        return run(Attention(**rows_of, **shape), backend, 2 * GIB)

    whole, last = call(slice(None)), call(slice(rows - tail, None))
    for mine, alone in zip(whole[:3], last[:3]):
        assert torch.equal(mine[-tail:], alone)


def topk_inputs(kind: str, rows: int, pack: int, heads: int, dtype: torch.dtype):
    """Small integers: every sum is exact in fp32, and ties are plenty."""
    rng = torch.Generator(device="cuda").manual_seed(7)

    def integers(*shape: int, most: int) -> torch.Tensor:
        return torch.randint(-most, most + 1, shape, generator=rng, device="cuda").float()

    query, key = integers(rows, heads, 128, most=2), integers(pack, 128, most=2)
    weights = integers(rows, heads, most=3)
    if kind == "equal":
        query.zero_()
    if kind == "half zero":
        key[::2] = 0
    if kind == "negative":
        weights = -weights.abs()
    if kind in ("rising", "falling"):
        query.fill_(1.0)
        weights.fill_(1.0)
        steps = torch.arange(pack, device="cuda") * 128 // pack
        steps = steps if kind == "rising" else 128 - steps
        key = (torch.arange(128, device="cuda") < steps[:, None]).float()
    return query.to(dtype), key.to(dtype), weights


def topk_ranges(rows: int, pack: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    row = torch.arange(rows, device="cuda")
    rng = torch.Generator(device="cuda").manual_seed(3)
    lengths = torch.tensor([0, 1, 2047, 2048, 2049, 2500, 2999, min(pack, 20001)], device="cuda")
    lengths = lengths.repeat(rows // 8 + 1)[:rows].clamp_max(pack)
    at = (torch.rand(rows, generator=rng, device="cuda") * (pack - lengths + 1)).long()
    bounds = torch.tensor([0, 700, pack // 3, pack // 3 + 2048, pack // 2, pack], device="cuda")
    position = torch.linspace(0, pack - 1, rows, device="cuda").long()
    document = bounds[torch.searchsorted(bounds, position, right=True) - 1]
    zero = torch.zeros_like(row)
    return {
        "causal": (zero, pack - rows + 1 + row),
        "short": (at, at + lengths),
        "documents": (document, position + 1),
        "empty": (zero, zero),
    }


def topk_call(backend: str):
    from fullspan.ops.index_topk import hopper_backend, triton_backend

    return (hopper_backend if backend == "hopper" else triton_backend).index_topk


@pytest.mark.parametrize("topk", [512, 2048])
@pytest.mark.parametrize("kind", ["random", "equal", "half zero", "negative", "rising", "falling"])
def test_topk_is_exact(backend, kind, topk):
    from fullspan.ops.index_topk import reference

    rows, pack = 200, 33333
    inputs = topk_inputs(kind, rows, pack, 64 if topk == 512 else 32, torch.bfloat16)
    for name, (start, end) in topk_ranges(rows, pack).items():
        wide = [tensor.float() for tensor in inputs]
        want = reference.index_topk(*wide, start, end, topk, GIB)
        first, second = (topk_call(backend)(*inputs, start, end, topk, GIB) for _ in range(2))
        for mine, again, true in zip(first, second, want):
            assert torch.equal(mine, true), name
            assert torch.equal(mine, again), name


def test_topk_of_fp8_keys():
    from fullspan.ops.index_topk import reference

    if not usable("hopper"):
        pytest.skip("needs a Hopper GPU")
    rows, pack = 200, 33333
    query, key, weights = topk_inputs("random", rows, pack, 32, torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-1, 2, (pack,), device="cuda")
    for start, end in topk_ranges(rows, pack).values():
        wide = key.float() * scale[:, None]
        want = reference.index_topk(query.float(), wide, weights, start, end, 2048, GIB)
        got = topk_call("hopper")(query, key, weights, start, end, 2048, GIB, scale)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_topk_of_fp8_by_name():
    """Halves up to 3.5, which e4m3 holds with a scale of 2^-7: the ids are those of the inputs."""
    from fullspan.ops.index_topk import reference
    from fullspan.ops.index_topk.op import index_topk
    from fullspan.ops.options import OpOptions

    if not usable("hopper"):
        pytest.skip("needs a Hopper GPU")
    rng = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((200, 33, 128), (33333, 128), (200, 33))
    query, key, weights = (
        torch.randint(-7, 8, s, generator=rng, device="cuda") / 2 for s in shapes
    )
    query[..., 0], key[..., 0] = 3.5, 3.5
    options = OpOptions(index_scores="fp8", index_topk="hopper")
    for start, end in topk_ranges(200, 33333).values():
        want = reference.index_topk(query, key, weights, start, end, 2048, GIB)
        inputs = (query.bfloat16(), key.bfloat16(), weights, start, end)
        got = index_topk(*inputs, topk=2048, options=options)
        assert torch.equal(got.ids, want[0]) and torch.equal(got.counts, want[1])


def test_topk_more_slots_than_keys_and_nan_outside_ranges(backend):
    from fullspan.ops.index_topk import reference

    query, key, weights = topk_inputs("random", 70, 600, 32, torch.bfloat16)
    key[500:] = float("nan")
    start, end = torch.zeros(70, device="cuda").long(), torch.arange(430, 500, device="cuda")
    want = reference.index_topk(query.float(), key[:500].float(), weights, start, end, 2048, GIB)
    got = topk_call(backend)(query, key, weights, start, end, 2048, GIB)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_topk_of_a_million_keys_within_the_workspace(backend):
    """4096 x 1,048,576 scores: more than 2^31. The last rows equal a call of their own; memory
    stays under the budget.
    """
    rows, pack = 4096, 1 << 20
    rng = torch.Generator(device="cuda").manual_seed(0)
    query = torch.randn(rows, 32, 128, generator=rng, device="cuda").bfloat16()
    key = torch.randn(pack, 128, generator=rng, device="cuda").bfloat16()
    weights = torch.randn(rows, 32, generator=rng, device="cuda")
    start = torch.zeros(rows, dtype=torch.int64, device="cuda")
    end = torch.arange(pack - rows + 1, pack + 1, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ids, counts = topk_call(backend)(query, key, weights, start, end, 2048, GIB)
    results = ids.numel() * 4 + counts.numel() * 4 + 2 * 4 * rows
    assert torch.cuda.max_memory_allocated() - before <= GIB + results + (1 << 20)
    last = topk_call(backend)(
        query[-64:], key, weights[-64:], start[-64:], end[-64:], 2048, GIB // 4
    )
    assert torch.equal(ids[-64:], last[0]) and bool((counts == 2048).all())
    assert bool((ids[:, 1:] > ids[:, :-1]).all())
