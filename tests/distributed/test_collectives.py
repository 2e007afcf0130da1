"""Each collective on real ranks, against what it says it does."""

import pytest
import torch

from fullspan.parallel.collectives import (
    all_reduce_gradients,
    all_reduce_sum,
    gather_rows,
    start_reduce_scatter_rows,
)
from tests.support.ranks import run_ranks, world_group


def exchange(rank: int, size: int) -> None:
    group = None if size == 1 else world_group()
    local = torch.arange(6.0).view(2, 3) + 10 * rank
    gathered = gather_rows(local, group)
    everyone = torch.cat([torch.arange(6.0).view(2, 3) + 10 * other for other in range(size)])
    assert torch.equal(gathered, everyone)
    # The adjoint: <gather(x), y> summed over ranks equals <x, reduce_scatter(y)> summed over ranks.
    weight = torch.randn(2 * size, 3, generator=torch.Generator().manual_seed(rank))
    scattered = start_reduce_scatter_rows(weight, group).wait()
    sides = torch.stack([(gathered * weight).sum(), (local * scattered).sum()])
    all_reduce_sum([sides], group)
    torch.testing.assert_close(sides[0], sides[1])


def sums(rank: int, size: int) -> list[torch.Tensor]:
    group = None if size == 1 else world_group()
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3, 1))]
    if rank == 0:  # no other rank has a trained row
        parameters[0].grad = torch.tensor([1.0, 2.0])
    parameters[1].grad = torch.full((3, 1), float(rank + 1))
    all_reduce_gradients(parameters, group)
    return [p.grad for p in parameters if p.grad is not None]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gather_and_its_adjoint(size):
    run_ranks(size, exchange)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_are_summed_also_where_a_rank_has_none(size):
    for first, second in run_ranks(size, sums):
        assert torch.equal(first, torch.tensor([1.0, 2.0]))
        assert torch.equal(second, torch.full((3, 1), size * (size + 1) / 2))
