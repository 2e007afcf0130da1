"""`train`: one run from its configuration to an adapter, on every rank; the loop over steps.

    output_dir/config.toml     the resolved configuration
               metrics.jsonl   one line a step and an evaluation (metrics.py)
               checkpoints/    what a run resumes from (checkpoint/resume.py)
               adapter/        the trained adapter in PEFT layout
               loss.png        the loss curve (plot.py)

After every step one small message agrees on whether to stop and on the highest peak of memory.
A checkpoint written after a step holds everything that the next step depends on, so a resumed run
has the losses of an uninterrupted one, bit for bit, on as many ranks. On another number of ranks it
continues too, with the same data order; the losses then agree to rounding.

Leaves out starting the ranks (launch.py) and what is said before the first step (report.py).
"""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from signal import Signals

import torch

from fullspan.checkpoint.adapter import write_adapter
from fullspan.checkpoint.resume import FOLDER
from fullspan.errors import CheckpointError, TrainingError
from fullspan.parallel.collectives import all_reduce_sum
from fullspan.parallel.mesh import Mesh, open_mesh
from fullspan.train.config import RunConfig
from fullspan.train.metrics import (
    METRICS_FILE,
    Console,
    MetricsWriter,
    format_evaluation,
    format_step,
    peak_memory,
    throughput,
)
from fullspan.train.setup import RunParts, prepare
from fullspan.train.stop import StopRequest

ADAPTER_FOLDER = "adapter"
_RECENT_STEPS = 20

Explain = Callable[[RunConfig, int, int | None], str]
"""(configuration, number of ranks, bytes of the GPU if known) -> one line: what takes the memory,
and which settings change it. A function of some module's top level."""


def train(config: RunConfig, explain: Explain | None = None) -> int:
    """Trains on this rank; the environment says which it is (see parallel/mesh.py).

    explain: adds to the message where the GPU's memory ran out. Returns 0, or 128 + the signal that
    stopped the run after a step, as a shell would.

    Raises:
        FullspanError: something the user can mend; every rank raises.
    """
    with open_mesh(config.parallel, timeout_seconds=config.train.timeout_seconds) as mesh:
        return train_on(config, mesh, explain)


def train_on(config: RunConfig, mesh: Mesh, explain: Explain | None = None) -> int:
    """`train` where the ranks have met already.

    Raises:
        TrainingError: the GPU's memory ran out.
    """
    console = Console(first_rank=mesh.is_main)
    try:
        run = _Run(config, mesh, console, prepare(config, mesh, console))
        try:
            return run.run()
        finally:
            run.close()
    except torch.OutOfMemoryError as error:
        capacity, why = None, "`fullspan plan` shows what takes it"
        if mesh.device.type == "cuda":
            capacity = torch.cuda.get_device_properties(mesh.device).total_memory
        if explain is not None:
            why = explain(config, mesh.world.size, capacity)
        asked = str(error).splitlines()[0]
        raise TrainingError(f"the GPU's memory ran out ({asked}): {why}") from error


class _Run:
    """The steps that are left, with their evaluations, checkpoints and records."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        console: Console,
        parts: RunParts,
    ):
        self.config, self.mesh, self.console = config, mesh, console
        self.session, self.loader = parts.session, parts.loader
        self.eval_packs, self.fingerprint = parts.eval_packs, parts.fingerprint
        self.folder = Path(config.train.output_dir)
        self.metrics: MetricsWriter | None = None
        self.checkpoint = parts.start
        if mesh.is_main:
            self.metrics = MetricsWriter(
                self.folder,
                finished_steps=self.session.finished_steps,
                tensorboard=config.train.tensorboard,
            )
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def run(self) -> int:
        """All remaining steps and what follows them; the exit code."""
        total = self.config.train.steps
        with StopRequest() as stop:
            self.console.start_bar(total, self.session.finished_steps)
            if self._evaluation_is_missing():
                self._evaluate()
            while self.session.finished_steps < total:
                number = self._step(stop)
                step = self.session.finished_steps
                if number and step < total:
                    return self._stop(number)
                if step == total or _is_due(step, self.config.train.eval_every):
                    self._evaluate()
                if step == total or _is_due(step, self.config.checkpoint.every):
                    self._save()
            self.console.stop_bar()
        self._finish()
        return 0

    def close(self) -> None:
        self.console.stop_bar()
        if self.metrics is not None:
            self.metrics.close()

    def _step(self, stop: StopRequest) -> int:
        """One optimizer step and its record. Returns the signal that some rank got, or 0."""
        started = time.perf_counter()
        result = self.session.forward_backward(self.loader.next_step())
        update = self.session.optim_step()
        number, memory = self._agree(stop.signal_number)
        seconds = time.perf_counter() - started
        self._seconds.append(seconds)
        total, per_rank = throughput(result.tokens, seconds, self.mesh.world.size)
        step = self.session.finished_steps
        record = {
            "kind": "train",
            "step": step,
            "loss": result.loss,
            "lr": update.lr,
            "grad_norm": update.grad_norm,
            "tokens": result.tokens,
            "trained_tokens": result.trained_tokens,
            "epoch": self.loader.index / len(self.loader.packs),
            "seconds": seconds,
            "tokens_per_second": total,
            "tokens_per_second_per_rank": per_rank,
            "peak_memory_bytes": memory,
            "peak_memory_counts": peak_memory(self.mesh.device).counts,
        }
        if self.metrics is not None:
            self.metrics.write(record)
        steps = self.config.train.steps
        if step == steps or _is_due(step, self.config.train.log_every):
            eta = (steps - step) * sum(self._seconds) / len(self._seconds)
            self.console.print(format_step(record, steps, eta))
        self.console.advance(result.loss)
        return number

    def _agree(self, number: int) -> tuple[int, int]:
        """(a signal that any rank got, or 0; the highest peak memory of a rank, in bytes)."""
        signals = torch.zeros(self.mesh.world.size, device=self.mesh.device)
        memory = torch.zeros(self.mesh.world.size, device=self.mesh.device)
        signals[self.mesh.world.rank] = number
        memory[self.mesh.world.rank] = peak_memory(self.mesh.device).bytes
        all_reduce_sum([signals, memory], self.mesh.world.group, "signals and memory")
        return int(signals.max()), int(memory.max())

    def _evaluation_is_missing(self) -> bool:
        """Whether the evaluation of the step that the run starts at has yet to be done.

        It is due before the first step, and where a run was stopped between a step and its
        evaluation. Only the first rank has the records.
        """
        step = self.session.finished_steps
        due = step in (0, self.config.train.steps) or _is_due(step, self.config.train.eval_every)
        here = self.metrics is not None and not self.metrics.has_evaluation(step)
        answer = torch.tensor([float(due and here)], device=self.mesh.device)
        all_reduce_sum([answer], self.mesh.world.group, "whether to evaluate")
        return bool(answer.item())

    def _evaluate(self) -> None:
        if not self.eval_packs:
            return
        started = time.perf_counter()
        result = self.session.evaluate(self.eval_packs)
        record = {
            "kind": "eval",
            "step": self.session.finished_steps,
            "loss": result.loss,
            "trained_tokens": result.trained_tokens,
            "seconds": time.perf_counter() - started,
        }
        if self.metrics is not None:
            self.metrics.write(record)
        self.console.print(format_evaluation(record, self.config.train.steps))

    def _save(self) -> Path:
        path = self.session.save(
            self.folder / FOLDER,
            loader=self.loader.state(),
            fingerprint=self.fingerprint,
            keep_last=self.config.checkpoint.keep_last,
        )
        self.checkpoint = path
        self.console.print(f"saved {path}")
        return path

    def _stop(self, number: int) -> int:
        path = self._save()
        self.console.stop_bar()
        self.console.print(
            f"stopped by {Signals(number).name} after step {self.session.finished_steps} of "
            f"{self.config.train.steps}; the same command continues from {path}"
        )
        return 128 + number

    def _finish(self) -> None:
        """The adapter and the plot, by the first rank: from the last checkpoint, which holds the
        experts of every rank."""
        if self.metrics is None:
            return
        # Takes most of a second to import, which no other rank needs.
        from fullspan.train.plot import PLOT_FILE, plot_losses

        assert self.checkpoint is not None, "the last step saves"
        adapter, plot = self.folder / ADAPTER_FOLDER, self.folder / PLOT_FILE
        try:
            write_adapter(
                self.checkpoint,
                adapter,
                model_path=Path(self.config.model.path),
                lora=self.config.lora,
            )
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} (setting train.output_dir; {self.checkpoint} is whole: the same command "
                "or `fullspan export` writes the adapter from it)"
            ) from None
        plot_losses(self.metrics.records, plot, f"Training loss: {self.folder.name}")
        self.console.print(
            f"finished {self.config.train.steps} steps\n"
            f"  adapter     {adapter}\n"
            f"  metrics     {self.folder / METRICS_FILE}\n"
            f"  loss plot   {plot}\n"
            f"  checkpoint  {self.folder / FOLDER}"
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
