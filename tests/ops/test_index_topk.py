"""Index scores and their top-k against plain Python; ties, ranges, block sizes, memory.

Inputs of small whole numbers have exact scores and many ties, so a scalar reference decides every
row. Selections of real numbers are checked against a sort of the scores that the op itself finds.
"""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fullspan.errors import ConfigError
from fullspan.ops.index_topk import op, reference
from fullspan.ops.index_topk.op import index_topk
from fullspan.ops.options import OpOptions
from tests.ops.support import allocations, nbytes, ranges

OPTIONS = OpOptions()
SMALL = OpOptions(workspace_bytes=1 << 20)
PACKS = [([3, 130, 70], 0), ([203], 5), ([16] * 8, 0), ([1] * 20, 3), ([5, 11], 48)]


def whole_numbers(rows: int, keys: int, heads: int, dim: int, seed: int = 0) -> list[Tensor]:
    """query, key, weights."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((rows, heads, dim), (keys, dim), (rows, heads))
    return [torch.randint(-2, 3, size, generator=generator).float() for size in sizes]


def real_numbers(rows: int, keys: int, heads: int, dim: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((rows, heads, dim), (keys, dim), (rows, heads))
    return [torch.randn(size, generator=generator) for size in sizes]


def best(score: list[float], start: int, end: int, topk: int) -> list[int]:
    """The scalar reference of the selection."""
    ids = sorted(range(start, end), key=lambda s: (-score[s], s))[:topk]
    return sorted(ids) + [-1] * (topk - len(ids))


def scalar_index_topk(query, key, weights, start, end, topk) -> list[list[int]]:
    """The scalar reference of the whole op, one score at a time."""
    query, key, weights = (x.double().numpy() for x in (query, key, weights))
    ids = []
    for t in range(len(query)):
        score = [
            sum(
                w * max(0.0, float(np.dot(q, k))) for q, w in zip(query[t], weights[t], strict=True)
            )
            for k in key
        ]
        ids.append(best(score, int(start[t]), int(end[t]), topk))
    return ids


@pytest.mark.parametrize("topk", [1, 16, 300])
@pytest.mark.parametrize(("lengths", "padding"), PACKS)
def test_selection_of_a_pack_equals_the_scalar_reference(lengths, padding, topk):
    start, end = ranges(lengths, padding)
    inputs = whole_numbers(len(start), len(start), heads=2, dim=3)
    chosen = index_topk(*inputs, start, end, topk=topk, options=OPTIONS)
    expected = scalar_index_topk(*inputs, start, end, topk)
    assert chosen.ids.tolist() == expected
    assert chosen.counts.tolist() == [sum(i >= 0 for i in row) for row in expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_scored_in_float32(dtype):
    query, key, weights = whole_numbers(40, 40, heads=4, dim=8)
    start, end = ranges([40])
    chosen = index_topk(
        query.to(dtype), key.to(dtype), weights, start, end, topk=7, options=OPTIONS
    )
    assert chosen.ids.tolist() == scalar_index_topk(query, key, weights, start, end, 7)
    rounded = query.bfloat16(), key.bfloat16()
    score = reference.scores(*rounded, weights)
    assert score.dtype == torch.float32
    assert torch.equal(score, reference.scores(*(x.float() for x in rounded), weights))


@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (4, 16), (32, 128)])
def test_scores_of_real_numbers(heads, dim):
    query, key, weights = real_numbers(9, 300, heads, dim)
    dots = np.einsum("thd,sd->ths", query.double().numpy(), key.double().numpy())
    expected = np.einsum("th,ths->ts", weights.double().numpy(), np.maximum(dots, 0))
    error = np.abs(reference.scores(query, key, weights).numpy() - expected)
    size = np.einsum("th,ths->ts", np.abs(weights.double().numpy()), np.abs(dots))
    assert (error <= 4e-7 * (1 + size)).all()


@pytest.mark.parametrize("options", [OPTIONS, SMALL])
@pytest.mark.parametrize("topk", [5, 64, 700])
def test_selection_of_real_numbers_over_many_blocks(topk, options):
    query, key, weights = real_numbers(30, 2500, heads=4, dim=16)
    start = torch.randint(0, 1500, (30,))
    end = start + torch.randint(0, 1000, (30,))
    chosen = index_topk(query, key, weights, start, end, topk=topk, options=options)
    score = reference.scores(query, key, weights).tolist()
    assert chosen.ids.tolist() == [
        best(score[t], int(start[t]), int(end[t]), topk) for t in range(30)
    ]


@pytest.mark.parametrize("make", [whole_numbers, real_numbers])
@pytest.mark.parametrize("topk", [3, 40, 1000])
def test_workspace_does_not_change_the_selection(make, topk):
    inputs = make(70, 3000, heads=4, dim=8)
    start, end = torch.arange(70) * 3, torch.full((70,), 2999)
    sizes = [1 << 20, 1 << 21, 1 << 30]
    blocks = {reference._block(inputs[0], topk, size) for size in sizes}
    assert len(blocks) > 1 and min(keys for _, keys in blocks) < 3000
    results = [
        index_topk(*inputs, start, end, topk=topk, options=OpOptions(workspace_bytes=size))
        for size in sizes
    ]
    assert all(torch.equal(results[0].ids, other.ids) for other in results[1:])


@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (2, 24), (4, 16), (32, 128)])
def test_a_row_scores_the_same_in_any_company(heads, dim):
    """Bit for bit, whatever rows are computed with it and wherever the key tile ends."""
    query, key, weights = real_numbers(67, 600, heads, dim)
    rows = min(67, reference._tile_rows(heads))
    together = reference.scores(query[:rows], key, weights[:rows])
    for first, last in ((0, 1), (1, 3), (2, 7), (rows - 1, rows)):
        alone = reference.scores(query[first:last], key, weights[first:last])
        assert torch.equal(alone, together[first:last])
    for tile in (0, 256, 512):
        for keys in (1, 3, 17, 88):
            part = key[tile : tile + keys]
            alone = reference.scores(query[:rows], part, weights[:rows])
            assert torch.equal(alone, together[:, tile : tile + keys])


def test_a_key_is_in_the_same_place_of_a_tile_for_every_row(monkeypatch):
    """Some library may round by place, so blocks begin at whole tiles of the pack."""
    firsts = []

    def pack(score, first, start, end, original=reference.pack):
        firsts.append(first)
        return original(score, first, start, end)

    monkeypatch.setattr(reference, "pack", pack)
    query, key, weights = real_numbers(300, 3000, heads=4, dim=8)
    start = torch.arange(300) + 250
    index_topk(query, key, weights, start, start + 2000, topk=5, options=SMALL)
    assert 0 in firsts and 512 in firsts and {first % 256 for first in firsts} == {0}


def test_a_row_selects_the_same_on_any_rank():
    start, end = ranges([3, 130, 70], 5)
    query, key, weights = real_numbers(208, 208, heads=4, dim=16)
    whole = index_topk(query, key, weights, start, end, topk=16, options=OPTIONS)
    for rows in (1, 16, 52, 104):
        parts = zip(*(x.split(rows) for x in (query, weights, start, end)), strict=True)
        ids = [
            index_topk(q, key, w, first, last, topk=16, options=OPTIONS).ids
            for q, w, first, last in parts
        ]
        assert torch.equal(torch.cat(ids), whole.ids)


def test_of_equal_scores_the_lowest_ids_win():
    query, key, weights = real_numbers(4, 3000, heads=2, dim=4)
    start, end = torch.tensor([0, 5, 900, 2990]), torch.full((4,), 3000)
    chosen = index_topk(query * 0, key, weights, start, end, topk=50, options=SMALL)
    expected = [list(range(first, min(first + 50, 3000))) for first in start.tolist()]
    assert [[i for i in row if i >= 0] for row in chosen.ids.tolist()] == expected


def test_ties_at_the_border_across_blocks():
    """Two keys beat the rest, which tie: the lowest of those fill up, from whatever block."""
    key = torch.zeros(3000, 1)
    key[[2000, 2500]] = 1.0
    ones = torch.ones(1, 1, 1)
    span = torch.tensor([700]), torch.tensor([3000])
    chosen = index_topk(ones, key, ones[0], *span, topk=4, options=SMALL)
    assert chosen.ids.tolist() == [[700, 701, 2000, 2500]]


def test_the_order_of_packed_scores_is_that_of_the_floats():
    tiny, inf = torch.finfo(torch.float32).smallest_normal, torch.inf
    score = torch.tensor([[-inf, -3e38, -2.5, -1.0, -tiny, 0.0, tiny, 0.5, 1.0, 3e38, inf]])
    packed = reference.pack(score, 0, torch.tensor([[0]]), torch.tensor([[99]]))[0].tolist()
    assert packed == sorted(packed) and len(set(packed)) == len(packed)
    assert packed[0] > reference.EMPTY


def test_minus_zero_ties_with_zero():
    score = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    packed = reference.pack(score, 7, torch.tensor([[0]]), torch.tensor([[99]]))
    assert packed[0].tolist() == sorted(packed[0].tolist(), reverse=True)
    assert reference.unpack(packed).tolist() == [[7, 8, 9, 10]]


def test_ids_up_to_the_last_int32():
    first = (1 << 31) - 4
    span = torch.tensor([[first]]), torch.tensor([[1 << 31]])
    packed = reference.pack(torch.tensor([[1.0, -1.0, 0.0, 1.0]]), first, *span)
    assert reference.unpack(packed).tolist() == [[first, first + 1, first + 2, first + 3]]
    assert reference.unpack(packed.topk(2).values).tolist() == [[first, first + 3]]


def test_infinite_scores_are_ranked():
    key = torch.tensor([[1.0], [3e38], [2.0], [3e38], [-1.0]])
    query = torch.full((2, 1, 1), 3e38)
    weights = torch.tensor([[1.0], [-1.0]])
    span = torch.zeros(2, dtype=torch.int64), torch.full((2,), 5)
    chosen = index_topk(query, key, weights, *span, topk=2, options=OPTIONS)
    assert chosen.ids.tolist() == [[1, 2], [0, 4]]  # row 0: inf, inf, inf; row 1: 0.0, then 3e38


def test_keys_outside_the_range_are_never_chosen():
    query, key, weights = real_numbers(6, 700, heads=2, dim=4)
    key[:300], key[650:] = torch.nan, torch.inf
    query[0] = torch.nan  # a row of padding
    start = torch.tensor([0, 300, 310, 400, 649, 300])
    end = torch.tensor([0, 301, 650, 600, 650, 300])
    chosen = index_topk(query, key, weights, start, end, topk=400, options=SMALL)
    assert chosen.counts.tolist() == [0, 1, 340, 200, 1, 0]
    for row, first, last in zip(chosen.ids.tolist(), start.tolist(), end.tolist(), strict=True):
        assert row == list(range(first, last)) + [-1] * (400 - last + first)


def test_no_rows_and_no_keys():
    query, key, weights = real_numbers(3, 4, heads=2, dim=4)
    none = torch.zeros(3, dtype=torch.int64)
    nothing = index_topk(query, key[:0], weights, none, none, topk=2, options=OPTIONS)
    assert nothing.ids.tolist() == [[-1, -1]] * 3 and nothing.counts.tolist() == [0, 0, 0]
    empty = index_topk(query[:0], key, weights[:0], none[:0], none[:0], topk=2, options=OPTIONS)
    assert empty.ids.shape == (0, 2) and empty.counts.shape == (0,)


def test_the_selection_is_not_differentiable():
    inputs = [x.requires_grad_() for x in real_numbers(8, 8, heads=2, dim=4)]
    chosen = index_topk(*inputs, *ranges([8]), topk=2, options=OPTIONS)
    assert not chosen.ids.requires_grad and not chosen.counts.requires_grad


@pytest.mark.parametrize("keys", [1 << 12, 1 << 15])
def test_memory_is_bounded_whatever_the_number_of_keys(keys):
    query, key, weights = real_numbers(64, keys, heads=4, dim=8)
    span = torch.zeros(64, dtype=torch.int64), torch.full((64,), keys)
    results = []
    peak, largest = allocations(
        lambda: results.append(reference.index_topk(query, key, weights, *span, 16, 1 << 20))
    )
    assert peak - nbytes(*results[0]) <= 1 << 20
    assert largest < 64 * 4 * (1 << 12)  # below a [rows, keys] of float32 for the fewest keys


def test_keys_that_no_row_can_see_cost_nothing():
    """Work follows the documents: 32 of 64 tokens cost a small part of one of 2048."""

    def flops(lengths: list[int]) -> int:
        inputs = real_numbers(2048, 2048, heads=4, dim=8)
        with FlopCounterMode(display=False) as counter:
            reference.index_topk(*inputs, *ranges(lengths), 16, 1 << 30)
        return counter.get_total_flops()

    one = flops([2048])
    tile = reference._tile_rows(4)
    ends = [min(first + tile, 2048) for first in range(0, 2048, tile)]
    causal = sum(-(-end // 256) * 256 * tile for end in ends)
    assert one == causal * 2 * 4 * (8 + 1)
    assert flops([64] * 32) < 0.3 * one


def test_a_workspace_too_small_for_one_row():
    inputs = real_numbers(2, 2, heads=64, dim=128)
    with pytest.raises(
        ConfigError, match=r"ops.workspace_bytes is 1048576; .* needs at least \d+$"
    ):
        index_topk(*inputs, *ranges([2]), topk=2048, options=SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_registration(dtype):
    query, key, weights = real_numbers(20, 20, heads=2, dim=4)
    inputs = (query.to(dtype).requires_grad_(), key.to(dtype), weights)
    arguments = (*inputs, *ranges([12, 5], 3), 6, "reference", 1 << 20)
    torch.library.opcheck(op._index_topk, arguments)
    torch.library.opcheck(op._index_topk, (*arguments, torch.ones(20)))


def nearest_e4m3(values: np.ndarray) -> np.ndarray:
    """Each value at the nearest of the numbers that e4m3 has, of two the one with the even code."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    codes = np.concatenate([codes[::2], codes[1::2]])  # argmin takes the first of equals
    at = np.abs(np.abs(values)[..., None] - codes).argmin(-1)
    return np.sign(values) * codes[at]


def powers_and_whole_numbers(*shape: int, seed: int) -> Tensor:
    """Vectors of whole numbers up to 448 times a power of two, which is then their scale: scores
    of the rounded ones are exact."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-448, 449, shape, generator=generator).float()
    values[..., 0] = 448.0
    return values * 2.0 ** torch.randint(-2, 3, (*shape[:-1], 1), generator=generator)


def test_fp8_scores_are_those_of_inputs_rounded_by_vector():
    rows, heads, dim, topk = 90, 3, 4, 12
    query, key = (
        powers_and_whole_numbers(rows, heads, dim, seed=0),
        powers_and_whole_numbers(rows, dim, seed=1),
    )
    query[3], key[5] = 0.0, 0.0
    weights = torch.randint(-2, 3, (rows, heads), generator=torch.Generator().manual_seed(2))
    start, end = ranges([60, 25], 5)
    options = OpOptions(index_scores="fp8")
    chosen = index_topk(query, key, weights.float(), start, end, topk=topk, options=options)

    def rounded(x: Tensor) -> Tensor:
        scale = np.abs(x.numpy()).max(-1, keepdims=True) / 448
        scale[scale == 0] = 1
        return torch.from_numpy(nearest_e4m3(x.numpy() / scale) * scale)

    expected = scalar_index_topk(rounded(query), rounded(key), weights, start, end, topk)
    assert chosen.ids.tolist() == expected
    exact = index_topk(query, key, weights.float(), start, end, topk=topk, options=OPTIONS)
    assert not torch.equal(chosen.ids, exact.ids)


def test_fp8_keys_outside_a_range_may_be_nan():
    query, key, weights = real_numbers(40, 40, heads=2, dim=8)
    span = torch.zeros(40).long(), torch.full((40,), 30)
    options = OpOptions(index_scores="fp8")
    want = index_topk(query, key, weights, *span, topk=8, options=options)
    key[30:] = float("nan")
    assert torch.equal(
        index_topk(query, key, weights, *span, topk=8, options=options).ids, want.ids
    )


def test_fp8_copies_count_as_workspace():
    query, key, weights = real_numbers(2, 70_000, heads=2, dim=16)
    options = OpOptions(index_scores="fp8", workspace_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"ops.workspace_bytes is 1048576; the fp8 copies .* 168"):
        index_topk(query, key, weights, *ranges([2]), topk=8, options=options)
