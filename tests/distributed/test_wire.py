"""What a step moves, when, and what it asks the host: recorded on 4 real ranks, against the
formulas of docs/parallelism.md.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullspan.checkpoint.load import load_model
from fullspan.data.packing import Pack
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import inject, trainable_parameters
from fullspan.models.common.moe import Router
from fullspan.models.dsa import model as model_module
from fullspan.models.dsa.config import DsaConfig
from fullspan.ops.options import OpOptions
from fullspan.ops.packed import PackedLayout
from fullspan.parallel.config import ParallelConfig
from fullspan.parallel.mesh import Mesh
from fullspan.parallel.sequence import Partition
from fullspan.parallel.shard import ShardedWeights
from fullspan.train.schedule import OptimConfig
from fullspan.train.session import Session
from tests.support.budget import layer_budget
from tests.support.ranks import run_ranks
from tests.support.tiny import EVERY_TARGET, random_pack
from tests.support.wire import Event, Wire

RANKS, LENGTH, ITEM = 4, 160, 4  # float32
PACKS = ([3, 130, 20], [90])  # the last rank of the second has nothing but padding
# With these nothing reads what recompute would make of the experts' outputs.
UNREAD = tuple(target for target in EVERY_TARGET if target != "experts.down_proj")
SPLITS = {
    "ep 2": {"cp": 4, "ep": 2},
    "ep 4, traded": {"cp": 4, "ep": 4, "balance_indexer": "on", "targets": UNREAD},
    "ep 2, zigzag": {"cp": 4, "ep": 2, "partition": "zigzag"},
}
ITEMS = {
    "context.SequenceContext.start_gather": "latent",
    "context.GradientSum.start": "latent gradient",
    "context.SequenceContext.start_index_gather": "index keys",
    "balance.Trade.exchange": "index rows",
    "balance.Trade.give_back": "index rows",
    "expert.ExpertParallel.start": "expert counts",
    "expert._Exchange.forward": "expert rows",
    "expert._Exchange.backward": "expert rows",
    "expert.ExpertParallel.follow": "expert rows",
    "shard.ShardedWeights._start": "weights",
}


def record(rank: int, size: int, folder: Path, settings: dict) -> dict[str, Any]:
    """One step of two microbatches."""
    settings = dict(settings)
    targets = settings.pop("targets", EVERY_TARGET)
    parallel = ParallelConfig(shard_weights=True, **settings)
    mesh = Mesh.create(parallel, torch.device("cpu"))
    options = OpOptions(index_topk="reference", sparse_attention="reference")
    model = load_model(
        folder, dtype=torch.float32, device="cpu", options=options, recompute=True, mesh=mesh,
        shard_weights=True,
    )  # fmt: skip
    assert isinstance(model.weights, ShardedWeights)
    shares = [unit.share for unit in model.weights.units]
    inject(model, LoraConfig(r=2, alpha=4.0, targets=targets))
    session = Session(
        model, trainable_parameters(model), optim=OptimConfig(warmup_steps=0), total_steps=1,
        mesh=mesh, partition=parallel.partition, balance_indexer=parallel.balance_indexer,
    )  # fmt: skip
    wire, routed = Wire(), []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(
                lambda module, given, routing: routed.append(routing.experts.clone())
            )
    tables = Counter()
    for owner, name in (
        (model_module, "rope_angles"),
        (model_module, "inverse_frequencies"),
        (PackedLayout, "positions"),
        (PackedLayout, "key_ranges"),
        (Partition, "places"),
        (Partition, "rows"),
    ):
        setattr(owner, name, _counted(getattr(owner, name), tables, name))
    packs = [pack_of(lengths, model.config.vocab_size) for lengths in PACKS]
    traded = [session.place(pack).sequence.trade for pack in packs]
    tables.clear()
    wire.follow(model)
    with wire:
        loss = session.forward_backward(packs).loss
        norm = session.optim_step().grad_norm
    return {
        "result": (loss, norm),
        "config": model.config,
        "events": wire.events,
        "whole": wire.most_units_whole,
        "shares": shares,
        "routed": [experts.flatten().bincount(minlength=8) for experts in routed],
        "tables": tables,
        "traded": [(0, 0) if t is None else (sum(t.sends), sum(t.receives)) for t in traded],
    }


def _counted(function: Callable[..., Any], calls: Counter, name: str) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return counting


def pack_of(lengths: list[int], vocab: int) -> Pack:
    tokens, labels, layout = random_pack(lengths, vocab=vocab, multiple=LENGTH)
    return Pack(tokens=tokens, labels=labels, cu_seqlens=layout.cu_seqlens)


@pytest.fixture(scope="module", params=SPLITS, ids=SPLITS.keys())
def steps(request, tiny_checkpoints) -> tuple[dict, list[dict[str, Any]]]:
    """The settings of a split, and what each of its ranks recorded."""
    settings = SPLITS[request.param]
    return settings, run_ranks(RANKS, record, tiny_checkpoints["glm_moe_dsa"], settings)


@pytest.fixture(scope="module")
def alone(tiny_checkpoints, steps) -> dict[str, Any]:
    """One rank, with the same adapters."""
    settings = {"cp": 1, "targets": steps[0].get("targets", EVERY_TARGET)}
    return run_ranks(1, record, tiny_checkpoints["glm_moe_dsa"], settings)[0]


def test_the_recorded_steps_are_right(steps, alone):
    """Loss and gradient norm of one rank; it moves nothing."""
    assert not [event for event in alone["events"] if event.kind == "start"]
    _, ranks = steps
    for recorded in ranks:
        assert recorded["result"] == pytest.approx(alone["result"], rel=1e-6)


def expected(settings: dict, ranks: list[dict], rank: int) -> Counter:
    """Bytes that `rank` receives, by (pass, unit, item), as docs/parallelism.md has them."""
    mine = ranks[rank]
    config: DsaConfig = mine["config"]
    shares = [(RANKS - 1) * share for share in mine["shares"]]
    layers = range(1, config.num_hidden_layers + 1)
    bytes_of: Counter = Counter()
    for microbatch in range(len(PACKS)):
        for unit in layers:
            slots = (0, 0)
            if config.mlp_layer_types[unit - 1] == "sparse":
                slots = expert_slots(config, settings["ep"], ranks, rank, microbatch, unit)
            budget = layer_budget(
                config, unit - 1, rows=LENGTH // RANKS, cp=RANKS, ep=settings["ep"], itemsize=ITEM,
                slots=slots, traded=mine["traded"][microbatch], remade="targets" not in settings,
            )  # fmt: skip
            for (phase, item), count in budget.items():
                bytes_of[phase, unit, item] += count
        # Each layer is gathered while the unit before it, in the order of the pass, runs; the
        # embedding and the head when they run.
        bytes_of["forward", 0, "weights"] += shares[0]
        bytes_of["forward", layers[-1] + 1, "weights"] += shares[-1]
        for unit in range(layers[-1]):
            bytes_of["forward", unit, "weights"] += shares[unit + 1]
        bytes_of["recompute", layers[-1], "weights"] += shares[layers[-1]]
        for unit in layers[1:]:  # the embedding does not run backward
            bytes_of["recompute", unit, "weights"] += shares[unit - 1]
    return +bytes_of


def expert_slots(
    config: DsaConfig, ep: int, ranks: list[dict], rank: int, microbatch: int, unit: int
) -> tuple[int, int]:
    """Slots that leave this rank for an expert elsewhere, and that come from elsewhere."""
    sparse = [n for n, kind in enumerate(config.mlp_layer_types, 1) if kind == "sparse"]
    call = 2 * len(sparse) * microbatch  # forward, then recompute in reverse
    forward, recompute = call + sparse.index(unit), call + 2 * len(sparse) - 1 - sparse.index(unit)
    share = config.n_routed_experts // ep
    first = rank // ep * ep
    sent = received = 0
    for other in range(first, first + ep):
        routed = ranks[other]["routed"]
        assert torch.equal(routed[forward], routed[recompute])
        if other != rank:
            sent += int(ranks[rank]["routed"][forward].split(share)[other - first].sum())
            received += int(routed[forward].split(share)[rank - first].sum())
    return sent, received


def test_a_step_moves_what_the_formula_says(steps):
    settings, ranks = steps
    for rank, recorded in enumerate(ranks):
        moved: Counter = Counter()
        for event in recorded["events"]:
            if event.kind == "start" and not event.place.startswith("session."):
                moved[(*event.phase, ITEMS[event.place])] += event.received
        wanted = expected(settings, ranks, rank)
        assert +moved == wanted
        assert (settings.get("balance_indexer") == "on") == any(
            item == "index rows" for _, _, item in wanted
        )


def test_collectives_of_a_step_that_belong_to_no_layer(steps):
    """Once a step, however many microbatches: the loss, the gradients of what all ranks and of what
    some ranks hold, and of the latter the norm."""
    settings, ranks = steps
    for recorded in ranks:
        starts = Counter(
            e.place
            for e in recorded["events"]
            if e.kind == "start" and e.place.startswith("session.")
        )
        assert starts == {
            "session.Session._result": 1,
            "session.Session.gradients": 2 if settings["ep"] < RANKS else 1,
            "session.Session._gradient_norm": 1,
        }


def test_every_rank_enters_the_same_collectives_in_the_same_order(steps):
    _, ranks = steps
    orders = [
        [(e.what, e.place, e.phase) for e in recorded["events"] if e.kind == "start"]
        for recorded in ranks
    ]
    assert len(orders[0]) > 100
    assert all(order == orders[0] for order in orders)


def test_nothing_is_made_per_layer_that_a_microbatch_needs_once(steps):
    settings, ranks = steps
    traded = settings.get("balance_indexer") == "on"
    zigzag = settings.get("partition") == "zigzag"
    for recorded in ranks:
        assert recorded["tables"] == {
            "rope_angles": len(PACKS),
            "inverse_frequencies": len(PACKS),
            "positions": len(PACKS),
            "key_ranges": len(PACKS) * (5 if traded else 2),  # the facts; the balance's pairs
            # The session's and the facts'; a gather's order; the trade's two.
            "rows": len(PACKS) * (2 + RANKS + 2 * RANKS * zigzag + 2 * traded),
            **({"places": len(PACKS)} if zigzag else {}),
        }


def test_the_host_waits_only_for_the_sizes_of_expert_exchanges(steps):
    """One wait for each layer with experts, forward and recompute. Left out: ops, the loop that
    stands for a grouped matrix product on a CPU (models/common/linear.py), what a step does outside
    of layers, and the plan of a trade, which is made on the host."""
    _, ranks = steps
    planned = ("balance.IndexerBalance", "balance.Trade.plan", "balance._surplus")
    for recorded in ranks:
        sparse = recorded["config"].mlp_layer_types.count("sparse")
        outside = ("linear.", "session.", "optim.", "packing.", *planned)
        syncs = Counter(
            (event.place, event.what)
            for event in recorded["events"]
            if event.kind == "sync" and not event.place.startswith(outside)
        )
        wanted = len(PACKS) * 2 * sparse
        assert syncs == {("expert.PendingRoutes.wait", "tolist"): wanted}


def test_at_most_two_units_are_whole(steps):
    _, ranks = steps
    assert [recorded["whole"] for recorded in ranks] == [2] * RANKS


def of_unit(events: list[Event], phase: str, unit: int) -> list[str]:
    """First events of a unit in a pass, as words."""
    chosen = [e for e in events if e.phase == (phase, unit) and not e.place.startswith("shard.")]
    return [e.what if e.kind == "op" else f"{e.kind} {ITEMS.get(e.place, e.place)}" for e in chosen]


def test_the_gather_runs_beside_the_indexer_and_the_query(steps):
    """Layer 0, full: what the host starts between the start of the gather and its wait."""
    _, ranks = steps
    for recorded in ranks:
        for phase in ("forward", "recompute"):
            order = of_unit(recorded["events"], phase, 1)
            start = order.index("start latent")
            wait = order.index("wait context.GatheredLatent.wait")
            between = order[start:wait]
            assert order[wait + 1] == "sparse_attention_forward"
            assert between.count("mm") >= 2 and "bmm" in between, "the query and its absorption"
            assert ("index_topk" in between) == (phase == "forward")
            if phase == "forward":
                keys = order.index("start index keys")
                keys_wait = order.index("wait context.SequenceContext.select")
                assert "mm" in order[keys:keys_wait], "the index query"
                assert start < keys < keys_wait < order.index("index_topk") < wait


def test_the_reduce_scatter_runs_beside_the_backward_of_the_query(steps):
    _, ranks = steps
    for recorded in ranks:
        for unit in range(1, recorded["config"].num_hidden_layers + 1):
            order = of_unit(recorded["events"], "backward", unit)
            attention = order.index("sparse_attention_backward")
            start = order.index("start latent gradient")
            wait = order.index("wait context._AwaitGradient.backward")
            assert attention < start < wait
            between = order[start:wait]
            assert "bmm" in between, "the backward of the absorption"
            assert between.count("mm") >= 2, "the backward of q_b_proj"
            assert "mm" in order[wait:], "the backward of the latent's projection"
