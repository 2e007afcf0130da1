"""The index maps of a sequence over ranks."""

import pytest
import torch

from fullspan.errors import LayoutError
from fullspan.parallel.sequence import Partition, padded_length


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_row_has_one_owner_and_the_maps_are_inverse(size):
    partition = Partition(size=size, length=240)
    rows = [partition.rows(rank) for rank in range(size)]
    assert torch.equal(torch.cat(rows), torch.arange(240))  # a gather in rank order is the pack
    for rank, held in enumerate(rows):
        owner, place = partition.owner(held)
        assert owner.eq(rank).all()
        assert torch.equal(place, torch.arange(partition.rows_per_rank))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"size": 2, "length": 15}, "15 rows cannot be shared evenly by 2 ranks"),
        ({"size": 2, "length": 0}, "0 rows"),
        ({"size": 2, "length": 16, "mode": "striped"}, "unknown partition 'striped': .*contiguous"),
    ],
)
def test_refused(fields, words):
    with pytest.raises(LayoutError, match=words):
        Partition(**fields)
    with pytest.raises(LayoutError, match="rank 2 is outside"):
        Partition(size=2, length=16).rows(2)


def test_padded_length():
    assert [padded_length(n, 4) for n in (0, 1, 4, 5)] == [4, 4, 4, 8]
