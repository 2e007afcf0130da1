"""Whole training runs on a tiny checkpoint: their configuration, and running them on real ranks."""

import json
import random
from pathlib import Path
from typing import Any

import torch

from fullspan.parallel.config import ParallelConfig
from fullspan.parallel.mesh import Mesh
from fullspan.settings import build
from fullspan.train.config import RunConfig

PACK_LENGTH = 128  # the tiny checkpoint's index_topk is 64


def mesh_of(**parallel: Any) -> Mesh:
    """The mesh of a rank that `run_ranks` has started."""
    return Mesh.create(ParallelConfig(**parallel), torch.device("cpu"))


def write_texts(path: Path, count: int, seed: int) -> Path:
    """JSONL of plain texts that fill about half a pack each."""
    pick = random.Random(seed)
    words = ("span", "rank", "pack", "key", "row", "sum", "loss")
    with path.open("w") as file:
        for _ in range(count):
            text = " ".join(pick.choice(words) for _ in range(pick.randint(13, 22)))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def run_config(model: Path, folder: Path, name: str, /, **sections: dict[str, Any]) -> RunConfig:
    """A small run into `folder`/`name`: 5 packs, 2 a step, shuffled; `sections` override."""
    data, held_out = folder / "train.jsonl", folder / "eval.jsonl"
    if not data.exists():
        write_texts(data, 8, seed=1)
        write_texts(held_out, 2, seed=2)
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "float32"},
        "lora": {"r": 2, "alpha": 4.0, "targets": ["q_b_proj", "kv_b_proj", "experts.down_proj"]},
        "data": {"path": str(data), "pack_length": PACK_LENGTH, "seed": 3},
        "optim": {"lr": 5e-3, "warmup_steps": 2},
        "train": {"steps": 6, "accumulation": 2, "output_dir": str(folder / name)},
        "checkpoint": {},
    }
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    return build(RunConfig, values, "the test")
