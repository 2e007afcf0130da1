"""Groups of ranks on this machine, one after the other, each for one piece of work.

Without a GPU the ranks are forked from this process, which takes a tenth of a second and needs no
second import of PyTorch; the caller must not have used PyTorch's threads before. CUDA cannot be
forked: with GPUs they are started afresh. They meet through a file. Ranks that have a GPU each talk
through NCCL, unless told otherwise, others through gloo. Training starts its ranks differently
(train/launch.py), because it lives for days and on several machines.
"""

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fullspan.errors import ConfigError, FullspanError, LaunchError, RankLostError
from fullspan.parallel.watch import is_lost

# After the first rank has failed, how long others may take to say why they did.
SECONDS_TO_REPORT = 2.0

_USER, _BUG, _LOST = range(3)

Work = Callable[..., Any]
"""(device of this rank, arguments) -> anything that torch.save can write; of some module's top
level."""


@dataclass(frozen=True)
class _Failure:
    """order: an error of the user's before one of ours, that of having lost a rank last."""

    order: int
    seconds: float
    rank: int
    text: str


def run_group(
    ranks: int, work: Work, *arguments: Any, timeout_seconds: float, backend: str | None = None
) -> list[Any]:
    """`work(device, *arguments)` on each of `ranks` ranks; what each gave, in their order.

    backend: "nccl" or "gloo"; None: the first of them that can carry these ranks.

    Inside, torch.distributed's default group is that of the ranks; one rank has none. Raises
    LaunchError with the words of a rank that met something a user can mend, RuntimeError with the
    traceback of another failure. A rank that never answers ends it after timeout_seconds at most.
    """
    gpus = torch.cuda.device_count()
    backend = choose_backend(ranks, backend)
    forked, fresh = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
    start = fresh.Process if gpus else forked.Process
    with tempfile.TemporaryDirectory(prefix="fullspan-") as folder:
        processes = [
            start(
                target=_rank_main,
                args=(rank, ranks, gpus, folder, backend, timeout_seconds, work, arguments),
            )
            for rank in range(ranks)
        ]
        try:
            with _terminable():
                _start(processes)
                codes = _wait(processes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        if any(codes):
            _explain(codes, Path(folder))
        paths = [_result(folder, rank) for rank in range(ranks)]
        return [torch.load(path, weights_only=False, map_location="cpu") for path in paths]


def choose_backend(ranks: int, wanted: str | None = None) -> str:
    """The backend of that many ranks on this machine, see run_group. Raises ConfigError where
    `wanted` cannot carry them, or no number of GPUs fits them."""
    gpus = torch.cuda.device_count()
    backend = wanted or ("nccl" if gpus >= ranks else "gloo")
    if backend == "nccl" and ranks > gpus:
        there = f"there {'is' if gpus == 1 else 'are'} {gpus or 'none'}"
        raise ConfigError(
            f"{ranks} ranks, but NCCL needs a GPU for each and {there}: use fewer ranks, or gloo"
        )
    if gpus and ranks > gpus and ranks % gpus:
        raise ConfigError(f"{ranks} ranks cannot share {gpus} GPUs evenly: choose other sizes")
    return backend


def _rank_main(
    rank: int,
    ranks: int,
    gpus: int,
    folder: str,
    backend: str,
    timeout_seconds: float,
    work: Work,
    arguments: tuple[Any, ...],
) -> None:
    """One rank: leaves its result in `folder`, or why it failed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    try:
        device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(device)
        if ranks > 1:
            dist.init_process_group(
                backend,
                # Public and documented; the stub re-exports it without saying so.
                store=dist.FileStore(  # pyright: ignore[reportPrivateImportUsage] see above
                    f"{folder}/store", ranks
                ),
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=timeout_seconds),
            )
        result = work(device, *arguments)
        torch.save(result, _result(folder, rank))
        if ranks > 1:
            dist.destroy_process_group()
    except Exception as error:
        order = _USER if isinstance(error, FullspanError) else _BUG
        if isinstance(error, RankLostError) or (isinstance(error, RuntimeError) and is_lost(error)):
            order = _LOST
        text = traceback.format_exc() if order == _BUG else str(error)
        torch.save(_Failure(order, time.time(), rank, text), f"{folder}/failure-{rank}")
        os._exit(1)  # no clean-up that could wait for the other ranks


def _result(folder: str, rank: int) -> str:
    return f"{folder}/result-{rank}"


def _start(processes: Sequence[BaseProcess]) -> None:
    with warnings.catch_warnings():
        # Forking beside other threads: the ranks run nothing but the work.
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()


def _wait(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Until all have ended, or one has failed and the others had time to; their exit codes."""
    running = {process.sentinel: process for process in processes}
    deadline = float("inf")
    while running and time.monotonic() < deadline:
        patience = None if deadline == float("inf") else deadline - time.monotonic()
        for sentinel in wait(list(running), timeout=patience):
            process = running.pop(sentinel)  # pyright: ignore[reportArgumentType] a sentinel
            process.join()
            if process.exitcode:
                deadline = min(deadline, time.monotonic() + SECONDS_TO_REPORT)
    return [process.exitcode for process in processes]


def _explain(codes: Sequence[int | None], folder: Path) -> None:
    """Raise what the ranks have said, or that one ended without a word."""
    paths = folder.glob("failure-*")
    failures: list[_Failure] = [torch.load(path, weights_only=False) for path in paths]
    told = {failure.rank for failure in failures}
    silent = [rank for rank, code in enumerate(codes) if code and rank not in told]
    first = min(failures, key=lambda failure: (failure.order, failure.seconds), default=None)
    if silent and (first is None or first.order == _LOST):
        raise LaunchError(
            f"rank {silent[0]}: ended with code {codes[silent[0]]} and said nothing; if memory "
            "ran out, lower data.pack_length"
        )
    assert first is not None, "some rank has failed"
    if first.order == _BUG:
        raise RuntimeError(f"rank {first.rank} of {len(codes)} failed:\n{first.text}")
    raise LaunchError(f"rank {first.rank}: {first.text}" if len(codes) > 1 else first.text)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends this process as an exception would, so that it ends its ranks."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
