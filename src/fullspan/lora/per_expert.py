"""Adapters as the 2-D matrices of a checkpoint's own tensors, those of routed experts one by one.

vLLM and SGLang read "...mlp.experts.7.gate_proj.lora_A.weight" more reliably than PEFT's fused
form. The adapter of the stacked gate and up projections falls apart into two that share A and split
B by rows. state.py writes the folder; nothing reads this form back.
"""

from collections.abc import Mapping

from fullspan.lora.layers import LoRAModule
from fullspan.models.dsa.checkpoint import dsa_mapping
from fullspan.models.dsa.config import DsaConfig
from fullspan.shapes import Tensor


def split_adapters(
    config: DsaConfig, modules: Mapping[str, LoRAModule]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Name of a checkpoint's projection (without ".weight") -> A [rank, in] and B [out, rank].

    Every tensor is memory of its own, on the CPU: a file holds no two names of one memory.
    """
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for step in dsa_mapping(config).steps:
        module = modules.get(step.target.removesuffix(".weight"))
        if module is None:
            continue
        for piece in step.pieces():
            low, high = module.lora_a.detach(), piece.of(module.lora_b.detach())
            low = low[piece.lead] if piece.lead else low
            found[piece.source.removesuffix(".weight")] = low.cpu().clone(), high.cpu().clone()
    return found
