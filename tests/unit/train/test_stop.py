"""Signals while training: noted once, repeated Ctrl-C still interrupts, handlers come back."""

import os
import signal
import threading
import time

import pytest

import fullspan.train.stop
from fullspan.train.stop import StopRequest


def test_sigterm_is_noted_and_the_handler_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert stop.signal_number == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_number == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def python_handles_ctrl_c():
    """As in a terminal; a shell's background jobs start with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_one_ctrl_c_stops_and_a_later_one_interrupts(monkeypatch):
    monkeypatch.setattr(fullspan.train.stop, "SECONDS_OF_ONE_SIGNAL", 0.2)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the launcher's copy of the same Ctrl-C
        assert stop.signal_number == signal.SIGINT
        time.sleep(0.25)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_handler_of_somebody_else_stays():
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
        assert heard == [signal.SIGINT] and stop.signal_number == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_cannot_listen_and_does_not_fail():
    def use():
        with StopRequest() as stop:
            assert stop.signal_number == 0
        finished.append(True)

    finished: list[bool] = []
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert finished
