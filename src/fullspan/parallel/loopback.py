"""One process that is rank R of N: process groups whose other ranks are made up.

A group is PyTorch's own ProcessGroup with every exchange answered here, so that collectives.py, the
exchange of experts, sharded weights and the session run as they do among real ranks, with the same
sizes, memory and work. Nothing leaves the process and no store or address is needed. What the other
ranks would have sent is made from what this one sends, or by `Others` where it sends nothing:

    all_gather        own slot: own rows; any other: own rows, rolled, with some columns larger or
                      smaller by 1.6 %, for each slot others, so that no two keys score alike. Bytes
                      (frozen weights): `Others.weights`
    reduce_scatter    own slice, without the terms of the others
    all_reduce        what is there: the identity
    all_to_all        counts (int64): what would go to rank r comes from r, times `imbalance`. Rows
                      (floating point): own rows, repeated where more come than go. Rows of the
                      indexer (bytes) and selections (int32): `Others`

It leaves out the time and the buffers of a transport (a Transfer tells the bytes), and any value
that depends on other ranks: losses and gradients are this rank's share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

from fullspan.errors import ConfigError
from fullspan.parallel.config import ParallelConfig
from fullspan.parallel.group import Group
from fullspan.parallel.mesh import Axis, Mesh
from fullspan.parallel.watch import Watch
from fullspan.shapes import Tensor

CHANGE = 1 / 64  # of a column; exact in bfloat16, and larger than what rounding would undo
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are far apart for any number of ranks


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Bytes that this rank would have received in one exchange.

    what        as in the message about a lost rank, such as "all_gather of the latent"
    near, far   from ranks of its own node and of others
    ranks       of the group
    """

    what: str
    near: int
    far: int
    ranks: int


@dataclass
class Traffic:
    """Every exchange of this rank; `begin` and `end` stand around each."""

    transfers: list[Transfer] = field(default_factory=list)

    def begin(self, transfer: Transfer) -> None:
        self.transfers.append(transfer)

    def end(self) -> None:
        """Nothing here; for those who measure."""


@dataclass(kw_only=True)
class Others:
    """What other ranks send where nothing of this rank's own can stand for it.

    imbalance: slots that arrive at this rank's experts, over those that it sends.
    """

    imbalance: float = 1.0

    def counts(self, incoming: Tensor, outgoing: Tensor) -> None:
        """[ranks, exchanges, local experts] int64 on both sides."""
        incoming.copy_((outgoing * self.imbalance).round())

    def weights(self, gathered: Tensor, own: Tensor, rank: int) -> None:
        """[ranks * bytes] from [bytes]: copies of the own share."""
        gathered.view(-1, len(own)).copy_(own)

    def index_rows(self, out: Tensor) -> None:
        """[rows, bytes] of index queries and their weights."""
        out.zero_()

    def selections(self, out: Tensor) -> None:
        """[rows, topk + 1] int32: ids and their count, as Trade.give_back sends them."""
        topk = out.shape[1] - 1
        out[:, :topk] = torch.arange(topk, dtype=out.dtype, device=out.device)
        out[:, topk] = topk


class _Done(dist.Work):
    """Work that was finished when it began. Like that of a transport it holds its tensors until it
    is waited for."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        self._tensors = ()
        return True


class LoopbackGroup(dist.ProcessGroup):
    """Some ranks of which this process is one.

    Args:
        ranks: their numbers in the world, in the group's order.
        rank: this one's place among them.
        ranks_per_node: of the world, for the traffic.
        watch: where collectives.py notes what it exchanges.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        *,
        ranks_per_node: int,
        watch: Watch,
        traffic: Traffic,
        others: Others,
    ) -> None:
        super().__init__(rank, len(ranks))  # pyright: ignore[reportCallIssue] the stub lacks it
        self.ranks = tuple(ranks)
        nodes = [number // ranks_per_node for number in ranks]
        self._here = [node == nodes[rank] for node in nodes]
        self._watch, self._traffic, self._others = watch, traffic, others
        self._made: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    @torch.no_grad()
    def _gather(self, gathered: Tensor, own: Tensor, options: Any = None) -> dist.Work:
        self._begin([own.nbytes] * self.size())
        if own.dtype == torch.uint8:
            self._others.weights(gathered, own, self.rank())
        else:
            self._make_rows(gathered.view(self.size(), *own.shape), own)
        return self._end(gathered, own)

    @torch.no_grad()
    def _scatter(self, out: Tensor, full: Tensor, options: Any = None) -> dist.Work:
        self._begin([out.nbytes] * self.size())
        out.copy_(full.view(self.size(), *out.shape)[self.rank()])
        return self._end(out, full)

    @torch.no_grad()
    def _reduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        # A ring passes every part on twice.
        share = 2 * sum(tensor.nbytes for tensor in tensors) // self.size()
        self._begin([share] * self.size())
        return self._end(*tensors)

    @torch.no_grad()
    def _exchange(
        self, out: Tensor, rows: Tensor, received: list[int], sent: list[int], options: Any = None
    ) -> dist.Work:
        width = out[:1].numel() * out.itemsize
        self._begin([count * width for count in received])
        if out.dtype == torch.int64:
            self._others.counts(out, rows)
        elif out.dtype == torch.int32:
            self._others.selections(out)
        elif out.dtype == torch.uint8:
            self._others.index_rows(out)
        else:
            _repeat(out, rows)
        return self._end(out, rows)

    # What PyTorch calls, with arguments by place: the first names from 2.12 on, the others before.
    # Its stubs name the arguments, and each of them otherwise.
    all_gather_single = _allgather_base = _gather  # pyright: ignore[reportAssignmentType] see above
    reduce_scatter_single = _scatter  # pyright: ignore[reportAssignmentType] see above
    _reduce_scatter_base = _scatter  # pyright: ignore[reportAssignmentType] see above
    allreduce = _reduce  # pyright: ignore[reportAssignmentType] see above
    all_to_all_single = alltoall_base = _exchange  # pyright: ignore[reportAssignmentType] see above

    def set_timeout(self, timeout: Any) -> None:
        """Nothing waits."""

    def _make_rows(self, slots: Tensor, own: Tensor) -> None:
        """[ranks, rows, ...] from [rows, ...], without a temporary."""
        rows = len(own)
        for rank, slot in enumerate(slots):
            shift = int((rank + 1) * _GOLDEN % 1 * rows)
            if rank == self.rank():
                slot.copy_(own)
            elif own.is_floating_point():
                factors = self._factors(own)[rank]
                torch.mul(own[shift:], factors, out=slot[: rows - shift])
                torch.mul(own[:shift], factors, out=slot[rows - shift :])
            else:
                slot.copy_(own.roll(shift, 0))

    def _factors(self, own: Tensor) -> Tensor:
        """[ranks, ...]: what each slot's columns are multiplied by."""
        key = (own.shape[1:], own.dtype)
        if key not in self._made:
            generator = torch.Generator().manual_seed(0)
            signs = torch.randint(-1, 2, (self.size(), *own.shape[1:]), generator=generator)
            self._made[key] = (1 + signs * CHANGE).to(own.device, own.dtype)
        return self._made[key]

    def _begin(self, sizes: list[int]) -> None:
        """sizes: bytes from each rank."""
        others = [(size, here) for r, (size, here) in enumerate(zip(sizes, self._here))
                  if r != self.rank()]  # fmt: skip
        near = sum(size for size, here in others if here)
        far = sum(size for size, here in others if not here)
        self._traffic.begin(
            Transfer(what=self._watch.newest.what, near=near, far=far, ranks=self.size())
        )

    def _end(self, *tensors: Tensor) -> dist.Work:
        self._traffic.end()
        return _Done(*tensors)


def loopback_mesh(
    config: ParallelConfig,
    *,
    rank: int,
    size: int,
    device: torch.device,
    ranks_per_node: int = 8,
    traffic: Traffic | None = None,
    others: Others | None = None,
) -> Mesh:
    """The mesh of rank `rank` of `size`, as `Mesh.create` gives it among real ranks.

    It has no DeviceMesh: a rehearsal writes no checkpoint.

    Raises:
        ConfigError: dp, cp and ep do not fit the ranks, or there is no such rank.
    """
    cp = config.resolve_cp(size)
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size}: ranks are 0 to {size - 1} (--rank)")
    if size == 1:
        return Mesh.single(device)
    watch = Watch(rank=rank, size=size)
    traffic, others = traffic or Traffic(), others or Others()

    def axis(ranks: range) -> Axis:
        if len(ranks) == 1:
            return Axis()
        group = LoopbackGroup(
            ranks,
            ranks.index(rank),
            ranks_per_node=ranks_per_node,
            watch=watch,
            traffic=traffic,
            others=others,
        )
        return Axis(rank=ranks.index(rank), size=len(ranks), group=Group(group, watch))

    def block(width: int) -> range:
        first = rank // width * width
        return range(first, first + width)

    return Mesh(
        world=axis(range(size)),
        dp=axis(range(rank % cp, size, cp)),
        cp=axis(block(cp)),
        replicas=axis(range(rank % config.ep, size, config.ep)),
        ep=axis(block(config.ep)),
        device=device,
        watch=watch,
    )


def _repeat(out: Tensor, rows: Tensor) -> None:
    """`rows` over and over until `out` is full."""
    if not len(rows):
        out.zero_()
        return
    for turn in range(ceil(len(out) / len(rows))):
        part = out[turn * len(rows) : (turn + 1) * len(rows)]
        part.copy_(rows[: len(part)])
