"""The ranks of a run: replicas of the data, ranks that share a sequence or the experts.

    world = dp x cp            rank = dp_rank * cp + cp_rank
    world = replicas x ep      rank = replica * ep + ep_rank

The second view lies over the same ranks: a block of `ep` neighbours holds all routed experts once.
One block is a part of a sequence's ranks (ep divides cp) or some whole sequences (cp divides ep).
Every other frozen weight is spread over the whole world (shard.py).

Uses PyTorch's DeviceMesh and its own environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) as
torchrun sets it. DeviceMesh has no public way to see the same ranks in two ways, hence two of them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullspan.errors import LaunchError
from fullspan.parallel.config import ParallelConfig
from fullspan.parallel.group import Group
from fullspan.parallel.watch import Watch, client_store

SECONDS_TO_JOIN = 300.0


@dataclass(frozen=True, kw_only=True)
class Axis:
    """This rank's place along one axis of the mesh; `group` is None where the axis has one rank."""

    rank: int = 0
    size: int = 1
    group: Group | None = None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """PyTorch's own, for its checkpoints."""
        return None if self.group is None else self.group.process_group


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's place among all.

    world      all ranks; they share the frozen weights, and the gradients of replicated adapters
    dp, cp     the first view above
    replicas, ep   the second; ranks along `replicas` hold the same experts and expert adapters
    experts    the DeviceMesh (replicas, ep) that expert adapters are saved with; None on one rank
               and on made-up ones (loopback.py)
    watch      what every rank is doing
    """

    world: Axis
    dp: Axis
    cp: Axis
    replicas: Axis
    ep: Axis
    device: torch.device
    experts: DeviceMesh | None = None
    watch: Watch = field(default_factory=Watch)

    @classmethod
    def single(cls, device: torch.device) -> "Mesh":
        """One process alone."""
        one = Axis()
        return cls(world=one, dp=one, cp=one, replicas=one, ep=one, device=device)

    @classmethod
    def create(
        cls, config: ParallelConfig, device: torch.device, watch: Watch | None = None
    ) -> "Mesh":
        """Over the ranks of the default process group, or one process where there is none.

        watch: that of this rank; None: without posts.

        Raises:
            ConfigError: dp, cp and ep do not fit the ranks.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            config.resolve_cp(1)
            return cls.single(device)
        size = dist.get_world_size()
        watch = watch or Watch(rank=dist.get_rank(), size=size)
        cp = config.resolve_cp(size)
        data = init_device_mesh(device.type, (config.dp, cp), mesh_dim_names=("dp", "cp"))
        experts = init_device_mesh(
            device.type, (size // config.ep, config.ep), mesh_dim_names=("replicas", "ep")
        )
        world = dist.group.WORLD
        assert world is not None, "the process group exists"
        return cls(
            world=Axis(rank=dist.get_rank(), size=size, group=_group(world, watch)),
            dp=_axis(data, "dp", watch),
            cp=_axis(data, "cp", watch),
            replicas=_axis(experts, "replicas", watch),
            ep=_axis(experts, "ep", watch),
            device=device,
            experts=experts,
            watch=watch,
        )

    @property
    def is_main(self) -> bool:
        """The one rank that prints and writes."""
        return self.world.rank == 0


@contextmanager
def open_mesh(config: ParallelConfig, *, timeout_seconds: float = 600.0) -> Iterator[Mesh]:
    """Join the process group that the environment describes, and leave it at the end.

    One process needs none. timeout_seconds: how long a rank waits for another from then on; it
    waits for all to join for longer, as they start at unlike times.

    Raises:
        ConfigError: dp, cp and ep do not fit the number of ranks.
        LaunchError: the ranks could not find each other.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    config.resolve_cp(size)
    device = _local_device()
    if size == 1:
        yield Mesh.single(device)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        joining = timedelta(seconds=max(timeout_seconds, SECONDS_TO_JOIN))
        dist.init_process_group(backend, timeout=joining)
        store = client_store(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            f"fullspan/watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(
            f"rank {rank} of {size} could not join the process group: {reason}"
        ) from None
    watch = Watch(
        rank=rank,
        size=size,
        store=store,
        timeout_seconds=timeout_seconds,
        end_is_sudden=backend == "nccl",
    )
    try:
        with watch:
            yield Mesh.create(config, device, watch)
    finally:
        dist.destroy_process_group()


def _axis(mesh: DeviceMesh, name: str, watch: Watch) -> Axis:
    sub = mesh[name]
    if sub.size() == 1:
        return Axis()
    return Axis(rank=sub.get_local_rank(), size=sub.size(), group=_group(sub.get_group(), watch))


def _group(process_group: dist.ProcessGroup, watch: Watch) -> Group:
    """DeviceMesh gives its groups PyTorch's 30 minutes whatever the default group was given."""
    process_group.set_timeout(timedelta(seconds=watch.timeout_seconds))
    return Group(process_group, watch)


def _local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
