"""grouped_linear against a plain per-slot product, in float64: values and both gradients."""

import pytest
import torch

from fullspan.errors import LayoutError
from fullspan.models.common.linear import GroupedLinear, grouped_linear

CASES = {
    "mixed": [3, 0, 5, 1],
    "one-expert": [0, 0, 9, 0],
    "first-only": [2, 0, 0, 0],
    "no-slots": [0, 0, 0, 0],
}


def _operands(counts: list[int]):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), 6, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(4, 5, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    return x, weight, torch.tensor(counts)


def _plain(x, weight, counts):
    expert = torch.repeat_interleave(torch.arange(4), counts)
    return torch.einsum("si,soi->so", x, weight[expert])


@pytest.mark.parametrize("counts", CASES.values(), ids=CASES)
def test_values_and_gradients(counts):
    x, weight, counts = _operands(counts)
    out, wanted = grouped_linear(x, weight, counts), _plain(x, weight, counts)
    torch.testing.assert_close(out, wanted)
    seed = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    got = torch.autograd.grad(out, (x, weight), seed)
    torch.testing.assert_close(got, torch.autograd.grad(wanted, (x, weight), seed))


@pytest.mark.parametrize("counts", CASES.values(), ids=CASES)
def test_frozen_weights_get_no_gradient_and_keep_no_activation(counts):
    x, weight, counts = _operands(counts)
    module = GroupedLinear(4, 6, 5).double()
    module.weight.data.copy_(weight.detach())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = module(x, counts)
    assert not any(t.data_ptr() == x.data_ptr() and t.shape == x.shape for t in kept if t.numel())
    out.sum().backward()
    assert module.weight.grad is None
    wanted = torch.autograd.grad(_plain(x, module.weight, counts).sum(), x)[0]
    torch.testing.assert_close(x.grad, wanted)


def test_a_trained_weight_alone_gets_its_gradient():
    x, weight, counts = _operands([3, 0, 5, 1])
    x = x.detach()
    (got,) = torch.autograd.grad(grouped_linear(x, weight, counts).square().sum(), weight)
    (wanted,) = torch.autograd.grad(_plain(x, weight, counts).square().sum(), weight)
    torch.testing.assert_close(got, wanted)
    assert not got[1].any()


def test_strided_operands():
    """Chunks and transposes arrive in practice: gate and up are halves of one tensor."""
    x, weight, counts = _operands([3, 0, 5, 1])
    wide = torch.cat([x, x], dim=1).detach()[:, 6:]
    turned = weight.detach().transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(grouped_linear(wide, turned, counts), _plain(x, weight, counts))


def test_counts_that_do_not_fit_are_refused():
    x, weight, _ = _operands([3, 0, 5, 1])
    with pytest.raises(LayoutError, match="9 slots, but the experts' counts sum to 8"):
        grouped_linear(x, weight, torch.tensor([3, 0, 5, 0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rank", [8, 6], ids=["fused", "loop"])
@pytest.mark.parametrize("counts", CASES.values(), ids=CASES)
def test_cuda_equals_float64(counts, rank):
    """bf16: at most twice the error of rounding inputs and result once (2^-8 of the norm)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), 16, generator=generator).bfloat16()
    weight = torch.randn(4, rank, 16, generator=generator).bfloat16()
    counts = torch.tensor(counts)
    leaves = [t.cuda().requires_grad_() for t in (x, weight)]
    exact = [t.double().requires_grad_() for t in (x, weight)]
    out, wanted = grouped_linear(*leaves, counts.cuda()), _plain(*exact, counts)
    seed = torch.randn(wanted.shape, generator=generator).bfloat16()
    got = (out, *torch.autograd.grad(out, leaves, seed.cuda()))
    for value, true in zip(got, (wanted, *torch.autograd.grad(wanted, exact, seed.double()))):
        error = (value.double().cpu() - true).norm()
        assert error <= 2**-7 * true.norm()
