"""The rounding kernel gives the reference's bits in the places that a grouped product wants: in
Triton's interpreter on a CPU, compiled on a GPU.
"""

import sys

import pytest
import torch

from tests.support.triton_interpreter import DEVICE, INTERPRETED

from fullspan.ops.expert_products import (  # isort: skip
    deep_gemm_backend,
    reference,
    rounding,
    scaled_backend,
)
from fullspan.ops.fp8.reference import E4M3, dequantise_into, quantise  # isort: skip

COUNTS = ([5, 0, 9, 2], [0, 0, 3], [7], [0, 8, 0, 1, 0], [9, 7])
ALIGN = 8  # of DeepGEMM: 128


@pytest.fixture(autouse=True)
def _unrounded(monkeypatch):
    """Rounding up to a power of two, the interpreter of Triton 3.6 loses the carry (124.3 becomes
    64): there the kernel writes what is rounded in the end, as float32."""
    if INTERPRETED:
        monkeypatch.setattr(rounding, "E4M3", torch.float32)


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(got.to(E4M3).float(), wanted.float())


def quantised(x: torch.Tensor, block: tuple[int, int]) -> list[torch.Tensor]:
    """The reference on the CPU, and on a GPU the same bits."""
    wanted = [part.to(DEVICE) for part in quantise(x.cpu(), block, power_of_two=False)]
    for here, there in zip(wanted, quantise(x.to(DEVICE), block, power_of_two=False), strict=True):
        assert torch.equal(here.float(), there.float())
    return wanted


def rows_of(slots: int, width: int) -> torch.Tensor:
    """Values of many sizes, a row of zeros, a group of zeros, and numbers so small that a scale of
    theirs has no reciprocal."""
    x = torch.randn(slots, width) * 2.0 ** torch.randint(-8, 9, (slots, width))
    x[0] = 0
    x[-1, :128] = 0
    x[slots // 2, -128:] = 1e-39
    return x.to(DEVICE)


@pytest.mark.parametrize("width", [128, 640, 1152])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_are_spread_over_padded_experts(counts, width):
    torch.manual_seed(0)
    x = rows_of(sum(counts), width)
    got = rounding.spread_rows(x, torch.tensor(counts, device=DEVICE), ALIGN)
    values, scale = quantised(x, (1, 128))
    same(got.values.float()[got.place], values)
    assert torch.equal(got.scale[got.place], scale)
    expert = torch.full((len(got.values),), -1, dtype=torch.int32)
    start, place = 0, []
    for number, count in enumerate(counts):
        expert[start : start + count] = number
        place += range(start, start + count)
        start += -(-count // ALIGN) * ALIGN
    assert torch.equal(got.expert.cpu(), expert)
    assert got.place.tolist() == place
    assert start <= len(got.values) == rounding.padded_rows(len(x), len(counts), ALIGN)
    assert got.scale.stride() == (1, len(got.values))


def test_padding_is_not_written(monkeypatch):
    """Memory comes filled, and the values of padding stay so; no output of theirs is read."""
    fresh = torch.Tensor.new_empty

    def filled(like, *size, **given):
        found = fresh(like, *size, **given)
        return found.view(torch.uint8).fill_(0x55).view(found.dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    got = rounding.spread_rows(
        torch.ones(3, 128, device=DEVICE), torch.tensor([1, 2], device=DEVICE), ALIGN
    )
    padding = got.expert < 0
    assert int(padding.sum()) == len(got.values) - 3
    assert (got.values.view(torch.uint8)[padding] == 0x55).all()
    assert (got.scale[padding].contiguous().view(torch.uint8) == 0x55).all()


def test_rows_and_weights_by_row():
    torch.manual_seed(1)
    x = rows_of(6, 384)
    values, scale = rounding.round_rows(x)
    wanted, wanted_scale = quantised(x, (1, 384))
    same(values, wanted)
    assert torch.equal(scale[:, None], wanted_scale)

    weight, blocks = quantised(rows_of(256, 384), reference.BLOCK)
    wide = torch.empty(256, 384, device=DEVICE)
    dequantise_into(wide, weight, blocks, reference.BLOCK)
    values, scale = rounding.round_rows(weight, blocks)
    wanted, wanted_scale = quantised(wide, (1, 384))
    same(values, wanted)
    assert torch.equal(scale[:, None], wanted_scale)


def test_rows_of_any_stride():
    x = rows_of(4, 256)
    wide = torch.cat([x, x], 1)[:, :256]
    for got, wanted in zip(rounding.round_rows(wide), rounding.round_rows(x), strict=True):
        assert torch.equal(got.float(), wanted.float())


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bad):
    """It must not become 448."""
    x = torch.ones(2, 256, device=DEVICE)
    x[1, 3] = bad
    values, scale = rounding.round_rows(x)
    wide = values.float() * scale[:, None]
    assert wide[0].sub(1).abs().max() < 1e-6 and not wide[1, 3].isfinite()


class Grouped:
    """The product that DeepGEMM documents, in the place of its module: what it demands of its
    operands, and memory that holds NaN where it computes nothing."""

    @staticmethod
    def get_mk_alignment_for_contiguous_layout() -> int:
        return ALIGN

    @staticmethod
    def m_grouped_fp8_gemm_nt_contiguous(rows, weight, out, expert):
        (values, scale), (matrices, blocks) = rows, weight
        assert values.is_contiguous() and out.is_contiguous() and out.shape[0] == len(values)
        assert scale.stride() == (1, len(values)) and len(values) % ALIGN == 0
        assert expert.dtype == torch.int32 and expert.is_contiguous()
        wide = values.to(E4M3).float() * scale.repeat_interleave(128, 1)
        out.fill_(torch.nan)
        for first in range(0, len(values), ALIGN):
            of = expert[first]
            for row in range(first, first + ALIGN):
                if of >= 0 and expert[row] >= 0:
                    assert expert[row] == of, "a block of two experts"
                    matrix = reference._wide(matrices[of], blocks[of], reference.BLOCK)
                    out[row] = (wide[row] @ matrix.t()).to(out.dtype)


def scaled(a, b, scale_a, recipe_a, scale_b, recipe_b, *, offs, output_dtype, use_fast_accum):
    """PyTorch's product of [rows, in] and [experts, in, out] as it is documented."""
    assert recipe_a == recipe_b == scaled_backend.ScalingType.RowWise and not use_fast_accum
    assert a.stride(1) == 1 and b.stride(1) == 1 and offs.dtype == torch.int32
    rows, out = a.to(E4M3).float() * scale_a[:, None], []
    for expert, (start, end) in enumerate(zip([0, *offs[:-1].tolist()], offs.tolist())):
        matrix = b[expert].to(E4M3).float() * scale_b[expert]
        out.append(rows[start:end] @ matrix)
    return torch.cat(out).to(output_dtype)


@pytest.mark.parametrize("counts", COUNTS[:3], ids=str)
def test_what_is_handed_to_other_kernels_and_taken_back(monkeypatch, counts):
    """Operands, places and outputs, with the products of others in plain PyTorch."""
    torch.manual_seed(3)
    x = torch.randn(sum(counts), 256, device=DEVICE)
    weight, blocks = quantised(torch.randn(128 * len(counts), 256), reference.BLOCK)
    given = x, weight.view(-1, 128, 256), blocks.view(-1, 1, 2), torch.tensor(counts, device=DEVICE)
    monkeypatch.setitem(sys.modules, "deep_gemm", Grouped)
    monkeypatch.setattr(scaled_backend.F, "scaled_grouped_mm", scaled)
    for backend, wanted in (
        (deep_gemm_backend, reference.product(*given)),
        (scaled_backend, reference.product_by_row(*given)),
    ):
        assert torch.allclose(backend.product(*given), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("width", [2048, 6144])
def test_widths_of_glm_in_bfloat16(width):
    torch.manual_seed(2)
    counts = torch.tensor([500, 0, 1, 300, 128, 0, 70, 1], device=DEVICE)
    x = rows_of(1000, width).bfloat16()
    got = rounding.spread_rows(x, counts, 128)
    values, scale = quantised(x, (1, 128))
    assert torch.equal(got.values.view(torch.uint8)[got.place], values.view(torch.uint8))
    assert torch.equal(got.scale[got.place], scale)
    assert got.values.dtype == E4M3
