"""Order and resume of packs."""

import json

import pytest
import torch

from fullspan.data.loader import PackLoader, epoch_order
from fullspan.data.packing import Document, build_pack
from fullspan.errors import DataError

ORDER = [6, 3, 1, 7, 5, 0, 2, 4]
"""The first epoch of 8 packs with seed 9, for ever."""


def packs(count, start=0):
    made = []
    for i in range(start, start + count):
        tokens = torch.tensor([i, i], dtype=torch.int32)
        trained = torch.ones(2, dtype=torch.bool)
        made.append(build_pack([Document(tokens=tokens, trained=trained, source="")], 4, 0))
    return made


def loader(count=8, microbatches=1, shuffle=True, seed=9, start=0):
    return PackLoader(packs(count, start), microbatches=microbatches, shuffle=shuffle, seed=seed)


def draw(from_loader, steps):
    """First tokens of the packs of so many steps."""
    return [int(p.tokens[0]) for _ in range(steps) for p in from_loader.next_step()]


def test_resume_at_index_19_of_8_rows_continues_exactly():
    """VeOmni's data tests: 8 rows, seed 9, resume at index 19."""
    whole = draw(loader(), 24)
    first = loader()
    draw(first, 19)
    again = loader()
    again.load_state(json.loads(json.dumps(first.state())))
    assert draw(again, 5) == whole[19:24]
    assert again.state() == {**first.state(), "index": 24}


def test_every_pack_once_an_epoch_in_another_order():
    rows = draw(loader(), 24)
    epochs = [rows[i : i + 8] for i in (0, 8, 16)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_is_a_pure_function_written_down_here():
    assert epoch_order(8, seed=9, epoch=0) == ORDER
    assert epoch_order(8, seed=10, epoch=0) != ORDER
    assert loader().pack_id(19) == epoch_order(8, seed=9, epoch=2)[3]


def test_without_shuffle_file_order():
    assert draw(loader(count=3, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_steps_reach_over_the_end_of_an_epoch_and_microbatches_do_not_change_the_order():
    single = draw(loader(), 15)
    by_three = loader(microbatches=3)
    assert [len(by_three.next_step()) for _ in range(2)] == [3, 3]
    assert draw(by_three, 3) == single[6:]
    assert by_three.index // len(by_three.packs) == 1, "in its second epoch"
    later = loader(microbatches=1)
    later.load_state(by_three.state())
    assert draw(later, 1) == draw(loader(), 16)[15:]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (loader(count=7), "number of packs was 8 .* is 7 now"),
        (loader(start=1), "content of the packs was"),
        (loader(seed=10), "data.seed was 9 .* is 10 now"),
        (loader(shuffle=False), "data.shuffle was True .* is False now"),
    ],
)
def test_state_of_other_data_is_refused(other, reason):
    with pytest.raises(DataError, match=reason):
        other.load_state(loader().state())


def test_damaged_state_is_refused():
    state = loader().state()
    with pytest.raises(DataError, match="got keys"):
        loader().load_state({"index": 3})
    with pytest.raises(DataError, match="whole number"):
        loader().load_state({**state, "index": -1})


def test_no_packs_or_no_microbatches():
    with pytest.raises(DataError, match="no packs"):
        PackLoader([], microbatches=1, shuffle=False, seed=0)
    with pytest.raises(DataError, match="at least 1"):
        loader(microbatches=0)
