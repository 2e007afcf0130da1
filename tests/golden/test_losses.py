"""Losses of a few training steps against those checked in: a change that moves every run alike, and
so goes unseen where runs are compared with each other, is seen here.

After a change that is meant to move them: `python -m tests.golden.test_losses` from the project's
folder writes the file anew.
"""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from fullspan.checkpoint.load import load_model
from fullspan.checkpoint.tiny import init_tiny
from fullspan.data.packing import Pack
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import inject, trainable_parameters
from fullspan.ops.options import OpOptions
from fullspan.train.schedule import OptimConfig
from fullspan.train.session import Session
from tests.support.tiny import EVERY_TARGET, FAMILIES, random_pack

GOLDEN = Path(__file__).parent / "losses.json"
STEPS = 4
# Other processors and releases of PyTorch round sums differently, and Adam amplifies it.
TOLERANCE = 1e-4


def losses(folder: Path) -> list[float]:
    """Of steps with two packs each, adapters everywhere, from the tiny checkpoint."""
    model = load_model(
        folder, dtype=torch.float32, device="cpu", options=OpOptions(), recompute=True
    )
    inject(model, LoraConfig(r=4, alpha=8.0, targets=EVERY_TARGET))
    optim = OptimConfig(lr=3e-3, warmup_steps=1)
    session = Session(model, trainable_parameters(model), optim=optim, total_steps=STEPS)
    found = []
    for step in range(STEPS):
        packs = []
        for seed, lengths in ((2 * step, [90, 100]), (2 * step + 1, [3, 150])):
            tokens, labels, layout = random_pack(
                lengths, vocab=model.config.vocab_size, multiple=192, seed=seed
            )
            packs.append(Pack(tokens=tokens, labels=labels, cu_seqlens=layout.cu_seqlens))
        found.append(session.forward_backward(packs).loss)
        session.optim_step()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_checked_in(tiny_checkpoints, family):
    golden = json.loads(GOLDEN.read_text())[family]
    assert losses(tiny_checkpoints[family]) == pytest.approx(golden, rel=TOLERANCE)


def write() -> None:
    """Train once for each family and keep the losses."""
    found = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            init_tiny(Path(folder), family=family, seed=0)
            found[family] = losses(Path(folder))
    GOLDEN.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    write()
