"""The Triton kernel of block dequantise gives the reference's bits: in Triton's interpreter on a
CPU, compiled on a GPU.
"""

import pytest
import torch

from tests.support.triton_interpreter import DEVICE, INTERPRETED

from fullspan.ops.fp8 import reference, triton_backend  # isort: skip
from fullspan.ops.fp8.kernels import dequantise_kernel  # isort: skip
from fullspan.ops.fp8.op import E4M3, dequantise_blocks, scale_shape  # isort: skip

# The interpreter rounds to bfloat16 towards zero.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


def random_fp8(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Every e4m3 value but NaN (a GPU has a test of its own), and scales that all differ."""
    bits = torch.randint(0, 256, shape, dtype=torch.uint8)
    values = bits.masked_fill((bits & 0x7F) == 0x7F, 0x15).view(E4M3)
    grid = scale_shape(shape, block)
    scale = (torch.rand(grid) + 0.5) * 2.0 ** torch.randint(-9, 3, grid)
    return values.to(DEVICE), scale.to(DEVICE)


def check(weight, scale, block, out: torch.Tensor) -> None:
    """To the bit, and nothing else is written: `out` comes filled with NaN."""
    want = torch.empty(weight.shape, dtype=out.dtype, device=DEVICE)
    reference.dequantise_into(want, weight, scale, block)
    triton_backend.dequantise_into(out, weight, scale, block)
    assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((50, 70), (24, 40)),
        ((1, 1), (24, 40)),
        ((200, 300), (128, 128)),  # ragged rows and columns
        ((3, 49, 41), (24, 40)),
        ((2, 3, 31, 41), (16, 32)),  # experts with gate and up
        ((2, 1, 2, 9, 11), (4, 8)),
        ((300, 20), (200, 150)),  # a block of several tiles, no multiple of one, past the columns
        ((0, 5), (24, 40)),
        ((2, 0, 9), (24, 40)),
    ],
)
def test_equals_the_reference(shape, block, dtype):
    weight, scale = random_fp8(shape, block)
    check(weight, scale, block, torch.full(shape, torch.nan, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("width", [48, 45])
def test_any_strides(width):
    """Experts of a stack, every other one; rows and columns exchanged on each side; a wider row."""
    block = (16, 32)
    weight, scale = random_fp8((4, 2, 30, width), block)
    weight, scale = weight[::2], scale.transpose(2, 3).contiguous().transpose(2, 3)[::2]
    turned = torch.full((2, 2, width, 30), torch.nan, dtype=torch.float16, device=DEVICE).mT
    check(weight, scale, block, turned)
    inside = torch.full((2, 2, 30, 64), torch.nan, dtype=torch.float16, device=DEVICE)
    check(weight.mT.contiguous().mT, scale, block, inside[..., 3 : 3 + width])
    assert inside[..., :3].isnan().all() and inside[..., 3 + width :].isnan().all()


def test_a_program_writes_inside_its_block_only():
    """Tiles are powers of two; what passes their block has another scale, and another writer."""
    block, tile = (24, 40), (32, 64)
    weight, scale = random_fp8((50, 70), block)
    out = torch.full((50, 70), torch.nan, device=DEVICE)
    strides = [s for t in (weight, scale, out) for s in (0, 0, *t.stride())]
    dequantise_kernel[(1,)](weight, scale, out, 50, 70, 3, 2, 1, *strides, *block, *tile)
    assert out[:24, :40].isfinite().all()
    assert out[24:].isnan().all() and out[:, 40:].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU")
def test_auto_takes_it_and_nan_stays_nan():
    weight = torch.arange(256, dtype=torch.uint8, device="cuda").view(E4M3).view(2, 128)
    scale = torch.full((1, 1), 0.37, device="cuda")
    got = dequantise_blocks(weight, scale, (128, 128), torch.bfloat16)
    want = dequantise_blocks(weight, scale, (128, 128), torch.bfloat16, backend="reference")
    assert torch.equal(got.isnan(), want.isnan()) and int(got.isnan().sum()) == 2
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU")
def test_more_than_two_to_the_31_values():
    """64 experts of GLM-5.2's gate and up, 3.2e9 values: the last one equals a call of its own."""
    shape, block = (64, 2, 4096, 6144), (128, 128)
    weight = torch.randint(0, 127, shape, dtype=torch.uint8, device="cuda").view(E4M3)
    scale = torch.rand(scale_shape(shape, block), device="cuda")
    assert weight.numel() > 2**31
    got = dequantise_blocks(weight, scale, block, torch.bfloat16)
    last = dequantise_blocks(weight[-1], scale[-1], block, torch.bfloat16, backend="reference")
    assert torch.equal(got[-1], last)
