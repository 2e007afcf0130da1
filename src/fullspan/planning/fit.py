"""Whether a run fits a GPU, which splits of some GPUs do, and what to change where none does.

Only settings that exist are tried: parallel.dp, cp, ep and shard_weights. Everything else of the
run stays as it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullspan.errors import ConfigError, FullspanError
from fullspan.planning.case import Case
from fullspan.planning.hardware import Gpu
from fullspan.planning.memory import Memory, Phase
from fullspan.planning.times import Times
from fullspan.planning.wire import Traffic

_ALIKE = 0.02  # seconds that differ by less are no reason to choose
_LEAST_ROWS, _MOST_ROWS = 2, 1 << 30  # of a pack
# Item of a plan -> the setting that makes it smaller.
_SETTINGS = {
    "gathered units": "bounded: two units are whole at a time",
    "dequantised weights": "lower ops.expert_bytes",
    "FP8 operands": "lower ops.expert_bytes",
    "expert exchange": "lower ops.expert_bytes",
    "adapters": "lower lora.r or take targets out",
    "adapter gradients": "lower lora.r or take targets out",
    "Adam moments": "lower lora.r or take targets out",
    "update": "lower lora.r or take targets out",
    "saved activations": "set train.recompute = true",
    "gathered latent": "lower data.pack_length",
    "gradient of gathered latent": "lower data.pack_length",
    "gathered index keys": "lower data.pack_length",
    "kernel workspace": "lower ops.attention_bytes",
    "attention span": "lower ops.attention_bytes",
    "plan of the selection": "lower ops.attention_bytes",
    "index scores": "lower ops.workspace_bytes",
    "head logits": "lower ops.loss_chunk_rows",
    "allocator slack": "assumed; PYTORCH_ALLOC_CONF=expandable_segments:True keeps it low",
    "CUDA context": "fixed",
    "NCCL buffers": "fixed",
}


def setting_for(item: str, case: Case) -> str:
    """What makes an item of a plan smaller; most items grow with the rows of a rank."""
    if item == "routed experts":
        more = "raise parallel.ep"
        return more if case.ep < case.world else f"use more GPUs and {more} with them"
    if item == "other frozen weights":
        shards = case.run.parallel.shard_weights
        return "use more GPUs" if shards else "set parallel.shard_weights = true"
    train = case.run.train
    if item == "saved layer inputs" and train.recompute and not train.offload_inputs:
        return "set train.offload_inputs = true"
    if item in _SETTINGS:
        return _SETTINGS[item]
    if case.dp > 1:
        return "trade parallel.dp for parallel.cp, or lower data.pack_length"
    return "raise parallel.cp (more GPUs) or lower data.pack_length"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One split of a run on one kind of GPU."""

    case: Case
    gpu: Gpu
    memory: Memory

    @classmethod
    def of(cls, case: Case, gpu: Gpu) -> "Plan":
        return cls(case=case, gpu=gpu, memory=Memory.of(case))

    @property
    def spare(self) -> int:
        """Bytes that are left at the peak; below 0 where it does not fit."""
        return self.gpu.memory - self.memory.peak.total

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    def traffic(self) -> Traffic:
        return Traffic(self.case)

    def times(self) -> Times:
        return Times.of(self.case, self.gpu, self.traffic())


@dataclass(frozen=True, kw_only=True)
class Search:
    """fitting: (plan, its times) of every split that fits, fastest first; of those that are as fast
    the one with most to spare. closest: the split with the least memory, whether it fits or not.
    tried: how many splits the ranks allow."""

    fitting: Sequence[tuple[Plan, Times]]
    closest: Plan
    tried: int


def search(case: Case, gpu: Gpu, gpus: int) -> Search:
    """Every split of `gpus` ranks, judged by memory, ranked by expected seconds a pack.

    Raises:
        ConfigError: there is no such number of ranks.
    """
    plans = [Plan.of(split, gpu) for split in splits(case, gpus)]
    assert plans, "a rank for each pack, with all experts, is always a split"
    timed = [(plan, plan.times()) for plan in plans if plan.fits]
    fastest = min((times.per_pack for _, times in timed), default=1.0)

    def order(pair: tuple[Plan, Times]) -> tuple[int, int]:
        return int((pair[1].per_pack / fastest - 1) / _ALIKE), -pair[0].spare

    return Search(
        fitting=sorted(timed, key=order),
        closest=min(plans, key=lambda plan: plan.memory.peak.total),
        tried=len(plans),
    )


def splits(case: Case, gpus: int) -> Iterator[Case]:
    """The run on `gpus` ranks in every way that its settings allow."""
    if gpus < 1:
        raise ConfigError(f"--gpus is {gpus}: it must be at least 1")
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for dp in divisors:
        for ep in divisors:
            for shard in (False, True) if gpus > 1 else (False,):
                parallel = {"dp": dp, "cp": gpus // dp, "ep": ep, "shard_weights": shard}
                try:
                    yield case.split(gpus, **parallel)
                except FullspanError:
                    continue


def fewest_gpus(plan: Plan, most: int = 1024) -> int:
    """The least power of two of GPUs, above those of the plan, on which the run fits when all of
    them share the pack, the experts (as far as they go) and the weights; 0: not even `most`."""
    gpus = 1
    while gpus <= most:
        ep = min(gpus, plan.case.model.n_routed_experts)
        try:
            case = plan.case.split(gpus, dp=1, cp=gpus, ep=ep, shard_weights=gpus > 1)
            if gpus > plan.case.world and Plan.of(case, plan.gpu).fits:
                return gpus
        except FullspanError:
            pass
        gpus *= 2
    return 0


def longest_pack(plan: Plan) -> int:
    """The longest data.pack_length that fits with this split: what a pack must be a multiple of
    (parallel.cp), times a whole number; 0 where not even one multiple fits."""
    case = plan.case
    multiple = case.run.parallel.pack_multiple(case.world)

    def spare(count: int) -> int:
        return Plan.of(case.packed(count * multiple), plan.gpu).spare

    # Bytes grow almost evenly with rows: look where a straight line says, and a step beside it.
    least = -(-_LEAST_ROWS // multiple)
    low, high = least, max(least, case.pack // multiple)
    left, right = spare(low), spare(high)
    if left < 0:
        return 0
    while right >= 0 and high * multiple < _MOST_ROWS:
        low, high, left = high, 2 * high, right
        right = spare(high)
    while right < 0 and high - low > (step := max(1, low // 1000)):
        guess = low + max(1, int((high - low) * left / (left - right)))
        for count in (guess, guess + step, guess - step):
            if low < count < high:
                found = spare(count)
                low, left, high, right = (
                    (count, found, high, right) if found >= 0 else (low, left, count, found)
                )
    return (low if right < 0 else high) * multiple


def largest_items(phase: Phase, count: int) -> list[tuple[str, int]]:
    """The items that take most, largest first."""
    return sorted(phase.items.items(), key=lambda item: -item[1])[:count]
