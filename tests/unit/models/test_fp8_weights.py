"""Projections over FP8 weights: values and gradients are those of the dequantised weight, to the
bit, and no dequantised copy outlives its product.
"""

import pytest
import torch
from torch import nn

from fullspan.checkpoint.load import load_model
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import inject, trainable_parameters
from fullspan.lora.layers import LoRAGroupedLinear, LoRAKVUpProjection, LoRALinear
from fullspan.models.common.frozen import BlockLayout, FrozenProjection, FrozenWeight
from fullspan.models.common.linear import GroupedLinear, Linear, _fused_mm
from fullspan.models.dsa.attention import KVUpProjection
from fullspan.ops.fp8.op import dequantise_blocks, quantise_blocks
from fullspan.ops.options import OpOptions
from tests.support.fp8 import write_twins
from tests.support.memory import kept_bytes, peak_bytes
from tests.support.tiny import EVERY_TARGET, gradients, local_loss, random_pack

BLOCK = (24, 40)
COUNTS = torch.tensor([5, 0, 9, 2])


def pair(make, parts: int = 1, block: tuple[int, int] = BLOCK) -> tuple[nn.Module, nn.Module]:
    """A projection with random FP8 weights, and one with the same weights in float32."""
    fp8, plain = make(), make()
    shape = plain.weight.shape
    split = torch.randn(*shape[:-2], parts, shape[-2] // parts, shape[-1])
    values, scale = quantise_blocks(split, block)
    fp8.hold_fp8(BlockLayout(block=block, parts=parts))
    fp8.weight.data.copy_(values.flatten(-3, -2))
    fp8.weight_scale_inv.data.copy_(scale.flatten(-3, -2))
    dense = dequantise_blocks(values, scale, block, torch.float32)
    plain.weight.data.copy_(dense.flatten(-3, -2))
    return fp8, plain


CASES = {
    "linear": (lambda: Linear(70, 50), 1, lambda m, x: m(x.flatten(1)[:, :70])),
    "experts": (lambda: GroupedLinear(4, 70, 50), 1, lambda m, x: m(x.flatten(1)[:, :70], COUNTS)),
    # 31 rows each: the blocks of the second part begin inside a block of the whole
    "gate and up": (
        lambda: GroupedLinear(4, 70, 62),
        2,
        lambda m, x: m(x.flatten(1)[:, :70], COUNTS),
    ),
}
WRAPPERS = {
    Linear: LoRALinear,
    GroupedLinear: LoRAGroupedLinear,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("adapter", [False, True], ids=["bare", "lora"])
def test_output_and_input_gradient_are_those_of_the_dequantised_weight(name, dtype, adapter):
    torch.manual_seed(0)
    make, parts, call = CASES[name]
    fp8, plain = pair(make, parts)
    plain.to(dtype)
    assert fp8.weight.dtype == torch.float8_e4m3fn
    x = torch.randn(16, 5, 14).to(dtype)
    found = []
    for module in (fp8, plain):
        if adapter:
            generator = torch.Generator().manual_seed(1)
            wrapper = WRAPPERS[type(module)]
            module = wrapper(module, r=3, alpha=6.0, generator=generator)
            nn.init.normal_(module.lora_b, generator=generator)
        leaf = x.clone().requires_grad_()
        out = call(module, leaf)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out))
        trained = [p.grad for p in module.parameters() if p.requires_grad]
        found.append([out.detach(), leaf.grad, *trained])
    assert len(found[0]) == (4 if adapter else 2)
    for got, wanted in zip(*found, strict=True):
        assert wanted.any() and torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_of_the_up_projection_are_those_of_the_dequantised_weight(dtype):
    """Heads that are no whole number of blocks."""
    torch.manual_seed(0)
    found = []
    for module in pair(lambda: KVUpProjection(5, 14, 9, 33), 1):
        module = LoRAKVUpProjection(module, r=3, alpha=6.0, generator=torch.Generator())
        nn.init.ones_(module.lora_b)
        up, weights = module.parts()
        found.append([half.weight for half in up.halves(weights, dtype)])
    assert [half.shape for half in found[0]] == [(5, 14, 33), (5, 33, 9)]
    for got, wanted in zip(*found, strict=True):
        assert got.dtype == dtype and torch.equal(got, wanted.to(dtype))


def test_the_input_gradient_is_the_product_with_the_dequantised_weight():
    """Against the formula (transformers#46736: a frozen FP8 linear lost it)."""
    fp8, plain = pair(*CASES["linear"][:2])
    x = torch.randn(7, 70, requires_grad=True)
    grad = torch.randn(7, 50)
    fp8(x).backward(grad)
    assert torch.allclose(x.grad, grad @ plain.weight, rtol=1e-5, atol=1e-4)


def test_some_experts_at_once_give_what_all_give():
    """The fused path in groups that a workspace holds; a group without slots, and an uneven one."""
    fp8, _ = pair(lambda: GroupedLinear(5, 64, 48))
    counts = torch.tensor([3, 4, 0, 0, 6])
    x = torch.randn(13, 64).bfloat16()
    whole = _fused_mm(x, fp8.frozen, counts, False)
    back = _fused_mm(whole, fp8.frozen, counts, True)
    for experts in (1, 2, 3):
        layout = BlockLayout(block=BLOCK, workspace_bytes=experts * 64 * 48 * 2 + 5)
        weight = FrozenWeight(fp8.weight, fp8.weight_scale_inv, layout)
        assert torch.equal(_fused_mm(x, weight, counts, False), whole)
        assert torch.equal(_fused_mm(whole, weight, counts, True), back)


def test_experts_are_dequantised_one_by_one_on_a_cpu():
    """64 experts of 128 KiB in bfloat16: forward and backward hold one of them, and its strip."""
    experts, size = 64, 256 * 256
    fp8, _ = pair(lambda: GroupedLinear(experts, 256, 256), block=(128, 128))
    counts = torch.ones(experts, dtype=torch.int64)
    x = torch.randn(experts, 256).bfloat16().requires_grad_()
    peak = peak_bytes(lambda: fp8(x, counts).sum().backward())
    assert size * 2 < peak < size * 2 + size * 4 * 2.5 < experts * size * 2 / 8


def test_a_stack_past_two_to_the_31_is_addressed(tmp_path):
    """2.2e9 values in a sparse file; only the last expert has slots and values."""
    experts, rows, cols = 300, 1200, 6144
    assert experts * rows * cols > 1 << 31
    path = str(tmp_path / "stack")
    raw = torch.from_file(path, shared=True, size=experts * rows * cols, dtype=torch.uint8)
    with torch.device("meta"):
        module = GroupedLinear(experts, cols, rows)
        module.hold_fp8(BlockLayout(block=(128, 128)))
    scale = torch.ones(module.weight_scale_inv.shape)
    scale[-1] = 3.0
    stack = raw.view(torch.float8_e4m3fn).view(experts, rows, cols)
    stack[-1, -1] = torch.linspace(-2, 2, cols).to(torch.float8_e4m3fn)
    module.weight = nn.Parameter(stack, requires_grad=False)
    module.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
    counts = torch.zeros(experts, dtype=torch.int64)
    counts[-1] = 1
    x = torch.randn(1, cols, requires_grad=True)
    out = module(x, counts)
    out.sum().backward()
    last = stack[-1, -1].float() * 3
    assert torch.allclose(out[0, -1], x[0] @ last, rtol=1e-4, atol=1e-3)
    assert not out[0, :-1].any()
    assert torch.equal(x.grad[0], last)


def test_a_layer_without_room_for_a_scale_holds_a_plain_weight():
    module = Linear(4, 3)
    assert isinstance(module, FrozenProjection) and module.weight_scale_inv is None
    assert list(module.state_dict()) == ["weight"]
    module.hold_fp8(BlockLayout(block=(2, 2)))
    assert list(module.state_dict()) == ["weight", "weight_scale_inv"]
    assert module.weight_scale_inv.shape == (2, 2)
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """Models of the FP8 checkpoint and of its twin, in bfloat16, with adapters everywhere."""
    models = {}
    for path in write_twins(tmp_path_factory.mktemp("twins")):
        for recompute in (False, True):
            model = load_model(
                path, dtype=torch.bfloat16, device="cpu", options=OpOptions(), recompute=recompute
            )
            inject(model, LoraConfig(r=3, alpha=6.0, targets=EVERY_TARGET))
            for name, parameter in trainable_parameters(model).items():
                if name.endswith("lora_b"):
                    nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(1))
            models[path.name, recompute] = model
    return models


def _pack(model):
    return random_pack([100, 60], vocab=model.config.vocab_size)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_is_that_of_the_dequantised_twin_to_the_bit(twins, recompute):
    """Both multiply by the same bfloat16 values, so all that follows is the same."""
    found = []
    for name in ("fp8", "twin"):
        model = twins[name, recompute]
        loss, _ = local_loss(model, _pack(model))
        loss.backward()
        found.append((loss.detach(), gradients(model)))
        model.zero_grad()
    (loss, got), (wanted_loss, wanted) = found
    assert torch.equal(loss, wanted_loss)
    for name, gradient in wanted.items():
        assert gradient.any() and torch.equal(got[name], gradient), name


@pytest.mark.parametrize("recompute", [False, True])
def test_the_graph_keeps_no_dequantised_weight(twins, recompute):
    """Between forward and backward, FP8 costs not a byte more than plain weights do: with recompute
    that is layer inputs and selections, without it the activations.
    """
    kept = {}
    for name in ("fp8", "twin"):
        model = twins[name, recompute]
        pack = _pack(model)
        local_loss(model, pack)  # what exists from here on is no one's
        kept[name] = kept_bytes(lambda m=model, p=pack: local_loss(m, p)[0])
    print(f"recompute {recompute}: {kept['fp8']:,} bytes between forward and backward")
    assert kept["fp8"] == kept["twin"] > 0


def test_one_dequantised_weight_exists_at_a_time():
    """Six equal projections in a row, few rows: forward and backward peak at one weight in bfloat16
    beside its float32 strip and the scales over that strip's columns.
    """
    size = 512
    chain = nn.Sequential(*(pair(lambda: Linear(size, size))[0] for _ in range(6)))
    x = torch.randn(2, size).bfloat16().requires_grad_()
    peak = peak_bytes(lambda: chain(x).sum().backward())
    weight = size * size * 2
    print(f"peak {peak:,} bytes, a weight in bfloat16 {weight:,}")
    assert 3 * weight < peak < 3.2 * weight
    assert not x.grad.isnan().any()
