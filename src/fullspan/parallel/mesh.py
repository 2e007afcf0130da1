"""The ranks of a run: how many share one sequence, and the process group they do it in.

Uses PyTorch's DeviceMesh and its own environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) as
torchrun sets it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fullspan.errors import ConfigError, LaunchError
from fullspan.parallel.sequence import PARTITIONS


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a run is spread.

    cp          ranks that share one pack; 0 means all ranks of the run
    partition   which rows of a pack each of them holds
    """

    cp: int = 0
    partition: str = "contiguous"

    def __post_init__(self) -> None:
        if self.cp < 0:
            raise ConfigError(
                f"parallel.cp is {self.cp}: it must be 0 (all ranks) or a positive number of ranks"
            )
        if self.partition not in PARTITIONS:
            raise ConfigError(
                f"parallel.partition is {self.partition!r}: allowed are {', '.join(PARTITIONS)}"
            )


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's place. `cp_group` is None where one rank holds the whole sequence."""

    rank: int
    world_size: int
    cp_rank: int
    cp_size: int
    cp_group: dist.ProcessGroup | None
    device: torch.device

    @property
    def is_main(self) -> bool:
        """The one rank that prints and writes."""
        return self.rank == 0


@contextmanager
def open_mesh(config: ParallelConfig, *, timeout_seconds: float = 600.0) -> Iterator[Mesh]:
    """Join the process group that the environment describes, and leave it at the end. One process
    needs none.

    Raises:
        ConfigError: parallel.cp does not fit the number of ranks.
        LaunchError: the ranks could not find each other.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cp_size = config.cp or world_size
    if cp_size != world_size:
        raise ConfigError(
            f"parallel.cp is {cp_size} but {world_size} rank(s) were started: they must be equal "
            "(set parallel.cp, or --nproc-per-node)"
        )
    device = _local_device()
    if world_size == 1:
        yield Mesh(rank=0, world_size=1, cp_rank=0, cp_size=1, cp_group=None, device=device)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(
            f"rank {rank} of {world_size} could not join the process group: {reason}"
        ) from None
    try:
        mesh = init_device_mesh(device.type, (cp_size,), mesh_dim_names=("cp",))
        yield Mesh(
            rank=rank,
            world_size=world_size,
            cp_rank=mesh.get_local_rank("cp"),
            cp_size=cp_size,
            cp_group=mesh.get_group("cp"),
            device=device,
        )
    finally:
        dist.destroy_process_group()


def _local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
