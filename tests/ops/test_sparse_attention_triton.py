"""The plain Triton kernels of sparse attention against the reference: in Triton's interpreter on a CPU, compiled on a GPU."""

import pytest
import torch

from tests.support.selections import Attention, error, exact, make_attention
from tests.support.triton_interpreter import DEVICE

from fullspan.ops.sparse_attention import plan as plans  # isort: skip
from fullspan.ops.sparse_attention import triton_backend  # isort: skip

WORKSPACE = 1 << 30


def run(case: Attention, workspace: int = WORKSPACE) -> tuple[torch.Tensor, ...]:
    """out, lse, dquery, dkv, dsink by the kernels, the backward from their own forward."""
    inputs = (case.query, case.kv, case.ids, case.counts)
    settings = (case.sink, case.scale, case.value_dim, workspace)
    out, lse = triton_backend.forward(*inputs, *settings)
    return out, lse, *triton_backend.backward(case.grad, *inputs, out, lse, *settings)


def check(case: Attention, tolerance: float, workspace: int = WORKSPACE) -> None:
    got, want = run(case, workspace), exact(case)
    assert torch.equal(got[1].isinf(), want[1].isinf())
    for name, mine, true in zip(("out", "dquery", "dkv"), (got[0], *got[2:4]), (want[0], *want[2:4])):
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
        rows=19, heads=heads, value=24, rope=rope, pack=40, topk=12, counts=(0, 1, 12, 5), sink=rope > 0, device=DEVICE
    )
    check(case, 2e-6)


def test_half_precision_rounds_like_half_precision():
    case = make_attention(rows=17, heads=4, value=16, rope=16, pack=64, topk=20, dtype=torch.float16, device=DEVICE)
    check(case, 2e-3)


def test_direct_and_shared_keys_and_chunks(monkeypatch):
    """Thresholds lowered so that one small call has groups that share some keys, and groups that share none."""
    monkeypatch.setattr(plans, "FEW_DIRECT", 0)
    near = make_attention(rows=16, heads=2, value=16, rope=8, pack=400, topk=24, pool=48, device=DEVICE)
    far = make_attention(rows=20, heads=2, value=16, rope=8, pack=400, topk=24, device=DEVICE, seed=1)
    kv = torch.where(near.kv.isnan(), far.kv, near.kv)
    parts = {name: torch.cat([getattr(near, name), getattr(far, name)]) for name in ("query", "ids", "counts", "grad")}
    case = Attention(kv=kv, sink=None, scale=0.3, value_dim=16, **parts)
    plan = plans.build_plan(case.ids, case.counts, pack=400, first=0, rows=36, share=True)
    assert plan.mode.tolist() == [1, 0, 0]
    assert int(plan.direct_count[:16].sum()) > 0
    check(case, 2e-6)
    row = plans.bytes_per_row(24, 400, 24, 16, 4)
    assert plans.chunk_rows(36, 24, 400, 24, 16, 4, 8 * 400 + 17 * row, 1) == 17
    check(case, 2e-6, workspace=8 * 400 + 17 * row)


def test_the_plan_lists_every_pair_once(monkeypatch):
    """Each key's partial rows, shared or direct, stand for exactly the (row, slot) pairs that chose it, in order."""
    monkeypatch.setattr(plans, "FEW_DIRECT", 0)
    case = make_attention(rows=40, heads=1, value=16, rope=0, pack=90, topk=24, pool=40, counts=(24, 7, 20, 0, 24), device=DEVICE)
    plan = plans.build_plan(case.ids, case.counts, pack=90, first=4, rows=36, share=True)
    base = 36 * 24
    for key in range(90):
        pairs = []
        entries = plan.order[int(plan.start[key]) : int(plan.start[key + 1])].tolist()
        for entry in entries:
            if entry < base:
                pairs.append(entry)
                continue
            group, place = divmod(entry - base, plan.width)
            slots = plan.slots[group, place // plans.BLOCK, :, place % plans.BLOCK]
            rows = plan.active[group, place // plans.BLOCK, : int(plan.active_count[group, place // plans.BLOCK])]
            held = [row for row in range(plans.GROUP) if int(slots[row]) >= 0]
            assert set(held) <= set(rows.tolist())
            pairs += [int(slots[row]) for row in held]
        wanted = [
            row * 24 + slot
            for row in range(36)
            for slot in range(min(24, int(case.counts[4 + row])))
            if int(case.ids[4 + row, slot]) == key
        ]
        assert sorted(pairs) == wanted, key
    listed = [sorted(plan.direct[row, : int(plan.direct_count[row])].tolist()) for row in range(36)]
    assert sum(map(len, listed)) == int((plan.order[: int(plan.start[-1])] < base).sum())


def test_same_bits_on_every_run():
    case = make_attention(rows=20, heads=2, value=16, rope=8, pack=50, topk=16, device=DEVICE)
    for first, second in zip(run(case), run(case)):
        assert torch.equal(first, second)


def test_no_rows_and_rows_without_keys():
    case = make_attention(rows=4, heads=2, value=16, rope=8, pack=50, topk=16, counts=(0,), sink=True, device=DEVICE)
    out, lse, *gradients = run(case)
    assert lse.isinf().all() and not out.any()
    assert all(not gradient.any() for gradient in gradients)


def test_chunks_fit_the_workspace():
    """At GLM-5.2's widths: whole rounds of the multiprocessors, below the budget, and never less than a group."""
    for gib, units in ((1, 132), (4, 132), (64, 132)):
        rows = plans.chunk_rows(4096, 2048, 131072, 576, 64, 2, gib << 30, units)
        used = rows * plans.bytes_per_row(2048, 131072, 576, 64, 2) + 8 * 131072
        assert used <= gib << 30 and (rows % units == 0 or rows == 4096)
    assert plans.chunk_rows(4096, 2048, 131072, 576, 64, 2, 1 << 20, 132) == plans.GROUP
