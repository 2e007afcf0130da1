"""The numbers of docs/parallelism.md follow from its formulas."""

import re
from pathlib import Path

import pytest
import torch

from fullspan.models.common.linear import GroupedLinear
from fullspan.models.dsa.config import DsaConfig
from fullspan.models.dsa.model import DecoderLayer
from fullspan.ops.options import OpOptions
from fullspan.ops.packed import PackedLayout
from fullspan.parallel.balance import Trade
from fullspan.parallel.sequence import Partition
from tests.support.budget import layer_budget

LENGTH, RANKS, ITEM = 131_072, 8, 2
GLM_5_2 = {
    "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144,
    "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 78,
    "num_attention_heads": 64, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "index_topk": 2048, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk_freq": 4, "index_skip_topk_offset": 3, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 3, "rope_theta": 8_000_000,
}  # fmt: skip
PAGE = Path(__file__).parents[3] / "docs" / "parallelism.md"


def documented(item: str) -> list[float]:
    """The numbers in the last row of the page that starts with `item`."""
    row = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {item} |")][-1]
    return [float(cell) for cell in re.findall(r"(?<=\| )[\d.]+(?= )", row)]


def spread_bytes(config: DsaConfig, layer: int) -> int:
    """Of a layer without its routed experts: bf16, and float32 where the model insists on it."""
    with torch.device("meta"):
        module = DecoderLayer(config, layer, OpOptions(), range(config.n_routed_experts))
    experts = {id(m.weight) for m in module.modules() if isinstance(m, GroupedLinear)}
    wide = ("mlp.gate.weight", "weights_proj.weight")
    return sum(
        p.numel() * (4 if name.endswith(wide) else 2)
        for name, p in module.named_parameters()
        if id(p) not in experts
    )


def test_the_table_of_glm_5_2():
    config = DsaConfig.from_hf(GLM_5_2)
    rows = LENGTH // RANKS
    layout = PackedLayout(cu_seqlens=torch.tensor([0, LENGTH]), padded_length=LENGTH)
    trade = Trade.plan(layout, Partition(size=RANKS, length=LENGTH), RANKS - 1)
    leaving = rows * config.num_experts_per_tok * (RANKS - 1) // RANKS
    layer = 6
    budget = layer_budget(
        config, layer, rows=rows, cp=RANKS, ep=RANKS, itemsize=ITEM, slots=(leaving, leaving),
        traded=(sum(trade.sends), sum(trade.receives)), remade=False,
    )  # fmt: skip
    weights = spread_bytes(config, layer) * (RANKS - 1) / RANKS
    budget["forward", "weights"] = budget["recompute", "weights"] = round(weights)
    names = {
        "latent": "latent",
        "its gradient": "latent gradient",
        "indexer keys": "index keys",
        "traded rows": "index rows",
        "slots": "expert rows",
        "weights, bf16": "weights",
    }
    for words, item in names.items():
        passes = [budget[p, item] for p in ("forward", "recompute", "backward")]
        wanted = [count / 1e6 for count in [*passes, sum(passes)] if count]
        assert documented(words) == pytest.approx(wanted, abs=0.051), words
    share = sum(budget[p, "expert rows"] for p in ("forward", "recompute", "backward"))
    assert share / budget.total() == pytest.approx(5 / 6, abs=0.01)


def test_the_units_of_glm_5_2():
    config = DsaConfig.from_hf(GLM_5_2)
    layers = list(zip(config.indexer_types, config.mlp_layer_types))
    kinds = {kind: spread_bytes(config, layers.index(kind)) for kind in set(layers)}
    ends = 2 * config.vocab_size * config.hidden_size * 2
    assert (ends + sum(kinds[kind] for kind in layers)) / 1e9 == pytest.approx(37.4, abs=0.05)
