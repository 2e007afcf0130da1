"""Seconds from work and rates: what is added, what hides, and where rates come from."""

import json

import pytest

from fullspan.errors import ConfigError
from fullspan.planning.fit import Plan
from fullspan.planning.hardware import Links, gpu
from fullspan.planning.times import Times, link_seconds
from fullspan.planning.wire import EXCHANGE, GATHER, REDUCE, SCATTER, Traffic, Transfer
from tests.unit.planning.conftest import glm_case, tiny_case

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
        work = sum(times.compute[phase].values())
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
    rows = 131_072 / 8
    attended = 2 * case.work.attended / 8 * 64 * 78
    assert times.compute["forward"]["attention"] == pytest.approx(attended * 1088 / 525e12)
    plan = rows * 78 / known.rates["attention plan"].value
    assert times.compute["backward"]["attention"] == pytest.approx(
        attended * (3 * 576 + 2 * 512) / 300e12 + plan
    )
    assert "indexer" not in times.compute["recompute"], "the selection is kept"
    experts = 2 * rows * 8 * 3 * 6144 * 2048 * 75
    assert times.compute["recompute"]["experts"] == pytest.approx(1.3 * experts / 677e12, rel=1e-3)


def test_without_recompute_there_is_no_such_pass(glm):
    case = tiny_case(glm, train={"recompute": False})
    times = Plan.of(case, gpu("h200")).times()
    assert times.pass_seconds("recompute") == 0
    assert times.hfu == times.mfu


# ---------------------------------------------------------------------------------- rates


def row(op: str, **changes) -> str:
    values = {
        "op": op, "backend": "hopper", "rows": 4096, "keys": 131_072, "ms": 2.0, "flops": 1e12,
        "heads": 32 if op == "index_topk" else 64, "qk": 576, "topk": 2048, "workspace_gib": 1,
        "gpu": "NVIDIA H200",
    }  # fmt: skip
    return json.dumps(values | changes) + "\n"


def test_measured_rows_replace_stated_rates(tmp_path):
    """At the model's widths: the best backend, the nearest keys and workspace, the median."""
    (tmp_path / "h200.jsonl").write_text(
        row("forward") + row("forward", ms=4.0) + row("forward", ms=8.0)
        + row("forward", ms=0.1, keys=16_384) + row("forward", ms=0.1, backend="triton")
        + row("forward", ms=0.1, workspace_gib=4) + row("forward", ms=0.1, heads=128)
        + row("forward", ms=0.1, qk=512) + row("forward", ms=0.1, gpu="NVIDIA A100")
        + row("backward_planned", ms=0.1) + row("backward", ms=2.5)
        + row("index_topk", backend="triton", ms=5.0)
    )  # fmt: skip
    known = glm_case().measured(gpu("h200"), tmp_path)
    assert known.rates["attention forward"].value == pytest.approx(1e12 / 4e-3)
    assert "3 rows of" in known.rates["attention forward"].source
    assert known.rates["attention backward"].value == pytest.approx(1e12 / 2.5e-3)
    assert "attention plan" not in known.rates, "it is in the backward's rows"
    assert known.rates["indexer"].value == pytest.approx(1e12 / 5e-3)
    stated = gpu("h200").rates
    for part in ("head", "experts", "copy"):
        assert known.rates[part] == stated[part]


def test_no_rows_change_nothing(tmp_path):
    for folder in (None, tmp_path, tmp_path / "missing"):
        assert glm_case().measured(gpu("h200"), folder).rates == gpu("h200").rates


def test_what_is_no_row_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(row("forward") + "[1]\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2"):
        glm_case().measured(gpu("h200"), tmp_path)


def test_other_gpus_are_scaled_and_say_so():
    h100, h200 = gpu("h100"), gpu("h200")
    assert h100.rates["experts"].value == h200.rates["experts"].value
    assert h100.rates["copy"].value == pytest.approx(h200.rates["copy"].value * 3.35 / 4.8)
    assert "ratio of nominal peaks" in gpu("b200").rates["experts"].source
    with pytest.raises(ConfigError, match="known are h200, h100, b200"):
        gpu("a100")
