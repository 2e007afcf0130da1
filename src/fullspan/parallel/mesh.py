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
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullspan.errors import ConfigError, LaunchError
from fullspan.parallel.balance import check_choice
from fullspan.parallel.sequence import PARTITIONS


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The [parallel] section.

    dp              replicas, each with packs of its own
    cp              ranks that share one pack; 0: all ranks of a replica
    ep              ranks that share the routed experts
    partition       which rows of a pack each rank holds
    shard_weights   spread the other frozen weights over all ranks, and gather them layer by layer
    balance_indexer   trade rows between mirrored ranks so that their indexers do equal work; auto:
                    where it saves more time than it takes, by the numbers of balance.py
    """

    dp: int = 1
    cp: int = 0
    ep: int = 1
    partition: str = "contiguous"
    shard_weights: bool = False
    balance_indexer: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("dp", 1), ("cp", 0), ("ep", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"parallel.{name} is {getattr(self, name)}: it must be at least {least}"
                )
        if self.partition not in PARTITIONS:
            raise ConfigError(
                f"parallel.partition is {self.partition!r}: allowed are {', '.join(PARTITIONS)}"
            )
        check_choice(self.balance_indexer)

    def resolve_cp(self, world_size: int) -> int:
        """Ranks that share one pack, among `world_size` ranks.

        Raises:
            ConfigError: dp, cp and ep do not fit that many ranks.
        """
        cp = self.cp or max(world_size // self.dp, 1)
        if self.dp * cp != world_size:
            raise ConfigError(
                f"parallel.dp {self.dp} x parallel.cp {cp} makes {self.dp * cp}, but the run has "
                f"{world_size} rank{'s' if world_size > 1 else ''}: set parallel.cp (0 takes all "
                "ranks of a replica), parallel.dp or --nproc-per-node"
            )
        if world_size % self.ep or (cp % self.ep and self.ep % cp):
            raise ConfigError(
                f"parallel.ep is {self.ep}: it must divide the {world_size} ranks, and divide "
                f"parallel.cp ({cp}) or be a multiple of it"
            )
        return cp

    def pack_multiple(self, world_size: int) -> int:
        """What the length of a pack must be a multiple of."""
        return self.resolve_cp(world_size) * PARTITIONS[self.partition]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """This rank's place along one axis of the mesh; `group` is None where the axis has one rank."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's place among all.

    world      all ranks; they share the frozen weights, and the gradients of replicated adapters
    dp, cp     the first view above
    replicas, ep   the second; ranks along `replicas` hold the same experts and expert adapters
    experts    the DeviceMesh (replicas, ep) that expert adapters are saved with; None on one rank
    """

    world: Axis
    dp: Axis
    cp: Axis
    replicas: Axis
    ep: Axis
    device: torch.device
    experts: DeviceMesh | None = None

    @classmethod
    def single(cls, device: torch.device) -> "Mesh":
        """One process alone."""
        one = Axis()
        return cls(world=one, dp=one, cp=one, replicas=one, ep=one, device=device)

    @classmethod
    def create(cls, config: ParallelConfig, device: torch.device) -> "Mesh":
        """Over the ranks of the default process group, or one process where there is none.

        Raises:
            ConfigError: dp, cp and ep do not fit the ranks.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            config.resolve_cp(1)
            return cls.single(device)
        size = dist.get_world_size()
        cp = config.resolve_cp(size)
        data = init_device_mesh(device.type, (config.dp, cp), mesh_dim_names=("dp", "cp"))
        experts = init_device_mesh(
            device.type, (size // config.ep, config.ep), mesh_dim_names=("replicas", "ep")
        )
        return cls(
            world=Axis(rank=dist.get_rank(), size=size, group=dist.group.WORLD),
            dp=_axis(data, "dp"),
            cp=_axis(data, "cp"),
            replicas=_axis(experts, "replicas"),
            ep=_axis(experts, "ep"),
            device=device,
            experts=experts,
        )

    @property
    def is_main(self) -> bool:
        """The one rank that prints and writes."""
        return self.world.rank == 0


@contextmanager
def open_mesh(config: ParallelConfig, *, timeout_seconds: float = 600.0) -> Iterator[Mesh]:
    """Join the process group that the environment describes, and leave it at the end.

    One process needs none.

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
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(
            f"rank {rank} of {size} could not join the process group: {reason}"
        ) from None
    try:
        yield Mesh.create(config, device)
    finally:
        dist.destroy_process_group()


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    sub = mesh[name]
    if sub.size() == 1:
        return Axis()
    return Axis(rank=sub.get_local_rank(), size=sub.size(), group=sub.get_group())


def _local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
