"""Which tensors a GLM-5.x or DeepSeek-V3.2 checkpoint has, and where they go in the model.

The names of the two sides differ only for routed experts: files hold one matrix per expert, the
model one stack, gate rows above up rows (as `transformers` fuses them). The layer after the last
one is the MTP layer: it predicts a second token, is not trained and not loaded. Projections may be
FP8 (`scaled`); embedding, head, norms, router and the indexer's k_norm and weights_proj never are.
"""

from collections.abc import Iterator

import torch

from fullspan.checkpoint.mapping import (
    CheckpointMapping,
    Rename,
    StackExperts,
    Step,
)
from fullspan.models.dsa.config import DsaConfig

_ALWAYS = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_a_layernorm", "self_attn.q_a_proj",
    "self_attn.q_b_proj", "self_attn.kv_a_layernorm", "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_b_proj", "self_attn.o_proj",
)  # fmt: skip
_PROJECTIONS = frozenset((
    "self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_b_proj", "self_attn.o_proj", "wq_b.weight", "wk.weight",
))  # fmt: skip
_GATED = ("gate_proj", "up_proj", "down_proj")


def dsa_mapping(config: DsaConfig) -> CheckpointMapping:
    """The mapping of the model of one config."""
    steps: list[Step] = [_same("model.embed_tokens.weight")]
    for layer in range(config.num_hidden_layers):
        steps += _layer(config, layer)
    steps += [_same("model.norm.weight"), _same("lm_head.weight")]
    return CheckpointMapping(
        steps=tuple(steps),
        ignored=(f"model.layers.{config.num_hidden_layers}.",),
        forbidden={
            f"model.layers.{n}.self_attn.indexer.": (
                f"indexer_types makes layer {n} a shared layer, which owns no indexer"
            )
            for n, kind in enumerate(config.indexer_types)
            if kind == "shared"
        },
    )


def _layer(config: DsaConfig, layer: int) -> Iterator[Step]:
    prefix = f"model.layers.{layer}."
    for name in _ALWAYS:
        yield _same(f"{prefix}{name}.weight", scaled=name in _PROJECTIONS)
    if config.indexer_types[layer] == "full":
        indexer = f"{prefix}self_attn.indexer."
        for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias"):
            yield _same(indexer + name, scaled=name in _PROJECTIONS)
        # float32: rounding the head weights to bf16 flips picks near ties
        yield _same(f"{indexer}weights_proj.weight", torch.float32)
    if config.mlp_layer_types[layer] == "dense":
        for name in _GATED:
            yield _same(f"{prefix}mlp.{name}.weight", scaled=True)
        return
    yield _same(f"{prefix}mlp.gate.weight", torch.float32)
    yield _same(f"{prefix}mlp.gate.e_score_correction_bias", torch.float32)
    for name in _GATED:
        yield _same(f"{prefix}mlp.shared_experts.{name}.weight", scaled=True)
    yield _experts(config, f"{prefix}mlp.experts.", ("gate_proj", "up_proj"), "gate_up_proj")
    yield _experts(config, f"{prefix}mlp.experts.", ("down_proj",), "down_proj")


def _experts(config: DsaConfig, prefix: str, parts: tuple[str, ...], target: str) -> StackExperts:
    return StackExperts(
        sources=tuple(f"{prefix}{{expert}}.{part}.weight" for part in parts),
        target=f"{prefix}{target}.weight",
        experts=config.n_routed_experts,
        scaled=True,
    )


def _same(name: str, dtype: torch.dtype | None = None, *, scaled: bool = False) -> Rename:
    return Rename(source=name, target=name, dtype=dtype, scaled=scaled)
