"""A model without storage: names, shapes and kinds of modules are all that is needed here."""

import pytest
import torch

from fullspan.models.dsa.config import DsaConfig
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.options import OpOptions

FIELDS = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "indexer_types": ["full", "full", "shared"],
    "rope_theta": 1e4,
}


@pytest.fixture
def make_model():
    """A maker of equal models on the meta device: layer 0 dense, 1 and 2 with 4 routed experts."""

    def make() -> DsaForCausalLM:
        with torch.device("meta"):
            return DsaForCausalLM(DsaConfig.from_hf(FIELDS), OpOptions(), recompute=False)

    return make
