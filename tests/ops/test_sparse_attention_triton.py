"""The plain Triton kernels of sparse attention against the reference: in Triton's interpreter on a
CPU, compiled on a GPU.
"""

import dataclasses
import itertools
import re

import pytest
import torch

from tests.support.selections import Attention, error, exact, make_attention
from tests.support.triton_interpreter import DEVICE

from fullspan.errors import ConfigError  # isort: skip
from fullspan.ops.sparse_attention.op import sparse_attention_backward  # isort: skip
from fullspan.ops.sparse_attention import chunks as sizing  # isort: skip
from fullspan.ops.sparse_attention import launch, plan as plans  # isort: skip
from fullspan.ops.sparse_attention import triton_backend  # isort: skip

WORKSPACE = 1 << 30


def run(
    case: Attention,
    workspace: int = WORKSPACE,
    plan: plans.Plan | None = None,
    chunk: int = 0,
) -> tuple[torch.Tensor, ...]:
    """out, lse, dquery, dkv, dsink by the kernels, the backward from their own forward."""
    inputs = (case.query, case.kv, case.ids, case.counts)
    settings = (case.sink, case.scale, case.value_dim, workspace)
    out, lse = triton_backend.forward(*inputs, *settings)
    dkv = torch.full(case.kv.shape, torch.nan, device=DEVICE)
    delta = launch.row_products(case.grad, out)
    given = (case.grad, *inputs, delta, lse, dkv, list(plan or ()), chunk, *settings[:3], "triton")
    dquery, dsink = sparse_attention_backward(*given, workspace, False)
    return out, lse, dquery, dkv, dsink


def check(
    case: Attention,
    tolerance: float,
    workspace: int = WORKSPACE,
    plan: plans.Plan | None = None,
    chunk: int = 0,
) -> None:
    got, want = run(case, workspace, plan, chunk), exact(case)
    assert torch.equal(got[1].isinf(), want[1].isinf())
    for name, mine, true in zip(
        ("out", "dquery", "dkv"), (got[0], *got[2:4]), (want[0], *want[2:4])
    ):
        assert mine.isfinite().all(), name
        assert error(mine, true) < tolerance, (name, error(mine, true))
    finite = ~want[1].isinf()
    assert (got[1] - want[1])[finite].abs().max() < tolerance * 10
    if case.sink is not None:
        assert error(got[4], want[4]) < tolerance


@pytest.mark.parametrize("rope", [0, 8])
@pytest.mark.parametrize("heads", [3, 20])
def test_agrees_with_the_reference(heads, rope):
    case = make_attention(
        rows=19,
        heads=heads,
        value=24,
        rope=rope,
        pack=40,
        topk=12,
        counts=(0, 1, 12, 5),
        sink=rope > 0,
        device=DEVICE,
    )
    check(case, 2e-6)


def test_half_precision_rounds_like_half_precision():
    case = make_attention(
        rows=17, heads=4, value=16, rope=16, pack=64, topk=20, dtype=torch.float16, device=DEVICE
    )
    check(case, 2e-3)


def test_direct_and_shared_keys_and_chunks(monkeypatch):
    """Thresholds lowered so that one small call has groups that share some keys, and groups that
    share none.
    """
    monkeypatch.setattr(plans, "FEW_DIRECT", 0)
    near = make_attention(
        rows=16, heads=2, value=16, rope=8, pack=400, topk=24, pool=48, device=DEVICE
    )
    far = make_attention(
        rows=20, heads=2, value=16, rope=8, pack=400, topk=24, device=DEVICE, seed=1
    )
    kv = torch.where(near.kv.isnan(), far.kv, near.kv)
    parts = {
        name: torch.cat([getattr(near, name), getattr(far, name)])
        for name in ("query", "ids", "counts", "grad")
    }
    case = Attention(kv=kv, sink=None, scale=0.3, value_dim=16, **parts)
    sizes = triton_backend.sizes(case.query.device, torch.float32, (2, 24, 24), 16, 400, 0)
    plan = plans.build_plan(case.ids, case.counts, sizes, 48)
    assert plan.mode.tolist() == [1, 0, 0]
    assert int(plan.direct_count[:16].sum()) > 0
    check(case, 2e-6)
    assert sizing.choose_rows(sizes, 36, 1 << 17).chunk == 16
    check(case, 2e-6, workspace=1 << 17)
    chunked = plans.build_plan(case.ids, case.counts, sizes, 16)
    assert [chunk.rows for chunk in chunked.chunks(16)] == [16, 16, 4]
    check(case, 2e-6, plan=chunked, chunk=16)


@pytest.mark.parametrize("block", [128, 256])
def test_the_plan_lists_every_pair_once(monkeypatch, block):
    """Each key's partial rows, shared or direct, stand for exactly the (row, slot) pairs that chose
    it, chunk by chunk.
    """
    monkeypatch.setattr(plans, "FEW_DIRECT", 0)
    topk, pack, rows, chunk = 24, 90, 40, 32
    case = make_attention(
        rows=rows,
        heads=1,
        value=16,
        rope=0,
        pack=pack,
        topk=topk,
        pool=40,
        counts=(24, 7, 20, 0, 24),
        device=DEVICE,
    )
    sizes = triton_backend.sizes(case.query.device, torch.float32, (1, 16, topk), 16, pack, 0)
    plan = plans.build_plan(case.ids, case.counts, dataclasses.replace(sizes, block=block), chunk)
    kinds = set()
    halves = [(plan.part(slice(0, 32), chunk), 0), (plan.part(slice(32, rows), chunk), 32)]
    parts = [(plan, 0), *halves]  # a plan, and the same in two spans
    for plan, begin, part in ((p, at, part) for p, at in parts for part in p.chunks(chunk)):
        start, groups = part.start.tolist(), range(part.groups.start, part.groups.stop)
        leaders, direct = {}, {}
        for group in groups:
            first = (group * sizing.GROUP - part.at) * topk
            for place in range(int(plan.shared[group])):
                leaders[first + place] = (group, place)
        for row in range(part.rows):
            at = part.at + row
            listed = plan.direct[at, : int(plan.direct_count[at])].tolist()
            for rank, slot in enumerate(listed):
                pair = row * topk + slot
                shares = int(plan.mode[at // sizing.GROUP])
                direct[int(plan.direct_first[at]) + rank if shares else pair] = pair
        assert not leaders.keys() & direct.keys()
        for key in range(pack):
            pairs = []
            for entry in plan.order[start[key] : start[key + 1]].tolist():
                kinds.add(entry in leaders)
                if entry not in leaders:
                    pairs.append(direct.pop(entry))
                    continue
                group, place = leaders[entry]
                n, column = divmod(place, block)
                active = plan.active[group, n, : int(plan.active_count[group, n])].tolist()
                slots = plan.slots[group, n, :, column].tolist()
                assert all(slot < 0 for slot in slots[len(active) :])
                held = [(row, slot) for row, slot in zip(active, slots) if slot >= 0]
                base = group * sizing.GROUP - part.at
                assert all(slot // topk == base + row for row, slot in held)
                pairs += [slot for _, slot in held]
            wanted = [
                row * topk + slot
                for row in range(part.rows)
                for slot in range(min(topk, int(case.counts[begin + part.at + row])))
                if int(case.ids[begin + part.at + row, slot]) == key
            ]
            assert sorted(pairs) == wanted, key
        assert not direct
    assert kinds == {True, False}


class Fused(triton_backend.PlainKernels):
    """What `hopper` does with 64 heads, in plain PyTorch: P and dS among the partial rows of groups
    that share keys, and the partial rows of the others without either.
    """

    fused = 16

    def dquery(self, chunk):
        call = self.call
        slots, heads = chunk.rows * call.shape.topk, call.shape.padded_heads
        own = {name: call.query.new_full((slots, heads), torch.nan) for name in ("prob", "dscore")}
        self.call = dataclasses.replace(call, step=0, **own)
        super().dquery(chunk)
        self.call = call
        call.part.fill_(torch.nan)
        topk = call.shape.topk
        for row in range(chunk.rows):
            pairs = torch.arange(topk, device=DEVICE)[: int(call.counts[chunk.at + row])]
            pairs = row * topk + pairs
            prob, dscore = own["prob"][pairs], own["dscore"][pairs]
            group = row // sizing.GROUP
            if int(chunk.plan.mode[chunk.groups][group]):
                call.prob[pairs + group * call.step] = prob
                call.dscore[pairs + group * call.step] = dscore
                continue
            query, grad = call.query[chunk.at + row], call.grad_out[chunk.at + row]
            rows = dscore[:, : len(query)] @ query
            rows[:, : grad.shape[1]] += prob[:, : len(query)] @ grad
            call.part[pairs] = rows

    def partials(self, chunk):
        launch.launch_union(self.call, chunk)
        launch.launch_direct(self.call, chunk, skip_dense=True)


def test_probabilities_among_the_partial_rows(monkeypatch):
    """Groups that share all keys, most of them, and none, in chunks of two groups."""
    monkeypatch.setattr(plans, "FEW_DIRECT", 2)
    shape = {"heads": 16, "value": 48, "rope": 16, "pack": 400, "topk": 64, "device": DEVICE}
    same = make_attention(rows=16, pool=72, **shape)
    most = make_attention(rows=16, pool=90, seed=1, **shape)
    none = make_attention(rows=20, seed=2, **shape)
    most.ids[:, ::8] = none.ids[:16, ::8]  # some of which the row has twice
    order = most.ids.sort(dim=1)
    twice = torch.zeros_like(order.values, dtype=torch.bool)
    twice[:, 1:] = order.values[:, 1:] == order.values[:, :-1]
    most.ids.masked_fill_(torch.zeros_like(twice).scatter(1, order.indices, twice), -1)
    cases = (same, most, none)
    names = ("query", "ids", "counts", "grad")
    parts = {name: torch.cat([getattr(case, name) for case in cases]) for name in names}
    kv = torch.randn(400, 64, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    case = Attention(kv=kv, sink=None, scale=0.2, value_dim=48, **parts)
    sizes = launch.sizes_of(Fused, case.kv.device, torch.float32, (16, 64, 64), 48, 400, 0)
    assert sizes.fused
    plan = launch.make_plan(Fused, case.ids, case.counts, sizes, 32)
    assert plan.mode.tolist() == [2, 1, 0, 0] and int(plan.direct_count[16:32].sum()) > 0
    inputs = (case.query, case.kv, case.ids, case.counts)
    out, lse = triton_backend.forward(*inputs, None, 0.2, 48, WORKSPACE)
    dkv = torch.full(case.kv.shape, torch.nan, device=DEVICE)
    delta = launch.row_products(case.grad, out)
    given = (case.grad, *inputs, delta, lse, dkv, list(plan), 32, None, 0.2, 48, WORKSPACE, False)
    dquery, _ = launch.backward(Fused, *given)
    want = exact(case)
    assert error(dquery, want[2]) < 2e-6 and error(dkv, want[3]) < 2e-6


def test_same_bits_on_every_run():
    case = make_attention(rows=20, heads=2, value=16, rope=8, pack=50, topk=16, device=DEVICE)
    for first, second in zip(run(case), run(case)):
        assert torch.equal(first, second)


def test_one_key():
    case = make_attention(
        rows=3, heads=2, value=16, rope=8, pack=1, topk=4, sink=True, device=DEVICE
    )
    check(case, 2e-6)


def test_rows_without_keys():
    case = make_attention(
        rows=4, heads=2, value=16, rope=8, pack=50, topk=16, counts=(0,), sink=True, device=DEVICE
    )
    out, lse, *gradients = run(case)
    assert lse.isinf().all() and not out.any()
    assert all(not gradient.any() for gradient in gradients)


def test_row_products():
    for rows, heads, width in ((5, 3, 24), (2, 40, 16), (0, 4, 8)):
        grad, out = torch.randn(2, rows, heads, width, device=DEVICE).unbind()
        torch.testing.assert_close(launch.row_products(grad, out), (grad * out).sum(2))


def test_padding_copies_only_where_something_is_missing():
    """Queries and their gradients are the largest tensors of a call."""
    x = torch.randn(6, 4, 8)
    assert launch.whole(x, 1, 4).data_ptr() == x.data_ptr()
    assert launch.whole(x.mT, 1, 4).is_contiguous()
    grown = launch.whole(x, 1, 3, -1.0)
    assert (
        torch.equal(grown[:, :4], x)
        and grown.shape == (6, 6, 8)
        and bool((grown[:, 4:] == -1).all())
    )


def test_chunks_fit_the_workspace():
    """At GLM-5.2's widths: below the budget, not much of it where little is won by more, and rounds
    of the multiprocessors nearly full.
    """
    for gib, beside, fused in itertools.product((1, 2, 4, 64), (0, 213_000), (True, False)):
        for pack in (8192, 131072, 1 << 20):
            sizes = sizing.Sizes(
                topk=2048, pack=pack, qk=576, heads=64, itemsize=2, units=132, beside=beside,
                fused=fused,
            )  # fmt: skip
            for rows in (4096, 10007, 32768):
                chunk, span, block = sizing.choose_rows(sizes, rows, gib << 30)
                assert chunk % sizing.GROUP == 0 and chunk <= span <= block <= rows
                assert span % chunk == 0 or span == rows
                assert block % span == 0 or block == rows
                assert chunk / (-(-chunk // 132) * 132) > 0.85
                table = block * sizes.table_bytes + 4 * pack * -(-block // chunk)
                held = max(table, chunk * sizes.row_bytes) + span * (beside + 4 * 2048)
                kept = sizes.kept_bytes(rows, chunk)
                held += kept if kept <= gib << 28 else sizes.kept_bytes(block, chunk)
                assert held <= gib << 30
    # Offsets of P and dS are int32 in kernels_hopper_shared.py.
    far = sizing.Sizes(
        topk=4096, pack=1 << 26, qk=576, heads=128, itemsize=2, units=132, tiles=2, block=256
    )
    assert sizing.choose_rows(far, 16384, 1 << 42).chunk * 4096 * 128 < 2**31
    little = sizing.Sizes(topk=2048, pack=8192, qk=576, heads=64, itemsize=2, units=132)
    assert sizing.choose_rows(little, 8192, 64 << 30).chunk < 800
    with pytest.raises(
        ConfigError, match=r"ops\.attention_bytes is 1048576; .* least (\d+)"
    ) as caught:
        sizing.choose_rows(sizes, 4096, 1 << 20)
    least = int(re.search(r"least (\d+)", str(caught.value))[1])
    assert sizing.choose_rows(sizes, 4096, least).chunk == 16
