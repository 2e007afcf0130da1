"""Block-scaled FP8: every value has the scale of its block, at ragged ends, at any size."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fullspan.errors import LayoutError
from fullspan.ops.fp8.op import E4M3, dequantise_blocks, quantise_blocks, scale_shape
from tests.support.memory import peak_bytes

BLOCK = (24, 40)


def random_fp8(*shape: int, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Values over the whole range of e4m3, and scales that all differ."""
    weight = (torch.randn(shape) * 60).clamp(-448, 448).to(E4M3)
    grid = scale_shape(shape, block)
    return weight, (torch.rand(grid) + 0.5) * 2.0 ** torch.randint(-9, 3, grid)


def value_by_value(weight, scale, block):
    """The definition, in float64."""
    rows = torch.arange(weight.shape[-2]) // block[0]
    cols = torch.arange(weight.shape[-1]) // block[1]
    return weight.double() * scale.double()[..., rows, :][..., cols]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(48, 80), (50, 70), (1, 1), (23, 200), (3, 49, 41), (2, 2, 24, 1), (0, 5), (2, 0, 9)]
)
def test_a_value_is_multiplied_by_the_scale_of_its_block(shape, dtype):
    weight, scale = random_fp8(*shape)
    got = dequantise_blocks(weight, scale, BLOCK, dtype)
    # One rounding in float32, one to the result: the values that these two give, to the bit.
    assert torch.equal(got, value_by_value(weight, scale, BLOCK).float().to(dtype))


def test_the_last_scale_row_of_a_ragged_weight_counts():
    """kv_a_proj_with_mqa of GLM-5.2: 576 rows are four and a half blocks."""
    weight, _ = random_fp8(576, 6144, block=(128, 128))
    scale = torch.ones(5, 48)
    scale[4] = torch.arange(48) + 2.0
    got = dequantise_blocks(weight, scale, (128, 128), torch.float32)
    assert torch.equal(got[:512], weight[:512].float())
    last = weight[512:].float().unflatten(1, (48, 128)) * (torch.arange(48) + 2.0)[:, None]
    assert torch.equal(got[512:], last.flatten(1))
    with pytest.raises(LayoutError, match=r"has a scale \[5, 48\], not \[4, 48\]"):
        dequantise_blocks(weight, scale[:4], (128, 128), torch.float32)


def test_strips_do_not_show(monkeypatch):
    """A weight of many strips equals one of a single strip."""
    weight, scale = random_fp8(2, 200, 70)
    whole = dequantise_blocks(weight, scale, BLOCK, torch.float32)
    values = quantise_blocks(whole, BLOCK)
    monkeypatch.setattr("fullspan.ops.fp8.reference._STRIP_ELEMENTS", 24 * 70 * 2)
    assert torch.equal(dequantise_blocks(weight, scale, BLOCK, torch.float32), whole)
    for got, wanted in zip(quantise_blocks(whole, BLOCK), values, strict=True):
        assert torch.equal(got.float(), wanted.float())


def test_writes_into_a_workspace_of_any_strides():
    weight, scale = random_fp8(50, 70)
    space = torch.empty(70, 50, dtype=torch.bfloat16).t()
    assert dequantise_blocks(weight.t().contiguous().t(), scale, BLOCK, space.dtype, space) is space
    assert torch.equal(space, dequantise_blocks(weight, scale, BLOCK, torch.bfloat16))


def test_holds_no_second_copy():
    """Beside the result, a bounded float32 strip and its scales; never 4 bytes a value."""
    weight, scale = random_fp8(4096, 4096, block=(128, 128))
    out = torch.empty(weight.shape, dtype=torch.bfloat16)
    peak = peak_bytes(lambda: dequantise_blocks(weight, scale, (128, 128), out.dtype, out))
    assert peak < weight.numel() * 4 / 3


@pytest.mark.parametrize("shape", [(48, 80), (50, 70), (3, 49, 41), (1, 1)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_quantising_rounds_each_value_to_the_nearest(shape, power_of_two):
    weight = torch.randn(shape) * 2.0 ** torch.randint(-6, 6, (shape[-1],))
    before = weight.clone()
    values, scale = quantise_blocks(weight, BLOCK, power_of_two=power_of_two)
    assert torch.equal(weight, before)
    assert values.dtype == E4M3 and scale.shape == scale_shape(shape, BLOCK)
    ones = torch.ones(shape)
    each = value_by_value(ones, scale, BLOCK)
    largest = value_by_value(ones, _block_maxima(weight), BLOCK)
    if power_of_two:
        assert torch.equal(scale.log2(), scale.log2().round())
        assert (each * 448 >= largest).all() and (each * 224 < largest).all()
    else:
        assert torch.equal(each.float(), (largest.float() / 448))
    error = (value_by_value(values, scale, BLOCK) - weight.double()).abs()
    # Half a step of 3 bits of mantissa, or of the smallest step, 2^-9; a little for float32.
    bound = torch.maximum(weight.double().abs() * 2.0**-4, each * 2.0**-10) * (1 + 1e-6)
    assert (error <= bound).all()


def test_quantising_what_was_dequantised_gives_the_same_values():
    values, scale = quantise_blocks(torch.randn(50, 70), BLOCK)
    again, rescaled = quantise_blocks(dequantise_blocks(values, scale, BLOCK, torch.float32), BLOCK)
    assert torch.equal(again.float(), values.float())
    assert torch.equal(rescaled, scale)


def test_zeros_and_tiny_values_stay_finite():
    weight = torch.zeros(48, 80)
    weight[:24, 40:] = 1e-42  # a subnormal float32
    weight[24:, :40] = torch.finfo(torch.float32).max
    values, scale = quantise_blocks(weight, BLOCK)
    assert scale.isfinite().all() and (scale > 0).all()
    back = dequantise_blocks(values, scale, BLOCK, torch.float32)
    assert torch.equal(back[:24, :40], weight[:24, :40]) and back.isfinite().all()
    assert torch.allclose(back[24:, :40], weight[24:, :40], rtol=1e-6)


def test_offsets_pass_two_to_the_31(tmp_path):
    """The last expert of a stack of 2.2e9 values, in a sparse file that costs no memory."""
    experts, rows, cols = 300, 1200, 6144
    size = experts * rows * cols
    assert size > 1 << 31
    bytes_ = torch.from_file(str(tmp_path / "stack"), shared=True, size=size, dtype=torch.uint8)
    stack = bytes_.view(E4M3).view(experts, rows, cols)
    last, scale = random_fp8(rows, cols, block=(128, 128))
    stack[-1, -100:] = last[-100:]
    got = dequantise_blocks(stack[-1], scale, (128, 128), torch.float32)
    wanted = dequantise_blocks(last, scale, (128, 128), torch.float32)
    assert torch.equal(got[-100:], wanted[-100:])
    assert not got[:-100].any()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"weight": torch.zeros(50, 70)}, "float32"),
        ({"weight": torch.zeros(50, 70).to(torch.float8_e5m2)}, "float8_e5m2"),
        ({"scale": torch.ones(3, 1)}, r"\[3, 2\], not \[3, 1\]"),
        ({"block": (0, 40)}, "0 x 40"),
        ({"out_dtype": torch.int32}, "int32"),
        ({"out": torch.empty(50, 71)}, r"\[50, 71\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, told):
    weight, scale = random_fp8(50, 70)
    arguments = {"weight": weight, "scale": scale, "block": BLOCK, "out_dtype": torch.float32}
    with pytest.raises(LayoutError, match=told):
        dequantise_blocks(**{**arguments, **change})


def test_the_ops_are_registered_as_they_behave():
    weight, scale = random_fp8(50, 70)
    out = torch.zeros(50, 70)
    tests = ("test_faketensor",)  # comparing FP8 values, as test_schema does, is not implemented
    ops = torch.ops.fullspan
    torch.library.opcheck(
        ops.dequantise_blocks.default, (out, weight, scale, *BLOCK, "reference"), test_utils=tests
    )
    torch.library.opcheck(ops.quantise_blocks.default, (out, *BLOCK, True), test_utils=tests)
    with FakeTensorMode():
        fake = torch.empty(3, 50, 70)
        values, grid = quantise_blocks(fake, BLOCK)
        assert values.dtype == E4M3 and tuple(grid.shape) == (3, 3, 2)
        assert dequantise_blocks(values, grid, BLOCK, torch.bfloat16).shape == fake.shape


def _block_maxima(weight: torch.Tensor) -> torch.Tensor:
    maxima = torch.zeros(scale_shape(weight.shape, BLOCK))
    for place in torch.cartesian_prod(*map(torch.arange, maxima.shape)).view(-1, maxima.ndim):
        *lead, i, j = place.tolist()
        rows, cols = slice(i * 24, i * 24 + 24), slice(j * 40, j * 40 + 40)
        maxima[(*lead, i, j)] = weight[(*lead, rows, cols)].abs().max()
    return maxima
