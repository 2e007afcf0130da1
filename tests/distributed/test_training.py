"""Training on 1, 2 and 4 real ranks: the same loss, gradients and adapters however many share a
pack, at the first step and after updates; ranks with nothing to train; a stop that all agree on.
"""

import json
from pathlib import Path

import pytest
import torch

from fullspan.data.packing import untrained
from fullspan.errors import DataError, LayoutError, TrainingError
from fullspan.lora.inject import trainable_parameters
from fullspan.train.loop import train_on
from fullspan.train.schedule import OptimConfig
from fullspan.train.session import Session
from tests.support.packs import packed, random_documents
from tests.support.ranks import run_ranks
from tests.support.runs import mesh_of, run_config
from tests.support.tiny import relative, tiny_model

LOSS, GRADIENT = 1e-6, 1e-5
# After updates: rounding of the gradients, through the square roots and quotients of AdamW.
LATER = 1e-4


def _session(folder: Path) -> Session:
    model = tiny_model(folder, recompute=True)
    return Session(
        model,
        trainable_parameters(model),
        optim=OptimConfig(lr=1e-3, warmup_steps=2, clip_norm=0.5),
        total_steps=5,
        mesh=mesh_of(),
    )


def _packs(session: Session) -> list:
    """Steps of three microbatches: documents across ranks, one of pure prompt up to its last rows,
    and one that leaves the ranks but the first with padding."""
    vocab = session.model.config.vocab_size
    across = random_documents([30, 90, 21], vocab=vocab, seed=1)
    prompt = random_documents([140], vocab=vocab, seed=2, trained=lambda place: place > 130)
    short = random_documents([20], vocab=vocab, seed=3)
    return [packed(across, 144), packed(prompt, 144), packed(short, 80)]


def _steps(rank: int, size: int, folder: Path) -> dict:
    session = _session(folder)
    packs = _packs(session)
    seen: dict = {"losses": [], "norms": [], "evaluation": session.evaluate(packs).loss}
    for step in range(5):
        result = session.forward_backward(packs)
        if step == 0:
            seen["gradients"] = {n: g.clone() for n, g in session.gradients().items()}
        update = session.optim_step()
        seen["losses"].append(result.loss)
        seen["norms"].append(update.grad_norm)
        seen["counts"] = (result.trained_tokens, result.tokens)
    seen["adapters"] = {n: p.detach().clone() for n, p in session.adapters.items()}
    return seen


@pytest.fixture(scope="module")
def alone(tiny_checkpoints) -> dict:
    (seen,) = run_ranks(1, _steps, tiny_checkpoints["glm_moe_dsa"])
    return seen


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_train_as_one_process_does(size, alone, tiny_checkpoints):
    ranks = run_ranks(size, _steps, tiny_checkpoints["glm_moe_dsa"])
    for seen in ranks:
        assert seen["counts"] == alone["counts"]
        assert seen["evaluation"] == pytest.approx(alone["evaluation"], rel=LOSS)
        assert seen["losses"][0] == pytest.approx(alone["losses"][0], rel=LOSS)
        assert seen["losses"] == pytest.approx(alone["losses"], rel=LATER)
        assert seen["norms"][0] == pytest.approx(alone["norms"][0], rel=GRADIENT)
        assert seen["gradients"].keys() == alone["gradients"].keys()
        for name, gradient in alone["gradients"].items():
            assert relative(seen["gradients"][name], gradient) < GRADIENT, name
        for name, adapter in alone["adapters"].items():
            assert relative(seen["adapters"][name], adapter) < LATER, name
    for seen in ranks[1:]:
        assert seen["losses"] == ranks[0]["losses"], "ranks report one loss"
        for name, adapter in ranks[0]["adapters"].items():
            assert torch.equal(seen["adapters"][name], adapter), "replicas drift apart"
    assert alone["losses"][-1] < alone["losses"][0]


def _not_finite(rank: int, size: int, folder: Path) -> str:
    """Only the last rank's rows give a loss that is not finite."""
    session = _session(folder)
    before = {n: p.detach().clone() for n, p in session.adapters.items()}

    def broken(nll: torch.Tensor, microbatch) -> torch.Tensor:
        last = microbatch.row_ids == microbatch.row_ids.max()
        return nll + torch.where(last & (microbatch.row_ids > 120), float("nan"), 0.0)

    with pytest.raises(TrainingError) as caught:
        session.forward_backward(_packs(session), broken)
    assert all(torch.equal(p, before[n]) for n, p in session.adapters.items())
    return str(caught.value)


def test_a_loss_that_is_not_finite_on_one_rank_stops_all(tiny_checkpoints):
    messages = run_ranks(2, _not_finite, tiny_checkpoints["glm_moe_dsa"])
    assert messages[0] == messages[1] and "step 1: the loss is nan" in messages[0]


def _nothing_trained(rank: int, size: int, folder: Path) -> str:
    """Refused alike on every rank, which can go on together."""
    session = _session(folder)
    packs = _packs(session)
    with pytest.raises(DataError) as caught:
        session.forward_backward([untrained(pack) for pack in packs])
    session.forward_backward(packs)
    return str(caught.value)


def test_a_step_without_a_trained_token_is_refused_on_every_rank(tiny_checkpoints):
    messages = run_ranks(2, _nothing_trained, tiny_checkpoints["glm_moe_dsa"])
    assert messages[0] == messages[1] and "step 1: no trained token" in messages[0]


def _uneven(rank: int, size: int, folder: Path) -> None:
    session = _session(folder)
    documents = random_documents([90], vocab=session.model.config.vocab_size)
    with pytest.raises(LayoutError, match="91 rows"):
        session.forward_backward([packed(documents, 91)])


def test_a_pack_that_the_ranks_cannot_share_is_refused(tiny_checkpoints):
    run_ranks(2, _uneven, tiny_checkpoints["glm_moe_dsa"])


def _train(rank: int, size: int, model: Path, folder: Path, sections: dict) -> int:
    return train_on(run_config(model, folder, f"ranks-{size}", **sections), mesh_of())


def test_whole_runs_agree_and_leave_the_same_things(tiny_checkpoints, tmp_path, capfd):
    model = tiny_checkpoints["deepseek_v32"]
    sections = {
        "data": {"eval_path": str(tmp_path / "eval.jsonl")},
        "train": {"steps": 3, "eval_every": 2, "log_every": 2, "tensorboard": True},
    }
    records = {}
    for size in (1, 2):
        assert run_ranks(size, _train, model, tmp_path, sections) == [0] * size
        folder = tmp_path / f"ranks-{size}"
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records[size] = [json.loads(line) for line in lines]
        left = sorted(path.name for path in folder.iterdir())
        expected = ["adapter", "checkpoints", "config.toml", "loss.png", "metrics.jsonl"]
        assert left == [*expected, "tensorboard"]
        console = capfd.readouterr().out
        for part in (
            "experts.down_proj x",
            "held out  ",
            "{+",
            "sparse_attention reference",
            f"{128 // size} rows a rank",
            "2 pack(s) x 128 rows = 256 rows a step",
            "step 2/3  loss",
            "step 3/3  loss",
            "eval 0/3  loss",
            f"adapter     {folder / 'adapter'}",
            f"loss plot   {folder / 'loss.png'}",
        ):
            assert console.count(part) == 1, (part, console)
        assert "step 1/3" not in console
    order = [(r["kind"], r["step"]) for r in records[1]]
    assert order == [
        ("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("eval", 3)
    ]  # fmt: skip
    for one, two in zip(records[1], records[2], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=LATER)
        assert two["trained_tokens"] == one["trained_tokens"]
        if two["kind"] == "train":
            rate, seconds = two["tokens_per_second"], two["seconds"]
            assert rate == pytest.approx(two["tokens"] / seconds)
            assert two["tokens_per_second_per_rank"] == pytest.approx(rate / 2)
