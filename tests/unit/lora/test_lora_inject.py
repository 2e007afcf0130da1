"""Which modules a target names, what is refused and how; initial values depend on names only."""

import pytest
import torch

from fullspan.errors import ConfigError
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import adapted_modules, inject, trainable_parameters
from fullspan.lora.layers import LoRAGroupedLinear, LoRAKVUpProjection, LoRALinear


def _names(make_model, *targets: str) -> list[str]:
    return inject(make_model(), LoraConfig(r=2, targets=targets))


def _refused(make_model, target: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _names(make_model, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_bare_name_means_plain_projections_everywhere(make_model):
    assert _names(make_model, "down_proj") == [
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.shared_experts.down_proj",
        "model.layers.2.mlp.shared_experts.down_proj",
    ]


def test_routed_experts_are_named_with_their_owner(make_model):
    assert _names(make_model, "experts.down_proj", "experts.gate_up_proj") == [
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.down_proj",
        "model.layers.2.mlp.experts.gate_up_proj",
        "model.layers.2.mlp.experts.down_proj",
    ]


def test_names_end_at_dots_only(make_model):
    assert _names(make_model, "mlp.down_proj") == ["model.layers.0.mlp.down_proj"]
    assert _names(make_model, "layers.2.self_attn.o_proj") == ["model.layers.2.self_attn.o_proj"]
    assert _names(make_model, "model.layers.0.mlp.up_proj") == ["model.layers.0.mlp.up_proj"]


def test_two_targets_may_name_one_module(make_model):
    names = _names(make_model, "q_b_proj", "self_attn.q_b_proj")
    assert names == [f"model.layers.{layer}.self_attn.q_b_proj" for layer in range(3)]


def test_adapters_live_on_the_device_that_is_asked_for(make_model):
    """A sharded run's weights have no storage between uses: their device says nothing."""
    targets = ("kv_b_proj", "o_proj", "experts.down_proj")
    model = make_model()
    inject(model, LoraConfig(targets=targets), torch.device("meta"))
    assert {value.device.type for value in trainable_parameters(model).values()} == {"meta"}
    model = make_model().to("meta")
    inject(model, LoraConfig(targets=targets))
    assert {value.device.type for value in trainable_parameters(model).values()} == {"cpu"}


def test_each_kind_of_module_has_its_wrapper(make_model):
    model = make_model()
    inject(model, LoraConfig(targets=("kv_b_proj", "o_proj", "experts.down_proj")))
    assert {
        name.split(".")[-1]: type(module) for name, module in adapted_modules(model).items()
    } == {
        "kv_b_proj": LoRAKVUpProjection,
        "o_proj": LoRALinear,
        "down_proj": LoRAGroupedLinear,
    }


def test_only_adapters_are_trained(make_model):
    model = make_model()
    model.requires_grad_(True)  # a frozen indexer that was left trainable breaks a resume
    names = inject(model, LoraConfig(targets=("q_a_proj", "experts.down_proj")))
    wanted = [f"{name}.lora_{side}" for name in names for side in "ab"]
    assert list(trainable_parameters(model)) == wanted
    assert all(parameter.device.type == "cpu" for parameter in trainable_parameters(model).values())


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("indexer.wq_b", "the indexer is frozen: its top-k choice has no gradient"),
        ("wk", "the indexer is frozen"),
        ("self_attn.indexer", "the indexer is frozen"),
        ("mlp.gate", "the router is frozen"),
        ("embed_tokens", "the embedding is frozen"),
        ("lm_head", "the output layer is frozen"),
        ("q_a_layernorm", "norms are frozen"),
        ("model.norm", "norms are frozen"),
        (
            "gate_up_proj",
            "routed experts only; write them with their owner: 'experts.gate_up_proj'",
        ),
        ("self_attn", "model.layers.0.self_attn, a group of modules"),
    ],
)
def test_what_cannot_be_adapted_says_why(make_model, target, reason):
    message = _refused(make_model, target)
    assert reason in message
    assert repr(target) in message


@pytest.mark.parametrize(
    ("target", "near"),
    [
        ("q_b_prj", "q_b_proj"),
        ("kv_b", "kv_b_proj"),
        ("expert.down_proj", "experts.down_proj"),
        ("experts.gate_proj", "experts.gate_up_proj"),
    ],
)
def test_a_target_without_a_match_lists_near_misses_and_what_would_match(make_model, target, near):
    message = _refused(make_model, target)
    nearest = message.partition("; nearest: ")[2].partition(".  ")[0].partition(". These match")[0]
    assert near in nearest.split(", ")
    listed = message.partition("These match: ")[2].split(", ")
    assert {"q_a_proj", "kv_b_proj", "down_proj", "experts.down_proj"} <= set(listed)
    assert not {"wk", "wq_b", "gate", "lm_head", "weights_proj"} & set(listed)
    for name in listed:
        assert _names(make_model, name)


def test_one_bad_target_among_good_ones_is_refused(make_model):
    with pytest.raises(ConfigError, match="'q_proj' matches no module"):
        _names(make_model, "q_a_proj", "q_proj")


def test_injecting_twice_is_refused(make_model):
    model = make_model()
    inject(model, LoraConfig())
    with pytest.raises(ConfigError, match="already has adapters"):
        inject(model, LoraConfig())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, "lora.r is 0: it must be at least 1"),
        ({"r": -4}, "lora.r is -4"),
        ({"alpha": 0.0}, "lora.alpha is 0.0"),
        ({"alpha": float("nan")}, "lora.alpha is nan"),
        ({"alpha": float("inf")}, "lora.alpha is inf"),
        ({"targets": ()}, "lora.targets is empty"),
        ({"targets": ("q_a_proj", "")}, r"lora.targets\[1\] is ''"),
        ({"targets": (".q_a_proj",)}, r"lora.targets\[0\] is '.q_a_proj'"),
        ({"targets": ("o_proj", "o_proj")}, "names 'o_proj' twice"),
    ],
)
def test_settings_out_of_range(fields, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**fields)


def _initial(make_model, *targets: str, seed: int = 0) -> dict[str, torch.Tensor]:
    model = make_model()
    inject(model, LoraConfig(r=2, targets=targets, seed=seed))
    return {name: value.detach() for name, value in trainable_parameters(model).items()}


def test_initial_values_depend_on_seed_and_name_only(make_model):
    alone = _initial(make_model, "o_proj")
    torch.manual_seed(99)
    among = _initial(make_model, "experts.down_proj", "q_a_proj", "o_proj", "kv_b_proj")
    for name, value in alone.items():
        assert torch.equal(among[name], value)
    first, second = (
        "model.layers.0.self_attn.o_proj.lora_a",
        "model.layers.1.self_attn.o_proj.lora_a",
    )
    assert not torch.equal(alone[first], alone[second])
    assert not torch.equal(alone[first], _initial(make_model, "o_proj", seed=1)[first])
