"""Every wrapper against the dense weight W + alpha / r * B A, in float64: outputs and gradients."""

import pytest
import torch

from fullspan.lora.layers import LoRAGroupedLinear, LoRAKVUpProjection, LoRALinear
from fullspan.models.common.linear import GroupedLinear, Linear
from fullspan.models.dsa.absorbed import AdapterGradient, UpWeights
from fullspan.models.dsa.attention import KVUpProjection

R, ALPHA = 2, 5.0


def _fill(module: torch.nn.Module) -> torch.nn.Module:
    """Random float64 values everywhere, lora_b included."""
    generator = torch.Generator().manual_seed(3)
    for name in dict(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        parameter = module.get_submodule(owner).get_parameter(leaf)
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return module


def _wrap(wrapper, base):
    generator = torch.Generator().manual_seed(0)
    return _fill(wrapper(base, r=R, alpha=ALPHA, generator=generator))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
    )


def _dense(module) -> torch.Tensor:
    return module.base.weight + ALPHA / R * module.lora_b @ module.lora_a


def _same(module, x, out, wanted):
    """Values and the gradients of x and of both adapter matrices; none for the base."""
    torch.testing.assert_close(out, wanted)
    seed = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    leaves = (x, module.lora_a, module.lora_b)
    got = torch.autograd.grad(out, leaves, seed)
    torch.testing.assert_close(got, torch.autograd.grad(wanted, leaves, seed))
    assert not module.base.weight.requires_grad


@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 6), (0, 6), (2, 0, 6), (6,)])
def test_linear(shape):
    module, x = _wrap(LoRALinear, Linear(6, 5)), _random(*shape)
    _same(module, x, module(x), x @ _dense(module).t())


def test_linear_twice_and_without_a_gradient_of_its_input():
    module, x = _wrap(LoRALinear, Linear(6, 6)), _random(7, 6).detach()
    leaves = (module.lora_a, module.lora_b)
    got = torch.autograd.grad(module(module(x)).square().sum(), leaves)
    dense = _dense(module).t()
    wanted = torch.autograd.grad((x @ dense @ dense).square().sum(), leaves)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 9, 0, 0], [0, 0, 0, 0]])
def test_experts(counts):
    module, x = _wrap(LoRAGroupedLinear, GroupedLinear(4, 6, 5)), _random(sum(counts), 6)
    expert = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    wanted = torch.einsum("si,soi->so", x, _dense(module)[expert])
    _same(module, x, module(x, torch.tensor(counts)), wanted)


HEADS, NOPE, VALUE, LATENT = 3, 4, 5, 6


def _kv():
    module = _wrap(LoRAKVUpProjection, KVUpProjection(HEADS, NOPE, VALUE, LATENT))
    key, value = _dense(module).view(HEADS, NOPE + VALUE, LATENT).split([NOPE, VALUE], dim=1)
    return module, key, value


def _same_half(module, which, x, wanted):
    """As _same, of the products that attention makes: written into a part of a larger tensor."""
    up, weights = module.parts()
    weights = UpWeights(*(None if tensor is None else tensor.detach() for tensor in weights))
    half = up.halves(weights, x.dtype)[which]
    room = torch.full((*wanted.shape[:2], wanted.shape[2] + 2), torch.nan, dtype=x.dtype)
    half.product(x.detach(), room[..., 1:-1])
    torch.testing.assert_close(room[..., 1:-1], wanted)
    grad = torch.linspace(-1, 1, wanted.numel(), dtype=x.dtype).view_as(wanted)
    expected = torch.autograd.grad(wanted, (x, module.lora_a, module.lora_b), grad)
    got = torch.full((*x.shape[:2], x.shape[2] + 2), torch.nan, dtype=x.dtype)
    adapter = AdapterGradient(up, weights)
    own = half.adjoint(x.detach(), grad, got[..., 1:-1])
    none = tuple(torch.zeros_like(part) for part in up.halves(weights, x.dtype)[1 - which][1:3])
    adapter.add(*((own, none) if which == 0 else (none, own)))
    torch.testing.assert_close((got[..., 1:-1], adapter.a, adapter.b), expected)


def test_absorbed_query():
    module, key, _ = _kv()
    query = _random(7, HEADS, NOPE)
    wanted = torch.einsum("thn,hnl->thl", query, key)
    _same_half(module, 0, query, wanted)


def test_projected_value():
    module, _, value = _kv()
    latent = _random(7, HEADS, LATENT)
    wanted = torch.einsum("thl,hvl->thv", latent, value)
    _same_half(module, 1, latent, wanted)


def test_fresh_adapters_change_nothing_and_lora_b_learns_first():
    module = LoRALinear(_fill(Linear(6, 5)), r=R, alpha=ALPHA, generator=torch.Generator())
    x = _random(7, 6)
    assert torch.equal(module(x), module.base(x))
    module(x).square().sum().backward()
    assert module.lora_b.grad.norm() > 0
    assert not module.lora_a.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapters_stay_float32_and_follow_the_input_dtype(dtype):
    module = LoRALinear(
        Linear(6, 5).to(dtype), r=R, alpha=ALPHA, generator=torch.Generator().manual_seed(0)
    )
    module.base.weight.data.fill_(1)
    assert module.lora_a.dtype == module.lora_b.dtype == torch.float32
    out = module(torch.ones(3, 6, dtype=dtype))
    assert out.dtype == dtype
    out.sum().backward()
    assert module.lora_b.grad.dtype == torch.float32


def test_initial_values_are_those_of_peft():
    """Uniform within 1 / sqrt(fan in), for experts too; mean 0 and variance bound^2 / 3."""
    base = GroupedLinear(4, 100, 5)
    module = LoRAGroupedLinear(base, r=50, alpha=1.0, generator=torch.Generator().manual_seed(0))
    values = module.lora_a.detach()
    assert 0.0999 < values.abs().max() <= 0.1
    assert abs(values.mean()) < 2e-3
    torch.testing.assert_close(values.std(), torch.tensor(0.1 / 3**0.5), rtol=0.02, atol=0)
    assert not module.lora_b.any()
