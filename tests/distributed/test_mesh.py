"""Every mix of dp, cp and ep against one process: loss and gradients at step 1, and at step 5."""

from pathlib import Path

import pytest
import torch

from fullspan.checkpoint.load import load_model
from fullspan.data.packing import Pack
from fullspan.errors import ConfigError
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import expert_parameters, inject, trainable_parameters
from fullspan.ops.backend import resolve
from fullspan.ops.options import OpOptions
from fullspan.parallel.collectives import gather_rows
from fullspan.parallel.config import ParallelConfig
from fullspan.parallel.mesh import Mesh
from fullspan.train.schedule import OptimConfig
from fullspan.train.session import Session
from tests.support.ranks import run_ranks
from tests.support.tiny import EVERY_TARGET, random_pack, relative, stir

LOSS, GRADIENT = 1e-6, 1e-5
STEPS = 5
LR = 1e-4  # the default; Adam turns rounding of small gradients into rounding of weights
PACKS = ([3, 90, 30], [128], [16] * 7, [100])  # of one step; the last two end in padding


def open_session(folder: Path, parallel: ParallelConfig, *, recompute: bool = True) -> Session:
    """A session of this rank with adapters everywhere."""
    mesh = Mesh.create(parallel, torch.device("cpu"))
    model = load_model(
        folder,
        dtype=torch.float32,
        device="cpu",
        options=resolve(
            OpOptions(workspace_bytes=1 << 22, expert_bytes=1 << 22), mesh.device, torch.float32
        ),
        recompute=recompute,
        mesh=mesh,
        shard_weights=parallel.shard_weights,
    )
    inject(model, LoraConfig(r=2, alpha=4.0, targets=EVERY_TARGET))
    stir(model)
    return Session(
        model,
        trainable_parameters(model),
        optim=OptimConfig(lr=LR, warmup_steps=2, clip_norm=0.5),
        total_steps=STEPS,
        mesh=mesh,
        partition=parallel.partition,
    )


def step_packs(vocab: int, step: int) -> list[Pack]:
    packs = []
    for number, lengths in enumerate(PACKS):
        seed = 10 * step + number
        tokens, labels, layout = random_pack(lengths, vocab=vocab, multiple=128, seed=seed)
        packs.append(Pack(tokens=tokens, labels=labels, cu_seqlens=layout.cu_seqlens))
    return packs


def whole_gradients(session: Session) -> dict[str, torch.Tensor]:
    """Summed over the ranks, expert adapters of all ranks together."""
    shards = expert_parameters(session.model)
    group = session.mesh.ep.group
    return {
        name: (gather_rows(g, group) if name in shards else g).clone()
        for name, g in session.gradients().items()
    }


def train(rank: int, size: int, folder: Path, settings: dict) -> dict:
    session = open_session(folder, ParallelConfig(**settings))
    losses, norms, gradients = [], [], {}
    for step in range(1, STEPS + 1):
        packs = step_packs(session.model.config.vocab_size, step)
        losses.append(session.forward_backward(packs).loss)
        if step in (1, STEPS):
            gradients[step] = whole_gradients(session)
        norms.append(session.optim_step().grad_norm)
    return {"losses": losses, "norms": norms, "gradients": gradients}


@pytest.fixture(scope="module")
def alone(tiny_checkpoints) -> dict:
    (result,) = run_ranks(1, train, tiny_checkpoints["glm_moe_dsa"], {})
    assert result["losses"][-1] < result["losses"][0]
    return result


MIXES = [
    {"dp": 1, "cp": 2, "ep": 1, "shard_weights": True},
    {"dp": 1, "cp": 2, "ep": 2},
    {"dp": 2, "cp": 1, "ep": 1},
    {"dp": 2, "cp": 1, "ep": 2, "shard_weights": True},
    {"dp": 1, "cp": 4, "ep": 1},
    {"dp": 1, "cp": 4, "ep": 2, "partition": "zigzag"},
    {"dp": 1, "cp": 4, "ep": 4, "shard_weights": True},
    {"dp": 2, "cp": 2, "ep": 1, "shard_weights": True},
    {"dp": 2, "cp": 2, "ep": 2},
    {"dp": 2, "cp": 2, "ep": 4, "shard_weights": True, "partition": "zigzag"},
    {"dp": 4, "cp": 1, "ep": 1},
    {"dp": 4, "cp": 1, "ep": 2},
    {"dp": 4, "cp": 1, "ep": 4, "shard_weights": True},
]


@pytest.mark.parametrize("settings", MIXES, ids=lambda mix: "-".join(map(str, mix.values())))
def test_the_mesh_does_not_show(tiny_checkpoints, alone, settings):
    folder = tiny_checkpoints["glm_moe_dsa"]
    for part in run_ranks(settings["dp"] * settings["cp"], train, folder, settings):
        assert part["losses"] == pytest.approx(alone["losses"], rel=LOSS)
        assert part["norms"] == pytest.approx(alone["norms"], rel=GRADIENT)
        for step, wanted in alone["gradients"].items():
            errors = {n: relative(g, wanted[n]) for n, g in part["gradients"][step].items()}
            worst = max(errors, key=errors.__getitem__)
            print(f"{settings} step {step}: worst {worst} {errors[worst]:.2e}")
            assert errors[worst] < GRADIENT, f"step {step}, {worst}: {errors[worst]:.2e}"


@pytest.mark.parametrize(
    ("settings", "size", "words"),
    [
        ({"dp": 3}, 4, "parallel.dp 3 x parallel.cp 1 makes 3, but the run has 4 ranks"),
        ({"dp": 2, "cp": 4}, 4, "makes 8, but the run has 4"),
        ({"ep": 3}, 4, "parallel.ep is 3"),
        ({"dp": 2, "cp": 3, "ep": 2}, 6, r"parallel.ep is 2: .* parallel.cp \(3\)"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(settings, size, words):
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**settings).resolve_cp(size)
