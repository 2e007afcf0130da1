"""The router's choice, and rows that go to the experts in chunks."""

import pytest
import torch

from fullspan.models.common.linear import _SplitLinear
from fullspan.models.common.mlp import GatedMLP
from fullspan.models.common.moe import GroupedExperts, MixtureOfExperts, Router
from fullspan.parallel.expert import ExpertParallel
from tests.support.tiny import relative

ROWS, HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 40, 8, 4, 8, 2


def make(expert_bytes: int = 1 << 30, *, groups: int = 1, topk_group: int = 1) -> MixtureOfExperts:
    router = Router(
        HIDDEN,
        EXPERTS,
        chosen=CHOSEN,
        groups=groups,
        topk_group=topk_group,
        scaling=2.5,
        normalise=True,
    )
    moe = MixtureOfExperts(
        router,
        GroupedExperts(EXPERTS, range(EXPERTS), HIDDEN, INTERMEDIATE),
        GatedMLP(HIDDEN, INTERMEDIATE),
        expert_bytes=expert_bytes,
    )
    generator = torch.Generator().manual_seed(0)
    for tensor in moe.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return moe


def rows() -> torch.Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))


def by_hand(moe: MixtureOfExperts, row: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3's formula for one row, one expert after the other."""
    scores = torch.sigmoid(moe.gate.weight @ row)
    corrected = scores + moe.gate.e_score_correction_bias
    grouped = corrected.view(moe.gate.groups, -1)
    ranks = grouped.topk(2, dim=1).values.sum(1)
    allowed = torch.zeros_like(grouped, dtype=torch.bool)
    allowed[ranks.topk(moe.gate.topk_group).indices] = True
    chosen = corrected.masked_fill(~allowed.flatten(), -torch.inf).topk(CHOSEN).indices
    out = moe.shared_experts(row[None])[0]
    for expert in chosen:
        gate, up = (moe.experts.gate_up_proj.weight[expert] @ row).chunk(2)
        product = moe.experts.down_proj.weight[expert] @ (torch.nn.functional.silu(gate) * up)
        out = out + 2.5 * scores[expert] / scores[chosen].sum() * product
    return out


def test_router_and_experts_against_the_formula():
    x = rows()
    for groups, topk_group in ((1, 1), (4, 2), (2, 1)):
        moe = make(groups=groups, topk_group=topk_group)
        wanted = torch.stack([by_hand(moe, row) for row in x])
        assert relative(moe(x, ExpertParallel(experts=EXPERTS)), wanted) < 1e-6


@pytest.mark.parametrize("expert_bytes", [1 << 30, 1])
def test_values_that_nobody_reads_are_not_made(expert_bytes):
    """Recompute: the gradient is that of the whole forward pass, to the bit, the output is not
    set.
    """
    moe, parallel = make(expert_bytes), ExpertParallel(experts=EXPERTS)
    seed = torch.randn(ROWS, HIDDEN)
    found = []
    for unread in (False, True):
        x = rows().requires_grad_()
        out = moe(x, parallel, unread=unread)
        out.backward(seed)
        found.append((out.detach(), x.grad))
    assert found[1][0].isnan().all() and found[0][0].isfinite().all()
    assert torch.equal(found[1][1], found[0][1])


def test_chunks_change_nothing_and_stay_within_the_workspace(monkeypatch):
    x = rows().requires_grad_()
    sizes = []
    dispatch = ExpertParallel.dispatch
    monkeypatch.setattr(
        ExpertParallel,
        "dispatch",
        lambda self, slots, *rest: sizes.append(len(slots)) or dispatch(self, slots, *rest),
    )
    results = []
    slot_bytes = 4 * (4 * HIDDEN + 3 * INTERMEDIATE)
    for workspace in (1 << 30, 15 * CHOSEN * slot_bytes, 1):
        x.grad = None
        out = make(workspace)(x, ExpertParallel(experts=EXPERTS))
        out.square().sum().backward()
        results.append((out.detach(), x.grad))
    assert sizes == [ROWS * CHOSEN, *[14 * CHOSEN] * 2, 12 * CHOSEN, *[CHOSEN] * ROWS]
    for out, gradient in results[1:]:
        assert relative(out, results[0][0]) < 1e-6
        assert relative(gradient, results[0][1]) < 1e-6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_router_multiplies_bfloat16_rows_as_exactly_as_in_float32(device):
    """By three bfloat16 products: against float64, no worse than the plain product in float32 of
    the device and a few roundings of its sums; the gradient is the exact one, rounded.
    """
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    x = torch.randn(300, 1024, device=device).bfloat16().requires_grad_()
    weight = torch.randn(64, 1024, device=device) * 0.02
    exact = x.detach().double() @ weight.double().t()
    plain = relative(x.detach().float() @ weight.t(), exact)
    out = _SplitLinear.apply(x, weight)
    assert out.dtype == torch.float32 and relative(out, exact) < plain + 2**-23 * 8
    seed = torch.randn(300, 64, device=device)
    out.backward(seed)
    exact = seed.double() @ weight.double()
    assert relative(x.grad, exact) < 1.02 * relative(exact.bfloat16(), exact)
