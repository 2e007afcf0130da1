"""Ranks that the launcher starts: real processes and a real gloo group, with work that fails.

What a user sees of a failure: one line with the rank, or one traceback, never the launcher's own.
"""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fullspan.errors import CheckpointError, DataError, LaunchError
from fullspan.settings import build
from fullspan.train.config import RunConfig
from fullspan.train.launch import start_ranks
from fullspan.train.stop import StopRequest


@pytest.fixture
def config(tmp_path) -> RunConfig:
    values = {
        "model": {"path": "model"},
        "data": {"path": "data", "pack_length": 8},
        "train": {"steps": 1, "output_dir": str(tmp_path)},
    }
    return build(RunConfig, values, "the test")


def meet() -> tuple[int, torch.Tensor]:
    """Join the group and exchange something; this rank and the sum of the ranks plus one."""
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    return dist.get_rank(), total


def lose_rank_1() -> None:
    """Rank 0 waits for a rank that is gone; gloo tells it so."""
    dist.all_reduce(torch.zeros(1))


def write_ranks(config: RunConfig) -> int:
    rank, total = meet()
    text = f"{total.item()} {os.environ['WORLD_SIZE']} {os.environ['LOCAL_RANK']}"
    Path(config.train.output_dir, f"rank-{rank}").write_text(text)
    return 5 * rank


def user_error_on_rank_1(config: RunConfig) -> int:
    rank, _ = meet()
    if rank == 1:
        raise DataError("train.jsonl:3: role is 'wizard'")
    lose_rank_1()
    return 0


def bug_on_rank_1(config: RunConfig) -> int:
    rank, _ = meet()
    if rank == 1:
        raise ZeroDivisionError("a bug of ours")
    lose_rank_1()
    return 0


def rank_1_is_killed(config: RunConfig) -> int:
    rank, _ = meet()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lose_rank_1()
    return 0


def interrupted_while_loading(config: RunConfig) -> int:
    rank, _ = meet()
    if rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
    return 0


def disk_is_full_at_the_stop(config: RunConfig) -> int:
    wait_for_signal(config, signal.SIGTERM)
    raise CheckpointError("cannot save: the disk is full")


def rank_1_exits(config: RunConfig) -> int:
    if os.environ["RANK"] == "1":
        os._exit(7)
    time.sleep(60)
    return 0


def wait_for_signal(config: RunConfig, number: signal.Signals) -> int:
    rank, _ = meet()
    with StopRequest() as stop:
        dist.barrier()
        if rank == 0:
            for _ in range(2):  # `timeout` tells the process and its group
                os.kill(os.getppid(), number)
                time.sleep(0.1)
        deadline = time.monotonic() + 60
        while not stop.signal_number and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)  # the second one would have killed by now
        Path(config.train.output_dir, f"rank-{rank}").write_text(str(stop.signal_number))
    return 128 + stop.signal_number


def wait_for_sigterm(config: RunConfig) -> int:
    return wait_for_signal(config, signal.SIGTERM)


def wait_for_sigint(config: RunConfig) -> int:
    return wait_for_signal(config, signal.SIGINT)


def test_ranks_meet_and_the_highest_exit_code_counts(config, capfd):
    assert start_ranks(write_ranks, config, 2, 0) == 5
    folder = Path(config.train.output_dir)
    assert [(folder / f"rank-{rank}").read_text() for rank in (0, 1)] == ["3 2 0", "3 2 1"]
    assert capfd.readouterr() == ("", "")


def test_a_users_error_on_one_rank_is_one_line(config, capfd):
    with pytest.raises(LaunchError) as caught:
        start_ranks(user_error_on_rank_1, config, 2, 0)
    assert str(caught.value) == "rank 1: train.jsonl:3: role is 'wizard'"
    assert capfd.readouterr() == ("", "")


def test_a_bug_on_one_rank_shows_its_traceback_once(config, capfd):
    assert start_ranks(bug_on_rank_1, config, 2, 0) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("fullspan: rank 1 failed:\nTraceback (most recent call last):\n")
    assert err.endswith("ZeroDivisionError: a bug of ours\n")
    assert err.count("Traceback") == 1


def test_a_killed_rank_is_named_with_its_signal(config, capfd):
    with pytest.raises(LaunchError, match=r"^rank 1: killed by SIGKILL; .*data.pack_length"):
        start_ranks(rank_1_is_killed, config, 2, 0)
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_exits_without_a_word_is_named(config, capfd):
    with pytest.raises(LaunchError, match=r"^rank 1: exited with 7 and said nothing$"):
        start_ranks(rank_1_exits, config, 2, 0)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("work", "code"), [(wait_for_sigterm, 143), (wait_for_sigint, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_reaches_every_rank_by_its_name(config, capfd, work, code):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert start_ranks(work, config, 2, 0) == code
    folder = Path(config.train.output_dir)
    assert [(folder / f"rank-{rank}").read_text() for rank in (0, 1)] == [str(code - 128)] * 2
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == (1 if code == 130 else 0)


def test_a_stop_that_cannot_save_says_why(config, capfd):
    with pytest.raises(LaunchError, match=r"^rank [01]: cannot save: the disk is full$"):
        start_ranks(disk_is_full_at_the_stop, config, 2, 0)
    assert capfd.readouterr() == ("", "")


def test_a_stop_before_the_first_step_ends_with_a_line(config, capfd):
    assert start_ranks(interrupted_while_loading, config, 2, 0) == 130
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 2
    assert err.endswith("\nfullspan: stopped by SIGINT without saving\n")
