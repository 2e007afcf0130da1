"""Seconds from work and rates: what is added, what hides, and where rates come from."""

import json

import pytest

from fullspan.errors import ConfigError
from fullspan.planning.activations import Layer
from fullspan.planning.fit import Plan
from fullspan.planning.hardware import KINDS, Links, gpu
from fullspan.planning.model_cost import layer_weights
from fullspan.planning.report import plan_text
from fullspan.planning.times import Times, link_seconds
from fullspan.planning.wire import EXCHANGE, GATHER, REDUCE, SCATTER, Traffic, Transfer
from fullspan.planning.work import work
from tests.unit.planning.conftest import assuming, glm_case, tiny_case

PASSES = ("forward", "recompute", "backward")


def transfer(pattern: str, ranks: int, received: int = 10**9) -> Transfer:
    return Transfer(
        phase="forward", unit=1, item="latent", received=received, pattern=pattern, ranks=ranks
    )


@pytest.mark.parametrize("pattern", [EXCHANGE, GATHER, SCATTER, REDUCE])
def test_inside_a_node_everything_goes_over_nvlink(pattern):
    assert link_seconds(transfer(pattern, 8), Links()) == pytest.approx(1e9 / 300e9)


def test_between_nodes_an_exchange_is_each_ranks_own():
    """24 of 31 parts come from other nodes; of a gather each adapter of the node brings an 8th."""
    away = 1e9 * 24 / 31
    assert link_seconds(transfer(EXCHANGE, 32), Links()) == pytest.approx(away / 40e9)
    gathered = max(away / 8 / 40e9, 1e9 / 300e9)
    assert link_seconds(transfer(GATHER, 32), Links()) == pytest.approx(gathered)


def test_a_step_is_the_sum_of_its_passes(glm):
    case = glm_case("glm52_131k_32xh200", "--train.accumulation", "3")
    times = Plan.of(case, gpu("h200")).times()
    passes = 0.0
    for phase in PASSES:
        work = sum(times.compute(phase).values())
        exposed, hidden = sum(times.exposed[phase].values()), sum(times.hidden[phase].values())
        assert times.pass_seconds(phase) == pytest.approx(max(work, hidden) + exposed)
        assert exposed > 0 and hidden > 0
        passes += times.pass_seconds(phase)
    assert times.step == pytest.approx(3 * passes + times.update)
    assert times.update > 0
    assert times.per_pack == pytest.approx(times.step / 3)
    peak = times.per_pack * 32 * 989e12
    assert times.mfu == pytest.approx(times.flops.model / peak)
    assert times.hfu == pytest.approx(times.flops.total / peak)
    assert times.tokens_per_second == pytest.approx(131_072 / times.per_pack / 32)


def test_what_hides_counts_where_it_is_longer(glm):
    """Links a thousand times slower."""
    case = tiny_case(glm, world=4, parallel={"cp": 4, "shard_weights": True})
    slow = Links(nvlink=1e3, network=1e3)
    case = type(case)(run=case.run, model=case.model, form=case.form, world=4, links=slow)
    times = Times.of(case, gpu("h200"), Traffic(case))
    for phase in PASSES:
        assert times.pass_seconds(phase) == pytest.approx(
            sum(times.hidden[phase].values()) + sum(times.exposed[phase].values())
        )


def test_a_part_is_its_work_over_its_rate():
    case = glm_case()
    known = gpu("h200")
    times = Plan.of(case, known).times()
    rates = {kind: rate.value for kind, rate in known.rates.items()}
    rows = 131_072 / 8
    attended = 2 * case.work.attended / 8 * 64 * 78
    kernel = attended * 1088 / rates["attention forward"]
    assert times.work["forward"]["attention", "attention forward"] == pytest.approx(kernel)
    assert times.work["backward"]["attention", "attention backward"] == pytest.approx(
        attended * (3 * 576 + 2 * 512) / rates["attention backward"]
    )
    assert "indexer" not in times.compute("recompute"), "the selection is kept"
    experts = 1.3 * 2 * rows * 8 * 3 * 6144 * 2048 * 75 / rates["experts"]
    # One of three equal products makes the outputs, which recompute leaves out.
    for phase, share in (("forward", 1), ("recompute", 2 / 3)):
        assert times.work[phase]["experts", "experts"] == pytest.approx(experts * share, rel=1e-3)
    for phase in PASSES:
        parts = times.compute(phase)
        assert sum(parts.values()) == pytest.approx(sum(times.work[phase].values()))
        assert parts["experts"] > times.work[phase]["experts", "experts"]


@pytest.mark.parametrize("phase", PASSES)
def test_work_has_the_flops_of_the_model(phase):
    """Products of frozen weights, by whatever part and kind: those of model_cost, which a test
    compares with the real model; and every FP8 weight is dequantised once, those of experts once a
    chunk of rows."""
    case = assuming(glm_case(), imbalance=1.0)
    counted = Plan.of(case, gpu("h200")).times().flops
    found = work(case, counted, phase, scored=0.125)
    amounts = {}
    for (_, kind), amount in found.items():
        amounts[kind] = amounts.get(kind, 0.0) + amount
    plain = sum(amounts[kind] for kind in ("projections", "products by head", "float32"))
    assert plain == pytest.approx(counted.of("projections", phase) / 8)
    assert amounts["experts"] == pytest.approx(counted.of("experts", phase) / 8)
    weights = [w for n in range(78) for w in layer_weights(case.model, n) if w.scaled]
    if phase != "forward":
        weights = [w for w in weights if ".indexer." not in w.name]
    if phase == "recompute":  # whose outputs nobody reads
        weights = [w for w in weights if not (w.routed and "down_proj" in w.name)]
    assert case.chunks == 2
    elements = sum(w.numel * (case.chunks / 8 if w.routed else 1) for w in weights)
    assert amounts["dequantise"] == pytest.approx(3 * elements)


def test_bytes_of_rows_are_those_of_the_operators():
    """One dense layer's gated product and one sparse layer's permutes, counted by hand."""
    case = glm_case("glm52_131k_8xh200", "--lora.targets", '["q_a_proj"]')
    case = assuming(case, imbalance=1.0)
    counted = Plan.of(case, gpu("h200")).times().flops
    found = work(case, counted, "forward", scored=0.125)
    rows, slots = 16_384, 8 * 16_384
    dense = 3 * 12_288 * 3 + 75 * 3 * 2048
    assert found["dense", "elementwise"] == rows * dense * 2
    # In: row read, slot written; arrived: twice that; out: slot read, row written.
    assert found["experts", "permute"] == 75 * (2 * slots + 4 * slots + slots + rows) * 6144 * 2
    # In and arrived, not back.
    again = work(case, counted, "recompute", scored=0.125)
    assert again["experts", "permute"] == 75 * (2 * slots + 2 * slots) * 6144 * 2
    adapter = 78 * rows * (6144 + 2 * 2048) * 2  # input read; output read and written
    plain = glm_case("glm52_131k_8xh200", "--lora.targets", '["o_proj"]')
    plain = assuming(plain, imbalance=1.0)
    other = work(plain, counted, "forward", scored=0.125)
    changed = 78 * rows * (64 * 256 + 2 * 6144) * 2
    moved = found["attention", "elementwise"] - other["attention", "elementwise"]
    assert moved == adapter - changed


def test_without_recompute_there_is_no_such_pass(glm):
    case = tiny_case(glm, train={"recompute": False})
    times = Plan.of(case, gpu("h200")).times()
    assert times.pass_seconds("recompute") == 0
    assert times.hfu == times.mfu


# ---------------------------------------------------------------------------------- rates


def row(op: str, **changes) -> str:
    values = {
        "op": op, "backend": "hopper", "rows": 4096, "keys": 131_072, "ms": 2.0, "flops": 1e12,
        "heads": 32 if op == "index_topk" else 64, "qk": 576, "topk": 2048, "workspace_gib": 4,
        "gpu": "NVIDIA H200",
    }  # fmt: skip
    return json.dumps(values | changes) + "\n"


def test_measured_rows_come_before_the_package(tmp_path):
    """At the model's widths: the best backend, random keys, the nearest number of them and
    workspace, the median."""
    (tmp_path / "h200.jsonl").write_text(
        row("forward") + row("forward", ms=4.0) + row("forward", ms=8.0)
        + row("forward", ms=0.1, keys=16_384) + row("forward", ms=0.1, backend="triton")
        + row("forward", ms=0.1, workspace_gib=1) + row("forward", ms=0.1, heads=128)
        + row("forward", ms=0.1, qk=512) + row("forward", ms=0.1, gpu="NVIDIA A100")
        + row("backward_planned", ms=0.1) + row("backward", ms=2.5, ids="random")
        + row("backward", ms=0.1, ids="overlapping")
        + row("index_topk", backend="triton", ms=5.0)
        + json.dumps({"op": "permute", "bytes": 6e9, "ms": 2.0, "gpu": "NVIDIA H200"}) + "\n"
    )  # fmt: skip
    known = glm_case().gpu("h200", tmp_path)
    assert known.rates["attention forward"].value == pytest.approx(1e12 / 4e-3)
    assert "3 of the rows of" in known.rates["attention forward"].source
    assert known.rates["attention backward"].value == pytest.approx(1e12 / 2.5e-3)
    assert known.rates["indexer"].value == pytest.approx(1e12 / 5e-3)
    assert known.rates["permute"].value == pytest.approx(3e12)
    stated = glm_case().gpu("h200").rates
    for kind in ("head", "experts", "elementwise"):
        assert known.rates[kind] == stated[kind]
    other = glm_case().gpu("h100", tmp_path).rates
    assert other["permute"].value == pytest.approx(stated["permute"].value * 3.35 / 4.8)


def test_the_package_has_a_rate_for_every_kind_and_length():
    short, long = (
        glm_case("glm52_131k_32xh200", "--data.pack_length", str(n)).gpu("h200").rates
        for n in (1 << 17, 1 << 20)
    )
    assert set(short) == set(KINDS)
    assert short["attention backward"].value > long["attention backward"].value
    assert "1,048,576 keys" in long["indexer"].source


def test_fp8_scores_have_rates_of_their_own():
    plain, fp8 = (
        glm_case("glm52_131k_32xh200", "--ops.index_scores", name).gpu("h200").rates["indexer"]
        for name in ("bf16", "fp8")
    )
    assert plain.value < fp8.value and "hopper_fp8" in fp8.source


@pytest.mark.parametrize("products", ["deep_gemm", "scaled_grouped_mm"])
def test_fp8_products_of_the_experts_are_rated_forward(products):
    """The same FLOPs at a rate of their own, no expert dequantised; the backward pass as it was.
    Bytes: rows rounded, and outputs moved or weights rounded again."""
    name = "glm52_131k_8xh200"
    plain, case = (glm_case(name, "--ops.expert_products", p) for p in ("bf16", products))
    counted = Plan.of(case, gpu("h200")).times().flops
    before, after = (
        {phase: work(c, counted, phase, scored=0.125) for phase in PASSES} for c in (plain, case)
    )
    assert before["backward"] == after["backward"]
    rate = case.gpu("h200").rates["experts fp8"]
    assert rate.backend == products and rate.source.startswith(f"{products} alone")
    assert rate.value > case.gpu("h200").rates["experts"].value
    for phase in ("forward", "recompute"):
        old, new = dict(before[phase]), dict(after[phase])
        assert new.pop(("experts", "experts fp8")) == old.pop(("experts", "experts"))
        layers, slots, width = 75, case.busiest_slots, 6144 + (2048 if phase == "forward" else 0)
        out = 2 * 2048 + (6144 if phase == "forward" else 0)
        held, chunks = 32 * 6144 * 2048 * (3 if phase == "forward" else 2), case.chunks
        grown = {("experts", "elementwise"): slots * width * 3}
        if products == "deep_gemm":
            grown["experts", "permute"] = slots * out * 4
            grown["experts", "dequantise"] = -3 * held * chunks
        else:
            grown["experts", "dequantise"] = -held * chunks
        for place, amount in old.items():
            wanted = amount + layers * grown.get(place, 0)
            assert new.pop(place, 0) == pytest.approx(wanted, abs=1), place
        assert not new


def test_a_plan_says_how_fp8_products_are_rated():
    case = glm_case("glm52_131k_8xh200", "--ops.expert_products", "deep_gemm")
    rows = case.busiest_chunk_slots + 127 * 32
    for down, read, made in ((False, 6144, 4096), (True, 2048, 6144)):
        outputs = 2 * made * case.busiest_chunk_slots
        taken = max(rows * (read + read // 32 + 2 * made), 2 * made * rows + outputs) - outputs
        assert Layer.all(case)[-1].operands(down=down) == taken
        assert taken < 1.3 * case.run.ops.expert_bytes / 4 + 6e7
    text = plan_text(Plan.of(case, case.gpu("h200")))
    assert "experts  forward products in FP8 (deep_gemm): no step with them was measured" in text
    assert "deep_gemm alone" in text and "rated as" not in text
    other = glm_case("glm52_131k_8xh200", "--ops.expert_products", "reference")
    assert other.gpu("h200").rates["experts fp8"] == case.gpu("h200").rates["experts fp8"]
    text = plan_text(Plan.of(other, other.gpu("h200")))
    assert "assumed  reference's experts fp8 is rated as deep_gemm's\n" in text
    plain = glm_case()
    assert "experts fp8" not in plan_text(Plan.of(plain, plain.gpu("h200")))


def test_fp8_products_of_weights_that_are_not_fp8_are_no_plan(glm):
    with pytest.raises(ConfigError, match=r"^ops.expert_products is 'deep_gemm'.* not FP8: set"):
        tiny_case(glm, ops={"expert_products": "deep_gemm"})


def test_a_model_of_other_widths_has_the_measured_rates(glm):
    assert tiny_case(glm).gpu("h200").rates["indexer"] == gpu("h200").rates["indexer"]


def test_a_folder_without_rows_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"holds no \*\.jsonl .* \(option --rates\)"):
            gpu("h200", folder=folder)


def test_what_is_no_row_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(row("forward") + "[1]\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2"):
        gpu("h200", folder=tmp_path)


def test_other_gpus_are_scaled_and_say_so():
    h100, h200 = gpu("h100"), gpu("h200")
    assert h100.rates["experts"].value == h200.rates["experts"].value
    copied = h200.rates["elementwise"].value * 3.35 / 4.8
    assert h100.rates["elementwise"].value == pytest.approx(copied)
    assert "ratio of nominal peaks" in gpu("B200").rates["experts"].source
    with pytest.raises(ConfigError, match="known are h200, h100, b200"):
        gpu("a100")


def test_kernels_for_hopper_are_planned_where_they_run():
    """Elsewhere the plain ones are taken, and a named one is refused."""
    rates = glm_case().gpu("b200").rates
    kinds = ("attention forward", "attention backward", "indexer")
    assert {rates[kind].backend for kind in kinds} == {"triton"}
    assert {glm_case().gpu("h100").rates[kind].backend for kind in kinds} == {"hopper"}
    for words, backend in (
        (("--ops.sparse_attention", "hopper"), "hopper"),
        (("--ops.sparse_attention", "cudnn"), "cudnn"),
        (("--ops.expert_products", "deep_gemm"), "deep_gemm"),
    ):
        case = glm_case("glm52_131k_8xh200", *words)
        assert case.gpu("h100")
        with pytest.raises(ConfigError, match=rf"names '{backend}' for .* not on b200"):
            case.gpu("b200")
