"""A rehearsal on a GPU that the plan knows is set beside the plan's bytes and seconds."""

import json
import re
from pathlib import Path

import pytest

from fullspan.parallel.loopback import Transfer
from fullspan.planning.case import Case
from fullspan.planning.measure import Usage
from fullspan.planning.rehearsal_report import rehearsal_json, rehearsal_text
from fullspan.planning.rehearse import Rehearsal, fit_lengths
from fullspan.train.config import load_run_config

CONFIGS = Path(__file__).parents[3] / "configs"


def test_it_is_set_beside_the_plan() -> None:
    model = ["--model.path", str(CONFIGS / "models" / "glm-5.2")]
    case = Case.load(load_run_config(CONFIGS / "glm52_131k_8xh200.toml", model), world=None)
    found = Rehearsal(
        case=case, rank=7, device="NVIDIA H200", ops=case.run.ops, random_weights=True,
        usage=Usage(peak=20 << 30, kept=0, before=100 << 30, reserved=130 << 30),
        resident={"frozen weights": 90 << 30}, gradients=1 << 30, kept=18 << 30,
        seconds={("attention", "forward"): 3.0, ("loopback", "forward"): 1.0}, wall=4.0,
        transfers=[Transfer(what="all_gather of the latent", near=3 * 10**9, far=0, ranks=8)],
    )  # fmt: skip
    text, row = rehearsal_text(found), json.loads(json.dumps(rehearsal_json(found)))
    assert "the plan's peak allocated" in text and "the plan's seconds and the measured" in text
    assert row["peak_by_item"]["transient"] == 11 << 30
    planned = row["plan_seconds"]["forward"]["attention"]
    assert re.search(rf"attention +{planned:.3f} +{3 / planned:.2f} ", text)
    # 4 FLOPs a weight and row: the product and its gradient, in one pass.
    head = 4 * 154_880 * 6144 * 16_384 / 989e12
    assert row["floor_seconds"]["forward"]["head"] == pytest.approx(head)
    for which, parts in row["floor_seconds"].items():
        assert all(0 < s < row["plan_seconds"][which][part] for part, s in parts.items())
    floor = row["floor_seconds"]["forward"]["attention"]
    assert re.search(rf"nominal rates[^§]*attention +{floor:.3f} +{3 / floor:.2f} ", text)
    assert row["seconds_of_loopback"] == 1.0
    assert row["wire"]["all_gather of the latent"] == {"bytes": 3 * 10**9, "seconds": 0.01}
    assert fit_lengths(case, 6) == [13_104, 26_208, 39_320, 52_424, 65_536, 131_072]
