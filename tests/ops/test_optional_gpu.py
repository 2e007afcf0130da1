"""The optional backends on a GPU, where their packages are: errors against float64 no larger than
those of plain PyTorch in bfloat16 plus 10 %, edge cases, exact top-k.
"""

from functools import partial

import pytest
import torch

from fullspan.errors import BackendError
from fullspan.ops.backend import BACKENDS
from fullspan.ops.options import OpOptions
from fullspan.ops.selection import Selection
from tests.ops import test_kernels_gpu as kernels
from tests.ops.test_kernels_gpu import case_of, run, topk_inputs, topk_ranges
from tests.support.selections import EDGE_COUNTS, error, exact

DEVICE = torch.device("cuda")
GIB = 1 << 30

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def need(op: str, name: str) -> None:
    refusal = BACKENDS[op][name](DEVICE, torch.bfloat16, {})
    if refusal:
        pytest.skip(f"{name} {refusal}")


@pytest.fixture(params=["flash_mla", "cudnn"])
def backend(request) -> str:
    need("sparse_attention", request.param)
    return request.param


# One of the passes is `hopper`'s. The forward pass repeats its bits, out and lse.
check = partial(kernels.check, repeat=2)


@pytest.mark.parametrize("heads", [12, 24, 48, 64, 128])
def test_head_counts(backend, heads):
    check(case_of(heads=heads, pool=700, sink=heads != 64), backend)


@pytest.mark.parametrize("heads", [64, 128])
def test_without_rope(backend, heads):
    check(case_of(heads=heads, rope=0, sink=heads == 64), backend)


@pytest.mark.parametrize("sink", [False, True])
def test_edge_counts(backend, sink):
    check(case_of(topk=2048, counts=EDGE_COUNTS, pack=5000, sink=sink), backend)


def test_no_row_has_a_key(backend):
    """Every output and gradient is 0 and lse +inf."""
    case = case_of(counts=(0,), sink=True)
    out, lse, dquery, dkv, dsink = run(case, backend)
    assert not any(x.any() for x in (out, dquery, dkv, dsink)) and bool((lse == torch.inf).all())


def test_more_slots_than_keys(backend):
    check(case_of(topk=2048, pack=300), backend)


def test_topk_that_is_no_multiple_of_a_block(backend):
    check(case_of(topk=100, counts=(100, 64, 65, 99)), backend)


@pytest.mark.parametrize("pool", [None, 2560])
def test_full_rows_far_apart_and_close(backend, pool):
    check(case_of(rows=70, topk=2048, pack=60000, pool=pool), backend)


def test_parts_of_rows_within_the_workspace():
    """cuDNN's dkv is rounded to bf16 a part: the sum of parts stays close to that of one."""
    need("sparse_attention", "cudnn")
    case = case_of(rows=300, pool=700)
    whole, parts = run(case, "cudnn"), run(case, "cudnn", 28 << 20)
    assert torch.equal(whole[2], parts[2])
    assert error(parts[3], whole[3]) < 5e-3


def test_deterministic_algorithms_are_refused():
    need("sparse_attention", "cudnn")
    torch.use_deterministic_algorithms(True)
    with pytest.raises(BackendError, match="adds by float atomics"):
        run(case_of(), "cudnn")


def test_through_the_public_op(backend):
    """By name, with autograd, as a user has it."""
    from fullspan.ops.sparse_attention.op import sparse_attention

    case, want = case_of(sink=True), exact(case_of(sink=True))
    query, kv, sink = (x.detach().requires_grad_() for x in (case.query, case.kv, case.sink))
    given = {"scale": case.scale, "value_dim": 512, "sink": sink}
    options = OpOptions(sparse_attention=backend)
    out, _ = sparse_attention(query, kv, Selection(case.ids, case.counts), options=options, **given)
    out.backward(case.grad)
    for mine, true in zip((out, query.grad, kv.grad, sink.grad), (want[0], *want[2:])):
        assert error(mine, true) < 2e-2


@pytest.mark.parametrize("topk", [512, 2048])
@pytest.mark.parametrize("kind", ["random", "equal", "half zero", "negative", "rising", "falling"])
def test_topk_is_exact(kind, topk):
    from fullspan.ops.index_topk import cudnn_backend, reference

    need("index_topk", "cudnn")
    rows, pack = 200, 33333
    inputs = topk_inputs(kind, rows, pack, 64 if topk == 512 else 32, torch.bfloat16)
    for name, (start, end) in topk_ranges(rows, pack).items():
        wide = [tensor.float() for tensor in inputs]
        want = reference.index_topk(*wide, start, end, topk, GIB)
        given = (*inputs, start, end, topk, GIB // 32)
        first, second = (cudnn_backend.index_topk(*given) for _ in range(2))
        for mine, again, true in zip(first, second, want):
            assert torch.equal(mine, true), name
            assert torch.equal(mine, again), name


def test_topk_of_fp8_keys():
    from fullspan.ops.index_topk import cudnn_backend, reference

    need("index_topk", "cudnn")
    rows, pack = 200, 33333
    for heads in (32, 64, 33):
        query, key, weights = topk_inputs("random", rows, pack, heads, torch.float8_e4m3fn)
        scale = 2.0 ** torch.randint(-1, 2, (pack,), device="cuda")
        for start, end in topk_ranges(rows, pack).values():
            wide = key.float() * scale[:, None]
            want = reference.index_topk(query.float(), wide, weights, start, end, 2048, GIB)
            given = (query, key, weights, start, end, 2048, GIB, scale)
            got = cudnn_backend.index_topk(*given)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_topk_more_slots_than_keys_and_nan_outside_ranges():
    from fullspan.ops.index_topk import cudnn_backend, reference

    need("index_topk", "cudnn")
    query, key, weights = topk_inputs("random", 70, 600, 32, torch.bfloat16)
    key[500:], key[:40] = float("nan"), float("nan")
    start = torch.full((70,), 40, device="cuda").long()
    end = torch.arange(430, 500, device="cuda")
    clean = key.float().nan_to_num()
    want = reference.index_topk(query.float(), clean, weights, start, end, 2048, GIB)
    got = cudnn_backend.index_topk(query, key, weights, start, end, 2048, GIB)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_topk_of_a_million_keys_within_the_workspace():
    from fullspan.ops.index_topk import cudnn_backend

    need("index_topk", "cudnn")
    rows, pack = 256, 1 << 20
    rng = torch.Generator(device="cuda").manual_seed(0)
    query = torch.randn(rows, 32, 128, generator=rng, device="cuda").bfloat16()
    key = torch.randn(pack, 128, generator=rng, device="cuda").bfloat16()
    weights = torch.randn(rows, 32, generator=rng, device="cuda")
    start = torch.zeros(rows, dtype=torch.int64, device="cuda")
    end = torch.arange(pack - rows + 1, pack + 1, device="cuda")
    given = (query, key, weights, start, end, 2048)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ids, counts = cudnn_backend.index_topk(*given, GIB)
    results = ids.numel() * 4 + counts.numel() * 4
    beside = 8 * pack  # the numbers of the keys
    assert torch.cuda.max_memory_allocated() - before <= GIB + results + beside + (1 << 20)
    whole, _ = cudnn_backend.index_topk(*given, 8 * GIB)
    assert torch.equal(ids, whole) and bool((counts == 2048).all())
