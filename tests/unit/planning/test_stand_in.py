"""Random weights of a config.json alone, on this rank and on those that are made up."""

import shutil
from pathlib import Path

import pytest
import torch

from fullspan.checkpoint.load import load_model
from fullspan.checkpoint.tiny import init_tiny
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.backend import resolve
from fullspan.ops.options import OpOptions
from fullspan.parallel.config import ParallelConfig
from fullspan.parallel.loopback import loopback_mesh
from fullspan.parallel.shard import ShardedWeights
from fullspan.planning.stand_in import SyntheticRanks, Values, random_model, synthetic_pack

CPU = torch.device("cpu")
OPTIONS = resolve(OpOptions(), CPU, torch.bfloat16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A tiny FP8 checkpoint, and its config.json alone."""
    whole, alone = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("alone")
    init_tiny(whole, fp8=True)
    shutil.copy(whole / "config.json", alone)
    return whole, alone


def _random(
    folder: Path, rank: int = 0, size: int = 1, shard: bool = False, ep: int = 1
) -> DsaForCausalLM:
    mesh = loopback_mesh(ParallelConfig(ep=ep), rank=rank, size=size, device=CPU)
    return random_model(
        folder, Values(CPU), dtype=torch.bfloat16, options=OPTIONS, recompute=True,
        latent_norm_eps=None, mesh=mesh, shard_weights=shard,
    )  # fmt: skip


def test_every_tensor_has_the_shape_and_dtype_of_the_checkpoints(folders) -> None:
    whole, alone = folders
    real = load_model(whole, dtype=torch.bfloat16, device=CPU, options=OPTIONS, recompute=True)
    made = _random(alone).state_dict()
    wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in real.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in made.items()} == wanted
    dtypes = {dtype for _, dtype in wanted.values()}
    assert dtypes == {torch.float8_e4m3fn, torch.bfloat16, torch.float32}
    for name, tensor in made.items():
        assert tensor.float().isfinite().all(), name


def test_made_up_ranks_hold_the_rest_of_the_same_weights(folders) -> None:
    shards = [_random(folders[1], rank, 3, shard=True).weights for rank in range(3)]
    assert all(isinstance(store, ShardedWeights) for store in shards)
    units = [store.units for store in shards if isinstance(store, ShardedWeights)]
    others = SyntheticRanks(values=Values(CPU), units=units[1])
    for number, unit in enumerate(units[1]):
        gathered = torch.full((unit.share * 3,), 255, dtype=torch.uint8)
        others.weights(gathered, unit.shard, 1)
        whole = torch.cat([every[number].shard for every in units])
        for name, tensor in unit.views(gathered).items():
            assert torch.equal(tensor.float(), unit.views(whole)[name].float()), name


def test_ranks_that_share_the_experts_hold_those_of_one_model(folders) -> None:
    whole = _random(folders[1]).state_dict()
    parts = [_random(folders[1], rank, 2, ep=2).state_dict() for rank in range(2)]
    for name, tensor in whole.items():
        held = [part[name].float() for part in parts]
        split = held[0].shape != tensor.shape
        assert torch.equal(torch.cat(held) if split else held[1], tensor.float()), name
        assert split == (".mlp.experts." in name)


def test_selections_from_elsewhere_are_ascending_keys_before_this_rank() -> None:
    others = SyntheticRanks(values=Values(CPU), first=1000)
    out = torch.empty(300, 65, dtype=torch.int32)
    others.selections(out)
    ids = out[:, :64]
    assert (out[:, 64] == 64).all() and (ids.diff(dim=1) > 0).all()
    assert ids.min() >= 0 and ids.max() <= 1000
    assert len(ids.unique(dim=0)) > 1
    others.first = 9  # fewer keys than the width
    others.selections(out)
    assert out[0].tolist() == [*range(10), *[-1] * 54, 10]


def test_a_pack_has_the_documents_that_are_asked_for() -> None:
    pack = synthetic_pack(10, document=4, trained=1.0, vocab=50)
    assert pack.cu_seqlens.tolist() == [0, 4, 8, 10]
    assert pack.trained_tokens == 7
    assert synthetic_pack(10, document=0, trained=1.0, vocab=50).cu_seqlens.tolist() == [0, 10]
