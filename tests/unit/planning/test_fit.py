"""Which splits fit, and what is said where none does."""

import re
from itertools import pairwise

import pytest

from fullspan.errors import ConfigError
from fullspan.planning.fit import (
    Plan,
    Search,
    fewest_gpus,
    longest_pack,
    search,
    setting_for,
    splits,
)
from fullspan.planning.hardware import gpu
from fullspan.planning.report import search_text, split_name
from tests.unit.planning.conftest import glm_case, tiny_case

SEARCHES = (("h200", 8), ("h100", 2))


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, int], Search]:
    """Of some GPUs."""
    return {(name, n): search(glm_case(), gpu(name), n) for name, n in SEARCHES}


def test_the_splits_of_a_node_that_fit_131k(found):
    """The pack and the experts over all ranks, first with the most room to spare."""
    found = found["h200", 8]
    assert [split_name(plan.case) for plan, _ in found.fitting] == [
        "dp 1 x cp 8, ep 8, weights sharded",
        "dp 1 x cp 8, ep 8, weights whole",
    ]
    assert found.tried == 4 * 4 * 2


def test_splits_are_ranked_by_seconds_a_pack(found):
    found = found["h200", 8]
    seconds = [times.per_pack for _, times in found.fitting]
    assert len(seconds) > 1
    assert all(first <= 1.02 * second for first, second in pairwise(seconds))
    spare = [plan.spare for plan, _ in found.fitting]
    assert spare == sorted(spare, reverse=True), "both are as fast"
    assert all(plan.fits and plan.case.world == 8 for plan, _ in found.fitting)


def test_every_split_is_one_that_ranks_can_run(glm):
    """12 ranks, 8 experts, packs of 160 rows: cp 3, 6 and 12 do not divide the pack, ep 3, 6 and
    12 not the experts."""
    names = [split_name(case) for case in splits(tiny_case(glm), 12)]
    assert len(names) == len(set(names)) > 0
    assert {int(re.search(r"cp (\d+)", name)[1]) for name in names} == {1, 2, 4}
    assert {int(re.search(r"ep (\d+)", name)[1]) for name in names} == {1, 2, 4}


def test_no_gpus_are_refused(glm):
    with pytest.raises(ConfigError, match="--gpus is 0"):
        search(tiny_case(glm), gpu("h200"), 0)


def test_what_does_not_fit_names_items_and_settings(found):
    closest = found["h100", 2].closest
    assert not found["h100", 2].fitting
    text = search_text(found["h100", 2], 2)
    assert "none of 8 splits of 2 GPUs fits: h100 with 79.1 GiB" in text
    assert re.search(r"routed experts +337\.6 +use more GPUs and raise parallel\.ep", text)
    assert re.search(r"saved layer inputs +58\.5 +set train\.offload_inputs = true", text)
    more = int(re.search(r"fits (\d+) GPUs", text)[1])
    assert more == 16
    spread = closest.case.split(more, cp=more, ep=more)
    assert Plan.of(spread, closest.gpu).fits
    assert fewest_gpus(closest, most=8) == 0


def test_the_longest_pack_fits_and_hardly_more_does():
    plan = Plan.of(glm_case(), gpu("h200"))
    longest = longest_pack(plan)
    assert longest % 8 == 0
    assert Plan.of(plan.case.packed(longest), plan.gpu).fits
    assert not Plan.of(plan.case.packed(longest * 1002 // 1000 // 8 * 8), plan.gpu).fits
    assert longest_pack(Plan.of(plan.case, gpu("h100"))) == 0


def test_every_item_of_a_plan_has_a_setting():
    """That depends on what is set already."""
    case = glm_case()
    for item in Plan.of(case, gpu("h200")).memory.peak.items:
        assert setting_for(item, case)
    assert setting_for("routed experts", case).startswith("use more GPUs")
    assert setting_for("routed experts", case.split(8, ep=4)) == "raise parallel.ep"
    assert setting_for("other frozen weights", case) == "use more GPUs"
    whole = case.split(8, shard_weights=False)
    assert setting_for("other frozen weights", whole) == "set parallel.shard_weights = true"
    replicas = case.split(8, dp=2, cp=4)
    assert setting_for("saved layer inputs", replicas) == "set train.offload_inputs = true"
    assert setting_for("saved selections", replicas).startswith("trade parallel.dp")


@pytest.mark.parametrize(
    "config",
    ["glm52_131k_8xh200", "glm52_512k_8xh200", "glm52_131k_32xh200", "glm52_1m_32xh200"],
)
def test_shipped_runs_fit_what_they_are_named_for(config):
    assert Plan.of(glm_case(config), gpu("h200")).fits
