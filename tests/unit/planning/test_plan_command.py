"""`fullspan plan`: without torch, as text and JSON, as the documentation shows it, and in the
message of a run that is out of memory."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fullspan.cli.main import main
from fullspan.errors import TrainingError
from fullspan.planning.report import explain_out_of_memory
from fullspan.settings import dump_toml
from fullspan.train.config import load_run_config
from fullspan.train.loop import train
from fullspan.train.session import Session
from tests.support.runs import run_config
from tests.unit.planning.conftest import GLM

ROOT = Path(__file__).parents[3]
CONFIG = "configs/glm52_131k_8xh200.toml"
MODEL = ["--model-config", str(GLM)]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_torch_is_not_imported():
    """Nor anything else that is heavy."""
    program = (
        "import sys; from fullspan.cli.main import main;"
        f"code = main({['plan', CONFIG, *MODEL, '--gpus', '8']!r});"
        "heavy = {'torch', 'triton', 'transformers', 'safetensors', 'matplotlib'};"
        "print(sorted(heavy & set(sys.modules)), code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "[] 0\n"
    assert "2 of 32 splits of 8 GPUs fit: h200" in done.stdout


def test_json_has_the_figures_of_the_text(tmp_path, capsys):
    assert main(["plan", CONFIG, *MODEL, "--json", str(tmp_path / "plan.json")]) == 0
    text = capsys.readouterr().out
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["split"] == {"world": 8, "dp": 1, "cp": 8, "ep": 8, "shard_weights": True}
    peak = plan["memory"]["stages"][plan["memory"]["peak_stage"]]
    assert peak["bytes"] == plan["memory"]["peak_bytes"] == sum(peak["items"].values())
    assert plan["fits"] and peak["bytes"] < plan["memory"]["capacity_bytes"]
    assert f"total                         {peak['bytes'] / 2**30:.2f}" in text
    assert f"expected seconds of a step on h200: {plan['seconds']['step']:.1f}" in text
    assert len(plan["received_bytes"]["per_layer"]) == 78
    assert set(plan["memory"]["stages"]) == {"forward", "head", "recompute", "backward", "update"}
    assert plan["assumptions"]["imbalance"] == 1.3


def test_a_file_that_cannot_be_written_is_one_line(tiny_checkpoints, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{tiny_checkpoints["glm_moe_dsa"]}"\n[lora]\ntargets = ["q_b_proj"]\n'
        '[data]\npath = "unread"\n[train]\nsteps = 1\noutput_dir = "unwritten"\n'
    )
    words = [str(tmp_path / "run.toml"), "--world", "1", "--json", "no/such/folder/plan.json"]
    assert main(["plan", *words]) == 2
    assert "cannot write no/such/folder/plan.json" in capsys.readouterr().err


def test_settings_of_the_command_line_count(capsys):
    words = ["--cp", "32", "--ep=32", "--pack-length", "262144", "--lora.r", "8"]
    assert main(["plan", CONFIG, *MODEL, *words, "--document", "4096", "--trained", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "32 = dp 1 x cp 32, ep 32" in text
    assert "packs of 262,144 rows, 8,192 a rank" in text
    assert "rank 8: 69.1e6 parameters" in text
    assert "documents of 4,096 rows; 50% of rows trained" in text


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({}, []),
        ({"sparse_attention": "hopper", "index_topk": "hopper"}, []),
        ({"index_topk": "hopper", "index_scores": "fp8"}, []),
        (
            {"sparse_attention": "flash_mla"},
            ["flash_mla's attention forward is sized as hopper's"],
        ),
        (
            {"sparse_attention": "cudnn", "index_topk": "cudnn"},
            [
                "cudnn's attention backward is rated as hopper's and sized as hopper's",
                "cudnn's indexer is rated as hopper's",
            ],
        ),
        (
            {"index_topk": "cudnn", "index_scores": "fp8"},
            ["cudnn's indexer is rated as hopper's"],
        ),
        (
            {"sparse_attention": "triton"},
            [f"triton's attention {part} is sized as hopper's" for part in ("forward", "backward")],
        ),
    ],
)
def test_a_named_backend_with_the_figures_of_another_is_named(settings, lines, capsys):
    words = [f"--ops.{name}={value}" for name, value in settings.items()]
    assert main(["plan", CONFIG, *MODEL, *words]) == 0
    said = re.findall(r"(?m)^assumed  (.*'s .* is .*)$", capsys.readouterr().out)
    assert said == lines


def test_rows_of_a_named_backend_come_first(tmp_path, capsys):
    """What the benchmarks wrote of it; only its memory is another's."""
    (tmp_path / "rows.jsonl").write_text(
        '{"op": "backward", "backend": "hopper", "rate": 1e14, "gpu": "NVIDIA H200"}\n'
        '{"op": "backward", "backend": "cudnn", "rate": 2e14, "gpu": "NVIDIA H200"}\n'
        '{"op": "index_topk", "backend": "cudnn_fp8", "rate": 3e14, "gpu": "NVIDIA H200"}\n'
    )
    words = ["--ops.sparse_attention", "cudnn", "--ops.index_topk=cudnn", "--ops.index_scores=fp8"]
    assert main(["plan", CONFIG, *MODEL, *words, "--rates", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "attention backward  200 TFLOP/s" in text and "indexer             300 TFLOP/s" in text
    said = re.findall(r"(?m)^assumed  (.*'s .* is .*)$", text)
    assert said == ["cudnn's attention backward is sized as hopper's"]


def test_what_does_not_fit_exits_with_1(capsys):
    assert main(["plan", CONFIG, *MODEL, "--pack-length", "524288"]) == 1
    text = capsys.readouterr().out
    assert "the longest pack that fits this split has" in text
    assert main(["plan", CONFIG, *MODEL, "--gpus", "1", "--gpu", "h100"]) == 1
    assert "none of" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
    ([], "GLM-5.2-FP8/config.json: cannot read the model's configuration"),
    ([*MODEL, "--world", "7"], "parallel.dp 1 x parallel.cp 8 makes 8, but the run has 7"),
    ([*MODEL, "--parallel.cp", "0"], "parallel.cp is 0, all ranks of a replica"),
    ([*MODEL, "--ep", "3"], "parallel.ep is 3: it must divide"),
    ([*MODEL, "--gpu", "a100"], "no figures for a GPU 'a100'"),
    ([*MODEL, "--imbalance", "0.5"], "imbalance is 0.5: it must be at least 1"),
    ([*MODEL, "--lora.targets", '["wq_b"]'], "'wq_b' names nothing"),
    (["--model-config", CONFIG], "cannot be read as JSON"),
])  # fmt: skip
def test_what_cannot_be_planned_is_one_line(words, message, capsys):
    assert main(["plan", CONFIG, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# ------------------------------------------------------------------------- documentation


def test_the_documented_plans_are_what_the_command_prints():
    done = subprocess.run(
        [sys.executable, "scripts/update_plans.py", "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "5 plans in docs/planning.md\n"


# -------------------------------------------------------------------------- out of memory


def test_out_of_memory_names_items_and_settings():
    config = load_run_config(Path(CONFIG), [])
    line = explain_out_of_memory(config, 8, capacity=139 << 30, model_config=GLM)
    assert "\n" not in line
    assert re.match(r"the plan of this run peaks at 1\d\d\.\d GiB of 139\.0 GiB, in ", line)
    assert "routed experts 84.4 GiB (use more GPUs and raise parallel.ep with them)" in line
    assert "saved layer inputs 14.6 GiB (set train.offload_inputs = true)" in line


def test_out_of_memory_without_a_plan_says_why():
    config = load_run_config(Path(CONFIG), [])
    line = explain_out_of_memory(config, 8)
    assert line.startswith("no plan of this run can be made (") and "\n" not in line


def test_a_run_out_of_memory_points_to_its_plan(tiny_checkpoints, tmp_path, monkeypatch, capsys):
    """What the device says first, then the items of the plan."""

    def out_of_memory(self, packs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(Session, "forward_backward", out_of_memory)
    config = run_config(tiny_checkpoints["glm_moe_dsa"], tmp_path, "run")
    with pytest.raises(TrainingError, match=r"2\.00 GiB\.\): `fullspan plan` shows what takes it$"):
        train(config)
    (tmp_path / "run.toml").write_text(dump_toml(config))
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "Tried to allocate 2.00 GiB.): the plan of this run peaks at" in line
    assert "its largest items: index scores 1.0 GiB (lower ops.workspace_bytes); " in line
    assert line.count(" GiB (") == 4
