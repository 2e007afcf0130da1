"""Who scores which rows for whom: the plan is pure, so it is checked without ranks."""

import pytest
import torch

from fullspan.errors import ConfigError
from fullspan.ops.packed import PackedLayout
from fullspan.parallel.balance import IndexerBalance, Trade
from fullspan.parallel.config import ParallelConfig
from fullspan.parallel.sequence import Partition

PACKS = {
    "one document": [960],
    "a long document first, then short ones": [500] + [20] * 23,
    "sixty documents of 16": [16] * 60,
    "padding after a third": [320],
    "nothing but padding": [],
    "unlike documents": [1, 350, 9, 480, 33],
}
GLM = {"heads": 32, "dim": 128, "topk": 2048, "itemsize": 2}


def layout_of(lengths: list[int], padded: int = 960) -> PackedLayout:
    return PackedLayout(
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).long(), padded_length=padded
    )


@pytest.mark.parametrize("mode", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
def test_mirrors_score_the_same_number_of_pairs(lengths, size, mode):
    layout, partition = layout_of(lengths), Partition(mode=mode, size=size, length=960)
    trades = [Trade.plan(layout, partition, rank) for rank in range(size)]
    pairs = [int((trade.key_end - trade.key_start).sum()) for trade in trades]
    start, end = layout.key_ranges(torch.arange(960))
    assert sum(pairs) == int((end - start).sum())
    for rank, trade in enumerate(trades):
        mirror = trades[size - 1 - rank]
        held = torch.cat([trade.kept, trade.sent])
        assert torch.equal(held.sort().values, torch.arange(960 // size)), "each row once"
        assert trade.sends == tuple(
            len(trade.sent) if peer == size - 1 - rank else 0 for peer in range(size)
        )
        assert sum(trade.receives) == sum(mirror.sends)
        assert not (sum(trade.sends) and sum(trade.receives)), "rows go one way"
        assert len(trade.key_start) == len(trade.kept) + sum(trade.receives)
        # Each is within one row of their mean.
        longest = int((end - start).max())
        assert abs(pairs[rank] - pairs[size - 1 - rank]) < 2 * max(longest, 1)
        # The ranges are those of the rows that are scored, the received ones in the sender's order.
        rows, others = partition.rows(rank), partition.rows(size - 1 - rank)
        scored = torch.cat([rows[trade.kept], others[mirror.sent]])
        assert torch.equal(trade.key_start, start[scored])
        assert torch.equal(trade.key_end, end[scored])


def test_the_last_rank_sends_the_end_of_a_document():
    """Rows 960 - 120 k of one document: rank 7 of 8 has 15 times the pairs of rank 0."""
    partition = Partition(size=8, length=960)
    trade = Trade.plan(layout_of([960]), partition, 7)
    assert torch.equal(trade.sent, torch.arange(120 - len(trade.sent), 120))
    assert 50 < len(trade.sent) < 60
    assert not len(Trade.plan(layout_of([960]), partition, 0).sent)


def test_a_middle_rank_of_an_odd_number_keeps_its_rows():
    trade = Trade.plan(layout_of([960]), Partition(size=3, length=960), 1)
    assert sum(trade.sends) == sum(trade.receives) == len(trade.sent) == 0


@pytest.mark.parametrize(
    ("length", "size", "trades"),
    [(1 << 10, 8, False), (1 << 17, 8, True), (1 << 14, 16, False), (1 << 20, 32, True)],
)
def test_auto_trades_where_it_saves_time(length, size, trades):
    """GLM-5.2's indexer: 8,192 FLOPs a pair, 16,516 bytes a traded row."""
    balance = IndexerBalance(**GLM)
    assert (balance.sent_bytes, balance.returned_bytes) == (32 * 128 * 2 + 32 * 4, 2049 * 4)
    layout, partition = layout_of([length], length), Partition(size=size, length=length)
    plans = [balance.plan(layout, partition, rank) is not None for rank in (0, size // 2, size - 1)]
    assert plans == [trades] * 3


def test_the_sums_behind_auto_at_131k_on_8_ranks():
    """The last rank scores 15/64 of all pairs and after it an eighth; half its rows at most go."""
    balance = IndexerBalance(**GLM)
    length = 1 << 17
    rows = length // 8
    pairs = [rows * rows * rank + rows * rows // 2 for rank in range(8)]
    saved = balance.saved_seconds(pairs)
    assert saved == pytest.approx(length**2 * 7 / 128 * 8192 / 605e12, rel=1e-3)
    exchange = balance.exchange_seconds(pairs, rows)
    assert exchange == pytest.approx(100e-6 + rows * 7 / 15 * 16_516 / 300e9, rel=1e-3)
    planned = Trade.plan(layout_of([length], length), Partition(size=8, length=length), 7)
    assert sum(planned.sends) <= rows * 7 / 15, "the time is counted for no fewer rows than go"


def test_no_trade_where_it_is_off_or_changes_nothing():
    contiguous = Partition(size=4, length=960)
    on = IndexerBalance(choice="on", **GLM)
    assert IndexerBalance(choice="off", **GLM).plan(layout_of([960]), contiguous, 3) is None
    assert on.plan(layout_of([960]), Partition(size=1, length=960), 0) is None
    assert on.plan(layout_of([16] * 60), contiguous, 3) is None
    assert on.plan(layout_of([]), contiguous, 3) is None
    assert on.plan(layout_of([960]), Partition(mode="zigzag", size=4, length=960), 3) is None
    assert on.plan(layout_of([960]), contiguous, 1) is not None


def test_an_unknown_choice_is_refused():
    with pytest.raises(ConfigError, match="balance_indexer is 'yes': allowed are auto, on, off"):
        ParallelConfig(balance_indexer="yes")
    with pytest.raises(ConfigError, match="balance_indexer is 'yes'"):
        IndexerBalance(choice="yes", **GLM)
