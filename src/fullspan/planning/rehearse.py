"""The steps of one rank of many, run on one device: real model, kernels and sizes, made-up peers.

Built as train/setup.py builds a run, over a loopback group (parallel/loopback.py), with weights of
the checkpoint or, where model.path has only a config.json, random ones (stand_in.py). What is
measured: memory by item, time by part, the bytes of every exchange, and peaks over several lengths.
docs/rehearsal.md says what is real in it and what is not.

A rehearsed step is one pack of this rank and an optimizer step, whatever train.accumulation is.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from fullspan.checkpoint.load import load_model, op_widths
from fullspan.checkpoint.safetensors_io import WEIGHT_SUFFIXES
from fullspan.data.packing import Pack
from fullspan.errors import BackendError, ConfigError
from fullspan.models.dsa.config import DsaConfig
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.backend import resolve
from fullspan.ops.options import OpOptions
from fullspan.parallel.loopback import Transfer, loopback_mesh
from fullspan.parallel.mesh import Mesh
from fullspan.parallel.sequence import Partition
from fullspan.parallel.shard import FlatUnit, ShardedWeights
from fullspan.planning.case import Assumptions, Case
from fullspan.planning.linear_fit import LinearFit
from fullspan.planning.measure import Meter, Usage
from fullspan.planning.memory import Memory, allocated_bytes
from fullspan.planning.phases import (
    KEPT_AT,
    STAGES,
    Place,
    TimedTraffic,
    Timeline,
    follow,
    medians,
    named,
    stages,
)
from fullspan.planning.report import explain_out_of_memory
from fullspan.planning.stand_in import SyntheticRanks, Values, random_model, synthetic_pack
from fullspan.shapes import Tensor
from fullspan.train.config import RunConfig
from fullspan.train.session import Session
from fullspan.train.setup import DTYPES, adapt, host_memory, seed_generators

ADAPTER_STD = 0.02  # of lora_b, which is zero in a fresh adapter
SPARE = 1 << 30  # of the GPU's memory, for what is not the allocator's
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RehearsalOptions:
    """What is rehearsed.

    rank, world   this rank's number; None: the last. Ranks in all; None: dp x cp
    warmup        steps before those that are measured
    steps         measured steps; times are the median
    lengths       packs whose peaks the fit is made of, beside the run's own; (): no fit
    repeat        run one step twice and compare the bits of its loss and gradients
    assumed       what the plan assumes too: imbalance of experts, documents, trained rows

    Raises:
        ConfigError: a number is out of range.
    """

    rank: int | None = None
    world: int | None = None
    warmup: int = 1
    steps: int = 2
    lengths: Sequence[int] = ()
    repeat: bool = False
    assumed: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        for name, least in (("warmup", 0), ("steps", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name} is {getattr(self, name)}: it must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What was measured, of one step where nothing else is said.

    ops        with the backends that ran
    usage      above the resident bytes
    host       bytes of host memory for layer inputs
    resident   bytes by item that are there all the time
    gradients  bytes of the adapters' gradients, which come during the backward pass
    kept       bytes that the forward pass leaves for the backward pass
    seconds    by part and pass; wall: of the whole step by the host's clock
    transfers  every exchange
    fits       of peaks over rows, of a whole step ("all") and of each stage; none where no lengths
               were asked for
    unrepeated names of what was not the same bits in a second run; None: there was none
    """

    case: Case
    rank: int
    device: str
    ops: OpOptions
    random_weights: bool
    usage: Usage
    resident: Mapping[str, int]
    gradients: int
    kept: int
    seconds: Mapping[Place, float]
    wall: float
    transfers: Sequence[Transfer]
    host: int = 0
    fits: Mapping[str, LinearFit] = field(default_factory=dict)
    unrepeated: Sequence[str] | None = None

    @property
    def peak(self) -> int:
        """Most bytes that PyTorch's allocator had given out."""
        return self.before + self.usage.peak

    @property
    def before(self) -> int:
        """What is allocated between two steps."""
        return sum(self.resident.values()) if self.usage.before is None else self.usage.before


def rehearse(
    config: RunConfig, options: RehearsalOptions, device: torch.device, say: Say
) -> Rehearsal:
    """Rehearse a run's steps on `device`; `say` is told what happens.

    Raises:
        FullspanError: the configuration, the model folder or a backend cannot be used.
        BackendError: the rank does not fit on the device; the message names the plan's items.
    """
    case = Case.load(config, world=options.world, assumed=options.assumed)
    rank = case.world - 1 if options.rank is None else options.rank
    if device.type == "cpu":
        _check_host(case, rank)
    stage = Stage(case, rank, device)
    try:
        return stage.play(options, say)
    except torch.OutOfMemoryError as error:
        total = torch.cuda.get_device_properties(device).total_memory
        plan = explain_out_of_memory(config, case.world, capacity=total)
        raise BackendError(
            f"rank {rank} of {case.world} runs out of memory while {stage.doing}: {plan}; "
            f"PyTorch: {str(error).splitlines()[0]}"
        ) from None


def _check_host(case: Case, rank: int) -> None:
    """Refuse what a machine without a GPU has no memory for: loading it would take all of it."""
    needed = allocated_bytes(Memory.of(case).peak)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        raise BackendError(
            f"rank {rank} of {case.world} takes {needed / 2**30:.1f} GiB by its plan; there is no "
            f"GPU here, and this machine has {total / 2**30:.1f} GiB of memory: rehearse it on a "
            "GPU, or a smaller model"
        )


class Stage:
    """One rank, set up to be measured. others: what makes up the other ranks."""

    def __init__(
        self,
        case: Case,
        rank: int,
        device: torch.device,
        others: type[SyntheticRanks] = SyntheticRanks,
    ) -> None:
        self.case, self.rank, self.device = case, rank, device
        self.doing = "it loads the weights"
        self.values = Values(device)
        self.meter = Meter(device)
        self.timeline = Timeline(device, self.meter)
        self.traffic = TimedTraffic(self.timeline)
        dtype = DTYPES[case.run.model.dtype]
        index = case.model.index_n_heads * case.model.index_head_dim * dtype.itemsize
        self.others = others(
            imbalance=case.assumed.imbalance, values=self.values, index=(index, dtype)
        )
        self.mesh = loopback_mesh(
            case.run.parallel, rank=rank, size=case.world, device=device,
            ranks_per_node=case.links.ranks_per_node, traffic=self.traffic, others=self.others,
        )  # fmt: skip
        self.random_weights = not has_weights(Path(case.run.model.path))

    def open(self) -> Session:
        """The session of this rank, with adapters whose every gradient is alive."""
        run = self.case.run
        seed_generators(run.train.seed + self.rank)
        host = host_memory(run, self.mesh)
        model = model_of(run, self.mesh, self.values)
        if isinstance(model.weights, ShardedWeights):
            self.others.units = model.weights.units
        session, _ = adapt(model, run, self.mesh, host)
        with torch.no_grad():
            for name, parameter in session.adapters.items():
                if name.endswith("lora_b"):
                    self.values.normal(name, parameter, ADAPTER_STD)
        follow(model, self.timeline)
        return session

    def play(self, options: RehearsalOptions, say: Say) -> Rehearsal:
        """Everything that is measured, in order."""
        say(f"rank {self.rank} of {self.case.world}: loading the weights")
        session = self.open()
        resident = resident_bytes(session, self.others.units)
        length = self.case.pack
        usages = self._shorter(session, options.lengths, say)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()  # so that what is reserved is what this length needs
            if not options.warmup:
                self._map_memory()
        for turn in range(options.warmup):
            say(f"warm-up step {turn + 1} of {options.warmup}, {length:,} tokens")
            self.doing = "it warms up"
            self.step(session, length)
        self.doing = f"it runs a step of {length:,} tokens"
        self.traffic.transfers.clear()
        usage, seconds, walls = self._measured(session, length, options.steps)
        every = self.traffic.transfers
        transfers = every[: len(every) // len(walls)]
        say(f"a step takes {median(walls):.3f} s")
        unrepeated = self.unrepeated(session, length) if options.repeat else None
        return Rehearsal(
            case=self.case,
            rank=self.rank,
            device=torch.cuda.get_device_name(self.device) if on_gpu else "CPU",
            ops=session.model.options,
            random_weights=self.random_weights,
            usage=usage,
            resident=resident,
            gradients=_bytes(session.adapters.values()),
            kept=usage.entered[named(KEPT_AT)],
            seconds=seconds,
            wall=median(walls),
            transfers=transfers,
            host=0 if session.model.model.host is None else session.model.model.host.allocated,
            fits=self._fits({**usages, length: usage}, sum(resident.values())) if usages else {},
            unrepeated=unrepeated,
        )

    def step(self, session: Session, length: int) -> float:
        """One pack of `length` rows and an optimizer step; its loss."""
        loss = self._backward(session, length)
        self.timeline.enter("update", "step")
        session.optim_step()
        return loss

    def unrepeated(self, session: Session, length: int) -> list[str]:
        """What differs between two runs of the same pack from the same adapters."""
        self.doing = "it runs a pack twice"
        runs = []
        for _ in range(2):
            loss = self._backward(session, length)
            found = {name: g.cpu() for name, g in session.gradients().items()}
            runs.append({"loss": torch.tensor(loss, dtype=torch.float64), **found})
            session.zero_grad()
        first, second = runs
        return [name for name, value in first.items() if not torch.equal(value, second[name])]

    def _backward(self, session: Session, length: int) -> float:
        return session.forward_backward(self._packs(length)).loss

    def _packs(self, length: int) -> list[Pack]:
        """A pack for each replica, all alike."""
        case = self.case
        partition = Partition(mode=case.run.parallel.partition, size=case.cp, length=length)
        self.others.first = int(partition.rows(self.mesh.cp.rank)[0])
        pack = synthetic_pack(
            length,
            document=case.assumed.document,
            trained=case.assumed.trained,
            vocab=case.model.vocab_size,
        )
        return [pack] * case.dp

    def _measured(
        self, session: Session, length: int, steps: int
    ) -> tuple[Usage, dict[Place, float], list[float]]:
        """Memory, median seconds by place, and seconds of each step. The profiler that counts a
        CPU's memory is slow: there a step of its own is counted."""
        runs: list[dict[Place, float]] = []
        walls: list[float] = []

        def timed() -> None:
            for _ in range(steps):
                begin = time.perf_counter()
                self.timeline.start()
                self.step(session, length)
                runs.append(self.timeline.stop())
                walls.append(time.perf_counter() - begin)

        if self.device.type == "cuda":
            usage = self.meter.measure(timed)
        else:
            timed()
            transfers = list(self.traffic.transfers)
            usage = self.meter.measure(lambda: self.step(session, length))
            self.traffic.transfers[:] = transfers
        return usage, medians(runs), walls

    def _map_memory(self) -> None:
        """Let the allocator get from the driver what the plan's peak needs: the only step of this
        length would wait for it, here and there."""
        wanted = allocated_bytes(Memory.of(self.case).peak)
        missing = wanted - torch.cuda.memory_allocated(self.device)
        free, _ = torch.cuda.mem_get_info(self.device)
        torch.empty(max(0, min(missing, free - SPARE)), dtype=torch.uint8, device=self.device)

    def _shorter(self, session: Session, lengths: Sequence[int], say: Say) -> dict[int, Usage]:
        """A step of each length but the run's own, after one of the shortest that warms up."""
        found: dict[int, Usage] = {}
        for length in sorted(set(lengths) - {self.case.pack}):
            self.doing = f"it runs a step of {length:,} tokens"
            if not found:
                self.step(session, length)
            found[length] = self.meter.measure(lambda length=length: self.step(session, length))
            say(f"{length:,} tokens: {found[length].peak / (1 << 20):,.1f} MiB for a step")
        return found

    def _fits(self, usages: Mapping[int, Usage], resident: int) -> dict[str, LinearFit]:
        """Lines through the peaks of a step, and of each of its stages, over the rows."""
        rows = [length // self.case.cp for length in usages]
        befores = [resident if u.before is None else u.before for u in usages.values()]
        peaks = [{"all": usage.peak, **stages(usage.peaks)} for usage in usages.values()]
        return {
            name: LinearFit.of(rows, [b + peak[name] for b, peak in zip(befores, peaks)])
            for name in ("all", *STAGES)
            if all(name in peak for peak in peaks)
        }


def has_weights(folder: Path) -> bool:
    """Whether a model folder holds more than its config.json."""
    return any(path.suffix in WEIGHT_SUFFIXES for path in folder.iterdir())


def model_of(run: RunConfig, mesh: Mesh, values: Values) -> DsaForCausalLM:
    """A run's model on this rank: of its checkpoint or, where there is only a config.json, random.

    Raises:
        CheckpointError, ConfigError: the folder cannot be used.
    """
    dtype = DTYPES[run.model.dtype]
    folder, eps = Path(run.model.path), run.model.latent_norm_eps
    options = resolve(run.ops, mesh.device, dtype, **op_widths(DsaConfig.load(folder)))
    recompute, shard = run.train.recompute, run.parallel.shard_weights
    if not has_weights(folder):
        return random_model(
            folder, values, dtype=dtype, options=options, recompute=recompute,
            latent_norm_eps=eps, mesh=mesh, shard_weights=shard,
        )  # fmt: skip
    return load_model(
        folder, dtype=dtype, device=mesh.device, options=options, recompute=recompute,
        latent_norm_eps=eps, mesh=mesh, shard_weights=shard,
    )  # fmt: skip


def fit_lengths(case: Case, count: int) -> list[int]:
    """The run's own pack and `count` - 1 shorter ones, evenly up to half of it, each of which the
    ranks can share.

    Raises:
        ConfigError: the pack is too short for that many.
    """
    multiple = case.run.parallel.pack_multiple(case.world)
    shorter = max(1, count - 1)
    steps = range(1, shorter + 1)
    lengths = {case.pack * n // (2 * shorter) // multiple * multiple for n in steps} | {case.pack}
    if len(lengths) <= shorter or 0 in lengths:
        raise ConfigError(
            f"data.pack_length is {case.pack}: {count} lengths that are multiples of {multiple} "
            "do not fit in it (option --lengths)"
        )
    return sorted(lengths)


def resident_bytes(session: Session, units: Sequence[FlatUnit]) -> dict[str, int]:
    """What a session holds all the time, by item. units: of its sharded weights."""
    model = session.model
    frozen = [p for p in model.parameters() if not p.requires_grad and not p.is_meta]
    return {
        "frozen weights": _bytes([*frozen, *model.buffers(), *(unit.shard for unit in units)]),
        "adapters": _bytes(session.adapters.values()),
        "Adam moments": _bytes(session.optimizer.state_tensors().values()),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of the storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
