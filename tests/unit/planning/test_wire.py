"""Planned bytes on the wire against the formulas that tests/distributed/test_wire.py holds against
real ranks, and the planned trade of indexer rows against the one that ranks make."""

from collections import Counter

import pytest
import torch

from fullspan.ops.packed import PackedLayout
from fullspan.parallel.balance import IndexerBalance
from fullspan.parallel.sequence import Partition
from fullspan.planning.memory import held_elements
from fullspan.planning.model_cost import share_bytes, unit_weights
from fullspan.planning.wire import Trade, Traffic
from tests.support.budget import layer_budget
from tests.unit.planning.conftest import assuming, glm_case, tiny_case

RANKS = 4


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["experts.down_proj", "down_proj"])
def test_bytes_of_every_layer_and_pass(glm, ep, dtype, target):
    """Slots spread evenly, weights sharded."""
    parallel = {"cp": RANKS, "ep": ep, "shard_weights": True, "balance_indexer": "off"}
    case = tiny_case(
        glm, world=RANKS, parallel=parallel, model={"dtype": dtype},
        lora={"r": 3, "targets": [target, "o_proj"]},
    )  # fmt: skip
    leaving = case.slots * (ep - 1) // ep
    wanted: Counter = Counter()
    units = unit_weights(case.model)
    shares = [(RANKS - 1) * share_bytes(unit, case.form, RANKS) for unit in units]
    layers = range(1, case.model.num_hidden_layers + 1)
    for unit in layers:
        budget = layer_budget(
            case.model, unit - 1, rows=case.rows, cp=RANKS, ep=ep, itemsize=case.item,
            slots=(leaving, leaving), remade=target.startswith("experts"),
        )  # fmt: skip
        for (phase, item), count in budget.items():
            wanted[phase, unit, item] += count
    # Each layer is gathered while the unit before it, in the order of the pass, runs.
    for unit in (0, layers[-1] + 1):
        wanted["forward", unit, "embedding and head"] += shares[unit]
    for unit in range(layers[-1]):
        wanted["forward", unit, "weights"] += shares[unit + 1]
    wanted["recompute", layers[-1], "weights"] += shares[layers[-1]]
    for unit in layers[1:]:
        wanted["recompute", unit, "weights"] += shares[unit - 1]
    planned: Counter = Counter()
    for transfer in Traffic(case).transfers:
        if transfer.phase != "step":
            planned[transfer.phase, transfer.unit, transfer.item] += transfer.received
    assert planned == +wanted


def test_more_chunks_send_more_counts(glm):
    """And the same rows."""
    parallel = {"cp": 2, "ep": 2}
    whole = tiny_case(glm, world=2, parallel=parallel, data={"pack_length": 2048})
    parts = tiny_case(
        glm, world=2, parallel=parallel, data={"pack_length": 2048},
        ops={"expert_bytes": 1 << 20},
    )  # fmt: skip
    assert whole.chunks == 1 < parts.chunks
    one, many = Traffic(whole).by_item(), Traffic(parts).by_item()
    assert one["expert rows"] == many["expert rows"]
    for phase, count in one["expert counts"].items():
        assert many["expert counts"][phase] == parts.chunks * count


def test_gradients_go_round_a_ring_once_a_step(glm):
    parallel = {"dp": 2, "cp": 2, "ep": 2}
    case = tiny_case(glm, world=4, parallel=parallel, train={"accumulation": 3})
    traffic = Traffic(case)
    routed = [a for a in case.adapters if a.routed]
    others = [a for a in case.adapters if not a.routed]
    step = {item: phases["step"] for item, phases in traffic.by_item().items() if "step" in phases}
    assert step == {
        "gradients": 2 * 3 * held_elements(case, others) * 4 // 4,
        "expert gradients": 2 * 1 * held_elements(case, routed) * 4 // 2,
    }
    packs = sum(t.received for t in traffic.transfers if t.phase != "step")
    assert traffic.step_bytes == 3 * packs + sum(step.values())


def test_one_rank_moves_nothing(glm):
    assert Traffic(tiny_case(glm)).transfers == []


@pytest.mark.parametrize("partition", ["contiguous", "zigzag"])
@pytest.mark.parametrize("choice", ["auto", "on", "off"])
@pytest.mark.parametrize(("length", "document", "cp"), [
    (131_072, 131_072, 8), (131_072, 9_000, 8), (8_192, 8_192, 2),
])  # fmt: skip
def test_the_trade_is_the_one_that_ranks_make(length, document, cp, choice, partition):
    case = glm_case(
        "glm52_131k_8xh200", "--data.pack_length", str(length), "--parallel.cp", str(cp),
        "--parallel.ep", str(cp), "--parallel.partition", partition,
        "--parallel.balance_indexer", choice,
    )  # fmt: skip
    case = assuming(case, document=document)
    bounds = [*range(0, length, document), length]
    layout = PackedLayout(cu_seqlens=torch.tensor(bounds), padded_length=length)
    parts = Partition(mode=partition, size=cp, length=length)
    model = case.model
    decides = IndexerBalance(
        choice=choice, heads=model.index_n_heads, dim=model.index_head_dim, topk=model.index_topk,
        itemsize=2,
    )  # fmt: skip
    trades = [decides.plan(layout, parts, rank) for rank in range(cp)]
    planned = Trade.of(case)
    if trades[0] is None:
        assert planned.rows == 0
        assert planned.most == max(planned.own)
    else:
        assert planned.rows == max(len(trade.sent) for trade in trades)
        most = max(int((trade.key_end - trade.key_start).sum()) for trade in trades)
        assert planned.most == pytest.approx(most, rel=1e-3)
