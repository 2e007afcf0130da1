"""Positions and key ranges of packs, and what a PackedLayout refuses."""

import pytest
import torch

from fullspan.errors import LayoutError
from fullspan.ops.packed import PackedLayout
from tests.ops.support import layout

PACKS = [
    ([3, 130, 70], 0),
    ([3, 130, 70], 5),
    ([64], 0),
    ([5, 11], 0),
    ([4, 4], 8),
    ([1] * 9, 7),
    ([16] * 8, 0),
    ([], 6),
]


@pytest.mark.parametrize(("lengths", "padding"), PACKS)
def test_positions_and_key_ranges_of_every_row(lengths, padding):
    pack = layout(lengths, padding)
    positions, starts, ends, first = [], [], [], 0
    for length in lengths:
        positions += range(length)
        starts += [first] * length
        ends += range(first + 1, first + length + 1)
        first += length
    tail = [0] * padding
    rows = torch.arange(pack.padded_length)
    start, end = pack.key_ranges(rows)
    assert pack.positions(rows).tolist() == positions + tail
    assert start.tolist() == starts + tail
    assert end.tolist() == ends + tail
    assert pack.real_length == first


def test_rows_are_global_in_any_order():
    pack = layout([6, 10], 4)
    rows = torch.tensor([17, 15, 6, 0, 5, 6])
    assert pack.positions(rows).tolist() == [0, 9, 0, 0, 5, 0]
    start, end = pack.key_ranges(rows)
    assert start.tolist() == [0, 6, 6, 0, 0, 6]
    assert end.tolist() == [0, 16, 7, 1, 6, 7]


def test_no_rows():
    none = torch.arange(0)
    assert layout([4]).positions(none).shape == (0,)
    assert [x.shape for x in layout([4]).key_ranges(none)] == [(0,), (0,)]


@pytest.mark.parametrize("row", [-1, 8])
def test_a_row_outside_the_pack_is_a_bug(row):
    with pytest.raises(AssertionError, match="outside a pack of 8"):
        layout([5], 3).positions(torch.tensor([0, row]))


@pytest.mark.parametrize(
    ("bounds", "length", "message"),
    [
        ([1, 4], 4, "starts at 1; it must start at 0"),
        ([], 4, "is empty; it must start at 0"),
        ([0, 4, 4], 8, "from 4 to 4 at document 1; bounds must increase"),
        ([0, 4, 2], 8, "from 4 to 2 at document 1; bounds must increase"),
        ([0, 4, 9], 8, "end at row 9, past its padded length of 8; .* data.pack_length"),
    ],
)
def test_bounds_that_do_not_fit(bounds, length, message):
    with pytest.raises(LayoutError, match=message):
        PackedLayout(cu_seqlens=torch.tensor(bounds, dtype=torch.int64), padded_length=length)


def test_bounds_on_another_device():
    with pytest.raises(LayoutError, match="int64 tensor on the CPU"):
        PackedLayout(cu_seqlens=torch.zeros(1, dtype=torch.int64, device="meta"), padded_length=0)
