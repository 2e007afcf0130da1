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


def transform(rank: int, size: int, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
    """y = (e + 1) x^2 on the rank of expert e, with its gradient, in the order of the rows."""
    chosen = ROUTINGS[routing](rank)
    x = torch.randn(len(chosen), WIDTH, generator=_seeded(10 + rank)).requires_grad_()
    group = None if size == 1 else world_group()
    parallel = ExpertParallel(experts=EXPERTS, rank=rank if size > 1 else 0, size=size, group=group)
    order = chosen.argsort(stable=True)
    sent = parallel.dispatch(x[order], torch.bincount(chosen, minlength=EXPERTS))
    expert = torch.tensor(list(parallel.local)).repeat_interleave(sent.counts)
    out = parallel.combine((expert[:, None] + 1.0) * sent.rows.square(), sent)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    y = out[back]
    (y * torch.arange(1.0, 1 + WIDTH)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_visit_their_experts_and_come_back(size, routing):
    for rank, (y, gradient) in enumerate(run_ranks(size, transform, routing)):
        chosen = ROUTINGS[routing](rank)
        x = torch.randn(len(chosen), WIDTH, generator=_seeded(10 + rank))
        scale = chosen[:, None] + 1.0
        assert torch.equal(y, scale * x.square())
        torch.testing.assert_close(gradient, 2 * scale * x * torch.arange(1.0, 1 + WIDTH))
