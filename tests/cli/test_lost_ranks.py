"""Ranks of a real run that are killed, stopped or told to leave: how it ends and how it goes on."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from fullspan import settings
from fullspan.train.loop import train_on
from fullspan.train.metrics import read_metrics
from tests.support.ranks import run_ranks
from tests.support.runs import mesh_of, run_config

LIMIT = 600  # of a test that hangs; says nothing about the product
PLACE = r"at (step \d+|the checkpoint of step \d+), (in|after) [\w' ,]+ \(exchange \d+\)"


class Run:
    """`fullspan train --nproc-per-node N` in a process of its own, and its ranks.

    Its configuration is that of `run_config`; starting it again in the same folder continues.
    """

    def __init__(self, model: Path, folder: Path, ranks: int, **sections: dict) -> None:
        self.folder = folder
        config = run_config(model, folder, "run", **sections)
        (folder / "run.toml").write_text(settings.dump_toml(config))
        (folder / "tmp").mkdir(exist_ok=True)
        words = ["train", str(folder / "run.toml"), "--nproc-per-node", str(ranks)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fullspan.cli.main", *words],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def send_after(self, steps: int, rank: int, number: signal.Signals) -> None:
        """A signal to one rank, whose process the launcher's folder names."""
        deadline = time.monotonic() + LIMIT
        while len(losses(self.folder / "run")) < steps:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"no step {steps}: {self.process.communicate()}")
            time.sleep(0.01)
        (file,) = (self.folder / "tmp").glob(f"fullspan-*/{rank}.pid")
        os.kill(int(file.read_text()), number)

    def finish(self) -> tuple[int, str, str]:
        """Exit code and both outputs."""
        try:
            out, err = self.process.communicate(timeout=LIMIT)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


def losses(run: Path) -> list[float]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [r["loss"] for r in read_metrics(path) if r["kind"] == "train"]


def results(run: Path) -> list[tuple[str, float]]:
    """What the records say was computed, in the order of the run: (what, value)."""
    return [
        (f"{record['kind']} step {record['step']} {name}", record[name])
        for record in read_metrics(run / "metrics.jsonl")
        for name in ("loss", "grad_norm")
        if name in record
    ]


def adapter(run: Path) -> Path:
    return run / "adapter" / "adapter_model.safetensors"


def differing(run: Path, other: Path) -> list[str]:
    """Names of the adapter tensors whose bits differ."""
    ours, others = [load_file(adapter(folder)) for folder in (run, other)]
    assert ours.keys() == others.keys()
    return [name for name in ours if not torch.equal(ours[name], others[name])]


def _train(rank: int, size: int, model: Path, folder: Path, sections: dict) -> int:
    mesh = mesh_of(**sections["parallel"])
    return train_on(run_config(model, folder, "whole", **sections), mesh)


def test_a_run_whose_rank_is_killed_says_so_and_goes_on_with_the_same_bits(
    tiny_checkpoints, tmp_path
):
    model = tiny_checkpoints["glm_moe_dsa"]
    sections = {
        "parallel": {"ep": 2},
        "train": {"steps": 6, "timeout_seconds": 60.0},
        "checkpoint": {"every": 2},
    }
    run = Run(model, tmp_path, 4, **sections)
    run.send_after(3, 2, signal.SIGKILL)
    started = time.monotonic()
    code, _, err = run.finish()
    assert code == 2 and err.count("\n") == 1, err
    assert re.match(
        r"fullspan: error: rank 2: killed by SIGKILL; if memory ran out, .*; rank 2 has not "
        rf"answered for \d+ s: rank 2 was last seen {PLACE}; rank [013] waits {PLACE} "
        r"\(train.timeout_seconds is 60\)\n$",
        err,
    ), err
    assert time.monotonic() - started < 30, "long before the timeout: the connection closed"

    code, out, err = Run(model, tmp_path, 4, **sections).finish()
    assert code == 0, err
    assert re.search(r"resuming from \S+step-[24], ", out)
    run_ranks(4, _train, model, tmp_path, sections, timeout=LIMIT)
    resumed, whole = tmp_path / "run", tmp_path / "whole"
    pairs = zip(results(resumed), results(whole), strict=True)
    assert [pair for pair in pairs if pair[0] != pair[1]] == []
    assert differing(resumed, whole) == []
    assert adapter(resumed).read_bytes() == adapter(whole).read_bytes()


def test_a_rank_that_is_stopped_ends_the_run_in_bounded_time(tiny_checkpoints, tmp_path):
    """A stopped process heeds no SIGTERM; PyTorch alone would wait 30 s for it."""
    train = {"steps": 100, "timeout_seconds": 3.0}
    run = Run(tiny_checkpoints["glm_moe_dsa"], tmp_path, 2, train=train)
    run.send_after(3, 1, signal.SIGSTOP)
    started = time.monotonic()
    code, _, err = run.finish()
    assert code == 2 and err.count("\n") == 1, err
    assert re.match(
        rf"fullspan: error: rank 1 has not answered for \d+ s: rank 1 was last seen {PLACE}; "
        rf"rank 0 waits {PLACE} \(train.timeout_seconds is 3\)\n$",
        err,
    ), err
    assert time.monotonic() - started < 25


def test_sigterm_to_one_rank_saves_once_and_all_leave_with_its_code(tiny_checkpoints, tmp_path):
    run = Run(tiny_checkpoints["glm_moe_dsa"], tmp_path, 2, train={"steps": 100})
    run.send_after(2, 1, signal.SIGTERM)
    code, out, err = run.finish()
    assert code == 128 + signal.SIGTERM, err
    done = len(losses(tmp_path / "run"))
    assert 2 <= done < 100
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{done}"]
    assert out.count("saved ") == 1 and out.count("stopped by SIGTERM") == 1
    assert err == ""
