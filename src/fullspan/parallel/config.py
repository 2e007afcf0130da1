"""The [parallel] section. Imports no torch; the ranks themselves are mesh.py's."""

from dataclasses import dataclass
from typing import Literal

from fullspan.errors import ConfigError

# Mode (sequence.py): equal chunks of the pack for each rank.
PARTITIONS = {"contiguous": 1, "zigzag": 2}
BALANCE_CHOICES = ("auto", "on", "off")


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
    partition: Literal["contiguous", "zigzag"] = "contiguous"
    shard_weights: bool = False
    balance_indexer: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("dp", 1), ("cp", 0), ("ep", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"parallel.{name} is {getattr(self, name)}: it must be at least {least}"
                )
        check_partition(self.partition)
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
        if not ep_fits(self.ep, cp=cp, world_size=world_size):
            raise ConfigError(
                f"parallel.ep is {self.ep}: it must divide the {world_size} ranks, and divide "
                f"parallel.cp ({cp}) or be a multiple of it"
            )
        return cp

    def pack_multiple(self, world_size: int) -> int:
        """What the length of a pack must be a multiple of."""
        return self.resolve_cp(world_size) * PARTITIONS[self.partition]


def ep_fits(ep: int, *, cp: int, world_size: int) -> bool:
    """Whether blocks of `ep` ranks fill the world, each a part of a sequence or some whole ones."""
    return world_size % ep == 0 and (cp % ep == 0 or ep % cp == 0)


def check_partition(name: str) -> None:
    """Raise ConfigError unless parallel.partition can be `name`."""
    if name not in PARTITIONS:
        raise ConfigError(f"parallel.partition is {name!r}: allowed are {', '.join(PARTITIONS)}")


def check_choice(choice: str) -> None:
    """Raise ConfigError unless parallel.balance_indexer can be `choice`."""
    if choice not in BALANCE_CHOICES:
        raise ConfigError(
            f"parallel.balance_indexer is {choice!r}: allowed are {', '.join(BALANCE_CHOICES)}"
        )
