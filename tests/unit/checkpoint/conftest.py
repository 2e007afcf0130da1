"""A checkpoint of one's own to damage, and a way to change single tensors in it."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullspan.checkpoint.mapping import CheckpointMapping, Tensors
from fullspan.checkpoint.safetensors_io import CheckpointFolder
from fullspan.shapes import Tensor


@pytest.fixture
def folder(tiny_checkpoints, tmp_path) -> Path:
    """A copy of the tiny GLM checkpoint."""
    return Path(shutil.copytree(tiny_checkpoints["glm_moe_dsa"], tmp_path / "model"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Apply `change` to all tensors of the folder and rewrite them as one shard with its index."""
    tensors = all_tensors(folder)
    change(tensors)
    for shard in shards(folder):
        shard.unlink()
    name = "model-00001-of-00001.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def peak_bytes() -> int:
    """The most memory that this process ever held, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def all_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder, read by safetensors alone."""
    return {name: t for shard in shards(folder) for name, t in load_file(shard).items()}


def written_back(
    tensors: Tensors, mapping: CheckpointMapping, source: CheckpointFolder
) -> Iterator[tuple[str, torch.Tensor]]:
    """What a whole checkpoint holds after `tensors` (by model name) replaced those of `source`,
    with its names and dtypes; what the mapping ignores is copied through.
    """
    for name, tensor in mapping.to_checkpoint(tensors):
        yield name, tensor.to(source.tensors[name].dtype)
    with source.reader() as reader:
        for name in filter(mapping.is_ignored, source.tensors):
            yield name, reader.read(name)
