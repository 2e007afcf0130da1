"""What is read from a Hugging Face config.json, and what is refused by name."""

import json
from pathlib import Path

import pytest

from fullspan.errors import CheckpointError, ConfigError
from fullspan.models.dsa.config import DsaConfig

GLM_5_2 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "head_dim": 192,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
FULL_IN_GLM_5_2 = [0, 1, *range(2, 78, 4)]


def changed(**fields) -> DsaConfig:
    merged = {**GLM_5_2, **fields}
    return DsaConfig.from_hf({name: value for name, value in merged.items() if value is not ...})


def full_layers(config: DsaConfig) -> list[int]:
    return [layer for layer, kind in enumerate(config.indexer_types) if kind == "full"]


def test_glm_5_2():
    config = changed()
    assert full_layers(config) == FULL_IN_GLM_5_2
    assert config.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 75
    assert (config.rope_theta, config.yarn) == (8e6, None)
    assert config.indexer_rope_interleave
    assert config.softmax_scale == 256**-0.5  # nope + rope; the decoy head_dim 192 plays no part
    assert config.latent_norm_eps == 1e-5


@pytest.mark.parametrize("name", ["deepseek_sparse_attention", "indexed_attention"])
def test_what_transformers_writes_as_layer_types(name):
    assert changed(layer_types=[name] * 78) == changed()


def test_the_list_of_indexers_wins_over_the_schedule():
    types = ["full" if layer in FULL_IN_GLM_5_2 else "shared" for layer in range(78)]
    assert full_layers(changed(indexer_types=types, index_topk_freq=9)) == FULL_IN_GLM_5_2
    # GLM-5 and 5.1 give neither: every layer has its own indexer.
    config = changed(index_topk_freq=..., index_skip_topk_offset=...)
    assert full_layers(config) == list(range(78))


def test_deepseek_v32():
    yarn = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = changed(
        model_type="deepseek_v32",
        indexer_rope_interleave=...,
        index_topk_freq=...,
        index_skip_topk_offset=...,
        rope_parameters=...,
        rope_theta=10000,
        rope_scaling=yarn,
        n_group=8,
        topk_group=4,
    )
    assert not config.indexer_rope_interleave
    assert full_layers(config) == list(range(78))
    assert config.yarn is not None and config.yarn.original_max_position == 4096
    assert config.softmax_scale == pytest.approx(256**-0.5 * (0.1 * 3.6888794541139363 + 1) ** 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"index_tpok": 4}, ["'index_tpok'", "nearest", "index_topk"]),
        ({"model_type": "llama"}, ["'llama'", "glm_moe_dsa"]),
        ({"hidden_size": ...}, ["no field hidden_size"]),
        ({"hidden_size": "6144"}, ["hidden_size", "'6144'", "integer"]),
        ({"kv_lora_rank": 0}, ["kv_lora_rank", "0"]),
        ({"num_experts": 128}, ["num_experts is 128", "n_routed_experts is 256"]),
        ({"qk_head_dim": 192}, ["qk_head_dim is 192", "256"]),
        ({"scoring_func": "softmax"}, ["scoring_func", "'softmax'", "'sigmoid'"]),
        ({"attention_bias": True}, ["attention_bias", "True", "False"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq is 2", "only 1"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings"]),
        ({"indexer_types": ["shared"] + ["full"] * 77}, ["shared layer", "before it"]),
        ({"indexer_types": ["full"] * 77}, ["indexer_types has 77", "num_hidden_layers is 78"]),
        ({"indexer_types": ["full"] * 77 + ["half"]}, ["indexer_types[77]", "'half'", "full"]),
        ({"layer_types": ["sliding_attention"] * 78}, ["layer_types[0]", "'sliding_attention'"]),
        ({"mlp_layer_types": ["dense"] * 78}, ["first_k_dense_replace is 3", "78 dense"]),
        ({"mlp_layer_types": ["dense"] * 3 + ["moe"] * 75}, ["mlp_layer_types[3]", "'moe'"]),
        ({"rope_theta": 1e6}, ["rope_theta", "must agree"]),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "longrope"}}, ["'longrope'"]),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, ["yarn", "factor"]),
        ({"rope_parameters": ...}, ["no rope_theta"]),
        ({"n_group": 3}, ["n_group 3", "256"]),
        ({"n_group": 64, "topk_group": 1}, ["num_experts_per_tok is 8", "4 experts"]),
        ({"qk_rope_head_dim": 63}, ["qk_rope_head_dim is 63", "even"]),
    ],
)
def test_refused_by_name(fields, words):
    with pytest.raises(ConfigError) as caught:
        changed(**fields)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_folder_without_a_readable_config(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        DsaConfig.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GLM_5_2)[:-1])
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        DsaConfig.load(tmp_path)
