"""The exchange of expert parallelism against one rank, for even and for degenerate routings."""

import pytest
import torch

from fullspan.parallel.expert import ExpertParallel
from tests.support.ranks import run_ranks, world_group

EXPERTS, WIDTH, ROWS = 8, 5, 12
ROUTINGS = {
    "random": lambda rank: torch.randint(0, EXPERTS, (ROWS,), generator=_seeded(rank)),
    "all rows to one expert": lambda rank: torch.full((ROWS,), 3),
    "empty experts": lambda rank: torch.randint(5, 7, (ROWS,), generator=_seeded(rank)),
    "a rank without rows": lambda rank: torch.arange(0 if rank == 1 else ROWS) % EXPERTS,
}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def operands(rank: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = _seeded(10 + rank)
    return torch.randn(slots, WIDTH, generator=generator), torch.rand(slots, generator=generator)


def transform(rank: int, size: int, routing: str) -> tuple[torch.Tensor, ...]:
    """y = (e + 1) w x^2 on the rank of expert e, with the gradients of x and w, in the order of the
    rows."""
    chosen = ROUTINGS[routing](rank)
    x, weights = (tensor.requires_grad_() for tensor in operands(rank, len(chosen)))
    group = None if size == 1 else world_group()
    parallel = ExpertParallel(experts=EXPERTS, rank=rank if size > 1 else 0, size=size, group=group)
    order = chosen.argsort(stable=True)
    # Two exchanges at once, of every other slot.
    turns = [order[::2], order[1::2]]
    counts = torch.stack([torch.bincount(chosen[turn], minlength=EXPERTS) for turn in turns])
    y = torch.full((len(chosen), WIDTH), torch.nan)
    for turn, route in zip(turns, parallel.start(counts).wait(), strict=True):
        here, factors, dispatch = parallel.dispatch(x[turn], weights[turn], route)
        expert = torch.tensor(list(parallel.local)).repeat_interleave(route.counts)
        out = ((expert + 1.0) * factors)[:, None] * here.square()
        back = parallel.combine(out, dispatch)
        seed = torch.randn(back.shape, generator=_seeded(rank))
        (wanted,) = torch.autograd.grad(back, out, seed, retain_graph=True)
        assert torch.equal(parallel.follow(seed, dispatch), wanted)
        y = y.index_copy(0, turn, back)
    (y * torch.arange(1.0, 1 + WIDTH)).sum().backward()
    assert x.grad is not None and weights.grad is not None
    return y.detach(), x.grad, weights.grad


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_visit_their_experts_and_come_back(size, routing):
    seed = torch.arange(1.0, 1 + WIDTH)
    for rank, (y, of_rows, of_weights) in enumerate(run_ranks(size, transform, routing)):
        chosen = ROUTINGS[routing](rank)
        x, weights = operands(rank, len(chosen))
        scale = ((chosen + 1.0) * weights)[:, None]
        assert torch.equal(y, scale * x.square())
        torch.testing.assert_close(of_rows, 2 * scale * x * seed)
        torch.testing.assert_close(of_weights, (chosen + 1.0) * (x.square() * seed).sum(1))
