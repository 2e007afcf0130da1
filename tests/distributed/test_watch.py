"""The watch on real ranks: what is noted, what is posted, and who is named when an exchange fails.

How whole runs end is in tests/cli/test_lost_ranks.py.
"""

import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

import fullspan.parallel.watch as watch_module
from fullspan.errors import RankLostError
from fullspan.parallel.collectives import all_reduce_sum, gather_rows, start_all_gather_rows
from fullspan.parallel.group import Group
from fullspan.parallel.watch import Watch, client_store, is_lost
from tests.support.ranks import run_ranks, world_group

TIMEOUT = 3.0
# Until a stopped process goes on, so that a test that waits for it fails and does not hang.
LIMIT = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def watched(rank: int, size: int, port: int) -> tuple[Group, object]:
    """All ranks with a watch that posts, and what must live as long."""
    host = dist.TCPStore("127.0.0.1", port, is_master=True) if rank == 0 else None
    process_group = world_group().process_group
    dist.barrier()
    store = client_store("127.0.0.1", port, "watch")
    process_group.set_timeout(timedelta(seconds=TIMEOUT))
    watch = Watch(rank=rank, size=size, store=store, timeout_seconds=TIMEOUT)
    return Group(process_group, watch), host


def busy(rank: int, size: int, port: int) -> str:
    """Rank 1 computes for longer than the others wait."""
    group, host = watched(rank, size, port)
    with group.watch:
        group.watch.begin("step 7")
        all_reduce_sum([torch.ones(1)], group, "the loss")
        if rank == 1:
            time.sleep(TIMEOUT + 4)
        with pytest.raises(RankLostError) as caught:
            gather_rows(torch.ones(2), group, "the latent")
        if rank == 0:
            time.sleep(3)  # it has the store
    del host
    return str(caught.value)


def test_a_rank_that_is_busy_is_named_by_all():
    messages = run_ranks(2, busy, free_port())
    assert messages[0] == messages[1], "the first verdict is everyone's"
    assert messages[0].startswith("rank 1 answers but is behind: for ")
    assert "it has been at step 7, after all_reduce of the loss (exchange 1);" in messages[0]
    assert "rank 0 waits at step 7, in all_gather of the latent (exchange 2)" in messages[0]
    assert "train.timeout_seconds is 3: raise it if rank 1 is only slow" in messages[0]


def gives_up(rank: int, size: int, port: int) -> str:
    """Rank 1 fails by itself, and takes its time to end."""
    group, host = watched(rank, size, port)
    group.watch.begin("step 2")
    if rank == 1:
        with pytest.raises(ZeroDivisionError), group.watch:
            all_reduce_sum([torch.ones(1)], group, "the loss")
            raise ZeroDivisionError("a bug")
        time.sleep(TIMEOUT + 3)
        return ""
    with group.watch, pytest.raises(RankLostError) as caught:
        all_reduce_sum([torch.ones(1)], group, "the loss")
        all_reduce_sum([torch.ones(1)], group, "the gradients")
    time.sleep(1)
    del host
    return str(caught.value)


def test_a_rank_that_failed_is_named_with_its_error():
    message = run_ranks(2, gives_up, free_port())[0]
    assert message.startswith(
        "rank 1 ended at step 2, after all_reduce of the loss (exchange 1), with an error: Zero"
    )


def notes(rank: int, size: int) -> list:
    group = world_group()
    group.watch.begin("step 1")
    seen = [group.watch.newest]
    first = start_all_gather_rows(torch.ones(2), group, "a")
    second = start_all_gather_rows(torch.ones(2), group, "b")
    second.wait()
    seen.append(group.watch.newest)
    first.wait()
    seen.append(group.watch.newest)
    group.watch.begin("step 1")  # another microbatch
    gather_rows(torch.ones(1), group, "c")
    seen.append(group.watch.newest)
    group.watch.begin("step 2")
    seen.append(group.watch.newest)
    return [n._replace(since=0.0) for n in seen]


def test_exchanges_are_numbered_in_their_activity_and_waits_keep_the_number():
    for seen in run_ranks(2, notes):
        found = [(n.phase, n.activity, n.entered, n.number, n.what) for n in seen]
        assert found == [
            (1, "step 1", 0, 0, ""),
            (1, "step 1", 2, 2, "all_gather of b"),
            (1, "step 1", 2, 1, "all_gather of a"),
            (1, "step 1", 3, 3, "all_gather of c"),
            (2, "step 2", 0, 0, ""),
        ]
        assert not any(n.waiting for n in seen)


def host(connection: Connection) -> None:
    """Says on which port it has a store, and keeps it until `connection` is closed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    connection.send(store.port)
    with suppress(EOFError):
        connection.recv()
    del store


def test_a_store_whose_host_has_stopped_does_not_hold_up_the_error(monkeypatch):
    """The host goes on only after the error; an error that waited for it would quote its answer."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=host, args=(there,), daemon=True)
    process.start()
    there.close()
    assert process.pid is not None
    goes_on = threading.Timer(LIMIT, os.kill, (process.pid, signal.SIGCONT))
    try:
        store = client_store("127.0.0.1", here.recv(), "watch")
        monkeypatch.setattr(watch_module, "SECONDS_FOR_AN_ANSWER", 0.3)
        monkeypatch.setattr(watch_module, "SECONDS_OF_SILENCE", 0.1)
        monkeypatch.setattr(watch_module, "SECONDS_BETWEEN_POSTS", 0.01)  # a post is held up too
        with Watch(rank=1, size=2, store=store) as watch:
            os.kill(process.pid, signal.SIGSTOP)
            goes_on.start()
            error = watch.lost(RuntimeError("[gloo/pair.cc:5] Read error. This is typically ..."))
        assert goes_on.is_alive(), "leaving the watch waited for the host"
    finally:
        goes_on.cancel()
        process.kill()
        process.join()
    assert str(error) == (
        "rank 1 has lost a rank at the start of the run, before its first exchange, and the host "
        "of rank 0, where ranks say what they do, does not answer: Read error."
    )


def test_where_an_exchange_cannot_fail_the_verdict_is_printed_before_the_end(monkeypatch, capfd):
    """NCCL's watchdog ends the process, so the thread has to speak, and must not fall silent."""
    monkeypatch.setattr(watch_module, "SECONDS_OF_SILENCE", 1.2)
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True)
    watches = [
        Watch(
            rank=rank,
            size=3,
            store=client_store("127.0.0.1", port, "watch"),
            timeout_seconds=1.0,
            end_is_sudden=True,
        )
        for rank in range(3)
    ]
    with watches[2]:
        watches[2].begin("step 4")
    with watches[0], watches[1]:
        for watch in watches[:2]:
            watch.begin("step 4")
            with watch.exchange("all_gather of the latent"):
                pass
        time.sleep(3.5)
    del store
    err = capfd.readouterr().err  # with what PyTorch says about the store of another test
    lines = sorted(line for line in err.splitlines() if line.startswith("fullspan:"))
    assert len(lines) == 2 and lines[0][18:] == lines[1][18:], lines
    assert lines[0].startswith("fullspan: rank 0: rank 2 has not answered for "), lines
    assert lines[1].startswith("fullspan: rank 1: rank 2 has not answered for "), lines


def test_one_rank_posts_nothing_and_starts_no_thread():
    with Watch() as watch:
        watch.begin("step 1")
        assert not watch._thread.is_alive()


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1", True),
        ("Application timeout caused pair closure", True),
        ("[unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete", True),
        ("[enforce fail at gloo/transport/tcp/pair.cc:450] op.preamble.length <= op.nbytes", False),
        ("The size of tensor a (3) must match the size of tensor b (4)", False),
    ],
)
def test_errors_of_our_own_are_not_taken_for_a_lost_rank(text, lost):
    assert is_lost(RuntimeError(text)) is lost
