"""What a loopback group answers, and that its mesh is the one that real ranks make."""

import pytest
import torch
import torch.distributed as dist

from fullspan.errors import ConfigError
from fullspan.parallel.collectives import (
    all_reduce_sum,
    all_to_all_rows,
    gather_rows,
    start_reduce_scatter_rows,
)
from fullspan.parallel.config import ParallelConfig
from fullspan.parallel.group import Group
from fullspan.parallel.loopback import CHANGE, Others, Traffic, loopback_mesh
from fullspan.parallel.mesh import Axis, Mesh
from tests.support.ranks import run_ranks
from tests.support.runs import mesh_of

CPU = torch.device("cpu")
SPLITS = [{"cp": 4, "ep": 2}, {"dp": 2, "cp": 2, "ep": 4}, {"dp": 2, "ep": 1}]


def _group(rank: int, size: int, **options) -> Group:
    mesh = loopback_mesh(ParallelConfig(cp=size), rank=rank, size=size, device=CPU, **options)
    assert mesh.cp.group is not None
    return mesh.cp.group


def _places(mesh: Mesh) -> dict[str, tuple[int, int, list[int] | None]]:
    def ranks(axis: Axis) -> list[int] | None:
        if axis.group is None:
            return None
        if dist.is_initialized():
            return dist.get_process_group_ranks(axis.group.process_group)
        return list(axis.group.process_group.ranks)

    axes = {name: getattr(mesh, name) for name in ("world", "dp", "cp", "replicas", "ep")}
    return {name: (axis.rank, axis.size, ranks(axis)) for name, axis in axes.items()}


def _real_places(rank: int, size: int) -> list:
    return [_places(mesh_of(**split)) for split in SPLITS]


def test_its_mesh_is_that_of_real_ranks() -> None:
    for rank, real in enumerate(run_ranks(4, _real_places)):
        for split, places in zip(SPLITS, real):
            mesh = loopback_mesh(ParallelConfig(**split), rank=rank, size=4, device=CPU)
            assert _places(mesh) == places, (rank, split)


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank 4 of 4: ranks are 0 to 3"):
        loopback_mesh(ParallelConfig(), rank=4, size=4, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_rows_are_its_own_and_others_like_them_without_ties(dtype) -> None:
    size, rank = 32, 5
    keys = torch.randn(24, 128, dtype=dtype, generator=torch.Generator().manual_seed(0))
    slots = gather_rows(keys, _group(rank, size)).view(size, 24, 128)
    assert torch.equal(slots[rank], keys)
    norms = slots.float().norm(dim=(1, 2)) / keys.float().norm()
    assert (norms - 1).abs().max() <= CHANGE
    query = torch.randn(128, generator=torch.Generator().manual_seed(1))
    scores = (slots.float() @ query).flatten()
    assert len(scores.unique()) == len(scores)


def test_sums_are_this_ranks_terms() -> None:
    group = _group(1, 4)
    full = torch.randn(8, 3)
    assert torch.equal(start_reduce_scatter_rows(full, group).wait(), full[2:4])
    value = torch.ones(3)
    all_reduce_sum([value], group)
    assert torch.equal(value, torch.ones(3))


@pytest.mark.parametrize("imbalance", [1.0, 1.5])
def test_as_many_rows_arrive_as_the_imbalance_says(imbalance: float) -> None:
    group = _group(2, 4, others=Others(imbalance=imbalance))
    counts = torch.tensor([[4, 2], [6, 8], [2, 2], [0, 10]])
    arriving = all_to_all_rows(counts, [1] * 4, [1] * 4, group)
    assert arriving.sum() == imbalance * counts.sum()
    sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
    rows = torch.randn(sum(sent), 3)
    out = all_to_all_rows(rows, sent, received, group)
    assert torch.equal(out[: len(rows)], rows)
    assert torch.equal(out, torch.cat([rows, rows])[: len(out)])


def test_it_counts_what_would_have_come_from_its_node_and_from_others() -> None:
    traffic = Traffic()
    group = _group(3, 4, ranks_per_node=2, traffic=traffic)
    gather_rows(torch.zeros(5, 2), group, "keys")
    all_to_all_rows(torch.zeros(4, 2), [1] * 4, [1, 2, 3, 4], group, "slots")
    all_reduce_sum([torch.zeros(8)], group, "sums")
    found = [(t.what, t.near, t.far, t.ranks) for t in traffic.transfers]
    assert found == [
        ("all_gather of keys", 40, 80, 4),
        ("all_to_all of slots", 24, 24, 4),
        ("all_reduce of sums", 16, 32, 4),
    ]
