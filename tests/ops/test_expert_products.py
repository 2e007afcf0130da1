"""FP8 products of the routed experts: what the rounding costs, that it is forward only, and what is
refused. `deep_gemm` and `scaled_grouped_mm` on a GPU against the references.
"""

import logging

import pytest
import torch
from torch import nn

from fullspan.checkpoint import tiny
from fullspan.checkpoint.load import load_model
from fullspan.errors import BackendError, ConfigError, LayoutError
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import inject
from fullspan.lora.layers import LoRAGroupedLinear
from fullspan.models.common import linear
from fullspan.models.common.frozen import BlockLayout, FrozenProjection
from fullspan.models.common.linear import GroupedLinear
from fullspan.models.common.mlp import GatedMLP
from fullspan.models.common.moe import GroupedExperts, MixtureOfExperts, Router
from fullspan.ops import backend
from fullspan.ops.backend import resolve
from fullspan.ops.expert_products import reference
from fullspan.ops.expert_products.op import expert_product, in_fp8
from fullspan.ops.expert_products.reference import BLOCK, product, product_by_row
from fullspan.ops.fp8.op import E4M3, quantise_blocks
from fullspan.ops.options import OpOptions
from fullspan.parallel.expert import ExpertParallel
from tests.support.memory import peak_bytes
from tests.support.tiny import EVERY_TARGET, gradients, local_loss, random_pack, stir

GPU, NAMES = torch.device("cuda"), ("deep_gemm", "scaled_grouped_mm")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
FORMS = {"deep_gemm": product, "scaled_grouped_mm": product_by_row}


def case_of(counts, out=256, width=384, device="cpu", dtype=torch.bfloat16):
    """Rows with a few large columns, which is what rounding by group is for, and blocks whose
    scales differ by up to 4."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(len(counts), out, width, generator=generator)
    sizes = 4 ** torch.rand(len(counts), out // 128, width // 128, generator=generator)
    sizes = sizes.repeat_interleave(128, 1).repeat_interleave(128, 2)
    weight, scale = quantise_blocks(normal * sizes * 0.02, BLOCK)
    x = torch.randn(sum(counts), width, generator=generator)
    x[:, ::100] *= 20
    tensors = (x.to(dtype), weight, scale, torch.tensor(counts))
    return tuple(tensor.to(device) for tensor in tensors)


def exact(x, weight, scale, counts):
    """With the dequantised weights, in float64."""
    wide = torch.stack([reference._wide(*pair, BLOCK) for pair in zip(weight, scale, strict=True)])
    ends = counts.cumsum(0).tolist()
    spans = zip([0, *ends], ends, strict=False)
    return torch.cat(
        [x[a:b].double() @ w.double().t() for (a, b), w in zip(spans, wide, strict=True)]
    )


def error(got, wanted) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(("name", "least", "most"), [
    ("deep_gemm", 0.012, 0.020), ("scaled_grouped_mm", 0.030, 0.042),
])  # fmt: skip
def test_the_error_that_rounding_makes(name, least, most):
    """README.md states it: by row both operands are rounded by 2.6 %, by block one."""
    given = case_of([40, 0, 24], width=6144)
    assert least < error(FORMS[name](*given), exact(*given)) < most


def test_only_the_operands_are_rounded():
    """Against the formula, with products in float64."""

    def rounded(values):
        scale = values.abs().amax(-1, keepdim=True) / 448
        return (values * (1 / scale)).to(E4M3).double() * scale.double()

    x, weight, scale, _ = given = case_of([3, 2], dtype=torch.float32)
    for form, group in ((product, 128), (product_by_row, 384)):
        rows = rounded(x.unflatten(1, (-1, group))).flatten(1)
        scales = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        wide = weight.float() * scales
        wide = rounded(wide) if form is product_by_row else wide.double()
        wanted = torch.cat([rows[:3] @ wide[0].t(), rows[3:] @ wide[1].t()])
        assert error(form(*given), wanted) < 1e-6


def test_bits_repeat_and_rows_do_not_see_one_another():
    x, weight, scale, counts = given = case_of([0, 5, 0, 9, 0])
    whole = expert_product(*given, backend="reference")
    assert torch.equal(expert_product(*given, backend="reference"), whole)
    assert whole.dtype == x.dtype
    other = x.clone()
    other[5:] = torch.nan
    got = expert_product(other, weight, scale, counts, backend="reference")
    assert torch.equal(got[:5], whole[:5]) and got[5:].isnan().all()
    none = torch.zeros_like(counts)
    assert expert_product(x[:0], weight, scale, none, backend="reference").shape == (0, 256)


def test_zeros_and_huge_values():
    x, weight, scale, counts = case_of([4])
    x[0], x[1] = 0, 3e38
    got = expert_product(x, torch.zeros_like(weight), scale, counts, backend="reference")
    assert not got.any()
    assert not expert_product(x, weight, scale, counts, backend="reference")[0].any()


def fp8_module(products: str, parts: int = 1, **layout) -> GroupedLinear:
    _, weight, scale, _ = case_of([1, 1, 1], out=256, width=128)
    module = GroupedLinear(3, 128, 256)
    module.hold_fp8(BlockLayout(block=BLOCK, parts=parts, products=products, **layout))
    module.weight.data, module.weight_scale_inv.data = weight, scale
    return module


@pytest.mark.parametrize("adapter", [False, True], ids=["bare", "lora"])
@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_are_those_of_the_dequantised_weight(adapter, parts):
    """To the bit, an adapter's too: it sees rows as they are. Outputs differ by the rounding."""
    counts = torch.tensor([6, 0, 3])
    rows = torch.randn(9, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = {}
    for products in ("reference", "bf16"):
        module = fp8_module(products, parts)
        if adapter:
            generator = torch.Generator().manual_seed(1)
            module = LoRAGroupedLinear(module, r=8, alpha=6.0, generator=generator)
            nn.init.normal_(module.lora_b, generator=generator)
        x = rows.clone().requires_grad_()
        out = module(x, counts)
        out.backward(torch.linspace(-1, 1, out.numel()).bfloat16().view_as(out))
        trained = [p.grad for p in module.parameters() if p.requires_grad]
        found[products] = out.detach(), x.grad, *trained
    (out, *got), (plain, *wanted) = found.values()
    assert 1e-3 < error(out, plain) < 5e-2
    assert len(got) == (3 if adapter else 1)
    for gradient, other in zip(got, wanted, strict=True):
        assert other.any() and torch.equal(gradient, other)


def moe_of(products: str) -> MixtureOfExperts:
    torch.manual_seed(0)
    router = Router(128, 8, chosen=2, groups=1, topk_group=1, scaling=2.5, normalise=True)
    experts = GroupedExperts(8, range(8), 128, 128)
    moe = MixtureOfExperts(router, experts, GatedMLP(128, 128), expert_bytes=60_000)
    for tensor in moe.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape) * 0.1)
    for module, parts in ((experts.gate_up_proj, 2), (experts.down_proj, 1)):
        weight, scale = quantise_blocks(module.weight.data, BLOCK)
        module.hold_fp8(BlockLayout(block=BLOCK, parts=parts, products=products))
        module.weight.data, module.weight_scale_inv.data = weight, scale
    return moe


def test_recompute_gives_what_the_forward_pass_gave():
    """Rows in chunks, and a recompute that leaves out what nobody reads."""
    moe, parallel = moe_of("reference"), ExpertParallel(experts=8)
    rows, seed = torch.randn(40, 128), torch.randn(40, 128)
    found = []
    for unread in (False, True):
        x = rows.clone().requires_grad_()
        out = moe(x, parallel, unread=unread)
        out.backward(seed)
        found.append((out.detach(), x.grad))
    assert moe._chunk_rows(rows) < 40
    assert found[1][0].isnan().all() and torch.equal(found[0][1], found[1][1])
    plain = moe_of("bf16")(rows, parallel)
    assert 1e-3 < error(found[0][0], plain) < 5e-2
    assert torch.equal(moe(rows, parallel), found[0][0])


def test_a_step_of_a_model_with_adapters_everywhere(tmp_path, monkeypatch):
    """From the setting to the loss: with and without recompute the same step to the bit, its loss
    and gradients near those of bf16 products and not the same."""
    sizes = tiny._sizes
    monkeypatch.setattr(tiny, "FP8_BLOCK", BLOCK)
    monkeypatch.setattr(tiny, "_sizes", lambda ids: sizes(ids) | {"moe_intermediate_size": 128})
    tiny.init_tiny(tmp_path / "tiny", fp8=True)
    found = []
    for products, recompute in (("bf16", True), ("reference", True), ("reference", False)):
        model = load_model(
            tmp_path / "tiny", dtype=torch.bfloat16, device="cpu", recompute=recompute,
            options=OpOptions(expert_products=products),
        )  # fmt: skip
        inject(model, LoraConfig(r=3, alpha=6.0, targets=EVERY_TARGET))
        stir(model)
        loss, _ = local_loss(model, random_pack([100, 60], vocab=model.config.vocab_size))
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    (plain, _), (loss, wanted), (other, got) = found
    assert torch.equal(loss, other) and 0 < abs(loss - plain) < 0.02 * plain
    for name, gradient in wanted.items():
        assert gradient.any() and torch.equal(got[name], gradient), name


def test_one_expert_is_wide_at_a_time():
    """64 experts of 64 KiB in FP8: the reference holds one in float32, its rows, and no copy."""
    experts, size = 64, 256 * 256
    x, weight, scale, counts = case_of([1] * experts, width=256)
    peak = peak_bytes(lambda: expert_product(x, weight, scale, counts, backend="reference"))
    assert size * 4 < peak < size * 4 * 3.5 < experts * size / 4


def test_experts_are_rounded_again_as_many_as_the_workspace_holds(monkeypatch):
    """The same values in groups; one group without slots. What is rounded is a byte an element."""
    _, weight, scale, _ = case_of([1] * 5, width=128)
    counts, sizes = torch.tensor([3, 4, 0, 0, 6]), []
    x = torch.randn(13, 128).bfloat16()

    def by_row(x, weight, scale, counts, *, backend):
        sizes.append(len(weight))
        return FORMS[backend](x, weight, scale, counts)

    monkeypatch.setattr(linear, "expert_product", by_row)
    found = []
    for experts in (5, 2, 1, 0):
        room = experts * 128 * 256 + 5
        layout = BlockLayout(block=BLOCK, workspace_bytes=room, products="scaled_grouped_mm")
        frozen = linear.FrozenWeight(weight, scale, layout)
        found.append(linear._grouped_mm(x, frozen, counts))
        assert torch.equal(found[-1], found[0])
    assert sizes == [5, 2, 1, *[1] * 6]
    assert error(found[0], product_by_row(x, weight, scale, counts)) == 0


@pytest.mark.parametrize("products", ["reference", *NAMES])
@pytest.mark.parametrize(("fp8", "found"), [
    (False, r"gate_up_proj.weight is not FP8 in this checkpoint"),
    (True, r"gate_up_proj.weight has 2 x \[64, 128\] in blocks of 24 x 40"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused_when_they_are_loaded(
    tmp_path, monkeypatch, products, fp8, found
):
    monkeypatch.setitem(backend.BACKENDS["expert_products"], products, lambda *_: None)
    backend.choose.cache_clear()
    tiny.init_tiny(tmp_path / "tiny", fp8=fp8)
    options = OpOptions(expert_products=products)
    with pytest.raises(ConfigError, match=rf"^ops.expert_products is '{products}', .*{found}: set"):
        load_model(
            tmp_path / "tiny", dtype=torch.bfloat16, device="cpu", options=options, recompute=True
        )
    backend.choose.cache_clear()


@pytest.mark.parametrize(
    "change",
    [
        {"weight": torch.zeros(2, 256, 384)},
        {"scale": torch.ones(2, 2, 2)},
        {"weight": torch.zeros(2, 200, 384).to(E4M3)},
    ],
)
def test_shapes_that_do_not_fit(change):
    names = ("x", "weight", "scale", "counts")
    given = dict(zip(names, case_of([1, 2]), strict=True)) | change
    with pytest.raises(LayoutError, match="FP8 products take e4m3 weights"):
        expert_product(*given.values(), backend="reference")


@pytest.fixture
def hopper(monkeypatch):
    """With the answers of a Hopper machine in place of this one's."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(backend.importlib.metadata, "version", lambda _: "3.6.0")
    backend.choose.cache_clear()
    yield monkeypatch
    backend.choose.cache_clear()


def test_they_are_chosen_by_name_only(hopper, caplog):
    with caplog.at_level(logging.INFO, logger="fullspan"):
        chosen = resolve(OpOptions(expert_products="auto"), GPU, torch.bfloat16)
        assert chosen.expert_products == "bf16" and not in_fp8("bf16") and not in_fp8("auto")
        resolve(OpOptions(expert_products="scaled_grouped_mm"), GPU, torch.bfloat16)
    assert caplog.records[-1].message == (
        "expert_products: scaled_grouped_mm, named by ops.expert_products: forward and recompute "
        "in FP8, rows rounded to e4m3; gradients as in bf16"
    )


@pytest.mark.parametrize("name", NAMES)
def test_other_gpus_and_dtypes_are_refused(hopper, name):
    check = backend.BACKENDS["expert_products"][name]
    assert "not in torch.float32" in str(check(GPU, torch.float32, {}))
    hopper.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert "needs a Hopper GPU" in str(check(GPU, torch.bfloat16, {}))
    assert check(torch.device("cpu"), torch.bfloat16, {}) == "needs an NVIDIA GPU, not cpu"


@pytest.mark.parametrize("broken", [
    "raise ImportError('no module of that name')", "raise AssertionError", "",
    "raise OSError('undefined symbol: _ZN3c10\\nmore')",
])  # fmt: skip
def test_a_package_that_does_not_load_is_one_line(hopper, tmp_path, broken):
    """Absent, of another torch, without a CUDA toolkit, or of another interface."""
    (tmp_path / "deep_gemm.py").write_text(broken)
    hopper.syspath_prepend(tmp_path)
    hopper.delitem(backend.importlib.import_module("sys").modules, "deep_gemm", raising=False)
    with pytest.raises(
        BackendError,
        match=r"^ops.expert_products = 'deep_gemm' cannot run for torch.bfloat16 on cuda "
        r"\([^\n]*deep_gemm: needs DeepGEMM and cannot import it \([^\n]+\): pip install "
        r"sgl-deep-gemm, of a release for torch [^\n]+ \(docs/benchmarks.md\)\)$",
    ):
        resolve(OpOptions(expert_products="deep_gemm"), GPU, torch.bfloat16)
    hopper.delitem(backend.importlib.import_module("sys").modules, "deep_gemm", raising=False)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("counts", [[300, 0, 1, 128, 0, 77], [0, 5, 0], [1000] * 8], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_as_the_reference(name, counts):
    """Both round the same operands to the same bits. Hopper's FP8 tensor cores keep 14 bits of what
    they add over 128 columns (arXiv 2412.19437, section 3.5.2; then float32 without fast sums), and
    a sum that is 2^-13 off becomes another bf16, 2^-7.5 away, once in 2^5.5: a norm of 2^-10.25, or
    8e-4. Scales that are one bit off cost `deep_gemm` 2e-3 and the other, whose second rounding of
    weights has ties, 4.4e-3."""
    if refusal := backend.BACKENDS["expert_products"][name](GPU, torch.bfloat16, {}):
        pytest.skip(refusal)
    x, *_ = given = case_of(counts, out=512, width=2048, device="cuda")
    got = expert_product(*given, backend=name)
    wanted = FORMS[name](*given)
    assert error(got, wanted) < 1.9e-3
    assert error(got, exact(*given)) < 1.02 * error(wanted, exact(*given)) + 1e-3
    again = expert_product(*given, backend=name)
    assert torch.equal(got, again)
    assert not expert_product(torch.zeros_like(x), *given[1:], backend=name).any()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_projection_on_a_gpu_in_a_step(name):
    """Forward by name, gradient of the dequantised weight to the bit, without slots too."""
    if refusal := backend.BACKENDS["expert_products"][name](GPU, torch.bfloat16, {}):
        pytest.skip(refusal)
    modules = [fp8_module(products).to(GPU) for products in (name, "bf16")]
    for slots in ([200, 0, 55], [0, 0, 0]):
        counts, seed = torch.tensor(slots, device=GPU), sum(slots)
        x = torch.randn(seed, 128, device=GPU).bfloat16()
        found = []
        for module in modules:
            assert isinstance(module, FrozenProjection)
            leaf = x.clone().requires_grad_()
            out = module(leaf, counts)
            out.backward(torch.ones_like(out))
            found.append((out.detach(), leaf.grad))
        assert torch.equal(found[0][1], found[1][1])
        assert not seed or 1e-3 < error(found[0][0], found[1][0]) < 6e-2
