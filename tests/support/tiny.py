"""Tiny checkpoints, models with non-trivial adapters, and packs: what most tests start from."""

from pathlib import Path

import torch
from torch import nn

from fullspan.checkpoint.load import load_model
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import adapted_modules, inject, trainable_parameters
from fullspan.lora.layers import LoRAGroupedLinear
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.backend import resolve
from fullspan.ops.linear_cross_entropy.op import IGNORE
from fullspan.ops.options import OpOptions
from fullspan.ops.packed import PackedLayout
from fullspan.ops.sizes import round_up
from fullspan.parallel.context import SequenceContext
from fullspan.parallel.expert import ExpertParallel
from fullspan.parallel.sequence import Partition
from fullspan.shapes import Tensor
from tests.support.ranks import world_group

FAMILIES = ("glm_moe_dsa", "deepseek_v32")
EVERY_TARGET = (
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "experts.gate_up_proj",
    "experts.down_proj",
)


def tiny_model(
    folder: Path, *, recompute: bool = False, adapters: bool = True, workspace_bytes: int = 1 << 22
) -> DsaForCausalLM:
    """The checkpoint in float32 with `transformers`' latent norm eps; adapters everywhere, lora_b
    not zero.
    """
    options = OpOptions(
        workspace_bytes=workspace_bytes,
        attention_bytes=workspace_bytes,
        expert_bytes=workspace_bytes,
        loss_chunk_rows=64,
    )
    options = resolve(options, torch.device("cpu"), torch.float32)
    model = load_model(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        options=options,
        recompute=recompute,
        latent_norm_eps=1e-6,
    )
    if adapters:
        inject(model, LoraConfig(r=3, alpha=6.0, targets=EVERY_TARGET, seed=1))
        stir(model)
    return model


def stir(model: nn.Module) -> None:
    """Give every lora_b values, the same on every split: from zero, lora_a has no gradient at the
    first step, and Adam's first step of lora_b is the sign of each gradient, however small.
    """
    generator = torch.Generator().manual_seed(7)
    for module in adapted_modules(model).values():
        shape, held = module.lora_b.shape, slice(None)
        if isinstance(module, LoRAGroupedLinear):
            shape, held = (module.base.experts, *shape[1:]), module.base.held
            held = slice(held.start, held.stop)
        with torch.no_grad():
            module.lora_b.copy_(torch.empty(shape).normal_(std=0.02, generator=generator)[held])


def random_pack(
    lengths: list[int], *, vocab: int, multiple: int = 1, seed: int = 0, trained: float = 0.7
) -> tuple[Tensor, Tensor, PackedLayout]:
    """Tokens, labels (next token inside the document, a part of them trained) and the layout of a
    random pack.
    """
    real = sum(lengths)
    total = round_up(max(real, 1), multiple)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (total,), generator=generator)
    labels = torch.full((total,), IGNORE)
    labels[: real - 1] = tokens[1:real]
    labels[torch.rand(total, generator=generator) > trained] = IGNORE
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    labels[bounds[1:] - 1] = IGNORE
    labels[real:] = IGNORE
    return tokens, labels, PackedLayout(cu_seqlens=bounds, padded_length=total)


def local_loss(
    model: DsaForCausalLM,
    pack: tuple[Tensor, Tensor, PackedLayout],
    *,
    rank: int = 0,
    size: int = 1,
    mode: str = "contiguous",
) -> tuple[Tensor, Tensor]:
    """This rank's share of the mean loss over the pack's trained tokens, and its hidden rows."""
    tokens, labels, layout = pack
    partition = Partition(mode=mode, size=size, length=layout.padded_length)
    group = None if size == 1 else world_group()
    experts = ExpertParallel(experts=model.config.n_routed_experts)
    sequence = SequenceContext.create(layout, partition, experts=experts, rank=rank, group=group)
    rows = partition.rows(rank)
    hidden = model(tokens[rows], sequence)
    nll = model.token_losses(hidden, labels[rows])
    return nll.sum() / (labels != IGNORE).sum(), hidden


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradient of every adapter parameter by name, zeros where none arrived."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in trainable_parameters(model).items()
    }


def relative(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted (absolute where that is zero)."""
    scale = wanted.double().norm().item()
    return (got.double() - wanted.double()).norm().item() / (scale or 1.0)
