"""The index maps of a sequence over ranks."""

import pytest
import torch

from fullspan.errors import LayoutError
from fullspan.parallel.sequence import PARTITIONS, Partition


@pytest.mark.parametrize("mode", PARTITIONS)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_row_has_one_owner_and_the_maps_are_inverse(mode, size):
    partition = Partition(mode=mode, size=size, length=240)
    gathered, places = partition.gathered(), partition.places()
    assert torch.equal(gathered[places], torch.arange(240))
    assert torch.equal(places[gathered], torch.arange(240))
    for rank in range(size):
        rows = partition.rows(rank)
        assert (places[rows] // partition.rows_per_rank).eq(rank).all()
        assert rows.diff().gt(0).all()


def test_contiguous_gathers_in_order_and_zigzag_pairs_early_with_late_chunks():
    assert torch.equal(Partition(size=4, length=16).gathered(), torch.arange(16))
    zigzag = Partition(mode="zigzag", size=2, length=8)
    assert [zigzag.rows(rank).tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"size": 2, "length": 15}, "15 rows cannot be shared evenly by 2 ranks"),
        ({"size": 2, "length": 0}, "0 rows"),
        ({"size": 2, "length": 18, "mode": "zigzag"}, "positive multiple of 4"),
        ({"size": 2, "length": 16, "mode": "striped"}, "unknown partition 'striped': .*zigzag"),
    ],
)
def test_refused(fields, words):
    with pytest.raises(LayoutError, match=words):
        Partition(**fields)
    with pytest.raises(LayoutError, match="rank 2 is outside"):
        Partition(size=2, length=16).rows(2)
