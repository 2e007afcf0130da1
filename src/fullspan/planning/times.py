"""Expected seconds of a step on the slowest rank: work over stated rates, bytes over stated links.

A part's time is its FLOPs or bytes over the rate of hardware.py. Transfers that have work beside
them cost time only where they take longer than all of a pass's work; the others are added. Left
out: waiting for unequal ranks other than the stated ones, the data loader, and kernel launches.

    MFU = FLOPs of the step without recompute / (seconds x GPUs x nominal bf16 FLOPs of the GPU)
    HFU   the same with recompute

with the FLOPs of model_cost.flops: frozen weights count in forward and for the input's gradient,
the frozen indexer once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fullspan.planning.case import Case
from fullspan.planning.hardware import Gpu, Links
from fullspan.planning.memory import host_bytes
from fullspan.planning.model_cost import (
    PASSES,
    Flops,
    flops,
    layer_weights,
    routed_weights,
)
from fullspan.planning.wire import EXCHANGE, OVERLAPPED, Traffic, Transfer

Seconds = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one step on its slowest rank.

    compute   {pass: {part: seconds}} of one pack
    exposed   {pass: {item: seconds}}: transfers with nothing beside them
    hidden    {pass: {item: seconds}}: transfers that run beside the pass's work
    update    seconds after the packs
    packs     packs that a rank works on in a step
    """

    compute: Mapping[str, Seconds]
    exposed: Mapping[str, Seconds]
    hidden: Mapping[str, Seconds]
    update: float
    packs: int
    flops: Flops
    case: Case
    gpu: Gpu

    @classmethod
    def of(cls, case: Case, gpu: Gpu, traffic: Traffic) -> "Times":
        counted = flops(
            case.model,
            case.run.lora,
            case.work,
            recompute=case.run.train.recompute,
            trained=case.assumed.trained,
        )
        exposed: dict[str, dict[str, float]] = {phase: {} for phase in (*PASSES, "step")}
        hidden: dict[str, dict[str, float]] = {phase: {} for phase in PASSES}
        for transfer in traffic.transfers:
            place = hidden if transfer.item in OVERLAPPED else exposed
            seconds = place[transfer.phase].get(transfer.item, 0.0)
            place[transfer.phase][transfer.item] = seconds + link_seconds(transfer, case.links)
        if host := host_bytes(case):
            for phase in ("forward", "recompute"):
                hidden[phase]["layer inputs"] = host / case.links.host
        update = sum(exposed.pop("step").values())
        return cls(
            compute={phase: _compute(case, gpu, traffic, counted, phase) for phase in PASSES},
            exposed=exposed,
            hidden=hidden,
            update=update,
            packs=case.run.train.accumulation,
            flops=counted,
            case=case,
            gpu=gpu,
        )

    def pass_seconds(self, phase: str) -> float:
        """Of one pack: work or what hides behind it, whichever takes longer, and the rest."""
        work = sum(self.compute[phase].values())
        hidden = sum(self.hidden[phase].values())
        return max(work, hidden) + sum(self.exposed[phase].values())

    @property
    def step(self) -> float:
        return self.packs * sum(map(self.pass_seconds, PASSES)) + self.update

    @property
    def per_pack(self) -> float:
        """Seconds a pack, all replicas together: what splits are ranked by."""
        return self.step / (self.packs * self.case.dp)

    @property
    def tokens_per_second(self) -> float:
        """Token slots a second a GPU: rows of the packs, padding included."""
        return self.case.pack / self.per_pack / self.case.world

    @property
    def mfu(self) -> float:
        return self._use(self.flops.model)

    @property
    def hfu(self) -> float:
        return self._use(self.flops.total)

    def _use(self, counted: float) -> float:
        return counted / (self.per_pack * self.case.world * self.gpu.peak)


def link_seconds(transfer: Transfer, links: Links) -> float:
    """Time of one transfer for one rank.

    A group of neighbours fills nodes. Inside a node everything goes over NVLink. Between nodes an
    all-to-all brings each rank its own part over its own adapter; a gather (a sum, likewise) brings
    each node a part once, spread over its adapters, and NVLink hands it on at the same time.
    """
    here = min(transfer.ranks, links.ranks_per_node)
    inside = transfer.received / links.nvlink
    if here == transfer.ranks:
        return inside
    away = transfer.received * (transfer.ranks - here) / (transfer.ranks - 1)
    over = away if transfer.pattern == EXCHANGE else away / here
    return max(inside, over / links.network)


def _compute(case: Case, gpu: Gpu, traffic: Traffic, counted: Flops, phase: str) -> Seconds:
    """{part: seconds} of one pass over one pack on the slowest rank."""
    share = 1 / case.cp
    rates = {part: rate.value for part, rate in gpu.rates.items()}
    if phase == "recompute" and not case.run.train.recompute:
        return {}
    attention = "attention backward" if phase == "backward" else "attention forward"
    busiest = case.busiest_slots / case.slots
    found = {
        "projections": counted.of("projections", phase) * share / rates["projections"],
        "experts": counted.of("experts", phase) * share * busiest / rates["experts"],
        "attention": counted.of("attention", phase) * share / rates[attention],
        "LoRA": counted.of("LoRA", phase) * share / rates["LoRA"],
        "head": counted.of("head", phase) * share / rates["head"],
        "dequantise": dequantised_bytes(case) / rates["dequantise"],
        "elementwise": elementwise_bytes(case, phase) / rates["copy"],
    }
    if phase == "backward" and "attention plan" in rates:
        plans = case.rows * case.model.num_hidden_layers
        found["attention"] += plans / rates["attention plan"]
    if phase == "forward":
        slowest = traffic.trade.most / max(sum(traffic.trade.own), 1)
        found["indexer"] = counted.of("indexer", phase) * slowest / rates["indexer"]
    return {part: seconds for part, seconds in found.items() if seconds}


def dequantised_bytes(case: Case) -> float:
    """Read and written in one pass: a byte and an activation's element of every FP8 weight that the
    rank uses; kv_b_proj twice, once for each half (models/dsa/attention.py)."""
    if case.form.block is None:
        return 0.0
    layers = [layer_weights(case.model, n) for n in range(case.model.num_hidden_layers)]
    plain = [w for layer in layers for w in layer if w.scaled and not w.routed]
    twice = [w for w in plain if "kv_b_proj" in w.name]
    elements = sum(w.numel for w in (*plain, *twice))
    routed = sum(w.numel for w in routed_weights(case.model)) / case.ep
    return (elements + routed) * (1 + case.item)


def elementwise_bytes(case: Case, phase: str) -> float:
    """Read and written by what is no matrix product, in one pass; the backward moves twice as much.

    For a row and layer, in elements: norms of the widths hidden (twice), q latent and kv latent,
    5 times each in the activation's dtype and 6 in float32 (models/common/norm.py); the absorbed
    query twice; the attention's output flattened twice; the MLP's product 6 times its inner width;
    with experts the rows 7 times, and 4 times for the busiest rank's share (parallel/expert.py).
    """
    model, item = case.model, case.item
    hidden, heads = model.hidden_size, model.num_attention_heads
    qk = model.kv_lora_rank + model.qk_rope_head_dim
    norms = (2 * hidden + model.q_lora_rank + model.kv_lora_rank) * (5 * item + 6 * 4)
    attention = 2 * heads * (qk + model.v_head_dim) * item
    sparse = model.mlp_layer_types.count("sparse")
    dense = model.num_hidden_layers - sparse
    shared = model.moe_intermediate_size * model.n_shared_experts
    mlp = 6 * item * (dense * model.intermediate_size + sparse * shared)
    rows = case.rows * (model.num_hidden_layers * (norms + attention) + mlp)
    moved = (7 * case.slots + 4 * case.busiest_slots) * hidden
    products = 6 * case.busiest_slots * model.moe_intermediate_size
    total = rows + sparse * (moved + products) * item
    return float(total) * (2 if phase == "backward" else 1)
