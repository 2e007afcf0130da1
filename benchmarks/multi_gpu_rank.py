"""What one rank of benchmarks/multi_gpu.py does: one model, stepped for parity, by the clock, and
rehearsed.

The time of an exchange that nothing hides is measured on the rank itself: every exchange has marks
around its start and around the wait for it, on a GPU in the stream that computes (events), else on
the clock. An exchange that is over before it is waited for counts nothing; one that computing waits
for counts as long as it waits, for slower ranks too.
"""

import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullspan.errors import BackendError, ConfigError
from fullspan.models.common.moe import GroupedExperts
from fullspan.parallel.mesh import Mesh
from fullspan.parallel.shard import FlatUnit, ShardedWeights
from fullspan.parallel.watch import Exchange, Watch
from fullspan.parity.probe import RunSeen, watched_steps
from fullspan.parity.run import SAMPLED_ROWS
from fullspan.planning.case import Case, read_fields
from fullspan.planning.measure import Meter
from fullspan.planning.memory import Memory
from fullspan.planning.phases import Place, Timeline, follow, medians
from fullspan.planning.rehearse import Stage, model_of, resident_bytes
from fullspan.planning.stand_in import SyntheticRanks, Values, synthetic_pack
from fullspan.shapes import Tensor
from fullspan.train.config import RunConfig
from fullspan.train.session import Session
from fullspan.train.setup import adapt, host_memory

PARITY_TRAINED = 0.8  # share of rows with a label; three documents, two of them of 3/8 of the pack
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")  # targets of parity, beside the run's
# gloo's threads keep a tensor for that long after its exchange; a CPU's memory is counted with it.
SECONDS_UNTIL_LET_GO = 0.003


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks of one split do.

    config    with their split and the pack of the parity part
    layers    of the model's config.json that the model is made of; (): all; None: as many of the
              first ones as the plan says fit
    products  rows of a matrix product in each run of the parity part, see RowBlocks; (): no such
              part
    lengths   packs that are timed
    rehearse  whether they are rehearsed too
    """

    config: RunConfig
    layers: tuple[int, ...] | None
    products: tuple[int | None, ...] = ()
    lengths: tuple[int, ...] = ()
    rehearse: bool = False
    warmup: int = 1
    steps: int = 3


@dataclass(kw_only=True)
class Taken:
    """By steps of one length. walls: seconds of each; seconds: medians by part and pass; peak:
    bytes that were allocated at most, None where they were not counted."""

    walls: list[float]
    seconds: dict[Place, float]
    peak: int | None

    @property
    def wall(self) -> float:
        return statistics.median(self.walls)

    def part(self, name: str) -> float:
        """Seconds of a part, all passes together."""
        return sum(value for (part, _), value in self.seconds.items() if part == name)


@dataclass(kw_only=True)
class RankSeen:
    """Of one rank. parity: a run for each of the job's products. real, rehearsed: by length;
    skipped: why there is none."""

    layers: int
    device: str
    parity: list[RunSeen] = field(default_factory=list)
    real: dict[int, Taken] = field(default_factory=dict)
    rehearsed: dict[int, Taken] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)


def work(device: torch.device, job: Job) -> RankSeen:
    """Everything that a job asks for, see run_group."""
    with _model_folder(job, device) as (config, layers):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        seen = RankSeen(layers=layers, device=name)
        timeline = Timeline(device, Meter(device))
        watch = TimedWatch(timeline, config.train.timeout_seconds)
        mesh = Mesh.create(config.parallel, device, watch)
        if job.products:
            seen.parity = _parity(config, mesh, job.products)
        arrived = _time(config, mesh, watch, job, seen) if job.lengths else {}
        if job.rehearse and arrived:
            _rehearse(config, mesh, job, arrived, seen)
        return seen


# ---------------------------------------------------------------------------------- the model


def cut(fields: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """The fields of a config.json for a model of some of its layers.

    Raises:
        ConfigError: there is no such layer.
    """
    known = fields["num_hidden_layers"]
    if not all(0 <= layer < known for layer in layers):
        raise ConfigError(f"--layers {list(layers)}: the model's are 0 to {known - 1}")
    kinds = {
        name: [fields[name][layer] for layer in layers]
        for name in ("indexer_types", "mlp_layer_types")
    }
    dense = kinds["mlp_layer_types"].count("dense")
    return {**fields, **kinds, "num_hidden_layers": len(layers), "first_k_dense_replace": dense}


@contextmanager
def _model_folder(job: Job, device: torch.device) -> Iterator[tuple[RunConfig, int]]:
    """The configuration with a model of the job's layers, and how many they are."""
    fields = read_fields(Path(job.config.model.path) / "config.json")
    every = fields["num_hidden_layers"]
    if job.layers == ():
        yield job.config, every
        return
    with tempfile.TemporaryDirectory(prefix="fullspan-") as folder:
        config = replace(job.config, model=replace(job.config.model, path=folder))
        first = [range(count) for count in range(every, 0, -1)]
        for layers in first if job.layers is None else [job.layers]:
            text = json.dumps(cut(fields, layers))
            Path(folder, "config.json").write_text(text, encoding="utf-8")
            if job.layers is not None or not _too_much(config, max(job.lengths), device):
                yield config, len(layers)
                return
    raise BackendError(f"the plan says that not even one layer fits on {device}")


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _too_much(config: RunConfig, length: int, device: torch.device) -> str:
    """What the plan says of a pack that does not fit; "" for one that does."""
    if device.type != "cuda":
        return ""
    sharing = -(-_world() // torch.cuda.device_count())
    room = torch.cuda.get_device_properties(device).total_memory / sharing
    planned = Memory.of(Case.load(config, world=_world()).packed(length)).peak.total
    if planned <= room:
        return ""
    return f"does not fit: planned {planned / 2**30:.1f} of {room / 2**30:.1f} GiB"


def _open(config: RunConfig, mesh: Mesh) -> Session:
    model = model_of(config, mesh, Values(mesh.device))
    return adapt(model, config, mesh, host_memory(config, mesh))[0]


def _release(device: torch.device) -> None:
    """What is no longer referred to, to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------- the parts


def _parity(config: RunConfig, mesh: Mesh, products: Sequence[int | None]) -> list[RunSeen]:
    """A step for each kind of products, the first of them twice; adapters on routed experts too."""
    targets = tuple(dict.fromkeys((*config.lora.targets, *EXPERTS)))
    session = _open(replace(config, lora=replace(config.lora, targets=targets)), mesh)
    length = config.data.pack_length
    pack = synthetic_pack(
        length,
        document=length * 3 // 8,
        trained=PARITY_TRAINED,
        vocab=session.model.config.vocab_size,
    )
    seen = [
        watched_steps(session, [[pack]], SAMPLED_ROWS, block, repeat=number == 0)
        for number, block in enumerate(products)
    ]
    del session
    _release(mesh.device)
    return seen


def _time(
    config: RunConfig, mesh: Mesh, watch: "TimedWatch", job: Job, seen: RankSeen
) -> dict[int, list[Tensor]]:
    """Fills `seen.real`; of each length, the slots of each expert here in one step, in order."""
    session = _open(config, mesh)
    store = session.model.weights
    units = store.units if isinstance(store, ShardedWeights) else ()
    follow(session.model, watch.timeline)
    arrived: dict[int, list[Tensor]] = {}
    for length in job.lengths:
        if reason := _too_much(config, length, mesh.device):
            seen.skipped[length] = reason
            continue
        vocab = session.model.config.vocab_size
        pack = synthetic_pack(length, document=0, trained=1.0, vocab=vocab)

        def step(pack=pack) -> None:
            session.forward_backward([pack])
            watch.timeline.enter("update", "step")
            session.optim_step()

        try:
            with _slots_of_experts(session.model) as arrived[length]:
                step()
            seen.real[length] = _take(session, units, watch.timeline, step, job, watch)
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
            if mesh.world.size > 1:  # the others wait for this rank
                raise BackendError(f"{length:,} tokens: {reason}") from None
            seen.skipped[length] = reason
            arrived.pop(length)
            session.zero_grad()
            _release(mesh.device)
    del session
    _release(mesh.device)
    return arrived


def _rehearse(
    config: RunConfig, mesh: Mesh, job: Job, arrived: dict[int, list[Tensor]], seen: RankSeen
) -> None:
    """The same rank over a loopback group. All ranks of a split rehearse at the same time, so that
    those that share a GPU share it here too."""
    case = Case.load(config, world=mesh.world.size)
    stage = Stage(case, mesh.world.rank, mesh.device, others=Replayed)
    assert isinstance(stage.others, Replayed)
    session = stage.open()
    for length, counts in arrived.items():
        stage.others.replay(counts)

        def step(length=length) -> None:
            stage.step(session, length)

        step()
        seen.rehearsed[length] = _take(session, stage.others.units, stage.timeline, step, job)


def _take(
    session: Session,
    units: Sequence[FlatUnit],
    timeline: Timeline,
    step: Callable[[], None],
    job: Job,
    watch: "TimedWatch | None" = None,
) -> Taken:
    """Steps by the clock and their peak, after a first one was made."""
    device = session.device
    runs: list[dict[Place, float]] = []
    walls: list[float] = []
    for _ in range(job.warmup - 1):
        step()

    def timed() -> None:
        for _ in range(job.steps):
            begin = time.perf_counter()
            timeline.start()
            step()
            runs.append(timeline.stop())
            walls.append(time.perf_counter() - begin)

    if device.type == "cuda":
        usage = Meter(device).measure(timed)
        return Taken(walls=walls, seconds=medians(runs), peak=(usage.before or 0) + usage.peak)
    timed()
    taken = Taken(walls=walls, seconds=medians(runs), peak=None)
    if not job.rehearse:
        return taken
    if watch is not None:
        watch.patience = SECONDS_UNTIL_LET_GO
    # By a profiler, with which a step takes several times as long.
    usage = Meter(device).measure(step)
    if watch is not None:
        watch.patience = 0.0
    resident = sum(resident_bytes(session, units).values())
    return replace(taken, peak=resident + usage.peak)


# --------------------------------------------------------------------------- what they need


class TimedWatch(Watch):
    """A watch whose exchanges are a part of a timeline: "exchange". patience: seconds that each
    waits at its end."""

    def __init__(self, timeline: Timeline, timeout_seconds: float) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(rank=rank, size=_world(), timeout_seconds=timeout_seconds)
        self.timeline = timeline
        self.patience = 0.0

    def exchange(self, what: str) -> Exchange:
        """See Watch."""
        super().exchange(what)
        return _TimedExchange(self, self.newest.entered, what)


class _TimedExchange(Exchange):
    def __init__(self, watch: TimedWatch, number: int, what: str) -> None:
        super().__init__(watch, number, what)
        self._timed, self._before = watch, watch.timeline.place

    def __enter__(self) -> None:
        self._before = self._timed.timeline.place
        self._timed.timeline.enter("exchange")
        super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        time.sleep(self._timed.patience)
        self._timed.timeline.enter(*self._before)


@contextmanager
def _slots_of_experts(model: nn.Module) -> Iterator[list[Tensor]]:
    """Of each call of experts within it, the slots of every expert of this rank."""
    found: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Any, ...]) -> None:
        found.append(given[-1].detach().clone())

    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    hooks = [module.register_forward_pre_hook(keep) for module in experts]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class Replayed(SyntheticRanks):
    """Other ranks that send as many slots to each expert as arrived in a real step."""

    def replay(self, arrived: Sequence[Tensor]) -> None:
        """Of one step, over and over."""
        self._arrived = itertools.cycle(arrived)

    def counts(self, incoming: Tensor, outgoing: Tensor) -> None:
        """See Others: all of an expert's slots, evenly over the ranks."""
        ranks, exchanges, _ = incoming.shape
        slots = torch.stack(list(itertools.islice(self._arrived, exchanges)))
        place = torch.arange(ranks, device=incoming.device)[:, None, None]
        incoming.copy_(slots // ranks + (place < slots % ranks))
