"""Real gloo ranks for tests: forked processes that meet through a file, in about a tenth of a
second.
"""

import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullspan.parallel.group import Group


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Run `function(rank, world_size, *args)` on real ranks; return what each rank returned, in
    rank order.

    With one rank there is no process group, as in the product. A rank that raises ends the test
    with its traceback; a rank that hangs ends it at `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=_main, args=(rank, world_size, folder, function, args, timeout))
            for rank in range(world_size)
        ]
        with warnings.catch_warnings():
            # Forking beside idle threads: the children only run what is given here.
            warnings.simplefilter("ignore", DeprecationWarning)
            for process in ranks:
                process.start()
        try:
            for process in ranks:
                process.join(timeout)
        finally:
            hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
            for process in ranks:
                process.kill()
        errors = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
        assert not errors, "\n".join(errors)
        assert not hung, f"ranks {hung} still ran after {timeout} s"
        codes = [process.exitcode for process in ranks]
        assert not any(codes), f"exit codes {codes}"
        return [
            torch.load(Path(folder) / f"result-{rank}", weights_only=False)
            for rank in range(world_size)
        ]


def world_group() -> Group:
    """All ranks, from inside one of several."""
    assert dist.group.WORLD is not None
    return Group(dist.group.WORLD)


def _main(
    rank: int,
    world_size: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
) -> None:
    try:
        torch.set_num_threads(1)
        if world_size > 1:
            store = dist.FileStore(f"{folder}/store", world_size)
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
        torch.save(function(rank, world_size, *args), Path(folder) / f"result-{rank}")
        if world_size > 1:
            dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"error-{rank}").write_text(
            f"rank {rank} of {world_size}:\n{traceback.format_exc()}"
        )
        raise SystemExit(1) from None
