"""Linear cross-entropy against torch's; ignored rows, chunks, memory."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fullspan.errors import ConfigError
from fullspan.ops.linear_cross_entropy import op, reference
from fullspan.ops.linear_cross_entropy.op import IGNORE, linear_cross_entropy
from fullspan.ops.options import OpOptions
from tests.ops.support import allocations, nbytes

OPTIONS = OpOptions()
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def inputs(rows: int = 20, width: int = 8, vocab: int = 50, dtype=torch.float32) -> list[Tensor]:
    """hidden, weight, labels; rows 0, 5, 6 and the last have no label."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[[0, 5, 6, -1]] = IGNORE
    return [hidden.to(dtype).requires_grad_(), weight.to(dtype), labels]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(hidden @ weight.T, labels, reduction="none", ignore_index=IGNORE)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1024])
def test_loss_and_gradient_equal_those_of_torch(chunk):
    hidden, weight, labels = inputs(dtype=torch.float64)
    options = OpOptions(loss_chunk_rows=chunk)
    loss = linear_cross_entropy(hidden, weight, labels, options=options)
    expected = plain(hidden, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(loss)
    ours, theirs = (torch.autograd.grad(x, hidden, grad)[0] for x in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    ignored = labels == IGNORE
    assert (loss[ignored] == 0).all() and (ours[ignored] == 0).all()


def test_gradient_equals_finite_differences():
    hidden, weight, labels = inputs(dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda hidden: linear_cross_entropy(hidden, weight, labels, options=OPTIONS), (hidden,)
    )


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_that_of_plain_torch(dtype, device, monkeypatch):
    """The loss is float32 for any input; the gradient is rounded once, and again when scaled."""
    monkeypatch.setattr(reference, "WIDENED_ELEMENTS", 1000)  # several slices of the vocabulary
    hidden, weight, labels = (x.detach().to(device) for x in inputs(64, 32, 500, dtype))
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, options=OPTIONS)
    wide = hidden.detach().double().requires_grad_()
    exact, rough = plain(wide, weight.double(), labels), plain(hidden, weight, labels)
    assert loss.dtype == torch.float32
    allowed = (plain(wide.float(), weight.float(), labels) - exact).abs().max()
    assert (loss - exact).abs().max() <= allowed + 1e-6
    grad = torch.rand(64, device=device)
    ours = torch.autograd.grad(loss, hidden, grad)[0]
    theirs = torch.autograd.grad(rough, hidden, grad.to(rough.dtype))[0]
    truth = torch.autograd.grad(exact, wide, grad.double())[0]
    error, allowed = ((x.double() - truth).norm() / truth.norm() for x in (ours, theirs))
    assert ours.dtype == dtype and error <= allowed + torch.finfo(torch.float32).eps


def test_large_logits_stay_finite():
    hidden, weight, labels = inputs()
    hidden = (hidden.detach() * 1e4).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, options=OPTIONS)
    torch.testing.assert_close(loss, plain(hidden, weight, labels))
    assert torch.autograd.grad(loss.sum(), hidden)[0].isfinite().all()


@pytest.mark.parametrize("rows", [0, 12])
def test_no_trained_row(rows):
    """A rank of pure prompt or padding: zeros, and a backward that runs."""
    hidden = torch.full((rows, 8), torch.nan, requires_grad=True)
    labels = torch.full((rows,), IGNORE)
    loss = linear_cross_entropy(hidden, torch.randn(50, 8), labels, options=OPTIONS)
    loss.sum().backward()
    assert loss.shape == (rows,) and (loss == 0).all()
    assert hidden.grad is not None and (hidden.grad == 0).all()


def test_ignored_rows_are_not_computed():
    hidden, weight, labels = inputs()
    with torch.no_grad():
        hidden[labels == IGNORE] = torch.nan
    loss = linear_cross_entropy(hidden, weight, labels, options=OPTIONS)
    (grad,) = torch.autograd.grad(loss.sum(), hidden)
    assert loss.isfinite().all() and grad.isfinite().all()


def test_no_gradient_is_kept_when_none_is_wanted():
    hidden, weight, labels = inputs()
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels, options=OPTIONS).requires_grad
    plain_hidden = hidden.detach()
    assert not linear_cross_entropy(plain_hidden, weight, labels, options=OPTIONS).requires_grad
    _, grad = reference.linear_cross_entropy(plain_hidden, weight, labels, IGNORE, 4, False)
    assert grad.shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_logits_than_a_chunk(dtype):
    """The logits of 16 rows, and a few times the hidden rows of a chunk; never [rows, vocab]."""
    hidden, weight, labels = inputs(400, 16, 4000, dtype)
    results = []
    peak, largest = allocations(
        lambda: results.append(
            reference.linear_cross_entropy(hidden.detach(), weight, labels, IGNORE, 16, True)
        )
    )
    chunk = 4 * 16 * 4000
    widened = 0 if dtype == torch.float32 else 4 * weight.numel()
    assert largest == max(chunk, widened)
    assert peak - nbytes(*results[0]) <= chunk + widened + (1 << 16)


def test_a_trained_head_is_refused():
    hidden, weight, labels = inputs()
    with pytest.raises(ConfigError, match=r"lm_head out of lora\.targets"):
        linear_cross_entropy(hidden, weight.requires_grad_(), labels, options=OPTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep_grad", [False, True])
def test_operator_registration(dtype, keep_grad):
    hidden, weight, labels = inputs(dtype=dtype)
    hidden = hidden if keep_grad else hidden.detach()
    torch.library.opcheck(op._linear_cross_entropy, (hidden, weight, labels, 7, keep_grad))
