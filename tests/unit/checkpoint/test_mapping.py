"""The mapping of names: every name consumed once, exact in both directions, shared layers own no
indexer, the MTP layer is passed over."""

import json

import pytest
import torch

from fullspan.checkpoint.load import meta_model
from fullspan.checkpoint.mapping import CheckpointMapping, Piece, Rename, StackExperts
from fullspan.checkpoint.safetensors_io import CheckpointFolder
from fullspan.checkpoint.tiny import init_tiny
from fullspan.errors import CheckpointError
from fullspan.models.dsa.checkpoint import dsa_mapping
from fullspan.models.dsa.config import DsaConfig
from fullspan.ops.options import OpOptions
from tests.support.tiny import FAMILIES
from tests.unit.checkpoint.conftest import all_tensors, written_back

STEPS = (
    Rename(source="plain", target="renamed"),
    StackExperts(sources=("e.{expert}.gate", "e.{expert}.up"), target="gate_up", experts=3),
    StackExperts(sources=("e.{expert}.down",), target="down", experts=3),
)
MODEL = {"renamed": (5,), "gate_up": (3, 4, 6), "down": (3, 6, 2)}
FILES = {
    "plain": (5,),
    **{f"e.{e}.{part}": (2, 6) for e in range(3) for part in ("gate", "up")},
    **{f"e.{e}.down": (6, 2) for e in range(3)},
}
MAPPING = CheckpointMapping(steps=STEPS, ignored=("extra.",))


def refused(files, model=MODEL, mapping=MAPPING) -> str:
    with pytest.raises(CheckpointError) as caught:
        mapping.check(files, model, where="here")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_name_is_consumed_once():
    MAPPING.check(FILES, MODEL, where="here")
    assert MAPPING.sources == set(FILES)


def test_fused_experts_hold_gate_above_up():
    """Against torch.cat and torch.stack, element for element."""
    files = {name: torch.randn(shape) for name, shape in FILES.items()}
    model = {name: torch.empty(shape) for name, shape in MODEL.items()}
    for step in STEPS:
        for piece in step.pieces():
            piece.of(model[step.target]).copy_(files[piece.source])
    pairs = [torch.cat([files[f"e.{e}.gate"], files[f"e.{e}.up"]]) for e in range(3)]
    assert torch.equal(model["gate_up"], torch.stack(pairs))
    assert torch.equal(model["down"], torch.stack([files[f"e.{e}.down"] for e in range(3)]))
    assert torch.equal(model["renamed"], files["plain"])
    back = dict(MAPPING.to_checkpoint(model))
    assert set(back) == set(files)
    assert all(torch.equal(back[name], tensor) for name, tensor in files.items())


def test_parts_also_divide_block_scales():
    """Scales of [rows / block, columns / block] stack as their weights do, whatever the block."""
    scales = torch.arange(2 * 6 * 2.0).view(2, 6, 2)
    assert Piece("up", (1,), 1, 2).source_shape((2, 6, 2)) == (3, 2)
    assert torch.equal(Piece("up", (1,), 1, 2).of(scales), scales[1, 3:])


def test_missing_and_unexpected_names_with_near_misses():
    files = {name: shape for name, shape in FILES.items() if name != "e.1.gate"}
    message = refused(files | {"e.1.gaet": (2, 6), "lonely_and_odd": (1,)})
    assert "here does not match its config.json" in message
    assert "1 missing tensor: e.1.gate (found instead: e.1.gaet)" in message
    assert "2 unexpected tensors: e.1.gaet (near: e.1.gate), lonely_and_odd" in message


def test_a_long_list_is_counted():
    message = refused({"plain": (5,)})
    assert "9 missing tensors" in message and "and 5 more" in message


def test_ignored_names_are_neither_missing_nor_unexpected():
    MAPPING.check(FILES | {"extra.a": (7,)}, MODEL, where="here")
    assert MAPPING.is_ignored("extra.a") and not MAPPING.is_ignored("plain")


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [("plain", (4,), "[5]"), ("e.2.up", (4, 6), "[2, 6]"), ("e.0.down", (2, 6), "[6, 2]")],
)
def test_wrong_shape_names_tensor_got_and_expected(name, shape, wanted):
    message = refused(FILES | {name: shape})
    assert f"{name} in here has shape {list(shape)}" in message and wanted in message


def test_two_steps_cannot_claim_one_name():
    twice = (Rename(source="a", target="x"), Rename(source="a", target="y"))
    with pytest.raises(AssertionError, match="same checkpoint tensor"):
        CheckpointMapping(steps=twice)
    with pytest.raises(AssertionError, match="same model tensor"):
        CheckpointMapping(steps=(Rename(source="a", target="x"), Rename(source="b", target="x")))


def test_a_model_that_the_mapping_does_not_cover_is_a_bug():
    with pytest.raises(AssertionError, match="disagree"):
        MAPPING.check(FILES, MODEL | {"other": (1,)}, where="here")


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_equal(tiny_checkpoints, family):
    """Files -> model names -> files, MTP-free folders of both families."""
    folder = tiny_checkpoints[family]
    mapping = dsa_mapping(DsaConfig.load(folder))
    files = all_tensors(folder)
    model = meta_model(DsaConfig.load(folder), OpOptions(), recompute=False).state_dict()
    filled = {name: torch.empty(t.shape) for name, t in model.items()}
    for step in mapping.steps:
        for piece in step.pieces():
            piece.of(filled[step.target]).copy_(files[piece.source])
    source = CheckpointFolder.open(folder)
    back = dict(written_back(filled, mapping, source))
    assert set(back) == set(files)
    assert all(torch.equal(back[name], tensor) for name, tensor in files.items())


def test_the_mtp_layer_is_passed_through_when_written_back(tmp_path):
    init_tiny(tmp_path, mtp=True, dtype="bfloat16")
    config = DsaConfig.load(tmp_path)
    mapping = dsa_mapping(config)
    files = all_tensors(tmp_path)
    mtp = {name for name in files if mapping.is_ignored(name)}
    assert {name.split(".")[2] for name in mtp} == {"6"} and "model.layers.6.eh_proj.weight" in mtp
    model = meta_model(config, OpOptions(), recompute=False).state_dict()
    zeros = {name: torch.zeros(t.shape) for name, t in model.items()}
    back = dict(written_back(zeros, mapping, CheckpointFolder.open(tmp_path)))
    assert set(back) == set(files)
    for name, tensor in files.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor if name in mtp else torch.zeros_like(tensor))


def test_only_full_layers_own_an_indexer(tiny_checkpoints):
    config = DsaConfig.load(tiny_checkpoints["glm_moe_dsa"])
    assert config.indexer_types == ("full", "full", "shared", "shared", "full", "shared")
    owners = {n.split(".")[2] for n in dsa_mapping(config).sources if ".indexer." in n}
    assert owners == {"0", "1", "4"}


def test_indexer_on_a_shared_layer_is_refused_with_the_reason(tiny_checkpoints):
    config = DsaConfig.load(tiny_checkpoints["glm_moe_dsa"])
    mapping = dsa_mapping(config)
    model = meta_model(config, OpOptions(), recompute=False).state_dict()
    shapes = {name: tuple(t.shape) for name, t in model.items()}
    files = {name: tuple(t.shape) for name, t in mapping.to_checkpoint(model)}
    files["model.layers.3.self_attn.indexer.wk.weight"] = (16, 128)
    message = refused(files, shapes, mapping)
    assert "model.layers.3.self_attn.indexer.wk.weight" in message
    assert "indexer_types makes layer 3 a shared layer" in message


def test_glm52_itself_maps_without_a_name_left_over():
    """All names of the released GLM-5.2 (78 layers, 256 experts), from the facts of its card."""
    layers, full = 78, {0, 1, 2, *range(6, 78, 4)}
    config = DsaConfig.from_hf(
        json.loads(json.dumps(GLM52))
        | {"indexer_types": ["full" if i in full else "shared" for i in range(layers)]}
    )
    mapping = dsa_mapping(config)
    names = mapping.sources
    experts = 75 * 256 * 3
    per_layer = 9 * layers + 5 * len(full) + 3 * 3 + 75 * (2 + 3)
    assert len(names) == 3 + per_layer + experts
    assert "model.layers.77.mlp.experts.255.down_proj.weight" in names
    assert mapping.is_ignored("model.layers.78.eh_proj.weight")
    assert not mapping.is_ignored("model.layers.7.mlp.gate.weight")


GLM52 = {
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 3, "head_dim": 192,
    "hidden_act": "silu", "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32,
    "index_skip_topk_offset": 3, "index_topk": 2048, "index_topk_freq": 4,
    "indexer_rope_interleave": True, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 1048576, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "model_type": "glm_moe_dsa", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "moe_router_dtype": "float32", "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 78, "num_key_value_heads": 64, "num_nextn_predict_layers": 1,
    "pad_token_id": 154820, "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
