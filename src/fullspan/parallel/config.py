"""The [parallel] section, and when balance_indexer "auto" trades. Imports no torch; the ranks
themselves are mesh.py's, the trade balance.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fullspan.errors import ConfigError

# Mode (sequence.py): equal chunks of the pack for each rank.
PARTITIONS = {"contiguous": 1, "zigzag": 2}
BALANCE_CHOICES = ("auto", "on", "off")

# Every tensor of a spread unit (shard.py) starts at a multiple of this many bytes, which every
# dtype's size divides.
ALIGNMENT = 16

# What "auto" reckons with.
SCORING_FLOPS_PER_SECOND = 605e12  # a bf16 index scorer, measured on one H200
NVLINK_BYTES_PER_SECOND = 300e9  # to one peer; two thirds of the 450e9 each way of an H200
NETWORK_BYTES_PER_SECOND = 40e9  # four fifths of a 400 Gbit/s adapter for each GPU
RANKS_PER_NODE = 8  # more ranks than this share a sequence over the network
EXCHANGE_SECONDS = 100e-6  # to start two all-to-alls and to copy the rows on both sides


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The [parallel] section.

    dp              replicas, each with packs of its own
    cp              ranks that share one pack; 0: all ranks of a replica
    ep              ranks that share the routed experts
    partition       which rows of a pack each rank holds
    shard_weights   spread the other frozen weights over all ranks, and gather them layer by layer
    balance_indexer   trade rows between mirrored ranks so that their indexers do equal work; auto:
                    where it saves more time than it takes, see BalanceRule
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


@dataclass(frozen=True, kw_only=True)
class BalanceRule:
    """Whether ranks trade rows of the indexer: parallel.balance_indexer, and what decides under
    "auto". `pairs` below: (query, key) pairs of a full layer that each rank scores by itself.

    heads, dim, topk   of the indexer
    itemsize           bytes of one element of its queries

    Raises:
        ConfigError: an unknown choice.
    """

    choice: str = "auto"
    heads: int
    dim: int
    topk: int
    itemsize: int

    def __post_init__(self) -> None:
        check_choice(self.choice)

    @property
    def sent_bytes(self) -> int:
        """Query and weights of a row on their way to the mirror."""
        return self.heads * (self.dim * self.itemsize + 4)

    @property
    def returned_bytes(self) -> int:
        """Its ids and count on the way back."""
        return 4 * (self.topk + 1)

    def trades(self, pairs: Sequence[int], rows: int) -> bool:
        """The same answer on every rank. rows: of each."""
        if self.choice == "off" or list(pairs) == list(pairs)[::-1]:
            return False
        return self.choice == "on" or self.saved_seconds(pairs) > self.exchange_seconds(pairs, rows)

    def saved_seconds(self, pairs: Sequence[int]) -> float:
        """Scoring time by which the slowest rank of a full layer gets faster: 2 FLOPs per pair,
        head and dim."""
        saved = max(pairs) - evened(pairs)
        return saved * 2 * self.heads * self.dim / SCORING_FLOPS_PER_SECOND

    def exchange_seconds(self, pairs: Sequence[int], rows: int) -> float:
        """What the trade of a full layer takes at most, both ways, with nothing beside it.

        The longest of a rank's `rows` go first, so its surplus of pairs is within the same share of
        its rows.
        """
        traded = rows * max((a - b) / 2 / a for a, b in zip(pairs, pairs[::-1]) if a > 0)
        near = len(pairs) <= RANKS_PER_NODE
        rate = NVLINK_BYTES_PER_SECOND if near else NETWORK_BYTES_PER_SECOND
        return EXCHANGE_SECONDS + traded * (self.sent_bytes + self.returned_bytes) / rate


def evened(pairs: Sequence[int]) -> float:
    """Pairs of the slowest rank once each has traded with its mirror."""
    return max((a + b) / 2 for a, b in zip(pairs, pairs[::-1]))
