"""Adapters as the 2-D matrices of a checkpoint's own tensors, those of routed experts one by one.

vLLM and SGLang read "...mlp.experts.7.gate_proj.lora_A.weight" more reliably than PEFT's fused
form. The adapter of the stacked gate and up projections falls apart into two that share A and split
B by rows. state.py writes them, checkpoint/merge.py adds them to the weights.
"""

from collections.abc import Mapping
from typing import NamedTuple

from fullspan.lora.layers import LoRAModule
from fullspan.models.dsa.checkpoint import dsa_mapping
from fullspan.models.dsa.config import DsaConfig
from fullspan.shapes import Float32, Tensor


class Matrices(NamedTuple):
    """An adapter on one 2-D matrix of a checkpoint, which it changes by scale * b a."""

    a: Float32[Tensor, "rank in"]
    b: Float32[Tensor, "out rank"]
    scale: float


def split_adapters(config: DsaConfig, modules: Mapping[str, LoRAModule]) -> dict[str, Matrices]:
    """Name of a checkpoint's tensor -> views of its adapter. modules: by name in the model."""
    found: dict[str, Matrices] = {}
    for step in dsa_mapping(config).steps:
        module = modules.get(step.target.removesuffix(".weight"))
        if module is None:
            continue
        for piece in step.pieces():
            low, high = module.lora_a.detach(), module.lora_b.detach()
            low = low[piece.lead] if piece.lead else low
            found[piece.source] = Matrices(low, piece.of(high), module.scale)
    return found
