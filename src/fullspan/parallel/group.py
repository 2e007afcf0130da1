"""The ranks of one axis as the collectives take them: a process group and the watch over it."""

from dataclasses import dataclass, field

import torch.distributed as dist

from fullspan.parallel.watch import Exchange, Watch


@dataclass(frozen=True)
class Group:
    """Some ranks, this one among them. Every exchange between them is noted in `watch`."""

    process_group: dist.ProcessGroup
    watch: Watch = field(default_factory=Watch)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.process_group)

    def exchange(self, collective: str, what: str) -> Exchange:
        """The next exchange: to be entered at its start, and again for the wait for it."""
        return self.watch.exchange(f"{collective} of {what}")
