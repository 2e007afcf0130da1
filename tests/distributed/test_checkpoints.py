"""Saving and loading checkpoints of toy tensors on real ranks and a real file system: exactness,
saves that are cut short, full disks, refusals. Whole runs are in test_resume.py.
"""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fullspan.checkpoint.folders import newest_checkpoint, read_header
from fullspan.checkpoint.random_state import random_states, restore_random_states
from fullspan.checkpoint.resume import (
    CheckpointConfig,
    check_fingerprint,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from fullspan.errors import CheckpointError, ConfigError
from tests.support.ranks import run_ranks


def group_of(size: int):
    return None if size == 1 else dist.group.WORLD


def toy(step: int, rows: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    names = ("adapter.x.lora_a", "optim.x.lora_a.exp_avg")
    return {name: torch.randn(rows, 4, generator=generator) for name in names}


def save(folder: Path, step: int, size: int = 1, *, rows: int = 8, keep_last: int = 2) -> Path:
    return save_checkpoint(
        folder,
        step=step,
        tensors=toy(step, rows),
        loader={"index": 3 * step},
        fingerprint={"optim.lr": 0.1},
        keep_last=keep_last,
        group=group_of(size),
    )


def listing(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _save_and_load(rank: int, size: int, folder: Path) -> None:
    group = group_of(size)
    torch.manual_seed(10 + rank)
    np.random.seed(20 + rank)
    path = save(folder, 7, size)
    drawn = torch.rand(3), np.random.rand(3)
    torch.manual_seed(0)
    np.random.seed(0)

    header = read_header(path)
    assert (header.step, header.world_size, header.loader) == (7, size, {"index": 21})
    wanted = {name: torch.zeros_like(tensor) for name, tensor in toy(0).items()}
    loaded = load_checkpoint(path, wanted, group)
    for name, tensor in toy(7).items():
        assert torch.equal(loaded[name], tensor)
        assert not wanted[name].any(), "what was asked for is not written to"
    assert torch.equal(torch.rand(3), drawn[0])
    assert (np.random.rand(3) == drawn[1]).all()


@pytest.mark.parametrize("size", [1, 2])
def test_tensors_and_random_states_come_back(size, tmp_path):
    run_ranks(size, _save_and_load, tmp_path)


def test_random_states_are_exact():
    """Apart from the test above because the checks of types in tests draw Python's numbers too."""
    random.seed(4)
    random.gauss(0, 1)  # the second of a pair is kept
    np.random.standard_normal()
    states = {name: state.clone() for name, state in random_states().items()}
    was = random.getstate(), np.random.get_state()[2:], torch.get_rng_state()
    for draw in (random.random, np.random.standard_normal, lambda: torch.rand(())):
        draw()
    restore_random_states(states)
    assert was[:2] == (random.getstate(), np.random.get_state()[2:])
    assert torch.equal(was[2], torch.get_rng_state())


def _load_on_more_ranks(rank: int, size: int, path: Path) -> float:
    torch.manual_seed(99)
    fresh = torch.Generator().manual_seed(99)
    loaded = load_checkpoint(path, toy(0), group_of(size))
    assert all(torch.equal(loaded[n], t) for n, t in toy(7).items())
    return float(torch.rand(1)) - float(torch.rand(1, generator=fresh))


def test_more_ranks_than_before_read_the_same_and_keep_fresh_random_states(tmp_path):
    run_ranks(1, _save_and_load, tmp_path)
    known, new = run_ranks(2, _load_on_more_ranks, tmp_path / "step-7")
    assert known != 0 and new == 0


@pytest.mark.parametrize("size", [1, 2])
def test_only_the_last_checkpoints_are_kept(size, tmp_path):
    run_ranks(size, _save_steps, tmp_path)
    assert names(tmp_path) == ["step-10", "step-9"]
    newest, remarks = newest_checkpoint(tmp_path)
    assert newest == tmp_path / "step-10" and remarks == []


def _save_steps(rank: int, size: int, folder: Path) -> None:
    for step in (2, 9, 10):
        save(folder, step, size)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 3, rows=16)
    assert names(tmp_path) == ["step-3"]
    assert load_checkpoint(tmp_path / "step-3", toy(0, rows=16), None)


def test_half_written_folders_are_passed_over_with_a_remark(tmp_path):
    good = save(tmp_path, 1)
    unnamed = tmp_path / ".saving-step-9"
    without_state = tmp_path / "step-2"
    truncated = tmp_path / "step-3"
    damaged = tmp_path / "step-4"
    for folder in (unnamed, without_state, truncated, damaged):
        shutil.copytree(good, folder)
    (without_state / "state.json").unlink()
    os.truncate(truncated / "__0_0.distcp", 100)
    (damaged / "state.json").write_text('{"format": 1, "step"')
    newest, remarks = newest_checkpoint(tmp_path)
    assert newest == good
    assert len(remarks) == 4
    for folder, reason in (
        (unnamed, "did not finish"),
        (without_state, "No such file"),
        (truncated, "__0_0.distcp has 100 bytes instead of"),
        (damaged, "state.json is damaged"),
    ):
        assert any(str(folder) in r and reason in r for r in remarks), (folder, remarks)

    save(tmp_path, 5, keep_last=1)
    assert names(tmp_path) == ["step-2", "step-3", "step-4", "step-5"], (
        "the save that did not finish is cleared away, what may be somebody's data is not"
    )


def test_a_format_of_the_future_is_refused(tmp_path):
    path = save(tmp_path, 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 2, "more": 1}))
    with pytest.raises(CheckpointError, match="format 2: allowed is 1"):
        read_header(path)


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 256 KiB, where this user may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _fail_to_save(rank: int, size: int, folder: Path, reason: str, limit: int) -> None:
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    save(folder, 1, size)
    before = listing(folder)
    dist.barrier() if size > 1 else None
    with pytest.raises(CheckpointError) as caught:
        save(folder, 2, size, rows=20_000)
    message = str(caught.value)
    assert "\n" not in message
    for part in (f"could not save {folder / 'step-2'}: {reason}", "MiB are free", "output_dir"):
        assert part in message, message
    assert listing(folder) == before
    assert names(folder) == ["step-1"]
    dist.barrier() if size > 1 else None
    save(folder, 3, size)
    assert names(folder) == ["step-1", "step-3"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_full_disk_leaves_the_older_checkpoints_untouched(size, small_disk):
    run_ranks(size, _fail_to_save, small_disk, os.strerror(errno.ENOSPC), 0)


@pytest.mark.parametrize("size", [1, 2])
def test_a_file_size_limit_leaves_the_older_checkpoints_untouched(size, tmp_path):
    folder = tmp_path / "checkpoints"
    run_ranks(size, _fail_to_save, folder, os.strerror(errno.EFBIG), 64 << 10)


def _fail_at_the_folder(rank: int, size: int, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"could not save .*Not a directory"):
        save(folder / "file" / "checkpoints", 1, size)


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_hears_of_a_failure_of_the_first(size, tmp_path):
    (tmp_path / "file").write_text("")
    run_ranks(size, _fail_at_the_folder, tmp_path)


# ---------------------------------------------------------------- refusals


def test_changed_settings_are_named_with_both_values(tmp_path):
    path = save(tmp_path, 1)
    header = read_header(path)
    check_fingerprint(path, header, {"optim.lr": 0.1})
    with pytest.raises(CheckpointError, match=r"optim\.lr was 0\.1 and is 0\.2 \("):
        check_fingerprint(path, header, {"optim.lr": 0.2})
    with pytest.raises(CheckpointError, match=r"lora\.r was not there and is 8; optim\.lr was"):
        check_fingerprint(path, header, {"optim.lr": 0.2, "lora.r": 8})


def test_tensors_that_do_not_fit_are_named(tmp_path):
    path = save(tmp_path, 1)
    wanted = toy(0)
    renamed = {name.replace("x.", "y."): tensor for name, tensor in wanted.items()}
    with pytest.raises(CheckpointError, match=r"2 tensor.*adapter\.x\.lora_a .*not in the run"):
        load_checkpoint(path, renamed, None)
    more = wanted | {"adapter.z.lora_a": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"1 tensor.*adapter\.z.* not in the checkpoint"):
        load_checkpoint(path, more, None)
    with pytest.raises(CheckpointError, match=r"lora_a is \[8, 4\] there and \[9, 4\] here"):
        load_checkpoint(path, toy(0, rows=9), None)


@pytest.mark.parametrize("size", [1, 2])
def test_damaged_contents_are_an_error_on_every_rank(size, tmp_path):
    path = save(tmp_path, 1)
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[: len(data) // 2] = b"\xff" * (len(data) // 2)
    (path / "__0_0.distcp").write_bytes(bytes(data))
    run_ranks(size, _fail_to_load, path, "cannot read")
    (path / ".metadata").write_bytes(b"no pickle")
    run_ranks(size, _fail_to_load, path, r"cannot read .*\.metadata")


def _fail_to_load(rank: int, size: int, path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path, toy(0), group_of(size))
    assert "\n" not in str(caught.value)


def test_what_resume_finds(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    first = save(run / "checkpoints", 1)
    second = save(run / "checkpoints", 2)

    def find(resume: bool | str, output: Path) -> Path | None:
        return find_checkpoint(CheckpointConfig(resume=resume), output, None)[0]

    assert find(True, run) == second
    assert find(True, other) is None and find(False, other) is None
    assert find(str(first), other) == first
    assert find(str(run), other) == second
    assert find(str(second), run) == second
    with pytest.raises(CheckpointError, match=r"already holds a run .*resume is false"):
        find(False, run)
    with pytest.raises(CheckpointError, match=r"holds a later one .*step-2"):
        find(str(first), run)
    with pytest.raises(CheckpointError, match=r"resume is '.*nothing'.*no complete checkpoint"):
        find(str(tmp_path / "nothing"), other)
    os.truncate(second / "__0_0.distcp", 100)
    assert find(True, run) == first
    os.truncate(first / "__0_0.distcp", 100)
    for resume in (True, False):
        with pytest.raises(CheckpointError, match=r"without a checkpoint to go on .* 100 bytes in"):
            find(resume, run)


@pytest.mark.parametrize("bad", [{"every": -1}, {"keep_last": 0}, {"resume": ""}])
def test_bad_settings_are_named(bad):
    with pytest.raises(ConfigError, match=rf"checkpoint\.{next(iter(bad))}"):
        CheckpointConfig(**bad)
