"""Our model against `transformers` on the same checkpoint, in float32, on texts longer than
index_topk.
"""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fullspan.lora.inject import adapted_modules, trainable_parameters
from fullspan.lora.layers import LoRAGroupedLinear
from fullspan.models.dsa.config import DsaConfig
from fullspan.models.dsa.model import DsaForCausalLM
from tests.support.tiny import FAMILIES, gradients, local_loss, random_pack, relative, tiny_model

LENGTH = 200
TOLERANCE = 1e-5


def _merge(theirs: nn.Module, ours: DsaForCausalLM) -> dict[str, nn.Parameter]:
    """Add each adapter's product to the weight that it adapts in `transformers`; those weights by
    module name.
    """
    parameters = dict(theirs.named_parameters())
    merged = {}
    for name, module in adapted_modules(ours).items():
        grouped = isinstance(module, LoRAGroupedLinear)
        merged[name] = parameters[name if grouped else f"{name}.weight"]
        with torch.no_grad():
            merged[name] += module.scale * (module.lora_b @ module.lora_a)
    return merged


def _adapter_gradients(
    ours: DsaForCausalLM, merged: dict[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """By the chain rule from the gradient G of a merged weight: dA = s B^T G and dB = s G A^T."""
    wanted = {}
    for name, module in adapted_modules(ours).items():
        gradient = merged[name].grad
        assert gradient is not None
        wanted[f"{name}.lora_a"] = module.scale * module.lora_b.detach().mT @ gradient
        wanted[f"{name}.lora_b"] = module.scale * gradient @ module.lora_a.detach().mT
    return wanted


def _compare(folder, ours: DsaForCausalLM) -> dict[str, float]:
    """Relative error of logits, loss and every adapter gradient."""
    pack = random_pack([LENGTH], vocab=ours.config.vocab_size)
    tokens, labels, _ = pack
    assert ours.config.index_topk * 2 < LENGTH
    loss, hidden = local_loss(ours, pack)
    loss.backward()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged = _merge(theirs, ours)
    logits = theirs(tokens[None]).logits[0]
    wanted_loss = nn.functional.cross_entropy(logits, labels)
    wanted_loss.backward()
    wanted = _adapter_gradients(ours, merged)
    errors = {name: relative(got, wanted[name]) for name, got in gradients(ours).items()}
    errors["logits"] = relative(ours.logits(hidden), logits)
    errors["loss"] = relative(loss, wanted_loss)
    return errors


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_every_adapter_gradient(tiny_checkpoints, family, recompute):
    ours = tiny_model(tiny_checkpoints[family], recompute=recompute)
    errors = _compare(tiny_checkpoints[family], ours)
    assert len(errors) == len(trainable_parameters(ours)) + 2
    worst = max(errors, key=errors.__getitem__)
    print(
        f"{family}: {len(errors)} tensors, worst {worst} {errors[worst]:.2e}, logits "
        f"{errors['logits']:.2e}, loss {errors['loss']:.2e}"
    )
    assert errors[worst] < TOLERANCE, f"{worst}: {errors[worst]:.2e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_flipped_indexer_rope_is_seen(tiny_checkpoints, family):
    ours = tiny_model(tiny_checkpoints[family])
    for layer in ours.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.interleaved ^= True
    errors = _compare(tiny_checkpoints[family], ours)
    assert errors["logits"] > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_flows_at_the_first_step(tiny_checkpoints, family):
    """lora_b is zero at first, so lora_b has a gradient and lora_a has none: also inside the
    absorbed kv_b_proj.
    """
    ours = tiny_model(tiny_checkpoints[family])
    for name, parameter in trainable_parameters(ours).items():
        if name.endswith("lora_b"):
            nn.init.zeros_(parameter)
    local_loss(ours, random_pack([LENGTH], vocab=ours.config.vocab_size))[0].backward()
    for name, gradient in gradients(ours).items():
        assert (gradient.norm() > 0) == name.endswith("lora_b"), name


def test_the_latent_norms_take_the_configs_eps_or_the_one_that_is_given(tiny_checkpoints):
    """Servers take rms_norm_eps for them, 1e-5 in GLM's config; `transformers` 1e-6."""
    config = DsaConfig.load(tiny_checkpoints["glm_moe_dsa"])
    assert config.latent_norm_eps == config.rms_norm_eps == 1e-5
    for layer in tiny_model(tiny_checkpoints["glm_moe_dsa"], adapters=False).model.layers:
        attention = layer.self_attn
        assert attention.q_a_layernorm.eps == attention.kv_a_layernorm.eps == 1e-6
        assert layer.input_layernorm.eps == 1e-5
