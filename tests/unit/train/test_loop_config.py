"""The [train] section's own checks, and what a resumed run must share."""

import pytest

from fullspan.errors import ConfigError
from fullspan.train.config import LoopConfig
from fullspan.train.setup import fingerprint
from tests.support.runs import run_config


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("steps", 0),
        ("accumulation", 0),
        ("log_every", 0),
        ("eval_every", -1),
        ("output_dir", ""),
        ("timeout_seconds", 0.0),
    ],
)
def test_a_bad_setting_is_named(setting, value):
    with pytest.raises(ConfigError, match=rf"train\.{setting} is"):
        LoopConfig(**{"steps": 1, "output_dir": "runs/x", setting: value})


def test_offloading_needs_recompute():
    with pytest.raises(ConfigError, match=r"set train\.recompute = true") as caught:
        LoopConfig(steps=1, output_dir="runs/x", recompute=False, offload_inputs=True)
    assert "\n" not in str(caught.value)


def test_places_and_what_only_rounds_may_change(tiny_checkpoints, tmp_path):
    model = tiny_checkpoints["glm_moe_dsa"]
    (tmp_path / "link").symlink_to(model)
    marks = fingerprint(run_config(model, tmp_path, "a"))
    other = run_config(
        tmp_path / "link", tmp_path, "b", train={"recompute": False}, ops={"loss_chunk_rows": 8}
    )
    assert fingerprint(other) == marks
    for sections in ({"optim": {"beta2": 0.95}}, {"data": {"shuffle": False}}, {"lora": {"r": 3}}):
        assert fingerprint(run_config(model, tmp_path, "a", **sections)) != marks


def test_the_number_of_steps_matters_only_to_a_decay(tiny_checkpoints, tmp_path):
    def marks(schedule: str, steps: int) -> dict:
        sections = {"optim": {"schedule": schedule}, "train": {"steps": steps}}
        model = tiny_checkpoints["glm_moe_dsa"]
        return fingerprint(run_config(model, tmp_path, "a", **sections))

    assert marks("constant", 6) == marks("constant", 7)
    assert marks("linear", 6) != marks("linear", 7)
