"""Adapter state and PEFT folders: layout against a scalar formula, round trips, damage."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullspan.errors import CheckpointError
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import adapted_modules, inject, trainable_parameters
from fullspan.lora.read import from_peft
from fullspan.lora.state import adapter_state, load_adapter_state, to_peft
from tests.support.tiny import EVERY_TARGET

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def _adapted(make_model, *targets: str, r: int = 2, alpha: float = 6.0):
    model, config = make_model(), LoraConfig(r=r, alpha=alpha, targets=targets)
    inject(model, config)
    generator = torch.Generator().manual_seed(5)
    for parameter in trainable_parameters(model).values():
        parameter.data.normal_(generator=generator)
    return model, config


def _equal(left, right) -> bool:
    left, right = adapter_state(left), adapter_state(right)
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def exported(make_model, tmp_path):
    model, config = _adapted(make_model, *EVERY_TARGET)
    to_peft(model, config, "base/model", tmp_path / "adapter")
    return model, tmp_path / "adapter"


def test_experts_are_expert_major_in_a_and_rank_major_in_b(make_model, tmp_path):
    """E 4, r 2: row of lora_A = e * r + i, column of lora_B = i * E + e."""
    model, config = _adapted(make_model, "layers.1.mlp.experts.down_proj")
    to_peft(model, config, "base", tmp_path)
    (module,) = adapted_modules(model).values()
    start = "base_model.model.model.layers.1.mlp.experts"
    file = load_file(tmp_path / WEIGHTS)
    a, b = file[f"{start}.lora_A.weight"], file[f"{start}.lora_B.weight"]
    assert (a.shape, b.shape) == ((8, 16), (24, 8))
    for e in range(4):
        for i in range(2):
            assert torch.equal(a[e * 2 + i], module.lora_a[e, i])
            assert torch.equal(b[:, i * 4 + e], module.lora_b[e, :, i])


def test_keys(exported):
    _, folder = exported
    start = "base_model.model.model.layers.1."
    keys = {key.removeprefix(start) for key in load_file(folder / WEIGHTS) if key.startswith(start)}
    owners = {key.removesuffix(".lora_A.weight") for key in keys if key.endswith(".lora_A.weight")}
    assert keys == {f"{owner}.lora_{side}.weight" for owner in owners for side in "AB"}
    assert owners == {
        *(f"self_attn.{name}" for name in EVERY_TARGET[:5]),
        *(f"mlp.shared_experts.{name}" for name in EVERY_TARGET[5:8]),
        "mlp.experts.base_layer",  # gate_up_proj, inside down_proj's wrapper
        "mlp.experts",
    }


@pytest.mark.parametrize(
    ("targets", "modules", "parameters"),
    [
        (("o_proj", "kv_b_proj"), ["kv_b_proj", "o_proj"], None),
        (("layers.1.self_attn.o_proj",), ["1.self_attn.o_proj"], None),
        (("down_proj",), [], ["down_proj.weight"]),
        (("shared_experts.up_proj",), [], ["shared_experts.up_proj.weight"]),
        (("mlp.up_proj",), [], ["mlp.up_proj.weight"]),
        (("q_a_proj", "experts.gate_up_proj"), ["q_a_proj"], ["experts.gate_up_proj"]),
        (("layers.2.mlp.experts.down_proj",), [], ["2.mlp.experts.down_proj"]),
    ],
)
def test_targets_are_the_shortest_that_select_the_same(
    make_model, tmp_path, targets, modules, parameters
):
    model, config = _adapted(make_model, *targets)
    to_peft(model, config, "base", tmp_path)
    fields = json.loads((tmp_path / CONFIG).read_text())
    assert (fields["target_modules"], fields["target_parameters"]) == (modules, parameters)


def test_config_fields(exported):
    _, folder = exported
    fields = json.loads((folder / CONFIG).read_text())
    assert fields["base_model_name_or_path"] == "base/model"
    assert (fields["r"], fields["lora_alpha"], fields["lora_dropout"]) == (2, 6, 0.0)
    assert (fields["peft_type"], fields["task_type"], fields["bias"]) == (
        "LORA",
        "CAUSAL_LM",
        "none",
    )


@pytest.mark.parametrize(
    "targets",
    [EVERY_TARGET, ("experts.gate_up_proj",), ("layers.2.mlp.experts.down_proj", "up_proj")],
    ids=["everything", "gate_up", "some"],
)
@pytest.mark.parametrize("injected", [False, True], ids=["bare", "injected"])
def test_round_trip_is_bit_equal(make_model, tmp_path, targets, injected):
    model, config = _adapted(make_model, *targets)
    to_peft(model, config, "base", tmp_path)
    other = make_model()
    if injected:
        inject(other, config)
    read = from_peft(tmp_path, other)
    assert _equal(model, other)
    assert (read.r, read.alpha) == (2, 6)
    assert set(read.targets) == set(adapted_modules(model))
    assert all(module.scale == 3.0 for module in adapted_modules(other).values())


def test_writing_again_replaces_and_leaves_other_files(make_model, exported):
    _, folder = exported
    (folder / "notes.txt").write_text("mine")
    model, config = _adapted(make_model, "o_proj", r=3)
    to_peft(model, config, "other", folder)
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS, "notes.txt"]
    other = make_model()
    from_peft(folder, other)
    assert _equal(model, other)


@pytest.mark.parametrize("occupied", [WEIGHTS, CONFIG], ids=["weights", "config"])
def test_a_failed_write_is_one_line_and_leaves_no_part(make_model, tmp_path, occupied):
    model, config = _adapted(make_model, "o_proj")
    (tmp_path / occupied / "a folder where a file must go").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="cannot write the adapter to"):
        to_peft(model, config, "base", tmp_path)
    assert not list(tmp_path.glob(".*"))
    assert not (tmp_path / CONFIG).is_file()


def test_a_model_without_adapters_cannot_be_written(make_model, tmp_path):
    with pytest.raises(CheckpointError, match="no adapters"):
        to_peft(make_model(), LoraConfig(), "base", tmp_path)
    assert not list(tmp_path.iterdir())


def _edit(folder, **changes):
    fields = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_rslora": True}, "use_rslora is True, only False can be read"),
        ({"use_dora": True}, "use_dora is True"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is [1, 2], only None"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"of_tomorrow": 1}, "of_tomorrow is 1, only None can be read"),
        ({"bias": "all"}, "bias is 'all', only 'none'"),
        ({"rank_pattern": {"o_proj": 4}}, "rank_pattern is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": None}, "r and lora_alpha are None and 6, they must be numbers"),
        ({"r": 3}, "has shape"),
        ({"target_modules": ".*o_proj"}, "target_modules is '.*o_proj': only a list"),
        ({"target_modules": ["c_attn"], "target_parameters": None}, "name no module of this model"),
        ({"target_modules": ["indexer.wk"], "target_parameters": None}, "the indexer is frozen"),
        ({"target_modules": ["q_a_proj"]}, "holds the unknown"),
        ({"target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]}, "holds the unknown"),
    ],
)
def test_configurations_that_mean_something_else_are_refused(
    make_model, exported, changes, message
):
    _, folder = exported
    _edit(folder, **changes)
    with pytest.raises(CheckpointError) as caught:
        from_peft(folder, make_model())
    assert message in str(caught.value)


def test_an_adapter_of_other_targets_or_scale_is_refused(make_model, exported):
    _, folder = exported
    fewer, _ = _adapted(make_model, "o_proj")
    with pytest.raises(CheckpointError, match="targets differ"):
        from_peft(folder, fewer)
    scaled, _ = _adapted(make_model, *EVERY_TARGET, alpha=4.0)
    with pytest.raises(CheckpointError, match=r"by lora_alpha / r = 3\.0"):
        from_peft(folder, scaled)


def _without_one_key(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(next(key for key in tensors if "layers.1.mlp.experts.lora_B" in key))
    save_file(tensors, folder / WEIGHTS)


def _truncate(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_one_key, "does not hold base_model.model.model.layers.1.mlp.experts.lora_B"),
        (_truncate, f"{WEIGHTS} is damaged"),
        (lambda folder: (folder / WEIGHTS).unlink(), f"no {WEIGHTS} in"),
        (lambda folder: (folder / CONFIG).unlink(), f"no {CONFIG} in"),
        (lambda folder: (folder / CONFIG).write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / CONFIG).write_text("[]"), "no JSON object"),
    ],
)
def test_damage_is_one_clear_line(make_model, exported, damage, message):
    _, folder = exported
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        from_peft(folder, make_model())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_adapter_state_round_trip_and_its_errors(make_model):
    model, _ = _adapted(make_model, *EVERY_TARGET)
    state = {name: tensor.clone() for name, tensor in adapter_state(model).items()}
    other = make_model()
    inject(other, LoraConfig(r=2, targets=EVERY_TARGET))
    load_adapter_state(other, state)
    assert _equal(model, other)
    name = "model.layers.0.self_attn.o_proj.lora_a"
    before = {key: tensor.clone() for key, tensor in adapter_state(other).items()}
    for wrong, message in (
        ({key: value for key, value in state.items() if key != name}, f"does not hold {name}"),
        (state | {"model.x.lora_a": state[name]}, "holds the unknown model.x.lora_a"),
        (state | {name: state[name][:1]}, r"has shape \[1, 20\] in the adapter state"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_adapter_state(other, wrong)
    assert all(torch.equal(before[key], tensor) for key, tensor in adapter_state(other).items())
