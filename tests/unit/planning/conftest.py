"""Cases to plan: tiny runs on the tiny checkpoints, and the shipped ones of GLM-5.2."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fullspan.planning.case import Case
from fullspan.settings import build
from fullspan.train.config import RunConfig, load_run_config
from tests.support.tiny import EVERY_TARGET

CONFIGS = Path(__file__).parents[3] / "configs"
GLM = CONFIGS / "models" / "glm-5.2" / "config.json"


def tiny_case(folder: Path, *, world: int | None = 1, **sections: dict[str, Any]) -> Case:
    """A run on a tiny checkpoint; `sections` override."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "dtype": "float32"},
        "lora": {"r": 3, "targets": list(EVERY_TARGET)},
        "data": {"path": "unread", "pack_length": 160},
        "train": {"steps": 1, "output_dir": "unwritten"},
    }
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    return Case.load(build(RunConfig, values, "the test"), world=world)


def glm_case(name: str = "glm52_131k_8xh200", *overrides: str, world: int | None = None) -> Case:
    """A shipped run of GLM-5.2-FP8."""
    run = load_run_config(CONFIGS / f"{name}.toml", overrides)
    return Case.load(run, world=world, model_config=GLM)


def assuming(case: Case, **assumed: Any) -> Case:
    """The same run with other assumptions."""
    return replace(case, assumed=replace(case.assumed, **assumed))


@pytest.fixture(scope="session")
def glm(tiny_checkpoints) -> Path:
    return tiny_checkpoints["glm_moe_dsa"]
