"""An exported adapter in stock `transformers` + `peft` gives our logits, loaded and merged.

In float32, on texts longer than index_topk, with lora_b far from zero so that every adapter shows.
"""

import warnings

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from fullspan.lora.inject import LoraConfig, adapted_modules, inject, trainable_parameters
from fullspan.lora.layers import LoRAGroupedLinear
from fullspan.lora.state import to_peft
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.packed import PackedLayout
from fullspan.parallel.context import SequenceContext
from fullspan.parallel.sequence import Partition
from tests.support.tiny import EVERY_TARGET, FAMILIES, relative, tiny_model

LENGTH = 150
TOLERANCE = 1e-5

TARGETS = {
    "everything": EVERY_TARGET,
    "kv_b_proj": ("kv_b_proj",),
    "gate_up": ("experts.gate_up_proj",),
    "down": ("experts.down_proj",),
    "dense-mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "shared-experts": ("shared_experts.gate_proj", "shared_experts.down_proj"),
    "one-layer": ("layers.2.self_attn.q_b_proj", "layers.2.mlp.experts.down_proj"),
}


def _trained(folder, targets: tuple[str, ...]) -> tuple[DsaForCausalLM, LoraConfig]:
    """Our model with adapters that change it plainly."""
    model = tiny_model(folder, adapters=False)
    config = LoraConfig(r=3, alpha=6.0, targets=targets)
    inject(model, config)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in trainable_parameters(model).items():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return model, config


def _tokens(model: DsaForCausalLM) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    assert model.config.index_topk * 2 < LENGTH
    return torch.randint(0, model.config.vocab_size, (LENGTH,), generator=generator)


@torch.no_grad()
def _our_logits(model: DsaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    layout = PackedLayout(cu_seqlens=torch.tensor([0, LENGTH]), padded_length=LENGTH)
    partition = Partition(size=1, length=LENGTH)
    sequence = SequenceContext.create(layout, partition, rank=0, group=None)
    return model.logits(model(tokens, sequence))


def _stock(folder) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _loaded(base: nn.Module, adapter) -> PeftModel:
    with warnings.catch_warnings():
        # transformers announces a renamed property that peft 0.21 still reads.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        return PeftModel.from_pretrained(base, adapter)


@torch.no_grad()
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_peft_gives_our_logits(tiny_checkpoints, tmp_path, family, targets):
    ours, config = _trained(tiny_checkpoints[family], targets)
    to_peft(ours, config, tiny_checkpoints[family], tmp_path)
    tokens = _tokens(ours)
    base = _stock(tiny_checkpoints[family])
    plain = base(tokens[None]).logits[0]
    theirs = _loaded(base, tmp_path)
    logits, wanted = theirs(tokens[None]).logits[0], _our_logits(ours, tokens)
    error = relative(wanted, logits)
    print(
        f"{family}: logits {error:.2e}, the adapter changes them by {relative(logits, plain):.2e}"
    )
    assert error < TOLERANCE
    assert relative(logits, plain) > 1000 * TOLERANCE
    _exactly_ours_are_adapted(theirs, ours)


def _exactly_ours_are_adapted(theirs: PeftModel, ours: DsaForCausalLM) -> None:
    count = sum(".lora_A." in name for name, _ in theirs.named_parameters())
    assert count == len(adapted_modules(ours))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_merging_changes_every_adapted_weight_and_keeps_the_logits(
    tiny_checkpoints, tmp_path, family
):
    ours, config = _trained(tiny_checkpoints[family], EVERY_TARGET)
    to_peft(ours, config, tiny_checkpoints[family], tmp_path)
    tokens = _tokens(ours)
    merged = _loaded(_stock(tiny_checkpoints[family]), tmp_path).merge_and_unload()
    before = dict(_stock(tiny_checkpoints[family]).named_parameters())
    after = dict(merged.named_parameters())
    assert before.keys() == after.keys()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {
        name if isinstance(module, LoRAGroupedLinear) else f"{name}.weight"
        for name, module in adapted_modules(ours).items()
    }
    assert relative(_our_logits(ours, tokens), merged(tokens[None]).logits[0]) < TOLERANCE
