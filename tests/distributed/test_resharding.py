"""A run with split experts: the adapter it leaves, and its checkpoint on other splits of the ranks.

Expert adapters and their moments are saved whole whatever ranks wrote them, so a run goes on with
any number of ranks, and its losses agree to rounding.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fullspan.checkpoint.load
import fullspan.train.loop
from fullspan.errors import FullspanError
from fullspan.train.loop import train_on
from fullspan.train.metrics import Console, read_metrics
from fullspan.train.setup import prepare
from tests.support.ranks import run_ranks
from tests.support.runs import mesh_of, run_config
from tests.support.tiny import relative

STEPS = 4
LORA = {"targets": ["q_b_proj", "kv_b_proj", "experts.gate_up_proj", "experts.down_proj"]}
# Adam divides by the root of the second moment: rounding of tiny gradients shows in the weights.
ADAPTER = 1e-3


def _sections(sections: dict) -> dict:
    train = {"steps": STEPS} | sections.get("train", {})
    return {"lora": LORA} | sections | {"train": train}


def _train(rank: int, size: int, model: Path, folder: Path, name: str, sections: dict) -> list:
    """The folders that this rank writes adapters to."""
    written = []
    write = fullspan.train.loop.write_adapter

    def noted(checkpoint: Path, output: Path, **settings):
        written.append(output)
        return write(checkpoint, output, **settings)

    fullspan.train.loop.write_adapter = noted
    mesh = mesh_of(**sections.get("parallel", {}))
    assert train_on(run_config(model, folder, name, **_sections(sections)), mesh) == 0
    return written


def losses(folder: Path) -> dict[int, float]:
    records = read_metrics(folder / "metrics.jsonl")
    return {r["step"]: r["loss"] for r in records if r["kind"] == "train"}


@pytest.fixture(scope="module")
def split(tiny_checkpoints, tmp_path_factory) -> Path:
    """The folder of a run `whole` by two ranks that share the experts, all its checkpoints kept."""
    folder = tmp_path_factory.mktemp("split")
    sections = {"parallel": {"ep": 2}, "checkpoint": {"every": 1, "keep_last": STEPS}}
    model = tiny_checkpoints["glm_moe_dsa"]
    written = run_ranks(2, _train, model, folder, "whole", sections)
    assert written == [[folder / "whole" / "adapter"], []], "one writer of the adapter"
    return folder


def test_the_adapter_does_not_show_the_split(split, tiny_checkpoints, tmp_path):
    run_ranks(1, _train, tiny_checkpoints["glm_moe_dsa"], tmp_path, "alone", {})
    files = {
        name: folder / "adapter"
        for name, folder in (("split", split / "whole"), ("alone", tmp_path / "alone"))
    }
    configs = [(folder / "adapter_config.json").read_bytes() for folder in files.values()]
    assert configs[0] == configs[1]
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in files.values())
    assert list(ours) == list(theirs)
    assert any("experts" in name for name in ours)
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape
        assert relative(ours[name], tensor) < ADAPTER, name


SPLITS = [
    (4, {"parallel": {"ep": 4}}),
    (4, {"parallel": {"dp": 2, "ep": 2}, "train": {"accumulation": 1}}),
    (1, {}),
]


@pytest.mark.parametrize(("size", "sections"), SPLITS, ids=["ep4", "dp2-ep2", "alone"])
def test_another_split_goes_on_with_the_same_losses(
    size, sections, split, tiny_checkpoints, tmp_path
):
    resume = {"checkpoint": {"resume": str(split / "whole" / "checkpoints" / "step-2")}}
    run_ranks(size, _train, tiny_checkpoints["glm_moe_dsa"], tmp_path, "on", sections | resume)
    expected, got = losses(split / "whole"), losses(tmp_path / "on")
    assert list(got) == [3, 4]
    for step, loss in got.items():
        assert loss == pytest.approx(expected[step], rel=1e-6)


def _state(rank: int, size: int, model: Path, folder: Path, sections: dict) -> dict:
    """What this rank starts with: its experts, adapters and moments."""
    mesh = mesh_of(**sections.get("parallel", {}))
    config = run_config(model, folder, "state", **_sections(sections))
    session = prepare(config, mesh, Console(first_rank=False)).session
    sharded = session._sharded
    return {
        "experts": session.expert_parallel.local,
        "tensors": session.optimizer.state_tensors() | session.adapters,
        "sharded": {n for n in session.optimizer.state_tensors() if n.rpartition(".")[0] in sharded}
        | sharded,
    }


def test_moments_come_back_on_the_ranks_of_their_experts(split, tiny_checkpoints, tmp_path):
    model = tiny_checkpoints["glm_moe_dsa"]
    resume = {"checkpoint": {"resume": str(split / "whole" / "checkpoints" / "step-2")}}
    (alone,) = run_ranks(1, _state, model, tmp_path, resume)
    moments = {n: t for n, t in alone["tensors"].items() if n.endswith(("exp_avg", "exp_avg_sq"))}
    assert moments and all(moment.any() for moment in moments.values())
    for part in run_ranks(4, _state, model, tmp_path, resume | {"parallel": {"ep": 4}}):
        experts = slice(part["experts"].start, part["experts"].stop)
        assert len(part["sharded"]) > 4
        for name, whole in alone["tensors"].items():
            wanted = whole[experts] if name in part["sharded"] else whole
            assert torch.equal(part["tensors"][name], wanted), name


def _refused(rank: int, size: int, model: Path, folder: Path, sections: dict) -> str:
    def load_nothing(*_: object) -> None:
        raise AssertionError("weights were loaded")

    fullspan.checkpoint.load._fill = load_nothing
    with pytest.raises(FullspanError) as caught:
        _train(rank, size, model, folder, "refused", sections)
    return str(caught.value)


@pytest.mark.parametrize(
    ("size", "sections", "words"),
    [
        (3, {"parallel": {"ep": 3}, "data": {"pack_length": 384}}, "parallel.ep is 3, which does"),
        (2, {"parallel": {"dp": 2}}, "packs a step (train.accumulation x parallel.dp) was 2"),
        (2, {"data": {"pack_length": 192}}, "data.pack_length was 128 and is 192"),
    ],
)
def test_what_cannot_go_on_is_refused_before_weights_load(
    size, sections, words, split, tiny_checkpoints, tmp_path
):
    if size == 2:
        resume = str(split / "whole" / "checkpoints" / "step-2")
        sections = sections | {"checkpoint": {"resume": resume}}
    messages = run_ranks(size, _refused, tiny_checkpoints["glm_moe_dsa"], tmp_path, sections)
    assert len(set(messages)) == 1
    assert words in messages[0] and "\n" not in messages[0]


def test_a_checkpoint_that_cannot_be_read_is_refused_before_weights_load(
    split, tiny_checkpoints, tmp_path
):
    step = tmp_path / "step-2"
    step.mkdir()
    for file in (split / "whole" / "checkpoints" / "step-2").iterdir():
        data = file.read_bytes()
        (step / file.name).write_bytes(b"\0" * len(data) if file.name == ".metadata" else data)
    sections = {"checkpoint": {"resume": str(step)}, "parallel": {"ep": 2}}
    messages = run_ranks(2, _refused, tiny_checkpoints["glm_moe_dsa"], tmp_path, sections)
    assert all("cannot read" in message and ".metadata" in message for message in messages)
