"""Which splits of the ranks are compared: every mix of the given sizes that fits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from fullspan.errors import ConfigError
from fullspan.parallel.config import PARTITIONS, check_partition, ep_fits
from fullspan.train.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Split:
    """The sizes of ParallelConfig, and the partition of a pack."""

    dp: int = 1
    cp: int = 1
    ep: int = 1
    partition: str = "contiguous"

    @property
    def ranks(self) -> int:
        return self.dp * self.cp

    def __str__(self) -> str:
        sizes = {"dp": self.dp, "cp": self.cp, "ep": self.ep}
        words = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "cp"]
        if self.cp > 1 and self.partition != "contiguous":
            words.append(self.partition)
        return " ".join(words)

    def apply(self, config: RunConfig) -> RunConfig:
        """`config` on these ranks. Raises ConfigError where its packs cannot be shared by them."""
        parallel = replace(
            config.parallel, dp=self.dp, cp=self.cp, ep=self.ep, partition=self.partition
        )
        changed = replace(config, parallel=parallel)
        changed.check_ranks(self.ranks)
        return changed


def every_split(
    *, dp: Sequence[int], cp: Sequence[int], ep: Sequence[int], partition: Sequence[str]
) -> list[Split]:
    """Every mix, the first of each first; it is what the others are compared with.

    Left out are mixes whose ep does not fit their ranks, and a partition of one rank that differs
    in name only. Raises ConfigError for a value that is in no mix, and where there is nothing
    to compare.
    """
    for name, sizes in (("dp", dp), ("cp", cp), ("ep", ep)):
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"--{name}: got {list(sizes)}: sizes must be at least 1")
    for mode in partition:
        check_partition(mode)
    splits: dict[Split, None] = {}
    for mode, replicas, sequence, experts in product(partition, dp, cp, ep):
        if not ep_fits(experts, cp=sequence, world_size=replicas * sequence):
            continue
        mode = mode if sequence > 1 else partition[0]
        splits.setdefault(Split(dp=replicas, cp=sequence, ep=experts, partition=mode))
    rule = "ep must divide dp x cp, and divide cp or be a multiple of it"
    for name, values in (("ep", ep), ("cp", cp), ("dp", dp), ("partition", partition)):
        for value in values:
            if not any(getattr(split, name) == value for split in splits):
                why = "it needs a cp above 1" if name == "partition" else rule
                raise ConfigError(f"--{name} {value} fits none of the other sizes: {why}")
    if len(splits) < 2:
        raise ConfigError(
            f"nothing to compare: --dp {dp}, --cp {cp}, --ep {ep} and --partition {partition} give "
            f"{len(splits)} split(s) that fit ({rule}); two are needed"
        )
    return list(splits)


def common_rows(splits: Sequence[Split], length: int) -> int:
    """The most rows of which every run of neighbouring rows that a rank holds is a multiple."""
    return gcd(*(length // (split.cp * PARTITIONS[split.partition]) for split in splits))
