"""Expected seconds of a step on the slowest rank: work over stated rates, bytes over stated links.

A part's time is its work (work.py) over the rates of hardware.py, one kind after the other.
Transfers that have work beside them cost time only where they take longer than all of a pass's
work; the others are added. Left out: waiting for unequal ranks other than the stated ones, the data
loader, and kernel launches.

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
from fullspan.planning.model_cost import PASSES, Flops, flops
from fullspan.planning.wire import EXCHANGE, OVERLAPPED, Traffic, Transfer
from fullspan.planning.work import PARTS, work

Seconds = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one step on its slowest rank.

    work      {pass: {(part, kind): seconds}} of one pack
    exposed   {pass: {item: seconds}}: transfers with nothing beside them
    hidden    {pass: {item: seconds}}: transfers that run beside the pass's work
    update    seconds after the packs
    packs     packs that a rank works on in a step
    """

    work: Mapping[str, Mapping[tuple[str, str], float]]
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
        scored = traffic.trade.most / max(sum(traffic.trade.own), 1)
        return cls(
            work={
                phase: {
                    place: amount / gpu.rates[place[1]].value
                    for place, amount in work(case, counted, phase, scored=scored).items()
                }
                for phase in PASSES
            },
            exposed=exposed,
            hidden=hidden,
            update=update,
            packs=case.run.train.accumulation,
            flops=counted,
            case=case,
            gpu=gpu,
        )

    def compute(self, phase: str) -> dict[str, float]:
        """{part: seconds} of a pass's work, parts as a rehearsal has them."""
        found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for (part, _), seconds in self.work[phase].items():
            found[part] += seconds
        return {part: seconds for part, seconds in found.items() if seconds}

    def pass_seconds(self, phase: str) -> float:
        """Of one pack: work or what hides behind it, whichever takes longer, and the rest."""
        work = sum(self.work[phase].values())
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
