"""The metrics file over restarts, throughput, memory, TensorBoard, console."""

import json
import os
import pty
import resource
import signal
import sys

import pytest
import torch

from fullspan.errors import CheckpointError, ConfigError
from fullspan.train.metrics import (
    Console,
    MetricsWriter,
    format_duration,
    format_step,
    peak_memory,
    read_metrics,
    smooth,
    throughput,
)
from tests.support.ranks import run_ranks

TRAIN = {
    "kind": "train",
    "step": 1,
    "loss": 2.5,
    "lr": 1e-4,
    "grad_norm": 0.7,
    "trained_tokens": 30,
    "tokens_per_second": 8000.0,
    "tokens_per_second_per_rank": 2000.0,
    "peak_memory_bytes": 3 << 29,
    "peak_memory_counts": "GPU allocated",
}


def write(folder, steps, *, finished_steps=0, **options):
    options = {"tensorboard": False} | options
    writer = MetricsWriter(folder, finished_steps=finished_steps, **options)
    for step in steps:
        writer.write(TRAIN | {"step": step, "loss": 1.0 / step})
    writer.close()
    return writer


def test_each_record_is_a_line_that_can_be_read_at_once(tmp_path):
    writer = MetricsWriter(tmp_path / "run", finished_steps=0, tensorboard=False)
    writer.write(TRAIN)
    assert json.loads(writer.path.read_text()) == TRAIN
    writer.write({"kind": "eval", "step": 1, "loss": 2.0, "trained_tokens": 5, "seconds": 1.0})
    assert [r["kind"] for r in read_metrics(writer.path)] == ["train", "eval"]
    assert writer.has_evaluation(1) and not writer.has_evaluation(0)
    writer.close()


def test_a_resumed_run_repeats_no_step_and_loses_none(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # the process died here
    writer = write(tmp_path, [4, 5, 6], finished_steps=3)
    on_disk = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in on_disk] == [1, 2, 3, 4, 5, 6]
    assert writer.records == on_disk


def test_a_run_from_the_start_keeps_nothing_of_a_dead_attempt(tmp_path):
    write(tmp_path, [1, 2])
    write(tmp_path, [1])
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind"\n{"kind": "train", "step": 3}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2"):
        read_metrics(path)


def test_a_value_that_is_not_finite_is_never_written(tmp_path):
    writer = MetricsWriter(tmp_path, finished_steps=0, tensorboard=False)
    with pytest.raises(ValueError, match="Out of range"):
        writer.write(TRAIN | {"loss": float("nan")})
    writer.close()


def _write_past_a_limit(rank, size, folder):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer = MetricsWriter(folder, finished_steps=0, tensorboard=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with pytest.raises(CheckpointError, match=r"cannot write .*metrics\.jsonl: File too large"):
        for step in range(100):
            writer.write(TRAIN | {"step": step})


def test_a_write_that_fails_is_one_clear_line(tmp_path):
    run_ranks(1, _write_past_a_limit, tmp_path)


def test_an_output_folder_that_cannot_be_made_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*train\.output_dir"):
        MetricsWriter(tmp_path / "file" / "run", finished_steps=0, tensorboard=False)


def test_tensorboard_gets_the_numbers(tmp_path):
    write(tmp_path, [1, 2], tensorboard=True)
    assert list((tmp_path / "tensorboard").glob("events.out.*"))


def test_missing_tensorboard_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"train\.tensorboard.*fullspan\[tensorboard\]"):
        MetricsWriter(tmp_path / "run", finished_steps=0, tensorboard=True)
    assert not (tmp_path / "run").exists()


def test_ranks_that_share_a_pack_do_not_multiply_its_tokens():
    assert throughput(12_000, 2.0, 1) == (6000.0, 6000.0)
    assert throughput(12_000, 2.0, 4) == (6000.0, 1500.0)


def test_peak_memory_of_a_cpu_is_that_of_the_process():
    before = peak_memory(torch.device("cpu"))
    assert before.counts == "process resident"
    size = before.bytes + (64 << 20)
    held = torch.ones(size, dtype=torch.uint8)
    after = peak_memory(torch.device("cpu")).bytes
    assert after > size
    assert after < 4 * size, "bytes, not KiB"
    del held


def test_the_console_line_tells_everything_once():
    line = format_step(TRAIN, 250, 3 * 3600 + 120)
    for part in ("1/250", "loss 2.5", "lr 1.00e-04", "grad norm 0.700", "8,000 tok/s"):
        assert part in line
    for part in ("2,000 per rank", "peak 1.50 GiB (GPU allocated)", "ETA 3h02m"):
        assert part in line
    assert "\n" not in line


def test_durations():
    assert [format_duration(s) for s in (0, 59.6, 61, 3661)] == ["0m00s", "1m00s", "1m01s", "1h01m"]


def test_smoothing_is_a_running_mean():
    assert smooth([4.0, 2.0, 0.0, 6.0], 2) == [4.0, 3.0, 1.0, 3.0]
    assert smooth([4.0, 2.0], 1) == [4.0, 2.0]


def test_only_the_first_rank_speaks_and_no_bar_without_a_terminal(capsys):
    for first_rank in (True, False):
        console = Console(first_rank=first_rank)
        console.start_bar(3, 0)
        console.print("hello")
        console.advance(1.0)
        console.stop_bar()
    captured = capsys.readouterr()
    assert captured.out == "hello\n" and captured.err == ""


def _with_a_terminal(rank, size):
    controller, terminal = pty.openpty()
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    streams = [os.fdopen(number, "w", closefd=False) for number in (1, 2)]
    sys.stdout, sys.stderr = streams
    console = Console(first_rank=True)
    console.start_bar(3, 1)
    console.print("a line")
    console.advance(0.125)
    console.stop_bar()
    sys.stderr.flush()
    return os.read(controller, 1 << 16).decode()


def test_a_terminal_gets_a_bar_that_starts_where_the_run_does(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    (shown,) = run_ranks(1, _with_a_terminal)
    assert "1/3 [" in shown and "2/3 [" in shown and "loss 0.1250" in shown
    assert "a line\r\n" in shown
