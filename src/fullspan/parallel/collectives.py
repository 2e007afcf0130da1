"""Every collective of the package, each with its shapes on both sides, its forward and its adjoint.

Nothing else in the package calls `torch.distributed` to move a tensor of the model (checkpointing
uses PyTorch's own). A group of `None` means one rank: every function is then the identity. Autograd
lives with the callers.

`what` names the tensor in the message about a rank that is lost; every collective can raise
RankLostError, see watch.py.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullspan.parallel.group import Group
from fullspan.parallel.watch import Exchange
from fullspan.shapes import Float, Tensor

try:  # torch 2.13 renamed these two and warns about the old names; 2.11 has the old ones only
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single


class PendingTensor:
    """A tensor that a collective is still writing; `wait` returns it when it is complete."""

    def __init__(
        self, tensor: Tensor, work: dist.Work | None = None, exchange: Exchange | None = None
    ) -> None:
        self._tensor = tensor
        self._work = work
        self._exchange = exchange

    def wait(self) -> Tensor:
        """Raises RankLostError where it cannot complete."""
        if self._work is not None and self._exchange is not None:
            with self._exchange:
                self._work.wait()
            self._work = None
        return self._tensor


def start_all_gather_rows(local: Tensor, group: Group | None, what: str = "rows") -> PendingTensor:
    """[rows, ...] on each rank -> [ranks * rows, ...] on every rank, in rank order.

    Adjoint: `start_reduce_scatter_rows`, which callers run on float32. Not differentiable by
    itself. Returns at once; the input must not change before `wait`.
    """
    if group is None:
        return PendingTensor(local)
    local = local.detach().contiguous()
    gathered = local.new_empty((group.size * local.shape[0], *local.shape[1:]))
    exchange = group.exchange("all_gather", what)
    with exchange:
        work = all_gather_single(gathered, local, group.process_group, async_op=True)
    return PendingTensor(gathered, work, exchange)


def start_reduce_scatter_rows(
    full: Tensor, group: Group | None, what: str = "rows"
) -> PendingTensor:
    """[ranks * rows, ...] on each rank -> [rows, ...]: rank r gets the sum over ranks of slice r.

    The adjoint of `start_all_gather_rows`. The sum runs in the dtype of `full`.
    """
    if group is None:
        return PendingTensor(full)
    rows = full.shape[0] // group.size
    scattered = full.new_empty((rows, *full.shape[1:]))
    exchange = group.exchange("reduce_scatter", what)
    with exchange:
        work = reduce_scatter_single(
            scattered, full.contiguous(), dist.ReduceOp.SUM, group.process_group, async_op=True
        )
    return PendingTensor(scattered, work, exchange)


def all_to_all_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group, what: str = "rows"
) -> Tensor:
    """[sum(sent), ...] -> [sum(received), ...]: the first sent[0] rows go to rank 0, and so on;
    what comes from rank 0 is first. Adjoint: the same with `sent` and `received` swapped."""
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    rows = rows.detach().contiguous()
    with group.exchange("all_to_all", what):
        dist.all_to_all_single(out, rows, list(received), list(sent), group=group.process_group)
    return out


def all_reduce_sum(
    tensors: Sequence[Tensor], group: Group | None, what: str = "some numbers"
) -> None:
    """Replace each tensor by its sum over the ranks, in place, in one message: the tensors are
    joined in their order in float32. Every rank must pass the same shapes. Never differentiated.
    """
    if group is None or not tensors:
        return
    joined = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
    with group.exchange("all_reduce", what):
        dist.all_reduce(joined, dist.ReduceOp.SUM, group.process_group)
    for tensor, part in zip(tensors, joined.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def sum_over_ranks(tensor: Tensor, group: Group | None, what: str = "some numbers") -> Tensor:
    """[...] on each rank -> [...], the sum over ranks, on every rank, in the dtype of `tensor`.

    Adjoint: itself. Every rank goes on with the same sum, so the gradient of each rank's term is
    the sum over ranks of what they each made of it.
    """
    if group is None:
        return tensor
    total = tensor.detach().clone()
    with group.exchange("all_reduce", what):
        dist.all_reduce(total, dist.ReduceOp.SUM, group.process_group)
    return total


def all_reduce_gradients(
    parameters: Sequence[torch.nn.Parameter],
    group: Group | None,
    what: str = "the adapters' gradients",
) -> None:
    """Sum the gradients of replicated parameters over the ranks of a sequence, which each saw a
    part of its rows.

    A parameter that no row of this rank reached counts as a zero gradient, so that every rank sends
    the same message.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    all_reduce_sum([p.grad for p in parameters if p.grad is not None], group, what)


def gather_rows(
    local: Float[Tensor, "rows *width"], group: Group | None, what: str = "rows"
) -> Tensor:
    """The blocking form of `start_all_gather_rows`, for parity checks."""
    return start_all_gather_rows(local, group, what).wait()
