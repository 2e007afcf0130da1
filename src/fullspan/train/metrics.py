"""What a run records and shows: metrics.jsonl (always), TensorBoard (on request), console lines and
a progress bar.

One JSON object a line, of two kinds. `{"kind": "train", "step": 3, "loss": ..}` after optimizer
step 3 (steps count from 1 here: the number of finished steps) and `{"kind": "eval", "step": 0,
"loss": ..}` for an evaluation after that many steps. Losses are in nats per trained token. Only the
first rank writes. Leaves out the plot (plot.py).

tok/s counts the tokens of the packs, padding left out. In total it is all tokens of a step over its
wall time, however many ranks share them; per rank it is that divided by the number of ranks.
"""

import json
import os
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from tqdm import tqdm

from fullspan.errors import CheckpointError, ConfigError

METRICS_FILE = "metrics.jsonl"
Record = Mapping[str, Any]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a missing file has none, a last line that was cut short is
    left out.

    Raises:
        CheckpointError: another line is no JSON object.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records.append({"kind": record["kind"], "step": int(record["step"]), **record})
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise CheckpointError(
                    f"{path}, line {number}: not a metrics record ({error})"
                ) from error
    return records


class MetricsWriter:
    """Appends records to `<folder>/metrics.jsonl`, each flushed, and mirrors their numbers to
    TensorBoard if asked.

    `finished_steps` is where the run starts: records of later steps (from an attempt that died
    after its checkpoint) are taken out first, so that no step appears twice. `records` holds
    everything that is in the file.
    """

    def __init__(self, folder: Path, *, finished_steps: int, tensorboard: bool):
        self.path = folder / METRICS_FILE
        before = read_metrics(self.path) if finished_steps else []
        self.records = [record for record in before if record["step"] <= finished_steps]
        self._board = _open_tensorboard(folder, finished_steps) if tensorboard else None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(".jsonl.new")
            fresh.write_text("".join(map(_line, self.records)), encoding="utf-8")
            fresh.replace(self.path)
            self._file: IO[str] = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def write(self, record: Record) -> None:
        """Adds one record; it is on its way to the disk when this returns."""
        self.records.append(dict(record))
        try:
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        if self._board is not None:
            for name, value in record.items():
                if name not in ("kind", "step") and isinstance(value, int | float):
                    self._board.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def has_evaluation(self, step: int) -> bool:
        return any(r["kind"] == "eval" and r["step"] == step for r in self.records)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot write {path}: {error.strerror} (setting train.output_dir)")


def _open_tensorboard(folder: Path, finished_steps: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "train.tensorboard = true needs the tensorboard package, which is not installed: "
            "pip install 'fullspan[tensorboard]', or set it to false (metrics.jsonl stays)"
        ) from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=finished_steps + 1)


@dataclass(frozen=True)
class PeakMemory:
    """The most memory this process has held so far, and what that counts."""

    bytes: int
    counts: str


def peak_memory(device: torch.device) -> PeakMemory:
    """On a GPU what PyTorch allocated there; on a CPU the resident set of the whole process."""
    if device.type == "cuda":
        return PeakMemory(torch.cuda.max_memory_allocated(device), "GPU allocated")
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage reports KiB on Linux, bytes on macOS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return PeakMemory(peak, "process resident")


def throughput(tokens: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Tokens per second, in total and per rank, of `ranks` that shared `tokens`."""
    total = tokens / seconds
    return total, total / ranks


def format_duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{whole % 60:02d}s"


def format_step(record: Record, total_steps: int, eta_seconds: float) -> str:
    """The console line of a train record."""
    return (
        f"step {record['step']:>{len(str(total_steps))}}/{total_steps}"
        f"  loss {record['loss']:.4f}  lr {record['lr']:.2e}  grad norm {record['grad_norm']:.3f}"
        f"  {record['tokens_per_second']:,.0f} tok/s"
        f" ({record['tokens_per_second_per_rank']:,.0f} per rank)"
        f"  peak {record['peak_memory_bytes'] / 2**30:.2f} GiB ({record['peak_memory_counts']})"
        f"  ETA {format_duration(eta_seconds)}"
    )


def format_evaluation(record: Record, total_steps: int) -> str:
    """The console line of an eval record."""
    return (
        f"eval {record['step']:>{len(str(total_steps))}}/{total_steps}  loss {record['loss']:.4f}"
        f"  over {record['trained_tokens']:,} trained tokens"
        f" in {format_duration(record['seconds'])}"
    )


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of up to `window` last values at each place."""
    means, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        means.append(total / min(index + 1, window))
    return means


class Console:
    """Prints for the first rank and stays silent on the others; keeps a progress bar below the
    lines on a terminal."""

    def __init__(self, *, first_rank: bool):
        self.first_rank = first_rank
        self._bar: tqdm | None = None

    def print(self, text: str) -> None:
        if not self.first_rank:
            return
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text)

    def start_bar(self, total_steps: int, finished_steps: int) -> None:
        """Shows a bar, if standard error is a terminal."""
        if self.first_rank and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            # Not as tqdm finds it: a terminal that does not know its size would get no bar.
            size = shutil.get_terminal_size()
            self._bar = tqdm(
                total=total_steps,
                initial=finished_steps,
                unit="step",
                ncols=size.columns,
                nrows=size.lines,
            )

    def advance(self, loss: float) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self._bar.update()

    def stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
