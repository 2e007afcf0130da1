"""Starting the ranks of a training run, and saying in one line why one of them failed.

Three ways in, one worker:
* `--nproc-per-node N`: PyTorch's elastic launcher (what torchrun is made of) starts N ranks here;
* torchrun: RANK, WORLD_SIZE and LOCAL_RANK are in the environment, this process is a rank;
* Slurm: `srun` started this process as a rank, its variables are translated (ranks.py).

SIGTERM and SIGINT to the parent reach every rank as SIGTERM (stop.py), so that they can save and
leave; another one, two seconds later or more, kills. Once a rank has failed, those that do not end
by themselves are killed after some seconds. Leaves out restarts: a run that failed is started again
and resumes.
"""

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from tqdm import tqdm

from fullspan.errors import FullspanError, LaunchError, RankLostError
from fullspan.parallel.watch import answer, client_store
from fullspan.train import loop, ranks
from fullspan.train.config import RunConfig, load_run_config
from fullspan.train.stop import SECONDS_OF_ONE_SIGNAL, RankInterrupt

EXIT_BUG = 1
EXIT_USER_ERROR = 2
# A rank with an unexpected error stays this long before it exits, so that a rank that has only lost
# its peer never looks like the first to fail.
SECONDS_BEFORE_EXIT = 1.0
# From the first report of a failure until ranks that are still there are killed. Longer than the
# others take to say what they know (parallel/watch.py).
SECONDS_FOR_STRAGGLERS = 4.0
_HINTS = {
    signal.SIGKILL: "if memory ran out, lower data.pack_length or use more ranks",
    signal.SIGABRT: "so NCCL ends a rank that waited too long for another: see the lines above",
}

Work = Callable[[RunConfig], int]


def run(
    path: Path,
    overrides: Sequence[str],
    found: ranks.Ranks,
    *,
    master_port: int | None,
    explain: loop.Explain | None = None,
) -> int:
    """Train as the configuration at `path` says; the exit code (128 + the signal that stopped it).

    found: what ranks.prepare has said about this process. explain: see loop.train. Raises
    FullspanError, in a run with several ranks as a message that names the rank.
    """
    config = load_run_config(path, overrides)
    config.check_ranks(found.world_size)
    work = partial(loop.train, explain=explain)
    if found.started_by == "none" and found.world_size > 1:
        port = ranks.local_port(os.environ, master_port)
        return start_ranks(work, config, found.world_size, port)
    try:
        return work(config)
    except FullspanError as error:
        if found.world_size == 1:
            raise
        if _is_first_to_fail():
            if isinstance(error, RankLostError):
                raise
            raise type(error)(f"rank {found.rank}: {error}") from None
        return EXIT_USER_ERROR


def _is_first_to_fail() -> bool:
    """Whether no other rank has said so yet; asks the store where the ranks met. Without an answer
    every rank speaks for itself.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:
        return True
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    count = answer(lambda: client_store(address, int(port), "fullspan/failed").add(attempt, 1))
    return count is None or count == 1


# ------------------------------------------------------------------------ ranks of our own


@dataclass(frozen=True, kw_only=True)
class Report:
    """Why a rank failed, as it says itself. `mendable`: a FullspanError, `text` is its message;
    otherwise `text` is a traceback. `lost`: another rank is the reason.
    """

    rank: int
    seconds: float
    mendable: bool
    text: str
    lost: bool = False


def start_ranks(work: Work, config: RunConfig, count: int, port: int) -> int:
    """Run `work(config)` on `count` ranks of this machine and wait for them; the exit code.

    work: a function of some module's top level, or a `partial` of one; its result is a rank's exit
    code.
    port: where the ranks meet, 0 for any free one.
    Raises LaunchError with the message of the rank that failed first; the traceback of an error
    that is not a user's goes to stderr instead.
    """
    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"fullspan-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        local_addr="127.0.0.1",
        max_restarts=0,
        # Its handlers would give the ranks 30 s to save; ours wait for them.
        signals_to_handle="SIGQUIT",
    )
    with (
        tempfile.TemporaryDirectory(prefix="fullspan-") as folder,
        _quiet_launcher(),
        _forward_signals() as received,
        _ended_stragglers(Path(folder)),
    ):
        try:
            codes = elastic_launch(launch_config, _rank_main)(work, config, folder, os.getpid())
        except ChildFailedError as failure:
            reports = _read_reports(Path(folder))
            if received and not _has_reason(failure, reports):
                name = signal.Signals(received[0]).name
                print(f"fullspan: stopped by {name} without saving", file=sys.stderr)
                return 128 + received[0]
            return _explain(failure, reports)
        except RendezvousError as error:
            raise LaunchError(f"the ranks could not be started: {error}") from error
    return 128 + received[0] if received else max(codes.values())


def _rank_main(work: Work, config: RunConfig, folder: str, parent: int) -> int:
    """One rank that start_ranks has started: works, or leaves a report in `folder` and exits."""
    rank = int(os.environ["RANK"])
    with suppress(OSError):
        Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    # Its own lock is between processes: left behind by a rank that ends early, Python complains.
    tqdm.set_lock(threading.RLock())

    signal.signal(signal.SIGINT, RankInterrupt(parent))
    try:
        return work(config)
    except FullspanError as error:
        lost = isinstance(error, RankLostError)
        report = Report(rank=rank, seconds=time.time(), mendable=True, text=str(error), lost=lost)
    except Exception:
        report = Report(rank=rank, seconds=time.time(), mendable=False, text=traceback.format_exc())
    _write_report(Path(folder), report)
    sys.stdout.flush()
    sys.stderr.flush()
    if not report.mendable:
        time.sleep(SECONDS_BEFORE_EXIT)
    # No clean-up that could wait for the other ranks.
    os._exit(EXIT_USER_ERROR if report.mendable else EXIT_BUG)


@contextmanager
def _forward_signals() -> Iterator[list[int]]:
    """Pass SIGTERM, SIGINT and SIGHUP on to the ranks as SIGTERM, after SIGINT where that came; a
    later one as SIGKILL. Gives the numbers received.
    """
    received: list[int] = []
    first_at = 0.0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        now = time.monotonic()
        if received and now - first_at < SECONDS_OF_ONE_SIGNAL:
            return  # sent to the process and to its group
        first_at = first_at or now
        received.append(number)
        if number == signal.SIGINT and len(received) == 1:
            print(
                "fullspan: stopping after this step; once more, in 2 s or later, to stop now",
                file=sys.stderr,
            )
        sent = [signal.SIGTERM] if len(received) == 1 else [signal.SIGKILL]
        if number == signal.SIGINT:
            sent.insert(0, signal.SIGINT)
        for child in multiprocessing.active_children():
            with suppress(ProcessLookupError):
                if child.pid is not None:
                    for each in sent:
                        os.kill(child.pid, each)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ended_stragglers(folder: Path) -> Iterator[None]:
    """Kill ranks that are still there SECONDS_FOR_STRAGGLERS after one has reported a failure: one
    that is stopped, or hangs in a system call, heeds no SIGTERM, and PyTorch waits 30 s for it.
    """
    done = threading.Event()

    def watch() -> None:
        while not any(folder.glob("*.json")):
            if done.wait(0.5):
                return
        if done.wait(SECONDS_FOR_STRAGGLERS):
            return
        for file in folder.glob("*.pid"):
            # Only a child whose end nobody has asked for yet: its number cannot be another's.
            with suppress(OSError, ValueError):
                pid = int(file.read_text())
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence the launcher's own log in this process; LOGLEVEL, its variable, brings it back."""
    before = logging.root.manager.disable
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


# -------------------------------------------------------------------------------- reports


def _write_report(folder: Path, report: Report) -> None:
    """So that the parent never sees half of it. A folder that is gone means nobody will read it."""
    unfinished = folder / f"{report.rank}.part"
    with suppress(OSError):
        unfinished.write_text(json.dumps(asdict(report)), encoding="utf-8")
        unfinished.rename(folder / f"{report.rank}.json")


def _read_reports(folder: Path) -> list[Report]:
    """The reports in the order of their time."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.json")]
    return sorted((Report(**json.loads(text)) for text in texts), key=lambda one: one.seconds)


def _has_reason(failure: ChildFailedError, reports: Sequence[Report]) -> bool:
    """Whether a rank failed by itself, and not by a signal or the loss of another."""
    return _killed_by(failure, reports) is None and any(not report.lost for report in reports)


def _killed_by(failure: ChildFailedError, reports: Sequence[Report]) -> signal.Signals | None:
    """The signal that has killed the rank that failed first, before it could report."""
    rank, first = failure.get_first_failure()
    silent = first.exitcode < 0 and rank not in [report.rank for report in reports]
    return signal.Signals(-first.exitcode) if silent else None


def _explain(failure: ChildFailedError, reports: Sequence[Report]) -> int:
    """Raise what the user can mend, or print the traceback of the rank that failed first.

    A rank that a signal has killed leaves no report, and the others then report its silence, and
    where it was. Otherwise a user's error counts before an unexpected one, which may follow from
    it, and that before the loss of a rank, which follows from either.
    """
    rank, first = failure.get_first_failure()
    lost = [report.text for report in reports if report.lost]
    number = _killed_by(failure, reports)
    if number is not None:
        parts = [f"rank {rank}: killed by {number.name}", _HINTS.get(number, ""), *lost[:1]]
        raise LaunchError("; ".join(part for part in parts if part))
    for report in reports:
        if report.mendable and not report.lost:
            raise LaunchError(f"rank {report.rank}: {report.text}")
    for report in reports:
        if not report.mendable:
            print(f"fullspan: rank {report.rank} failed:\n{report.text}", end="", file=sys.stderr)
            return EXIT_BUG
    raise LaunchError(
        lost[0] if lost else f"rank {rank}: exited with {first.exitcode} and said nothing"
    )
