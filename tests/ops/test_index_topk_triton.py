"""The plain Triton kernels of index top-k against the reference: in Triton's interpreter on a CPU,
compiled on a GPU.

Inputs are small integers, so that scores are exact whatever the order of the sums, and ties are
plenty.
"""

import pytest
import torch

from tests.support.triton_interpreter import DEVICE

from fullspan.errors import ConfigError  # isort: skip
from fullspan.ops.index_topk import reference, streaming, triton_backend  # isort: skip


def integers(*shape: int, most: int, seed: int) -> torch.Tensor:
    values = torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed))
    return values.float().to(DEVICE)


def check(query, key, weights, start, end, topk, *, first=128, workspace=1 << 30) -> None:
    want = reference.index_topk(query, key, weights, start, end, topk, 1 << 30)
    got = triton_backend.index_topk(query, key, weights, start, end, topk, workspace, first)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def ranges(rows: int, pack: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty, one key, the whole pack, and others that begin and end anywhere."""
    rng = torch.Generator().manual_seed(5)
    start = torch.randint(0, pack // 2, (rows,), generator=rng)
    end = torch.minimum(start + torch.randint(1, pack, (rows,), generator=rng), torch.tensor(pack))
    start[0], end[0] = 0, pack
    end[1] = start[1]
    end[2] = start[2] + 1
    return start.to(DEVICE), end.to(DEVICE)


@pytest.mark.parametrize("kind", ["random", "equal", "rising"])
def test_agrees_with_the_reference(kind):
    """rising: every later key beats all before it, so that a row's list floods at every span."""
    rows, pack, topk = 5, 700, 20
    query, key = integers(rows, 3, 24, most=3, seed=0), integers(pack, 24, most=3, seed=1)
    weights = integers(rows, 3, most=2, seed=2)
    if kind == "equal":
        query.zero_()
    if kind == "rising":
        query.fill_(1.0)
        weights.fill_(1.0)
        key.copy_((torch.arange(pack, device=key.device) // 4).float()[:, None].expand_as(key))
    key[::7] = 0
    check(query, key, weights, *ranges(rows, pack), topk)


def test_blocks_of_rows_begin_at_their_own_first_key():
    """Two blocks of rows in documents of their own, and a block whose rows have no key at all."""
    rows, pack = 2 * streaming.BQ + 2, 400
    query, key = integers(rows, 1, 16, most=2, seed=0), integers(pack, 16, most=2, seed=1)
    weights = torch.ones(rows, 1, device=DEVICE)
    start = torch.zeros(rows, dtype=torch.int64)
    start[streaming.BQ :] = 250
    end = torch.full((rows,), 250)
    end[streaming.BQ :] = torch.arange(streaming.BQ + 2) + 240
    end[2 * streaming.BQ :] = 0
    start[2 * streaming.BQ :] = 0
    key[320:] = float("nan")  # past every row's range
    check(query, key, weights, start.to(DEVICE), end.to(DEVICE), 16)


def test_more_slots_than_keys():
    query, key = integers(4, 2, 16, most=2, seed=0), integers(50, 16, most=2, seed=1)
    start, end = (
        torch.zeros(4, dtype=torch.int64, device=DEVICE),
        torch.tensor([50, 49, 1, 0], device=DEVICE),
    )
    check(query, key, torch.ones(4, 2, device=DEVICE), start, end, 64)


def test_spans_cover_all_keys_within_the_workspace():
    for rows, pack, budget in (
        (4096, 131072, 1 << 30),
        (2048, 1 << 20, 1 << 30),
        (100, 3000, 1 << 26),
        (16384, 131072, 1 << 28),
    ):
        slab, spans = streaming.plan_spans(rows, pack, 2048, budget, 384, streaming.FIRST_SPAN)
        assert streaming.slab_bytes(slab, max(keys for _, keys in spans), 2048, rows) <= budget
        assert [lo for lo, _ in spans] == [
            sum(keys for _, keys in spans[:i]) for i in range(len(spans))
        ]
        assert spans[-1][0] + spans[-1][1] >= pack + streaming.SEG
        assert all(keys % 384 == 0 and keys > 0 for _, keys in spans)
    with pytest.raises(ConfigError, match=r"ops\.workspace_bytes"):
        streaming.plan_spans(64, 4096, 2048, 1 << 20, 384, streaming.FIRST_SPAN)


def test_a_small_workspace_gives_the_same_ids():
    rows, pack = 5, 900
    query, key = integers(rows, 2, 16, most=2, seed=0), integers(pack, 16, most=2, seed=1)
    weights = integers(rows, 2, most=2, seed=2)
    need = streaming.slab_bytes(streaming.BQ, 256, 8, rows)
    slab, spans = streaming.plan_spans(rows, pack, 8, need, streaming.SEG, 256)
    assert slab == streaming.BQ and max(keys for _, keys in spans) == 256
    check(query, key, weights, *ranges(rows, pack), 8, first=256, workspace=need)
