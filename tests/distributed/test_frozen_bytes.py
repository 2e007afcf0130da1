"""Frozen weights on 1, 2 and 4 ranks: what each holds and what each reads falls as one over them.

How many gathered units are whole at a time is in test_wire.py.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fullspan.checkpoint.load import load_model
from fullspan.checkpoint.safetensors_io import CheckpointFolder, TensorReader
from fullspan.models.common.linear import GroupedLinear
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.options import OpOptions
from fullspan.parallel.shard import ShardedWeights
from tests.support.ranks import run_ranks
from tests.support.runs import mesh_of

ITEM = 4  # float32
ALIGNMENT = 16  # of the tensors in a unit, and of a unit's shards


def load(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Bytes that a rank holds by kind, and bytes that it read by the checkpoint's names."""
    read: Counter = Counter()
    plain = TensorReader.read

    def counting(reader: TensorReader, name: str, window: Any = None) -> torch.Tensor:
        tensor = plain(reader, name, window)
        read[name] += tensor.nbytes
        return tensor

    TensorReader.read = counting
    mesh = mesh_of(**({} if size == 1 else {"ep": size}))
    model = load_model(
        folder, dtype=torch.float32, device="cpu", options=OpOptions(), recompute=True, mesh=mesh,
        shard_weights=True,
    )  # fmt: skip
    assert isinstance(model.weights, ShardedWeights)
    held = {name: t.nbytes for name, t in model.state_dict().items() if t.device.type != "meta"}
    experts = {name: held.pop(name) for name in expert_names(model)}
    return {
        "shards": sum(unit.shard.untyped_storage().nbytes() for unit in model.weights.units),
        "units": len(model.weights.units),
        "experts": sum(experts.values()),
        "rest": held,
        "read": read,
    }


def expert_names(model: DsaForCausalLM) -> list[str]:
    return [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, GroupedLinear)]


@pytest.fixture(scope="module")
def loaded(tiny_checkpoints) -> dict[int, list[dict[str, Any]]]:
    folder = tiny_checkpoints["glm_moe_dsa"]
    return {size: run_ranks(size, load, folder) for size in (1, 2, 4)}


@pytest.mark.parametrize("size", [2, 4])
def test_held_bytes_fall_as_one_over_the_ranks(loaded, size):
    (alone,) = loaded[1]
    for part in loaded[size]:
        assert part["experts"] * size == alone["experts"]
        assert abs(part["shards"] * size - alone["shards"]) < ALIGNMENT * size * part["units"]
        assert part["rest"] == alone["rest"], "what every rank holds whole"
    # The final norm, and one number per routed expert that steers the router's choice.
    assert {name.rpartition(".")[2] for name in alone["rest"]} == {
        "weight",
        "e_score_correction_bias",
    }
    assert [name for name in alone["rest"] if name.endswith("weight")] == ["model.norm.weight"]
    assert sum(alone["rest"].values()) < 0.002 * (alone["shards"] + alone["experts"])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_reads_its_share(loaded, tiny_checkpoints, size):
    """Of routed experts its own, whole; of the rest of a unit one run, rounded to whole rows at
    both ends."""
    sizes = {
        name: info.nbytes
        for name, info in CheckpointFolder.open(tiny_checkpoints["glm_moe_dsa"]).tensors.items()
    }
    widest = 256 * ITEM  # a row of down_proj in a dense layer
    for part in loaded[size]:
        experts = {name: n for name, n in part["read"].items() if ".experts." in name}
        assert sum(experts.values()) == part["experts"]
        assert all(n == sizes[name] for name, n in experts.items())
        others = part["read"].total() - part["experts"] - sum(part["rest"].values())
        assert others < part["shards"] + 2 * widest * part["units"]
    everywhere = sum((part["read"] for part in loaded[size]), Counter())
    assert everywhere.keys() == sizes.keys()
    assert all(everywhere[name] >= n for name, n in sizes.items()), "every byte is read by someone"


def test_four_ranks_hold_a_quarter_each(loaded):
    """Of all that one rank would hold; half a percent more for what every rank holds whole."""
    (alone,), parts = loaded[1], loaded[4]
    total = alone["shards"] + alone["experts"] + sum(alone["rest"].values())
    for part in parts:
        held = part["shards"] + part["experts"] + sum(part["rest"].values())
        assert 0.25 <= held / total < 0.255
