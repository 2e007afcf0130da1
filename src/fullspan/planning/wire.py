"""Bytes that one rank receives from others in a step, by item, layer and pass.

The formulas are those of docs/parallelism.md, which tests/distributed/test_wire.py holds against
what real ranks move. Sizes that depend on the router are those of even routing, sizes that depend
on the data those of the plan's documents; the rank with the most indexer rows to trade is counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from fullspan.parallel.config import PARTITIONS, BalanceRule, evened
from fullspan.planning.case import Case
from fullspan.planning.memory import held_elements
from fullspan.planning.model_cost import Work, unit_shares

# Patterns, which decide how bytes meet the links (times.py).
GATHER, SCATTER, EXCHANGE, REDUCE = "all-gather", "reduce-scatter", "all-to-all", "all-reduce"
# What waits for nobody while it travels: it has a layer's or a query's work beside it.
OVERLAPPED = ("latent", "latent gradient", "index keys", "weights")


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One item in one pass of one unit (0 embedding, 1.. layers, then the head; -1: the step).

    received: bytes from other ranks. ranks: of the group.
    """

    phase: str
    unit: int
    item: str
    received: int
    pattern: str
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Trade:
    """What balancing the indexer does (parallel/balance.py).

    own: (query, key) pairs of a full layer by rank, before; most: pairs of the slowest rank as it
    runs; rows: those that the two ranks that trade most exchange.
    """

    own: Sequence[int]
    most: float
    rows: int = 0

    @classmethod
    def of(cls, case: Case) -> "Trade":
        """As parallel/balance.py decides."""
        own = [_pairs(case, rank) for rank in range(case.cp)]
        if not _rule(case).trades(own, case.rows):
            return cls(own=own, most=float(max(own)))
        sent = max(_sent(case, rank) for rank in range(case.cp) if own[rank] > own[-1 - rank])
        return cls(own=own, most=evened(own), rows=sent)


@dataclass(frozen=True)
class Traffic:
    """Every transfer of one pack, and those of a step that belong to no pack."""

    case: Case

    @cached_property
    def trade(self) -> Trade:
        return Trade.of(self.case)

    @cached_property
    def transfers(self) -> list[Transfer]:
        return [t for t in self._all() if t.received]

    @property
    def step_bytes(self) -> int:
        """Of a whole step: one rank's packs, and what follows them."""
        packs = self.case.run.train.accumulation
        return sum(t.received * (packs if t.unit >= 0 else 1) for t in self.transfers)

    def by_item(self) -> dict[str, dict[str, int]]:
        """{item: {pass: bytes}} of one pack; the step's own under the pass "step"."""
        found: dict[str, dict[str, int]] = {}
        for transfer in self.transfers:
            phases = found.setdefault(transfer.item, {})
            phases[transfer.phase] = phases.get(transfer.phase, 0) + transfer.received
        return found

    def of_layer(self, layer: int) -> dict[str, int]:
        """{item: bytes} of one layer in all passes of a pack."""
        found: dict[str, int] = {}
        for transfer in self.transfers:
            if transfer.unit == layer + 1:
                found[transfer.item] = found.get(transfer.item, 0) + transfer.received
        return found

    def _all(self) -> Iterator[Transfer]:
        layers = range(1, self.case.model.num_hidden_layers + 1)
        recompute = self.case.run.train.recompute
        passes = ["forward", "recompute", "backward"] if recompute else ["forward", "backward"]
        for unit in layers:
            for phase in passes:
                yield from self._sequence(phase, unit)
                yield from self._experts(phase, unit)
        yield from self._weights(recompute)
        yield from self._gradients()

    def _sequence(self, phase: str, unit: int) -> Iterator[Transfer]:
        case, model = self.case, self.case.model
        others = (case.cp - 1) * case.rows
        latent = others * (model.kv_lora_rank + model.qk_rope_head_dim)

        transfer = partial(Transfer, phase=phase, unit=unit, ranks=case.cp)
        if phase == "backward":
            yield transfer(item="latent gradient", received=latent * 4, pattern=SCATTER)
            return
        yield transfer(item="latent", received=latent * case.item, pattern=GATHER)
        if phase == "forward" and model.indexer_types[unit - 1] == "full":
            keys = others * model.index_head_dim * case.item
            yield transfer(item="index keys", received=keys, pattern=GATHER)
            # One of two ranks gets queries and weights, the other ids and counts: the larger.
            row = max(_rule(case).sent_bytes, _rule(case).returned_bytes)
            yield transfer(item="index rows", received=self.trade.rows * row, pattern=EXCHANGE)

    def _experts(self, phase: str, unit: int) -> Iterator[Transfer]:
        case, model = self.case, self.case.model
        if model.mlp_layer_types[unit - 1] != "sparse" or case.ep == 1:
            return
        away = case.slots * (case.ep - 1) // case.ep
        # Rows that come, each with its weight, and rows that return, where something reads them.
        ways = 1 if phase == "recompute" and not case.remakes_outputs(unit - 1) else 2
        rows = away * (ways * model.hidden_size * case.item + 4)
        counts = case.chunks * (case.ep - 1) * model.n_routed_experts // case.ep * 8
        parts = {"expert rows": rows, "expert counts": 0 if phase == "backward" else counts}
        for item, received in parts.items():
            yield Transfer(
                phase=phase, unit=unit, item=item, received=received, pattern=EXCHANGE,
                ranks=case.ep,
            )  # fmt: skip

    def _weights(self, recompute: bool) -> Iterator[Transfer]:
        """Each layer is gathered while the unit before it, in the order of the pass, runs: the
        transfer counts for the unit that runs. The embedding and the head are gathered when they
        run, and do not run in the backward pass."""
        case = self.case
        if not case.run.parallel.shard_weights or case.world == 1:
            return
        shares = unit_shares(case.model, case.form, case.world)
        last = case.model.num_hidden_layers
        moves = [("forward", unit, unit, "embedding and head") for unit in (0, last + 1)]
        moves += [("forward", unit, unit + 1, "weights") for unit in range(last)]
        if recompute:
            moves.append(("recompute", last, last, "weights"))
            moves += [("recompute", unit, unit - 1, "weights") for unit in range(2, last + 1)]
        for phase, unit, gathered, item in moves:
            received = (case.world - 1) * shares[gathered]
            yield Transfer(
                phase=phase, unit=unit, item=item, received=received, pattern=GATHER,
                ranks=case.world,
            )  # fmt: skip

    def _gradients(self) -> Iterator[Transfer]:
        """Adapter gradients in float32, once a step: of what every rank holds over all, of expert
        adapters over the ranks with the same experts (train/session.py); as a ring moves them."""
        case = self.case
        groups = {
            "gradients": (case.world, [a for a in case.adapters if not a.routed]),
            "expert gradients": (case.world // case.ep, [a for a in case.adapters if a.routed]),
        }
        for item, (ranks, chosen) in groups.items():
            received = 2 * 4 * held_elements(case, chosen) * (ranks - 1) // ranks
            yield Transfer(
                phase="step", unit=-1, item=item, received=received, pattern=REDUCE, ranks=ranks
            )


# ------------------------------------------------------------------------- pairs of each rank


def _chunks(case: Case, rank: int) -> list[tuple[int, int]]:
    """Runs [first, end) of a pack's rows that a rank holds (parallel/sequence.py)."""
    parts = PARTITIONS[case.run.parallel.partition]
    size = case.pack // (parts * case.cp)
    numbers = [rank] if parts == 1 else [rank, 2 * case.cp - 1 - rank]
    return [(n * size, (n + 1) * size) for n in numbers]


def _pairs(case: Case, rank: int) -> int:
    """(query, key) pairs that a full layer scores for the rows of a rank."""
    bounds = [
        Work.of(row, case.document, 1).pairs for chunk in _chunks(case, rank) for row in chunk
    ]
    return sum(bounds[1::2]) - sum(bounds[::2])


def _lengths(case: Case, rank: int) -> np.ndarray:
    """Keys that each row of a rank scores."""
    rows = np.concatenate([np.arange(first, end) for first, end in _chunks(case, rank)])
    return rows % case.document + 1


def _sent(case: Case, rank: int) -> int:
    """Rows that a rank sends to its mirror: the longest, up to half of its surplus of pairs."""
    mine, others = _lengths(case, rank), _lengths(case, case.cp - 1 - rank)
    half = (int(mine.sum()) - int(others.sum())) // 2
    return int((np.sort(mine)[::-1].cumsum() <= half).sum())


def _rule(case: Case) -> BalanceRule:
    model = case.model
    return BalanceRule(
        choice=case.run.parallel.balance_indexer, heads=model.index_n_heads,
        dim=model.index_head_dim, topk=model.index_topk, itemsize=case.item,
    )  # fmt: skip
