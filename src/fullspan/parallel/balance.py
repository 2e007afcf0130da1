"""Even work for the indexer: a rank that has more to score than its mirror sends it some rows.

A causal row scores every key of its document before it, so of contiguous shards of one document the
last rank scores about twice the mean and everyone waits for it. Rank r and its mirror size - 1 - r
therefore trade. The one with more (query, key) pairs sends the index queries and weights of its
longest rows; the mirror, which has the gathered keys of the whole pack like every rank, scores them
beside its own and sends ids and counts back. Both then score the same number of pairs, to within
one row's. A row's selection does not depend on who makes it.

Who sends what follows from the pack's layout alone, so each rank works it out once per microbatch,
without communication; key ranges are never sent. Any partition can be balanced; documents and
padding can make the first ranks the busy ones. What it leaves out: work is evened within pairs of
ranks only, and the attention, which reads index_topk keys whatever the range, needs no balance.
"""

from dataclasses import dataclass

import torch

from fullspan.ops.packed import PackedLayout
from fullspan.ops.selection import Selection
from fullspan.parallel.collectives import all_to_all_rows
from fullspan.parallel.config import BalanceRule
from fullspan.parallel.group import Group
from fullspan.parallel.sequence import Partition
from fullspan.shapes import Float, Float32, Int64, Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Trade:
    """Which rows this rank scores in a microbatch, and how they get there and back.

    kept, sent   local rows that this rank and that its mirror scores, ascending; together all
    sends, receives   rows to and from each rank: all zero but the mirror's
    key_start, key_end   ranges of the rows that this rank scores: those kept, then those received
    """

    kept: Int64[Tensor, "kept"]
    sent: Int64[Tensor, "sent"]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    key_start: Int64[Tensor, "scored"]
    key_end: Int64[Tensor, "scored"]

    @classmethod
    def plan(
        cls,
        layout: PackedLayout,
        partition: Partition,
        rank: int,
        device: torch.device | None = None,
    ) -> "Trade":
        """The trade of `rank` with its mirror; a pure function of the pack's layout."""
        mirror = partition.size - 1 - rank
        rows, others = partition.rows(rank), partition.rows(mirror)
        lengths, other_lengths = _lengths(layout, rows), _lengths(layout, others)
        sent = _surplus(lengths, other_lengths)
        received = _surplus(other_lengths, lengths)
        stays = torch.ones(len(rows), dtype=torch.bool)
        stays[sent] = False
        kept = stays.nonzero()[:, 0]
        start, end = layout.key_ranges(torch.cat([rows[kept], others[received]]))
        return cls(
            kept=kept.to(device),
            sent=sent.to(device),
            sends=_only(len(sent), mirror, partition.size),
            receives=_only(len(received), mirror, partition.size),
            key_start=start.to(device),
            key_end=end.to(device),
        )

    def exchange(
        self,
        query: Float[Tensor, "rows index_heads index_dim"],
        weights: Float32[Tensor, "rows index_heads"],
        group: Group,
    ) -> tuple[
        Float[Tensor, "scored index_heads index_dim"], Float32[Tensor, "scored index_heads"]
    ]:
        """The rows that this rank scores. Query and weights of a row travel as one run of bytes."""
        parts = (query.flatten(1), weights)
        packed = [part[self.sent].contiguous().view(torch.uint8) for part in parts]
        arrived = all_to_all_rows(
            torch.cat(packed, 1), self.sends, self.receives, group, "rows of the indexer"
        )
        widths = [part.shape[1] for part in packed]
        scored = [
            torch.cat([part[self.kept], received.contiguous().view(part.dtype)])
            for part, received in zip(parts, arrived.split(widths, dim=1), strict=True)
        ]
        return scored[0].unflatten(1, query.shape[1:]), scored[1]

    def give_back(self, found: Selection, group: Group) -> Selection:
        """The selection of every local row, from what this rank and its mirror found."""
        kept = len(self.kept)
        answers = torch.cat([found.ids[kept:], found.counts[kept:, None]], 1)
        returned = all_to_all_rows(answers, self.receives, self.sends, group, "selections")
        ids = found.ids.new_empty((kept + len(self.sent), found.ids.shape[1]))
        counts = found.counts.new_empty(len(ids))
        ids[self.kept], counts[self.kept] = found.ids[:kept], found.counts[:kept]
        ids[self.sent], counts[self.sent] = returned[:, :-1], returned[:, -1]
        return Selection(ids, counts)


class IndexerBalance(BalanceRule):
    """The rule, on packs."""

    def plan(
        self,
        layout: PackedLayout,
        partition: Partition,
        rank: int,
        device: torch.device | None = None,
    ) -> Trade | None:
        """The trade of `rank`, or None where nobody trades: the same answer on every rank."""
        if self.choice == "off" or partition.size == 1:
            return None
        pairs = _lengths(layout, partition.gathered()).view(partition.size, -1).sum(1)
        if not self.trades(pairs.tolist(), partition.rows_per_rank):
            return None
        return Trade.plan(layout, partition, rank, device)


def _lengths(layout: PackedLayout, rows: Int64[Tensor, "rows"]) -> Int64[Tensor, "rows"]:
    """Keys that each global row scores."""
    start, end = layout.key_ranges(rows)
    return end - start


def _surplus(lengths: Int64[Tensor, "rows"], others: Int64[Tensor, "rows"]) -> Tensor:
    """Places of the longest rows that hold at most half of what `lengths` has above `others`."""
    half = (lengths.sum() - others.sum()) // 2
    longest = lengths.sort(descending=True, stable=True)
    fits = (longest.values.cumsum(0) <= half) & (longest.values > 0)
    return longest.indices[fits].sort().values


def _only(rows: int, peer: int, size: int) -> tuple[int, ...]:
    return tuple(rows if rank == peer else 0 for rank in range(size))
