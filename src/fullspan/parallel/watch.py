"""What every rank is doing, so that the one that the others wait for can be named.

A rank notes each exchange that it enters in memory (`Watch.exchange`): an assignment, nothing is
sent. In a run of several ranks a thread posts the newest note to the store where the ranks met,
twice a second. When an exchange fails, because it timed out or a connection closed, the rank reads
the posts of all and raises a RankLostError that says who is silent or behind, and where it was
(verdict.py). The first verdict is posted too, and later ones repeat it.

Under NCCL the host runs ahead of the GPU and an exchange that hangs does not fail here: PyTorch's
watchdog ends the process at the timeout. Shortly before, the thread prints the verdict.

Leaves out ending the other ranks (train/launch.py).
"""

import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

# Public and documented; the stub re-exports them without saying so.
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] see above

from fullspan.errors import FullspanError, RankLostError
from fullspan.parallel.verdict import Note, Post, verdict

SECONDS_BETWEEN_POSTS = 0.5
# A rank whose post does not change for this long is silent.
SECONDS_OF_SILENCE = 2.0
# The store itself may be gone.
SECONDS_FOR_AN_ANSWER = 10.0
# Before PyTorch's watchdog ends a rank whose GPU waits.
SECONDS_BEFORE_THE_WATCHDOG = 5.0

_VERDICT = "verdict"
T = TypeVar("T")
# Of errors of a transport, as opposed to shapes or dtypes that do not fit.
_LOST = ("gloo", "timed out", "timeout", "connection", "nccl")


class Exchange:
    """One exchange with other ranks: a context for its start, and again for the wait for it.

    Raises, in place of an error of the transport:
        RankLostError: see `Watch.lost`.
    """

    def __init__(self, watch: "Watch", number: int, what: str) -> None:
        self._watch, self._number, self._what = watch, number, what

    def __enter__(self) -> None:
        self._watch.note(self._number, self._what, waiting=True)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and is_lost(error):
            raise self._watch.lost(error) from error
        self._watch.note(self._number, self._what, waiting=False)


class Watch:
    """The notes of this rank, and with a store those of all.

    Args:
        store: where the ranks post, a client of this rank's own; None: this rank alone knows.
        timeout_seconds: train.timeout_seconds, after which an exchange fails.
        end_is_sudden: whether it ends the process instead (NCCL).

    It posts within its `with` block.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        size: int = 1,
        store: Store | None = None,
        timeout_seconds: float = 600.0,
        end_is_sudden: bool = False,
    ) -> None:
        self.rank, self.size = rank, size
        self.timeout_seconds = timeout_seconds
        self.newest = Note(since=time.time())
        self._store = store
        self._beats = 0
        self._end_is_sudden = end_is_sudden
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_posting, daemon=True)

    # -------------------------------------------------------------------- notes of this rank

    def begin(self, activity: str) -> None:
        """What follows is `activity`, such as "step 7": exchanges count from 1 again. Every rank
        begins the same activities in the same order."""
        if activity != self.newest.activity:
            self.newest = Note(phase=self.newest.phase + 1, activity=activity, since=time.time())

    def exchange(self, what: str) -> Exchange:
        """The next exchange, such as "all_gather of the latent"."""
        self.newest = self.newest._replace(entered=self.newest.entered + 1)
        return Exchange(self, self.newest.entered, what)

    def note(self, number: int, what: str, *, waiting: bool) -> None:
        self.newest = self.newest._replace(
            number=number, what=what, waiting=waiting, since=time.time()
        )

    # --------------------------------------------------------------------- posts of all ranks

    def __enter__(self) -> "Watch":
        if self._store is not None:
            self._post()
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """An error is posted, so that ranks that wait for this one can say why it is gone."""
        self._closed.set()
        if self._store is None:
            return
        self._thread.join(SECONDS_FOR_AN_ANSWER)
        if error is not None and not isinstance(error, RankLostError):
            text = str(error) if isinstance(error, FullspanError) else type(error).__name__
            self.newest = self.newest._replace(error=text or type(error).__name__)
            answer(self._post)

    def lost(self, error: RuntimeError) -> RankLostError:
        """Says which rank this one has lost, from the posts of all, after `error` in an exchange.
        Takes some seconds; the answer is the same on every rank."""
        mine = self.newest
        if self._store is None:
            return RankLostError(
                f"rank {self.rank} has lost a rank {mine.place()}: {_reason(error)}"
            )
        text = answer(lambda: self._agreed_verdict(mine, _reason(error)))
        if text is None:
            text = (
                f"rank {self.rank} has lost a rank {mine.place()}, and the host of rank 0, where "
                f"ranks say what they do, does not answer: {_reason(error)}"
            )
        return RankLostError(text)

    def _agreed_verdict(self, mine: Note, reason: str) -> str:
        store = self._store
        assert store is not None
        if not store.check([_VERDICT]):
            before = self._read()
            time.sleep(SECONDS_OF_SILENCE)
            text = verdict(
                self.rank,
                mine,
                before=before,
                after=self._read(),
                now=time.time(),
                reason=reason,
                timeout_seconds=self.timeout_seconds,
            )
            return store.compare_set(_VERDICT, "", text).decode()
        return store.get(_VERDICT).decode()

    def _read(self) -> dict[int, Post]:
        store = self._store
        assert store is not None
        ranks = [rank for rank in range(self.size) if store.check([str(rank)])]
        posts = store.multi_get([str(rank) for rank in ranks])
        return {rank: Post.from_json(post.decode()) for rank, post in zip(ranks, posts)}

    def _post(self) -> None:
        assert self._store is not None
        self._beats += 1
        post = Post(beats=self._beats, at=time.time(), note=self.newest)
        self._store.set(str(self.rank), post.to_json())

    def _keep_posting(self) -> None:
        warned = False
        while not self._closed.wait(SECONDS_BETWEEN_POSTS):
            try:
                self._post()
                if self._end_is_sudden and not warned and self._is_stuck():
                    warned = True  # by a thread of its own: this one has to go on posting
                    threading.Thread(target=self._warn, daemon=True).start()
            except RuntimeError:  # the store is gone, and with it the job
                return

    def _warn(self) -> None:
        with suppress(RuntimeError):
            text = self._agreed_verdict(self.newest, "no progress")
            print(f"fullspan: rank {self.rank}: {text}", file=sys.stderr, flush=True)

    def _is_stuck(self) -> bool:
        """Whether the watchdog is about to end this rank. Before the first activity, while weights
        load, ranks exchange nothing for as long as it takes."""
        margin = min(SECONDS_BEFORE_THE_WATCHDOG, self.timeout_seconds / 4)
        waited = time.time() - self.newest.since
        return self.newest.phase > 0 and waited > self.timeout_seconds - margin


def is_lost(error: RuntimeError) -> bool:
    """Whether the error says that another rank could not be reached."""
    text = str(error).lower()
    if "enforce fail" in text:  # gloo's word for sizes that do not fit
        return False
    return isinstance(error, dist.DistError) or any(word in text for word in _LOST)


def client_store(address: str, port: int, prefix: str) -> Store:
    """A connection of its own to the store where the ranks met, under `prefix`.

    Raises RuntimeError if it cannot be reached.
    """
    store = TCPStore(
        address,
        port,
        is_master=False,
        timeout=timedelta(seconds=SECONDS_FOR_AN_ANSWER),
    )
    return PrefixStore(prefix, store)


def answer(question: Callable[[], T]) -> T | None:
    """What `question` to a store gives; None if it fails or takes too long: where the process that
    has the store is stopped, even connecting never ends, whatever the timeout."""
    answers: list[T] = []

    def ask() -> None:
        with suppress(RuntimeError):
            answers.append(question())

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS_FOR_AN_ANSWER + SECONDS_OF_SILENCE)
    return answers[0] if answers else None


def _reason(error: BaseException) -> str:
    """One line without the place in gloo's sources and its general advice."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[^]]*\] *", "", line).partition(" This is typically")[0]
