"""Who this process is among the ranks of a run: the environment of torchrun, of Slurm, or none.

Reads and writes environment variables only, and imports no torch: the number of CPU threads has to
be set before torch is imported. Starting ranks is in launch.py, joining them in parallel/mesh.py.
"""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from fullspan.errors import LaunchError

# Ports that Slurm runs derive from their job id: below the usual ephemeral range.
SLURM_PORTS = range(15000, 30000)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The run as this process sees it.

    started_by  "torchrun" (or whatever set RANK), "slurm", or "none" for a process on its own
    """

    started_by: str
    rank: int
    world_size: int


def prepare(
    environ: MutableMapping[str, str], *, nproc_per_node: int | None, master_port: int | None
) -> Ranks:
    """Find out who started this process and complete `environ` for torch.distributed.

    nproc_per_node  ranks to start here, None: not said; refused where ranks exist already
    master_port     where they meet, None: MASTER_PORT or one that is chosen
    Raises LaunchError for contradictions, and for variables that are missing or no numbers.
    """
    if nproc_per_node is not None and nproc_per_node < 1:
        raise LaunchError(f"--nproc-per-node is {nproc_per_node}: it must be at least 1")
    if master_port is not None:
        _check_port(master_port, "--master-port")
    if "RANK" in environ:
        found = _from_torchrun(environ)
        if master_port is not None:
            raise LaunchError(
                "--master-port is for ranks that fullspan starts: these were started with "
                "MASTER_PORT set, give the port to what started them"
            )
    elif _slurm_tasks(environ, nproc_per_node) > 1:
        found = _from_slurm(environ, master_port)
    else:
        return _on_our_own(environ, nproc_per_node or 1, master_port)
    if nproc_per_node is not None:
        raise LaunchError(
            f"--nproc-per-node {nproc_per_node} inside rank {found.rank} of {found.world_size} "
            f"that {found.started_by} has started: leave it out"
        )
    return found


def _from_torchrun(environ: MutableMapping[str, str]) -> Ranks:
    found = Ranks(
        started_by="torchrun",
        rank=_number(environ, "RANK"),
        world_size=_number(environ, "WORLD_SIZE"),
    )
    _number(environ, "LOCAL_WORLD_SIZE", "1")
    _number(environ, "LOCAL_RANK")
    if found.world_size > 1:
        _check_meeting_point(environ, found.rank)
    return found


def _on_our_own(
    environ: MutableMapping[str, str], nproc_per_node: int, master_port: int | None
) -> Ranks:
    if nproc_per_node == 1 and master_port is not None:
        raise LaunchError("--master-port needs ranks that meet: add --nproc-per-node N")
    set_threads(environ, nproc_per_node)
    return Ranks(started_by="none", rank=0, world_size=nproc_per_node)


def set_threads(environ: MutableMapping[str, str], local_world_size: int) -> None:
    """Share the cores that this process may use between the ranks of this machine, unless the user
    has set OMP_NUM_THREADS. A process on its own keeps the default.
    """
    if local_world_size > 1:
        threads = max(1, _cores() // local_world_size)
        environ.setdefault("OMP_NUM_THREADS", str(threads))


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


# ------------------------------------------------------------------------------------- Slurm


def _slurm_tasks(environ: Mapping[str, str], nproc_per_node: int | None) -> int:
    """Tasks of the srun step that this process belongs to; 1 outside of one.

    A batch script carries the task count of its job without being a task of it, and would train
    alone while it reserves them all.
    """
    if "SLURM_PROCID" not in environ:
        return 1
    if "SLURM_STEP_NUM_TASKS" in environ:
        return _number(environ, "SLURM_STEP_NUM_TASKS")
    if nproc_per_node is None and _number(environ, "SLURM_NTASKS", "1") > 1:
        raise LaunchError(
            f"this Slurm job has {environ['SLURM_NTASKS']} tasks, but this process was not started "
            "by srun: use `srun fullspan train ...`, or --nproc-per-node N"
        )
    return 1


def _from_slurm(environ: MutableMapping[str, str], master_port: int | None) -> Ranks:
    rank = _number(environ, "SLURM_PROCID")
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if "MASTER_ADDR" not in environ and not nodes:
        raise LaunchError("neither SLURM_JOB_NODELIST nor MASTER_ADDR is set")
    local_rank = _number(environ, "SLURM_LOCALID")
    port = environ.get("MASTER_PORT")
    if master_port is not None:
        port = str(master_port)
    elif port is None:
        job = _number(environ, "SLURM_JOB_ID") + _number(environ, "SLURM_STEP_ID", "0")
        port = str(SLURM_PORTS[job % len(SLURM_PORTS)])
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "1")
    local_world_size = tasks_on_node(counts, _number(environ, "SLURM_NODEID", "0"))
    environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(local_world_size),
        MASTER_ADDR=environ.get("MASTER_ADDR") or first_host(nodes or ""),
        MASTER_PORT=port,
    )
    if "SLURM_CPUS_PER_TASK" in environ:
        environ.setdefault("OMP_NUM_THREADS", environ["SLURM_CPUS_PER_TASK"])
    set_threads(environ, local_world_size)
    _check_meeting_point(environ, rank)
    return Ranks(started_by="slurm", rank=rank, world_size=world_size)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: "n[03-05,9],gpu1" gives "n03"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


def tasks_on_node(counts: str, node: int) -> int:
    """Tasks on one node, from Slurm's short form: "2(x3),1" means 2, 2, 2, 1."""
    expanded: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError(f"SLURM_TASKS_PER_NODE is {counts!r}: it must look like '8(x4),2'")
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded[node] if node < len(expanded) else expanded[-1]


# ------------------------------------------------------------------------------------- ports


def _check_meeting_point(environ: Mapping[str, str], rank: int) -> None:
    """MASTER_ADDR and MASTER_PORT are set, and rank 0 can listen (torchrun listens for it)."""
    if not environ.get("MASTER_ADDR"):
        raise LaunchError("MASTER_ADDR is not set: it names the machine of rank 0")
    port = _number(environ, "MASTER_PORT")
    _check_port(port, "MASTER_PORT")
    if rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        require_free_port(port)


def local_port(environ: Mapping[str, str], master_port: int | None) -> int:
    """The port where ranks that we start meet: the one given or MASTER_PORT, which must be free, or
    0 for any.
    """
    port = master_port if master_port is not None else _number(environ, "MASTER_PORT", "0")
    _check_port(port, "MASTER_PORT")
    if port:
        require_free_port(port)
    return port


def require_free_port(port: int) -> None:
    """Raise LaunchError unless this machine can listen on `port`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As torch does: a port in TIME_WAIT may be used again, one with a listener may not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"port {port}, where the ranks meet, cannot be used ({error.strerror}): choose "
                "another with --master-port or MASTER_PORT"
            ) from None


def _check_port(port: int, name: str) -> None:
    if not 0 <= port <= 65535:
        raise LaunchError(f"{name} is {port}: a port lies between 1 and 65535")


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default)
    if text is None:
        raise LaunchError(f"{name} is not set in the environment, but its companions are")
    if not re.fullmatch(r"\d+", text):
        raise LaunchError(f"{name} is {text!r} in the environment: it must be a whole number")
    return int(text)
