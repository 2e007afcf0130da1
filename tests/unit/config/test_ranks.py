"""Who a process is: torchrun's environment, Slurm's, none; contradictions and ports."""

import os
import socket

import pytest

from fullspan.errors import LaunchError
from fullspan.train import ranks
from fullspan.train.ranks import Ranks

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "12",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[08-09]",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
}


def prepare(environ, nproc_per_node=None, master_port=None):
    return ranks.prepare(environ, nproc_per_node=nproc_per_node, master_port=master_port)


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_process_on_its_own():
    environ = {}
    assert prepare(environ) == Ranks(started_by="none", rank=0, world_size=1)
    assert environ == {}


def test_ranks_to_start_share_the_cores():
    cores = len(os.sched_getaffinity(0))
    environ = {}
    assert prepare(environ, nproc_per_node=2).world_size == 2
    assert environ == {"OMP_NUM_THREADS": str(max(1, cores // 2))}
    environ = {}
    prepare(environ, nproc_per_node=1000)
    assert environ == {"OMP_NUM_THREADS": "1"}
    environ = {"OMP_NUM_THREADS": "7"}
    prepare(environ, nproc_per_node=2)
    assert environ == {"OMP_NUM_THREADS": "7"}


def test_torchrun():
    environ = dict(TORCHRUN)
    assert prepare(environ) == Ranks(started_by="torchrun", rank=3, world_size=4)
    assert environ == TORCHRUN


def test_torchrun_comes_before_slurm():
    assert prepare(TORCHRUN | SLURM).started_by == "torchrun"


def test_slurm():
    environ = dict(SLURM)
    assert prepare(environ) == Ranks(started_by="slurm", rank=9, world_size=12)
    made = {name: value for name, value in environ.items() if name not in SLURM}
    cores = len(os.sched_getaffinity(0))
    assert made == {
        "RANK": "9",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu08",
        "MASTER_PORT": str(15000 + (123456 + 2) % 15000),
        "OMP_NUM_THREADS": str(max(1, cores // 4)),
    }


def test_slurm_meeting_point_can_be_given():
    environ = SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "1234", "SLURM_CPUS_PER_TASK": "6"}
    prepare(environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("head", "1234")
    assert environ["OMP_NUM_THREADS"] == "6"
    environ = dict(SLURM)
    prepare(environ, master_port=4321)
    assert environ["MASTER_PORT"] == "4321"


def test_slurm_batch_script_is_no_task():
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
    with pytest.raises(LaunchError, match=r"8 tasks.*srun fullspan train"):
        prepare(batch)
    assert prepare(batch, nproc_per_node=8).started_by == "none"
    assert prepare({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).world_size == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("localhost", "localhost"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[08-09]", "gpu08"),
        ("gpu[3,7-9],cpu1", "gpu3"),
        ("rack[2-3]node[01,04]-ib,other", "rack2node01-ib"),
    ],
)
def test_first_host(nodes, first):
    assert ranks.first_host(nodes) == first


@pytest.mark.parametrize(
    ("counts", "node", "tasks"), [("8", 0, 8), ("8(x3),2", 2, 8), ("8(x3),2", 3, 2), ("4", 5, 4)]
)
def test_tasks_on_node(counts, node, tasks):
    assert ranks.tasks_on_node(counts, node) == tasks


@pytest.mark.parametrize(
    ("environ", "options", "message"),
    [
        ({}, {"nproc_per_node": 0}, "--nproc-per-node is 0: it must be at least 1"),
        ({}, {"master_port": 29500}, "--master-port needs ranks that meet"),
        ({}, {"nproc_per_node": 2, "master_port": 70000}, "--master-port is 70000"),
        (TORCHRUN, {"nproc_per_node": 2}, "inside rank 3 of 4 that torchrun has started"),
        (SLURM, {"nproc_per_node": 2}, "inside rank 9 of 12 that slurm has started"),
        (TORCHRUN, {"master_port": 1234}, "--master-port is for ranks that fullspan starts"),
        (TORCHRUN | {"RANK": "x"}, {}, "RANK is 'x' in the environment"),
        (TORCHRUN | {"MASTER_ADDR": ""}, {}, "MASTER_ADDR is not set"),
        ({"RANK": "0"}, {}, "WORLD_SIZE is not set in the environment"),
        (SLURM | {"SLURM_JOB_NODELIST": ""}, {}, "neither SLURM_JOB_NODELIST nor MASTER_ADDR"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "a lot"}, {}, "SLURM_TASKS_PER_NODE is 'a lot'"),
    ],
)
def test_contradictions(environ, options, message):
    with pytest.raises(LaunchError) as caught:
        prepare(dict(environ), **options)
    assert message in str(caught.value)


def test_a_taken_port_is_named(taken_port):
    with pytest.raises(LaunchError, match=rf"port {taken_port}, .*--master-port or MASTER_PORT"):
        ranks.local_port({}, taken_port)
    with pytest.raises(LaunchError, match=f"port {taken_port}"):
        ranks.local_port({"MASTER_PORT": str(taken_port)}, None)
    with pytest.raises(LaunchError, match=f"port {taken_port}"):
        prepare(TORCHRUN | {"RANK": "0", "MASTER_PORT": str(taken_port)})
    # Another rank connects there, and under torchrun its agent is who listens.
    prepare(TORCHRUN | {"MASTER_PORT": str(taken_port)})
    agent = {"RANK": "0", "MASTER_PORT": str(taken_port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    prepare(TORCHRUN | agent)


def test_local_port():
    assert ranks.local_port({}, None) == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert ranks.local_port({"MASTER_PORT": "1"}, port) == port
    assert ranks.local_port({"MASTER_PORT": str(port)}, None) == port
