"""Gathered sums, gated products and norms against formulas in float64: the reference, and the
Triton kernels, in Triton's interpreter on a CPU and compiled on a GPU.
"""

import pytest
import torch
from torch.nn import functional as F

from tests.support.triton_interpreter import DEVICE, INTERPRETED

from fullspan.ops.rows import reference, triton_backend  # isort: skip
from fullspan.ops.rows.op import gather_rows, rms_norm, swiglu  # isort: skip

DTYPES = [torch.float32] + ([] if INTERPRETED else [torch.bfloat16])
IMPLEMENTATIONS = {"reference": reference, "triton": triton_backend}


@pytest.fixture(params=IMPLEMENTATIONS)
def rows(request):
    """One implementation."""
    return IMPLEMENTATIONS[request.param]


def random(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, dtype=torch.float32) -> None:
    """At most one rounding of the result away from float64, and float32's own error."""
    assert got.dtype == dtype
    error = (got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    assert error < (2**-8 if dtype == torch.bfloat16 else 1e-6)


def chosen(rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(index [rows, count], inverse [rows * count, 1]) of a sum over shuffled slots."""
    index = torch.randperm(rows * count)
    inverse = torch.empty_like(index)
    inverse[index] = torch.arange(rows * count) // count
    return index.view(rows, count).to(DEVICE), inverse[:, None].to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "count"), [(5, 3), (300, 8), (2100, 1), (64, 2)])
def test_gathered_sums(rows, width, count, dtype):
    x = random(22, width + 3, dtype=dtype)[:, 1 : 1 + width]
    index = torch.randint(0, 22, (9, count), device=DEVICE)
    got = rows.gather_rows(x, index)
    if count == 1:
        assert torch.equal(got, x[index[:, 0]])
    close(got, x.double()[index].sum(1), dtype)


def test_the_gradient_of_a_gathered_sum_is_the_other_one():
    """Slots from rows and rows from slots; gradients as autograd has them for indexing."""
    index, inverse = chosen(11, 4)
    for given, there, back in ((44, index, inverse), (11, inverse, index)):
        x = random(given, 6).requires_grad_()
        seed = random(len(there), 6)
        out = gather_rows(x, there, back)
        wanted = x[there].sum(1)
        close(out, wanted.double())
        (got,) = torch.autograd.grad(out, x, seed)
        close(got, torch.autograd.grad(wanted, x, seed)[0].double())


def formula(gate, up, weights):
    out = F.silu(gate.double()) * up.double()
    return out if weights is None else out * weights.double()[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 256, 2100])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gated_product_and_its_gradients(rows, width, weighted, dtype):
    """Halves of wider rows, as gate and up of an expert are; gradients written into halves."""
    both = random(6, 2 * width, dtype=dtype) * 3
    gate, up = both.chunk(2, 1)
    weights = torch.rand(6, device=DEVICE) if weighted else None
    leaves = [t.double().requires_grad_() for t in (gate, up) + ((weights,) * weighted)]
    wanted = formula(*leaves, *([] if weighted else [None]))
    close(rows.swiglu(gate, up, weights), wanted, dtype)
    grad = random(6, width, dtype=dtype)
    space = torch.full((6, 2 * width), torch.nan, dtype=dtype, device=DEVICE)
    dgate, dup = space.chunk(2, 1)
    dweights = rows.swiglu_backward(grad, gate, up, weights, dgate, dup)
    true = torch.autograd.grad(wanted, leaves, grad.double())
    close(dgate, true[0], dtype)
    close(dup, true[1], dtype)
    if weighted:
        close(dweights, true[2])
    else:
        assert dweights.numel() == 0


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gated_product_through_autograd(side_by_side, weighted):
    gate, up = random(5, 9).requires_grad_(), random(5, 9).requires_grad_()
    weights = torch.rand(5, device=DEVICE).requires_grad_() if weighted else None
    given = (torch.cat([gate, up], 1), None) if side_by_side else (gate, up)
    seed = random(5, 9)
    out, wanted = swiglu(*given, weights), formula(gate, up, weights)
    leaves = [gate, up] + ([weights] if weighted else [])
    got = torch.autograd.grad(out, leaves, seed)
    for mine, true in zip(got, torch.autograd.grad(wanted, leaves, seed.double()), strict=True):
        close(mine, true.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [6, 64, 1100])
def test_the_norm_and_its_gradient(rows, width, dtype):
    """A narrower part of wider rows, as the latent of keys is."""
    x = (random(7, width + 8, dtype=dtype) * 5)[:, :width]
    weight, grad = random(width, dtype=dtype), random(7, width, dtype=dtype)
    leaf = x.double().requires_grad_()
    wanted = leaf / (leaf.square().mean(1, keepdim=True) + 1e-3).sqrt() * weight.double()
    out, rstd = rows.rms_norm(x, weight, 1e-3)
    error = (out.double() - wanted).norm() / wanted.norm()
    assert error < (2**-8 if dtype == torch.bfloat16 else 1e-6)
    (true,) = torch.autograd.grad(wanted, leaf, grad.double())
    close(rows.rms_norm_backward(grad, x, weight, rstd), true, dtype)


def test_the_norm_through_autograd():
    x, weight = random(2, 3, 8).requires_grad_(), random(8)
    wanted = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    out, seed = rms_norm(x, weight, 0.1), random(2, 3, 8)
    close(out, wanted.double())
    (got,) = torch.autograd.grad(out, x, seed)
    close(got, torch.autograd.grad(wanted, x, seed)[0].double())


def test_rounds_to_the_dtype_before_the_weight():
    """As the families' own code has it: bits of bfloat16 that one rounding alone would not give."""
    x, weight = torch.randn(50, 64).bfloat16(), (torch.rand(64) + 1).bfloat16()
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-5), weight * wide.bfloat16())
    assert not torch.equal(rms_norm(x, weight, 1e-5), (weight.float() * wide).bfloat16())


def test_strips_do_not_show(monkeypatch):
    """The reference works on a bounded number of rows at a time."""

    def results() -> list[torch.Tensor]:
        torch.manual_seed(1)
        x, grad, weights = torch.randn(23, 8), torch.randn(23, 8), torch.rand(23)
        dgate, dup = torch.empty(23, 8), torch.empty(23, 8)
        out, rstd = reference.rms_norm(x, x[0], 0.1)
        dweights = reference.swiglu_backward(grad, x, out, weights, dgate, dup)
        gathered = reference.gather_rows(x, torch.arange(22).view(11, 2))
        back = reference.rms_norm_backward(grad, x, x[0], rstd)
        return [out, rstd, back, dweights, dgate, dup, gathered, reference.swiglu(x, out, weights)]

    whole = results()
    monkeypatch.setattr(reference, "_STRIP_ELEMENTS", 5 * 8)
    for got, wanted in zip(results(), whole, strict=True):
        assert torch.equal(got, wanted)


def test_no_rows_and_no_columns(rows):
    empty = torch.empty(0, 4, device=DEVICE)
    assert rows.gather_rows(empty, torch.empty(0, 2, dtype=torch.int64, device=DEVICE)).shape == (
        0,
        4,
    )
    assert rows.swiglu(empty, empty, torch.empty(0, device=DEVICE)).shape == (0, 4)
    assert rows.rms_norm(empty, torch.ones(4, device=DEVICE), 0.1)[0].shape == (0, 4)


def test_the_ops_are_registered_as_they_behave():
    ops, check = torch.ops.fullspan, torch.library.opcheck
    tests = ("test_schema", "test_faketensor")
    x, weights = torch.randn(6, 8), torch.rand(6)
    index = torch.arange(6).view(3, 2)
    check(ops.gather_rows.default, (x, index, "reference"), test_utils=tests)
    for up, weight in ((None, weights), (torch.randn(6, 8), None)):
        check(ops.swiglu.default, (x, up, weight, "reference"), test_utils=tests)
        width = 4 if up is None else 8
        given = (torch.randn(6, width), x, up, weight, "reference")
        check(ops.swiglu_backward.default, given, test_utils=tests)
    check(ops.rms_norm.default, (x, torch.ones(8), 0.1, "reference"), test_utils=tests)
    given = (x, x, torch.ones(8), torch.ones(6), "reference")
    check(ops.rms_norm_backward.default, given, test_utils=tests)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU")
def test_more_than_two_to_the_31_values():
    """Rows whose offsets pass 2^31: the last ones equal a call of their own, twice."""
    rows, width = 400_000, 6144
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda").normal_()
    assert x.numel() > 2**31
    index = torch.arange(rows, device="cuda").flip(0)[:, None]
    gathered = gather_rows(x, index, index)
    assert torch.equal(gathered[:7], x[-7:].flip(0)) and torch.equal(gathered[-7:], x[:7].flip(0))
    del gathered
    out = swiglu(x)
    assert torch.equal(out[-7:], swiglu(x[-7:])) and torch.equal(out, swiglu(x))
    del out
    weight = torch.ones(width, dtype=torch.bfloat16, device="cuda")
    out = rms_norm(x, weight, 1e-5)
    assert torch.equal(out[-7:], rms_norm(x[-7:], weight, 1e-5))
