"""Sparse attention and its gradient against a dense masked one; empty slots and rows; memory."""

import pytest
import torch
from torch import Tensor

from fullspan.errors import ConfigError
from fullspan.ops.options import OpOptions
from fullspan.ops.selection import Selection
from fullspan.ops.sparse_attention import op, reference
from fullspan.ops.sparse_attention.op import (
    row_products,
    sparse_attention,
    sparse_attention_backward,
    sparse_attention_forward,
)
from tests.ops.support import allocations, dense_attention, nbytes, random_selection, selection

OPTIONS = OpOptions()
SCALE = 0.3


def inputs(rows: int, keys: int, heads: int = 4, qk: int = 24, dtype=torch.float64) -> list[Tensor]:
    """query, kv, sink, each requiring a gradient."""
    generator = torch.Generator().manual_seed(1)
    sizes = ((rows, heads, qk), (keys, qk), (heads,))
    made = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    return [x.to(dtype).requires_grad_() for x in made]


def run(query, kv, chosen, value_dim=16, sink=None, options=OPTIONS):
    return sparse_attention(
        query, kv, chosen, scale=SCALE, value_dim=value_dim, sink=sink, options=options
    )


def with_gradients(out: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("value_dim", [7, 16, 24])
@pytest.mark.parametrize(("rows", "keys", "topk"), [(9, 12, 5), (30, 300, 200), (40, 64, 64)])
def test_output_and_gradients_equal_dense_attention(rows, keys, topk, value_dim, with_sink):
    query, kv, sink = inputs(rows, keys)
    chosen = random_selection(rows, keys, topk)
    leaves = [query, kv, sink] if with_sink else [query, kv]
    used = sink if with_sink else None
    out, lse = run(query, kv, chosen, value_dim, used)
    expected = dense_attention(query, kv, chosen, SCALE, value_dim, used)
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        with_gradients(out, leaves, grad), with_gradients(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    assert not lse.requires_grad


@pytest.mark.parametrize("with_sink", [False, True])
def test_gradients_equal_finite_differences(with_sink):
    query, kv, sink = inputs(6, 5, heads=2, qk=4)
    chosen = selection([[], [0, 3], [-1, 2, -1, 4], [1], [0, 1, 2, 3, 4], [4]])
    leaves = (query, kv, sink) if with_sink else (query, kv)
    assert torch.autograd.gradcheck(
        lambda query, kv, sink=None: run(query, kv, chosen, 3, sink)[0], leaves
    )


def test_lse_is_the_natural_log_of_the_denominator():
    query, kv, sink = inputs(2, 6)
    chosen = selection([[0, 2, 5], [1]])
    for used in (None, sink):
        _, lse = run(query, kv, chosen, sink=used)
        for row, ids in enumerate(([0, 2, 5], [1])):
            logits = query[row] @ kv[ids].T * SCALE
            logits = logits if used is None else torch.cat([logits, sink[:, None]], 1)
            torch.testing.assert_close(lse[row], logits.logsumexp(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_that_of_plain_torch(dtype):
    """Against float64 of the same rounded inputs; a tenth more, as both are sums of roundings, and
    four of float32 because the softmax is computed again from an lse of about 5.
    """
    query, kv, sink = leaves = inputs(40, 300, dtype=dtype)
    chosen = random_selection(40, 300, 200)
    grad = torch.randn(40, 4, 16).to(dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    ours = with_gradients(run(query, kv, chosen, sink=sink)[0], leaves, grad)
    plain = with_gradients(dense_attention(query, kv, chosen, SCALE, 16, sink), leaves, grad)
    exact = dense_attention(wide[0], wide[1], chosen, SCALE, 16, wide[2])
    for one, other, truth in zip(
        ours, plain, with_gradients(exact, wide, grad.double()), strict=True
    ):
        assert one.dtype == dtype
        error, allowed = ((x.double() - truth).norm() / truth.norm() for x in (one, other))
        assert error <= 1.1 * allowed + 4 * torch.finfo(torch.float32).eps


def test_empty_slots_are_never_read():
    """-1 anywhere, and whatever lies at or past the count, in the output and in every gradient."""
    query, kv, sink = inputs(4, 9)
    clean = selection([[2, 4, 7], [5], [4, 8], [3]])
    dirty = selection(
        [[2, -1, 4, -1, 7, 99999], [-1, -1, 5, 0, 0, 0], [4, 8, 1, 2, 3, 5], [-1, 3]],
        counts=[5, 3, 2, 6],
    )
    for used in (None, sink):
        leaves = [query, kv] if used is None else [query, kv, sink]
        out, lse = run(query, kv, clean, sink=used)
        grad = torch.randn_like(out)
        expected = with_gradients(out, leaves, grad)
        again, again_lse = run(query, kv, dirty, sink=used)
        for ours, theirs in zip(with_gradients(again, leaves, grad), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(again_lse, lse)


def test_keys_that_no_row_selects_reach_nothing():
    """Key 0 above all, which is where a -1 would land."""
    query, kv, sink = inputs(5, 9, dtype=torch.float32)
    chosen = selection([[2, 4], [-1, 4, -1, 7], [], [5], [-1, -1]])
    with torch.no_grad():
        kv[[0, 1, 3, 6, 8]] = torch.tensor(
            [torch.nan, torch.inf, -torch.inf, torch.nan, torch.nan]
        )[:, None]
    out, _ = run(query, kv, chosen, sink=sink)
    gradients = torch.autograd.grad(out.sum(), [query, kv, sink])
    assert out.isfinite().all() and all(x.isfinite().all() for x in gradients)
    assert (gradients[1][[0, 1, 3, 6, 8]] == 0).all()
    assert (gradients[1][[2, 4, 5, 7]] != 0).all()


@pytest.mark.parametrize("with_sink", [False, True])
def test_rows_without_keys_take_no_part(with_sink):
    query, kv, sink = inputs(4, 6, dtype=torch.float32)
    sink = sink if with_sink else None
    chosen = selection([[], [1, 3], [-1, -1, -1], [0, 5]], counts=[0, 2, 3, 2])
    live = Selection(chosen.ids[[1, 3]], chosen.counts[[1, 3]])
    with torch.no_grad():
        query[[0, 2]] = torch.nan
    out, lse = run(query, kv, chosen, sink=sink)
    grad = torch.randn_like(out)
    grad[[0, 2]] = torch.nan
    leaves = [query, kv] if sink is None else [query, kv, sink]
    _, dquery, *others = with_gradients(out, leaves, grad)
    assert (out[[0, 2]] == 0).all() and (dquery[[0, 2]] == 0).all()
    assert (lse[[0, 2]] == torch.inf).all()
    kept = query[[1, 3]].detach().requires_grad_()
    alone, _ = run(kept, kv, live, sink=sink)
    expected = with_gradients(alone, [kept, *leaves[1:]], grad[[1, 3]])
    ours = [out[[1, 3]], dquery[[1, 3]], *others]
    assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))


@pytest.mark.parametrize("rows", [0, 3])
def test_no_row_has_a_key(rows):
    query, kv, sink = inputs(rows, 6)
    chosen = Selection(
        torch.full((rows, 4), -1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    )
    out, _ = run(query, kv, chosen, sink=sink)
    gradients = torch.autograd.grad(out.sum(), [query, kv, sink])
    assert out.shape == (rows, 4, 16) and (out == 0).all()
    assert all((x == 0).all() for x in gradients)


def test_a_key_that_every_row_selects():
    query, kv, _ = inputs(500, 40, dtype=torch.float32)
    chosen = random_selection(500, 39, 8)
    first = torch.full((500, 1), 39, dtype=torch.int32)  # ids need not ascend here
    chosen = Selection(torch.cat([first, chosen.ids], 1), chosen.counts + 1)
    out, _ = run(query, kv, chosen)
    exact = [x.detach().double().requires_grad_() for x in (query, kv)]
    truth = dense_attention(*exact, chosen, SCALE, 16, None)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, kv, grad)[0]
    expected = torch.autograd.grad(truth, exact[1], grad.double())[0]
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def test_more_slots_than_keys():
    query, kv, _ = inputs(4, 6)
    few = selection([[0], [0, 1], [0, 1, 2], [0, 1, 2, 3, 4, 5]])
    ids = torch.nn.functional.pad(few.ids, (0, 194), value=-1)
    out, _ = run(query, kv, few)
    grad = torch.randn_like(out)
    expected = with_gradients(out, [query, kv], grad)
    wide, _ = run(query, kv, Selection(ids, few.counts))
    for ours, theirs in zip(with_gradients(wide, [query, kv], grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_logits(size):
    query, kv, sink = inputs(20, 30)
    query = (query.detach() * size).requires_grad_()
    chosen = random_selection(20, 30, 12)
    out, lse = run(query, kv, chosen, sink=sink)
    expected = dense_attention(query, kv, chosen, SCALE, 16, sink)
    grad, leaves = torch.randn_like(out), [query, kv, sink]
    for ours, theirs in zip(
        with_gradients(out, leaves, grad), with_gradients(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        assert ours.isfinite().all()
    assert lse[chosen.counts > 0].isfinite().all()


def test_sinks_at_both_ends():
    query, kv, _ = inputs(6, 9)
    chosen = random_selection(6, 9, 4)
    sink = torch.tensor([-torch.inf, 0.0, 1e4, -1.0], dtype=torch.float64, requires_grad=True)
    out, _ = run(query, kv, chosen, sink=sink)
    assert torch.equal(out[:, 0], run(query, kv, chosen)[0][:, 0])
    assert (out[:, 2] == 0).all()
    gradients = torch.autograd.grad(out.sum(), [query, kv, sink])
    assert all(x.isfinite().all() for x in gradients)
    assert gradients[2][[0, 2]].tolist() == [0, 0] and gradients[2][1] != 0


def raw(dtype=torch.float32, rows: int = 60, keys: int = 300, topk: int = 200):
    """Arguments of the raw forward up to the backend, and a gradient of its output."""
    query, kv, sink = (x.detach() for x in inputs(rows, keys, dtype=dtype))
    chosen = random_selection(rows, keys, topk)
    grad = torch.randn(rows, 4, 16).to(dtype)
    return (query, kv, chosen.ids, chosen.counts), (sink, SCALE, 16, "reference"), grad


def both_passes(tensors, settings, grad, workspace: int) -> list[Tensor]:
    out, lse = sparse_attention_forward(*tensors, *settings, workspace)
    dkv = torch.full_like(tensors[1], torch.nan, dtype=lse.dtype)
    delta = row_products(grad, out, "reference")
    given = (grad, *tensors, delta, lse, dkv, [], 0, *settings, workspace, False)
    dquery, dsink = sparse_attention_backward(*given)
    return [out, lse, dquery, dkv, dsink]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_again_and_with_any_workspace(dtype):
    tensors, settings, grad = raw(dtype)
    first = both_passes(tensors, settings, grad, 1 << 30)
    assert [x.dtype for x in first] == [dtype, torch.float32, dtype, torch.float32, torch.float32]
    assert reference._block_slots(tensors[2], 400, 4000, 1 << 18) < 60 * 200
    for workspace in (1 << 30, 1 << 20, 1 << 18):
        again = both_passes(tensors, settings, grad, workspace)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_bits_in_any_company(dtype):
    tensors, settings, grad = raw(dtype)
    query, kv, ids, counts = tensors
    out, lse, dquery, _, _ = both_passes(tensors, settings, grad, 1 << 30)
    for rows in (slice(0, 1), slice(1, 3), slice(7, 14), slice(59, 60)):
        part = (query[rows], kv, ids[rows], counts[rows])
        alone = both_passes(part, settings, grad[rows], 1 << 30)
        assert all(torch.equal(x, y[rows]) for x, y in zip(alone, (out, lse, dquery)))


@pytest.mark.parametrize("keys", [1 << 10, 1 << 14])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_bounded_whatever_the_number_of_keys(dtype, keys):
    tensors, settings, grad = raw(dtype, rows=1500, keys=keys, topk=100)
    settings, workspace = (*settings[:3], 1 << 20), 1 << 20
    results = []
    peak, largest = allocations(lambda: results.append(reference.forward(*tensors, *settings)))
    out, lse = results.pop()
    assert peak - nbytes(out, lse) <= workspace and largest <= workspace
    dkv = torch.empty(tensors[1].shape)
    given = (grad, *tensors, lse.clone(), lse, dkv, (), 0, *settings, False)
    peak, largest = allocations(lambda: results.append(reference.backward(*given)))
    assert peak - nbytes(*results[0]) <= workspace and largest <= workspace


def test_a_workspace_too_small_for_one_row():
    query, kv, _ = inputs(2, 9, heads=64, qk=576, dtype=torch.float32)
    ids = torch.zeros(2, 2048, dtype=torch.int32)
    chosen = Selection(ids, torch.ones(2, dtype=torch.int32))
    with pytest.raises(ConfigError, match=r"ops.attention_bytes is 1048576; .* at least \d+, for"):
        run(query, kv, chosen, 512, options=OpOptions(attention_bytes=1 << 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_sink", [False, True])
def test_operator_registration(dtype, with_sink):
    query, kv, sink = inputs(5, 9, dtype=dtype)
    chosen = random_selection(5, 9, 4)
    settings = (sink if with_sink else None, SCALE, 16, "reference", 1 << 20)
    tensors = (query, kv, chosen.ids, chosen.counts)
    torch.library.opcheck(op._sparse_attention, (*tensors, *settings))
    detached = [x.detach() for x in tensors]
    raw_settings = (sink.detach() if with_sink else None, *settings[1:])
    torch.library.opcheck(sparse_attention_forward, (*detached, *raw_settings))
    out, lse = sparse_attention_forward(*detached, *raw_settings)
    dkv = lse.new_zeros(kv.shape)
    for add in (False, True):
        given = (out, *detached, lse.clone(), lse, dkv, [], 0, *raw_settings, add)
        torch.library.opcheck(sparse_attention_backward, given)
    torch.library.opcheck(op._row_products, (out, out.clone(), "reference"))
