"""An exported adapter in stock `transformers` + `peft` gives our logits, loaded and merged.

In float32, on texts longer than index_topk, with lora_b far from zero so that every adapter shows.
"""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from fullspan.cli.main import main
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import adapted_modules, inject, trainable_parameters
from fullspan.lora.layers import LoRAGroupedLinear
from fullspan.lora.state import adapter_state, to_peft
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.packed import PackedLayout
from fullspan.parallel.context import SequenceContext
from fullspan.parallel.expert import ExpertParallel
from fullspan.parallel.sequence import Partition
from fullspan.train.schedule import OptimConfig
from fullspan.train.session import Session
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
    experts = ExpertParallel(experts=model.config.n_routed_experts)
    sequence = SequenceContext.create(layout, partition, experts=experts)
    return model.logits(model(tokens, sequence))


def _stock(folder) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _loaded(base: nn.Module, adapter) -> PeftModel:
    with warnings.catch_warnings():
        # transformers announces a renamed property that peft 0.21 still reads.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        return PeftModel.from_pretrained(base, adapter)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *(pytest.param("glm_moe_dsa", targets, id=name) for name, targets in TARGETS.items()),
        pytest.param("deepseek_v32", EVERY_TARGET, id="deepseek_v32"),
    ],
)
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


def _run_folder(checkpoint: Path, folder: Path) -> Path:
    """Three steps by the command line, on every target; returns the folder of the run."""
    model, data, config = folder / "model", folder / "data.jsonl", folder / "config.toml"
    shutil.copytree(checkpoint, model)
    fields = json.loads((model / "config.json").read_text())
    # transformers has this eps whatever the file says; the default here is that of the servers.
    (model / "config.json").write_text(json.dumps(fields | {"latent_norm_eps": 1e-6}))
    rows = [{"text": " ".join(str(row * n % 97) for n in range(60))} for row in range(1, 7)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.write_text(
        f"""
        [model]
        path = "{model}"
        dtype = "float32"
        [lora]
        r = 3
        alpha = 6
        targets = {json.dumps(EVERY_TARGET)}
        [data]
        path = "{data}"
        pack_length = 384
        [optim]
        lr = 2e-2
        schedule = "constant"
        [train]
        steps = 3
        output_dir = "{folder / "run"}"
        [checkpoint]
        every = 2
        """
    )
    assert main(["train", str(config)]) == 0
    return folder / "run"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_run_gives_the_logits_of_the_trained_model(
    tiny_checkpoints, tmp_path, capsys, family
):
    run = _run_folder(tiny_checkpoints[family], tmp_path)
    ours = tiny_model(tmp_path / "model", adapters=False)
    inject(ours, LoraConfig(r=3, alpha=6, targets=EVERY_TARGET))
    session = Session(ours, trainable_parameters(ours), optim=OptimConfig(lr=2e-2), total_steps=3)
    session.load(run / "checkpoints" / "step-3")
    assert all(value.any() for name, value in adapter_state(ours).items() if name[-1] == "b")

    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    tokens = _tokens(ours)
    base = _stock(tmp_path / "model")
    with torch.no_grad():
        plain = base(tokens[None]).logits[0]
        logits = _loaded(base, tmp_path / "out")(tokens[None]).logits[0]
    error = relative(_our_logits(ours, tokens), logits)
    print(f"{family}: logits {error:.2e}, training changed them by {relative(logits, plain):.2e}")
    assert error < TOLERANCE
    assert relative(logits, plain) > 1000 * TOLERANCE

    # The folder that training itself wrote is the same; an earlier step is another adapter.
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (run / "adapter" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert main(["export", str(run), "--step", "2"]) == 0
    other = _loaded(_stock(tmp_path / "model"), run / "adapter-step-2")
    with torch.no_grad():
        earlier = other(tokens[None]).logits[0]
    assert relative(earlier, logits) > 100 * TOLERANCE
    _damaged_checkpoints_are_one_line(run, capsys)


def _damaged_checkpoints_are_one_line(run: Path, capsys) -> None:
    """The files keep their sizes, so only reading them shows the damage."""
    (tensors,) = (run / "checkpoints" / "step-3").glob("*.distcp")
    for file in (tensors, tensors.with_name(".metadata")):
        file.write_bytes(bytes([7]) * file.stat().st_size)
        capsys.readouterr()
        assert main(["export", str(run)]) == 2
        message = capsys.readouterr().err
        assert "cannot read the adapters in" in message
        assert message.count("\n") == 1


def test_a_run_without_a_checkpoint_cannot_be_exported(tmp_path, capsys):
    assert main(["export", str(tmp_path)]) == 2
    assert f"no config.toml in {tmp_path}" in capsys.readouterr().err
