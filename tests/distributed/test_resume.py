"""Whole runs of a tiny model on real ranks, interrupted and resumed: the same losses, bit for
bit."""

import json
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

import fullspan.train.setup
from fullspan.checkpoint.tiny import init_tiny
from fullspan.errors import CheckpointError, DataError, FullspanError
from fullspan.train.loop import train_on
from fullspan.train.metrics import read_metrics
from tests.support.ranks import run_ranks
from tests.support.runs import mesh_of, run_config

EVERY_STEP = {"every": 1, "keep_last": 100}


def _train(rank: int, size: int, model: Path, folder: Path, name: str, sections: dict) -> int:
    return train_on(run_config(model, folder, name, **sections), mesh_of())


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def records(folder: Path, kind: str = "train") -> list[dict]:
    """The records without what a clock or the system decides."""
    read = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == kind]
    noise = ("seconds", "tokens_per_second", "tokens_per_second_per_rank", "peak_memory_bytes")
    return [{k: v for k, v in r.items() if k not in noise} for r in read]


@pytest.mark.parametrize(("size", "steps"), [(1, (1, 3, 4)), (2, (2, 4))])
def test_a_run_resumed_at_any_step_has_the_same_bits(size, steps, tiny_checkpoints, tmp_path):
    """6 steps of 2 packs out of 7, shuffled: resumed before and after the epoch's border."""
    model = tiny_checkpoints["glm_moe_dsa"]
    run_ranks(size, _train, model, tmp_path, "whole", {"checkpoint": EVERY_STEP})
    whole = tmp_path / "whole"
    expected = records(whole)
    assert [r["step"] for r in expected] == [1, 2, 3, 4, 5, 6]
    assert expected[2]["epoch"] < 1 < expected[3]["epoch"], "the epoch ends within a step"
    assert len({r["loss"] for r in expected}) == 6
    for step in steps:
        name = f"from-{step}"
        sections = {"checkpoint": {"resume": str(whole / "checkpoints" / f"step-{step}")}}
        run_ranks(size, _train, model, tmp_path, name, sections)
        assert records(tmp_path / name) == expected[step:]
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            ours, theirs = tmp_path / name / "adapter" / file, whole / "adapter" / file
            assert ours.read_bytes() == theirs.read_bytes()


def _train_until_signal(
    rank: int, size: int, model: Path, folder: Path, name: str, sections: dict, lines: int
) -> int:
    """Only the last rank is told, after some steps."""

    def tell() -> None:
        path = folder / name / "metrics.jsonl"
        while not path.exists() or path.read_text().count('"train"') < lines:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if rank == size - 1:
        threading.Thread(target=tell, daemon=True).start()
    return _train(rank, size, model, folder, name, sections)


@pytest.mark.parametrize("size", [1, 2])
def test_sigterm_on_one_rank_saves_on_all_and_the_same_command_goes_on(
    size, tiny_checkpoints, tmp_path
):
    model = tiny_checkpoints["glm_moe_dsa"]
    sections = {"data": {"eval_path": str(tmp_path / "eval.jsonl")}, "train": {"eval_every": 1}}
    run_ranks(size, _train, model, tmp_path, "whole", sections)
    codes = run_ranks(size, _train_until_signal, model, tmp_path, "run", sections, 2)
    assert codes == [128 + signal.SIGTERM] * size
    run = tmp_path / "run"
    done = [r["step"] for r in records(run)]
    assert 2 <= len(done) < 6
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step-{done[-1]}"]
    assert not (run / "adapter").exists(), "an adapter that is not finished is not left around"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": done[-1] + 1, "loss": 1e9}) + "\n")

    assert run_ranks(size, _train, model, tmp_path, "run", sections) == [0] * size
    assert records(run) == records(tmp_path / "whole")
    assert records(run, "eval") == records(tmp_path / "whole", "eval")
    assert len(records(run, "eval")) == 7
    assert (run / "adapter" / "adapter_model.safetensors").exists()


def test_a_run_that_is_finished_trains_no_more(tiny_checkpoints, tmp_path):
    model = tiny_checkpoints["glm_moe_dsa"]
    run_ranks(1, _train, model, tmp_path, "run", {"train": {"steps": 3}})
    before = listing(tmp_path / "run" / "checkpoints"), records(tmp_path / "run")
    assert run_ranks(1, _train, model, tmp_path, "run", {"train": {"steps": 3}}) == [0]
    assert before == (listing(tmp_path / "run" / "checkpoints"), records(tmp_path / "run"))


def _train_with_little_room(
    rank: int, size: int, model: Path, folder: Path, name: str, sections: dict
) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
    with pytest.raises(CheckpointError) as caught:
        _train(rank, size, model, folder, name, sections)
    return str(caught.value)


def test_a_run_that_cannot_save_ends_and_goes_on_where_it_was_saved(tiny_checkpoints, tmp_path):
    """With a constant rate the number of steps may grow, since no step depends on it."""
    model = tiny_checkpoints["glm_moe_dsa"]

    def sections(steps: int) -> dict:
        return {"optim": {"schedule": "constant"}, "train": {"steps": steps}}

    run_ranks(1, _train, model, tmp_path, "whole", sections(4))
    run_ranks(1, _train, model, tmp_path, "run", sections(2))
    saved = listing(tmp_path / "run" / "checkpoints")
    arguments = (model, tmp_path, "run", sections(4))
    (message,) = run_ranks(1, _train_with_little_room, *arguments)
    assert "could not save" in message and "File too large" in message and "\n" not in message
    assert listing(tmp_path / "run" / "checkpoints") == saved
    run_ranks(1, _train, *arguments)
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_another_number_of_ranks_continues_to_rounding(tiny_checkpoints, tmp_path, capfd):
    model = tiny_checkpoints["glm_moe_dsa"]
    run_ranks(1, _train, model, tmp_path, "whole", {"checkpoint": EVERY_STEP})
    sections = {"checkpoint": {"resume": str(tmp_path / "whole" / "checkpoints" / "step-3")}}
    run_ranks(2, _train, model, tmp_path, "two", sections)
    expected, got = records(tmp_path / "whole")[3:], records(tmp_path / "two")
    assert [r["step"] for r in got] == [4, 5, 6]
    for one, two in zip(expected, got, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert two["epoch"] == one["epoch"] and two["lr"] == one["lr"]
    assert "written by 1 rank(s) and now there are 2" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"optim": {"lr": 1e-3}}, "optim.lr was 0.005 and is 0.001"),
        ({"lora": {"r": 4}}, "lora.r was 2 and is 4"),
        ({"lora": {"targets": ["o_proj"]}}, "lora.targets was .* and is .'o_proj'"),
        ({"train": {"steps": 9}}, "train.steps was 3 and is 9"),
        ({"train": {"accumulation": 1}}, r"packs a step \(train.accumulation.*was 2 and is 1"),
        ({"data": {"seed": 4}}, "data.seed was 3 and is 4"),
        ({"data": {"pack_length": 256}}, "data.pack_length was 128 and is 256"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype was 'float32' and is 'bfloat16'"),
    ],
)
def test_settings_that_break_a_resume_are_refused_before_weights_load(
    sections, named, finished_run, tmp_path
):
    error = refusal(finished_run, tmp_path, sections)
    assert isinstance(error, CheckpointError)
    with pytest.raises(CheckpointError, match=named):
        raise error


def test_another_model_or_other_data_is_refused(finished_run, tmp_path):
    init_tiny(tmp_path / "other", seed=1)
    error = refusal(finished_run, tmp_path, {"model": {"path": str(tmp_path / "other")}})
    assert isinstance(error, CheckpointError) and "the model's weights was" in str(error)
    run = tmp_path / "copy"
    data = run / "train.jsonl"
    data.write_text(data.read_text().replace("span", "spin", 1))
    error = refusal(run, tmp_path / "again", {"data": {"path": str(data)}})
    assert isinstance(error, DataError) and "content of the packs" in str(error)


@pytest.fixture(scope="module")
def finished_run(tiny_checkpoints, tmp_path_factory) -> Path:
    """The folder of a run `a` of 3 steps, with the link `model` to its checkpoint."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "model").symlink_to(tiny_checkpoints["glm_moe_dsa"])
    run_ranks(1, _train, folder / "model", folder, "a", {"train": {"steps": 3}})
    return folder


def refusal(finished: Path, tmp_path: Path, sections: dict) -> FullspanError:
    """What a copy of a finished run says to other settings. The base weights are out of reach."""
    copy = tmp_path / "copy" if not (tmp_path / "copy").exists() else tmp_path / "copy2"
    shutil.copytree(finished, copy, symlinks=True)
    sections = {"train": {}} | sections
    sections["train"] = {"steps": 3} | sections["train"]
    (error,) = run_ranks(1, _refused, copy / "model", copy, "a", sections)
    return error


def _refused(
    rank: int, size: int, model: Path, folder: Path, name: str, sections: dict
) -> FullspanError:
    def load_nothing(*_: object) -> None:
        raise AssertionError("weights were loaded")

    fullspan.train.setup._load = load_nothing
    with pytest.raises(FullspanError) as caught:
        _train(rank, size, model, folder, name, sections)
    return caught.value
