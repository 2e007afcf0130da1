"""What is refused before data or weights are read, and which setting the message names."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fullspan.checkpoint.safetensors_io import TensorReader
from fullspan.errors import CheckpointError, ConfigError, DataError, FullspanError
from fullspan.parallel.mesh import Mesh
from fullspan.train.loop import train_on
from fullspan.train.metrics import Console
from fullspan.train.setup import prepare
from tests.support.runs import run_config


@pytest.fixture
def refused(tiny_checkpoints, tmp_path, monkeypatch):
    """Prepares a run with the given sections, without reading a weight; its message."""

    def no_reading(*_: object) -> None:
        raise AssertionError("a weight was read")

    def attempt(kind: type[FullspanError], /, **sections: dict) -> str:
        monkeypatch.setattr(TensorReader, "read", no_reading)
        config = run_config(tiny_checkpoints["glm_moe_dsa"], tmp_path, "run", **sections)
        with pytest.raises(kind) as caught:
            prepare(config, Mesh.single(torch.device("cpu")), Console(first_rank=True))
        message = str(caught.value)
        assert "\n" not in message
        return message

    return attempt


def test_targets_are_matched_before_weights_and_data_are_read(refused):
    message = refused(
        ConfigError, lora={"targets": ["q_c_proj"]}, data={"path": "/nowhere/at/all.jsonl"}
    )
    assert "'q_c_proj' matches no module" in message and "q_b_proj" in message


def test_held_out_data_is_called_by_its_own_setting(refused):
    message = refused(DataError, data={"eval_path": "/nowhere/at/all.jsonl"})
    assert message.startswith("data.eval_path: /nowhere/at/all.jsonl does not exist")


def test_an_output_folder_that_cannot_be(refused, tmp_path: Path):
    (tmp_path / "file").write_text("")
    message = refused(CheckpointError, train={"output_dir": str(tmp_path / "file" / "run")})
    assert "cannot write" in message and "train.output_dir" in message


def test_a_checkpoint_past_the_last_step(refused, tiny_checkpoints, tmp_path: Path):
    constant = {"optim": {"schedule": "constant"}}
    folder = tiny_checkpoints["glm_moe_dsa"]
    config = run_config(folder, tmp_path, "run", train={"steps": 3}, **constant)
    assert train_on(config, Mesh.single(torch.device("cpu"))) == 0
    message = refused(ConfigError, train={"steps": 2}, **constant)
    assert message.startswith("train.steps is 2, but") and "after step 3" in message


def test_training_does_not_know_of_planning():
    """Which knows of it: the command line brings them together."""
    program = (
        "import sys; import fullspan.train.launch;"
        "print([name for name in sys.modules if name.startswith('fullspan.planning')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
