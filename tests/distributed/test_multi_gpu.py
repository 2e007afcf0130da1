"""benchmarks/multi_gpu.py on gloo ranks of this machine: the part of it that needs no GPU."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist

from benchmarks import multi_gpu
from fullspan.parallel import context
from fullspan.parallel.collectives import PendingTensor
from fullspan.planning.stand_in import Values

# Of the tiny model, one layer of each kind, as the default has of GLM-5.2.
LAYERS = "1,2,4"


@pytest.fixture
def run(tiny_checkpoints, tmp_path, capsys):
    """The exit code, the rows and the output of a run on a model of random weights: a tiny one, of
    which there is only a config.json."""
    shutil.copy(tiny_checkpoints["glm_moe_dsa"] / "config.json", tmp_path)

    def with_words(*words: str) -> tuple[int, list[dict], str]:
        rows = tmp_path / "rows.jsonl"
        fixed = ["--device", "cpu", "--tokens", "192", "--lengths", "192", "--steps", "1"]
        fixed += ["--layers", LAYERS, "--out", str(rows), "--model.path", str(tmp_path)]
        code = multi_gpu.main([*fixed, *words])
        lines = rows.read_text().splitlines() if rows.exists() else []
        return code, [json.loads(line) for line in lines], "".join(capsys.readouterr())

    return with_words


def test_two_ranks_pass_every_part(run):
    code, rows, out = run("--cp", "1,2", "--partition", "contiguous")
    assert code == 0 and out.rstrip().endswith("passed")
    assert [row["op"].removeprefix("multi_gpu_") for row in rows] == [
        "parity", "step", "parity", "step", "rehearsal", "rehearsal",
    ]  # fmt: skip
    assert {row["layers"] for row in rows} == {3} and {row["transport"] for row in rows} == {"gloo"}
    one, two = (row for row in rows if row["op"] == "multi_gpu_parity")
    assert one["bits_difference"] == two["bits_difference"] == two["topk_difference"] == 0
    assert two["loss_difference"] <= 1e-6 and 0 < two["gradients_difference"] <= 1e-5
    alone, shared = (row for row in rows if row["op"] == "multi_gpu_step")
    assert alone["exchange_ms"] == 0 < shared["exchange_ms"] < shared["ms"]
    assert shared["tokens_per_second_per_rank"] == pytest.approx(96e3 / shared["ms"], rel=1e-3)
    for row in rows[-2:]:
        assert row["rehearsed_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.03)


def test_bfloat16_is_compared_with_equal_rows_too(run):
    words = ["--cp", "1,2", "--parts", "parity", "--partition", "zigzag"]
    code, rows, _ = run(*words, "--model.dtype", "bfloat16")
    assert code == 0
    assert [row["product_rows"] for row in rows] == [None, None, 48]
    assert [row["partition"] for row in rows] == ["", "zigzag", "zigzag"]
    assert all(row.get("topk_difference", 0) == 0 for row in rows if row["product_rows"])


def test_a_dropped_reduce_scatter_fails(run, monkeypatch):
    def own_part(full, group, *what):
        rows = full.shape[0] // dist.get_world_size()
        return PendingTensor(full[dist.get_rank() * rows :][:rows])

    monkeypatch.setattr(context, "start_reduce_scatter_rows", own_part)
    code, rows, out = run("--cp", "1,2", "--parts", "parity", "--partition", "contiguous")
    assert code == 1 and [row["passed"] for row in rows] == [True, False]
    assert "FAILED\nproducts as they come: cp 2 ep 2 gradients" in out


def test_experts_of_another_model_fail(run, monkeypatch):
    fill = Values.fill
    monkeypatch.setattr(Values, "fill", lambda self, name, tensor, part=0: fill(self, name, tensor))
    code, _, out = run("--cp", "1,2", "--parts", "parity", "--partition", "contiguous")
    assert code == 1 and "cp 2 ep 2 loss" in out.partition("FAILED\n")[2]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--cp 1,5", "data.pack_length is 192: it must be a multiple of 5"),
        ("--cp 1,16", "parallel.ep is 16, which does not divide the model's 8 routed experts"),
        ("--cp 1,0", "sizes must be at least 1"),
        ("--cp 1", "parity compares two sizes or more"),
        ("--cp 1,2 --backend nccl", "--backend nccl: PyTorch sees no GPU"),
        ("--cp 1,2 --parts speed,dept", "allowed are parity, speed, rehearsal, depth"),
        ("--cp 1,2 --layers 1,6", "the model's are 0 to 5"),
        ("--cp 1,2 --partition zigzak", "parallel.partition is 'zigzak'"),
        ("--cp 1,2 --steps 0", "--steps is 0"),
        ("--cp 1,2 --out absent/rows", "--out: cannot write absent/rows"),
        ("--cp 1,2 --train.stepz 1", "unknown setting 'train.stepz'"),
    ],
)
def test_what_cannot_be_run_is_one_line(run, words, error):
    code, rows, out = run(*words.split())
    assert code == 2 and not rows
    assert error in out and out.count("\n") == 1


def test_more_ranks_than_gpus_need_gloo(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    code, _, out = run("--cp", "1,2", "--backend", "nccl")
    assert code == 2 and out.count("\n") == 1
    assert "2 ranks, but NCCL needs a GPU for each and there is 1" in out
