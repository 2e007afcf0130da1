"""Being told to stop: SIGTERM and SIGINT become a wish that the loop fulfils between two steps.

Leaves out how the ranks agree on it (loop.py) and how signals reach them (launch.py).
"""

import os
import signal
import threading
import time
from types import FrameType

# Launchers repeat the terminal's Ctrl-C, and `timeout` its SIGTERM, within milliseconds; a person
# needs longer.
SECONDS_OF_ONE_SIGNAL = 2.0


class RankInterrupt:
    """The SIGINT handler of a rank that `parent` has started. Ctrl-C reaches every process of the
    terminal, but the parent's SIGTERM counts: SIGINT before it is only its name."""

    def __init__(self, parent: int) -> None:
        self.parent = parent
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self.parent:  # the kernel's, sent because there is no parent any more
            os._exit(128 + signal.SIGINT)
        self.came = True


class StopRequest:
    """Within its `with` block the first SIGTERM or SIGINT is only noted, in `signal_number`.

    A second Ctrl-C, two seconds later or more, is a KeyboardInterrupt as usual. A SIGINT handler
    that is not Python's own stays in place. Outside the main thread, where Python allows no
    handlers, nothing is noted.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._first_at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]  # as it was given
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self.signal_number and now - self._first_at >= SECONDS_OF_ONE_SIGNAL
        if number == signal.SIGINT and again:
            raise KeyboardInterrupt
        before = signal.getsignal(signal.SIGINT)
        if isinstance(before, RankInterrupt) and before.came:
            number = signal.SIGINT
        if not self.signal_number:
            self.signal_number, self._first_at = number, now
