"""`fullspan train` as users start it: two ranks by each launcher, stopped and resumed, refused."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullspan import settings
from fullspan.train.config import RunConfig
from tests.support.runs import write_texts

COMMAND = [sys.executable, "-m", "fullspan.cli.main", "train"]
LIMIT = 240
RUN = """
[model]
path = "{model}"
dtype = "float32"
[lora]
r = 2
targets = ["q_b_proj", "kv_b_proj"]
[data]
path = "train.jsonl"
pack_length = 128
[train]
steps = {steps}
output_dir = "out"
"""


@pytest.fixture
def run_folder(tmp_path, tiny_checkpoints) -> Path:
    """A folder with run.toml and its data; run.toml takes 3 steps."""
    write_texts(tmp_path / "train.jsonl", 8, seed=1)
    model = tiny_checkpoints["glm_moe_dsa"]
    (tmp_path / "run.toml").write_text(RUN.format(model=model, steps=3))
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    """This process's, less what would make it a rank."""
    mine = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    return mine | {"OMP_NUM_THREADS": "1"} | more


def start(folder: Path, *words: str, command: list[str] = COMMAND, **more: str):
    return subprocess.Popen(
        [*command, *words],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def losses(folder: Path) -> list[float]:
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if record["kind"] == "train"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_every_launcher_gives_the_same_run(run_folder):
    """Our own, torchrun, and what srun sets for its tasks."""
    code, out, err = finish(start(run_folder, "run.toml", "--nproc-per-node", "2"))
    assert code == 0, err
    assert out.count("finished 3 steps") == 1
    assert "Traceback" not in err
    saved = settings.load(RunConfig, run_folder / "out" / "config.toml")
    assert saved.data.path == str(run_folder / "train.jsonl")
    expected = losses(run_folder)
    assert len(expected) == 3

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-port", str(free_port()), "-m", "fullspan.cli.main", "train"]
    anew = ["--train.output_dir", "torchrun/out"]
    code, _, err = finish(start(run_folder, "run.toml", *anew, command=torchrun))
    assert code == 0, err
    assert losses(run_folder / "torchrun") == expected

    slurm = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "MASTER_PORT": str(free_port()),
    }
    anew = ["--train.output_dir", "slurm/out"]
    tasks = [
        start(run_folder, "run.toml", *anew, **slurm, SLURM_PROCID=rank, SLURM_LOCALID=rank)
        for rank in ("0", "1")
    ]
    ends = [finish(task) for task in tasks]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "finished 3 steps" in ends[0][1]
    assert ends[1][1] == ""
    assert losses(run_folder / "slurm") == expected


def test_sigterm_saves_and_the_same_command_continues(run_folder):
    """That the losses go on as if nothing had been is shown in tests/distributed."""
    words = ["run.toml", "--nproc-per-node", "2", "--train.steps", "40"]
    process = start(run_folder, *words)
    deadline = time.monotonic() + LIMIT
    metrics = run_folder / "out" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 128 + signal.SIGTERM, err
    assert "stopped by SIGTERM" in out
    assert "Traceback" not in err
    before = losses(run_folder)
    assert len(before) < 40

    code, _, err = finish(start(run_folder, *words))
    assert code == 0, err
    assert losses(run_folder)[: len(before)] == before
    assert len(losses(run_folder)) == 40


def test_what_every_rank_refuses_is_said_once(run_folder):
    words = ["--nproc-per-node", "2", "--model.path", "absent"]
    code, out, err = finish(start(run_folder, "run.toml", *words))
    assert code == 2
    assert out == ""
    assert err.startswith("fullspan: error: rank ")
    assert err.count("\n") == 1
    assert str(run_folder / "absent") in err


def test_a_port_in_use_is_one_line(run_folder):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        words = ["run.toml", "--nproc-per-node", "2", "--master-port", str(port)]
        code, out, err = finish(start(run_folder, *words))
    assert code == 2
    assert out == ""
    assert err.startswith(f"fullspan: error: port {port}, where the ranks meet, cannot be used")
    assert err.count("\n") == 1
    assert not (run_folder / "out").exists()
