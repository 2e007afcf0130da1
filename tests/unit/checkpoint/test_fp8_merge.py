"""Merged checkpoints: base plus adapters, in BF16 and back in FP8, after a run on an FP8 base.

A run of two steps on the command line is exported in every form, once for the whole module.
"""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from fullspan.checkpoint.adapter import read_adapters
from fullspan.checkpoint.load import load_model
from fullspan.checkpoint.merge import rewrite
from fullspan.checkpoint.safetensors_io import CheckpointFolder
from fullspan.checkpoint.tiny import FP8_BLOCK, init_tiny
from fullspan.cli.main import main
from fullspan.errors import CheckpointError
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import adapted_modules, inject, trainable_parameters
from fullspan.lora.state import load_adapter_state
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.fp8.op import dequantise_blocks
from fullspan.ops.options import OpOptions
from fullspan.ops.packed import PackedLayout
from fullspan.parallel.context import SequenceContext
from fullspan.parallel.expert import ExpertParallel
from fullspan.parallel.sequence import Partition
from tests.support.memory import peak_bytes
from tests.support.tiny import EVERY_TARGET, relative
from tests.unit.checkpoint.conftest import all_tensors

LENGTH = 150  # the tiny checkpoint's index_topk is 64
LAYER = "model.layers.3."
# Module and the rows of its adapter that each checkpoint tensor takes.
ADAPTED = {
    f"{LAYER}self_attn.q_b_proj": (f"{LAYER}self_attn.q_b_proj", None, slice(None)),
    f"{LAYER}self_attn.kv_b_proj": (f"{LAYER}self_attn.kv_b_proj", None, slice(None)),
    f"{LAYER}mlp.experts.5.gate_proj": (f"{LAYER}mlp.experts.gate_up_proj", 5, slice(0, 64)),
    f"{LAYER}mlp.experts.5.up_proj": (f"{LAYER}mlp.experts.gate_up_proj", 5, slice(64, 128)),
    f"{LAYER}mlp.experts.0.down_proj": (f"{LAYER}mlp.experts.down_proj", 0, slice(None)),
    f"{LAYER}mlp.shared_experts.up_proj": (f"{LAYER}mlp.shared_experts.up_proj", None, slice(None)),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run on an FP8 base, with everything exported; `model` beside it."""
    folder = tmp_path_factory.mktemp("merge")
    init_tiny(folder / "model", fp8=True, mtp=True)
    fields = json.loads((folder / "model" / "config.json").read_text())
    # transformers has this eps whatever the file says; the default here is that of the servers.
    text = json.dumps(fields | {"latent_norm_eps": 1e-6})
    (folder / "model" / "config.json").write_text(text)
    rows = [{"text": " ".join(str(row * n % 97) for n in range(60))} for row in range(1, 5)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text(
        f"""
        [model]
        path = "{folder / "model"}"
        [lora]
        r = 3
        alpha = 6
        targets = {json.dumps(EVERY_TARGET)}
        [data]
        path = "{folder / "data.jsonl"}"
        pack_length = 256
        [optim]
        lr = 2e-2
        schedule = "constant"
        [train]
        steps = 2
        output_dir = "{folder / "run"}"
        """
    )
    assert main(["train", str(folder / "config.toml")]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def trained(run) -> DsaForCausalLM:
    """The trained model in float32: FP8 weights dequantised exactly, adapters beside them."""
    model = _load(run.parent / "model")
    _adapt(model, run)
    return model


def _adapt(model: DsaForCausalLM, run: Path) -> None:
    """Give it the adapters at the end of the run."""
    inject(model, LoraConfig(r=3, alpha=6, targets=EVERY_TARGET))
    load_adapter_state(model, read_adapters(run / "checkpoints" / "step-2"))


@pytest.fixture(scope="module")
def bf16(run) -> Path:
    assert main(["export", str(run), "--format", "merged"]) == 0
    return run / "merged"


@pytest.fixture(scope="module")
def fp8(run) -> Path:
    output = run / "merged-fp8"
    command = ["export", str(run), "--format", "merged", "--dtype", "fp8", "--output", str(output)]
    assert main(command) == 0
    return output


def _load(folder: Path) -> DsaForCausalLM:
    return load_model(
        folder, dtype=torch.float32, device="cpu", options=OpOptions(), recompute=False
    )


@torch.no_grad()
def _logits(model: DsaForCausalLM) -> torch.Tensor:
    layout = PackedLayout(cu_seqlens=torch.tensor([0, LENGTH]), padded_length=LENGTH)
    experts = ExpertParallel(experts=model.config.n_routed_experts)
    sequence = SequenceContext.create(layout, Partition(size=1, length=LENGTH), experts=experts)
    return model.logits(model(_tokens(), sequence))


def _tokens() -> torch.Tensor:
    return torch.randint(0, 320, (LENGTH,), generator=torch.Generator().manual_seed(0))


def _dense(files: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    scale = files.get(f"{name}_scale_inv")
    if scale is None:
        return files[name].float()
    return dequantise_blocks(files[name], scale, FP8_BLOCK, torch.float32)


def _sums(run: Path, trained: DsaForCausalLM) -> dict[str, torch.Tensor]:
    """W + alpha / r * B A of the tensors in ADAPTED, from the adapter's own matrices."""
    base = all_tensors(run.parent / "model")
    found = {}
    for name, (module, expert, rows) in ADAPTED.items():
        adapter = adapted_modules(trained)[module]
        a, b = adapter.lora_a.detach(), adapter.lora_b.detach()
        a, b = (a, b) if expert is None else (a[expert], b[expert])
        assert b.any()
        found[f"{name}.weight"] = _dense(base, f"{name}.weight") + 2.0 * (b[rows] @ a)
    return found


def test_bf16_holds_the_rounded_sums(run, trained, bf16):
    files = all_tensors(bf16)
    for name, wanted in _sums(run, trained).items():
        assert files[name].dtype == torch.bfloat16
        # An element at a tie may round either way: the sum is made in another order.
        assert (files[name].float() - wanted).abs().max() <= wanted.abs().max() * 2.0**-8
        assert relative(files[name], wanted.bfloat16()) < 1e-4, name
    assert not any(tensor.dtype == torch.float8_e4m3fn for tensor in files.values())
    assert not any("_scale" in name for name in files)
    fields = json.loads((bf16 / "config.json").read_text())
    assert "quantization_config" not in fields and fields["dtype"] == "bfloat16"
    base = run.parent / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (bf16 / name).read_bytes() == (base / name).read_bytes()


def test_merging_changes_nothing_else(run, bf16, fp8):
    base = all_tensors(run.parent / "model")
    merged, back = all_tensors(bf16), all_tensors(fp8)
    assert back.keys() == base.keys()
    assert merged.keys() == {name for name in base if not name.endswith("_scale_inv")}
    frozen = [n for n in base if ".indexer." in n or "norm" in n or ".gate." in n]
    mtp = [n for n in base if n.startswith("model.layers.6.")]
    assert len(frozen) > 20 and len(mtp) > 60
    for name in [*frozen, *mtp, "lm_head.weight", "model.embed_tokens.weight"]:
        assert back[name].dtype == base[name].dtype
        assert torch.equal(back[name].float(), base[name].float()), name
        if name in merged:
            wanted = _dense(base, name)
            kept = base[name].dtype if base[name].dtype == torch.float32 else torch.bfloat16
            assert torch.equal(merged[name], wanted.to(kept)), name


def test_fp8_is_requantised_and_its_error_reported(run, trained, fp8, capsys):
    files = all_tensors(fp8)
    for name, wanted in _sums(run, trained).items():
        assert files[name].dtype == torch.float8_e4m3fn
        # e4m3 rounds to 2^-4 of a value at most; 0.026 on average of a normal distribution.
        assert 0.01 < relative(_dense(files, name), wanted) < 0.035
    report = json.loads((fp8 / "merge_report.json").read_text())
    assert report["format"] == "fp8" and report["tensors"] == len(files)
    errors = report["errors"]
    assert "self_attn.q_b_proj" in errors and "mlp.experts.up_proj" in errors
    assert not any("indexer" in kind or "MTP" in kind for kind in errors)
    _error_is_that_of_the_files(run, trained, files, errors["self_attn.q_b_proj"])


def _error_is_that_of_the_files(run, trained, files, reported) -> None:
    """Recomputed from what is in the folders, over the six layers."""
    base = all_tensors(run.parent / "model")
    error = exact = change = largest = 0.0
    for layer in range(6):
        module = f"model.layers.{layer}.self_attn.q_b_proj"
        adapter = adapted_modules(trained)[module]
        added = 2.0 * (adapter.lora_b @ adapter.lora_a).detach()
        wanted = _dense(base, f"{module}.weight") + added
        missed = _dense(files, f"{module}.weight") - wanted
        largest = max(largest, missed.abs().max().item())
        error += missed.double().square().sum().item()
        exact += wanted.double().square().sum().item()
        change += added.double().square().sum().item()
    assert reported["tensors"] == reported["adapted"] == 6
    assert reported["largest"] == pytest.approx(largest, rel=1e-4)
    assert reported["relative"] == pytest.approx(math.sqrt(error / exact), rel=1e-4)
    assert reported["of_change"] == pytest.approx(math.sqrt(error / change), rel=1e-4)


def _without_choices(folder: Path, copy: Path) -> Path:
    """The same weights with every key and every expert chosen. Rounding tips choices, and a row
    with another expert is another row: with none to make, logits show the rounding itself.
    """
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).symlink_to(file)
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"index_topk": LENGTH, "num_experts_per_tok": 8}
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(fields))
    return copy


def test_merged_models_give_the_trained_models_logits(run, bf16, fp8, tmp_path):
    """Within what rounding the weights costs: bfloat16 moves each by 2^-9 at most, e4m3 by 0.026 of
    their norm; six layers of a few products add up to some times that.
    """
    trained = _load(_without_choices(run.parent / "model", tmp_path / "trained"))
    base = _logits(trained)
    _adapt(trained, run)
    wanted = _logits(trained)
    found = {
        path.name: relative(_logits(_load(_without_choices(path, tmp_path / path.name))), wanted)
        for path in (bf16, fp8)
    }
    print(f"logits: training changed {relative(base, wanted):.1e}, merged {found}")
    assert found["merged"] < 0.01
    assert found["merged-fp8"] < 0.15
    assert relative(base, wanted) > 2 * found["merged-fp8"]


def test_transformers_loads_the_bf16_merge_and_agrees(bf16):
    model, info = AutoModelForCausalLM.from_pretrained(
        bf16, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(name.startswith("model.layers.6.") for name in info["unexpected_keys"])
    with torch.no_grad():
        logits = model.eval()(_tokens()[None]).logits[0]
    assert relative(_logits(_load(bf16)), logits) < 1e-5


def test_the_command_prints_the_errors(run, capsys, tmp_path):
    command = ["export", str(run), "--format", "merged", "--dtype", "fp8", "--step", "2"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "rounding error" in out and "self_attn.kv_b_proj" in out
    assert f"{run / 'merged-step-2'}: step-2 merged" in out
    for options, told in (
        (["--format", "merged"], "is not an empty folder"),
        (["--format", "peft", "--dtype", "bf16"], "--dtype says nothing about --format peft"),
        (["--format", "merged", "--base-model", "x"], "--base-model says nothing about --format"),
    ):
        assert main(["export", str(run), *options, "--output", str(run)]) == 2
        message = capsys.readouterr().err
        assert told in message and message.count("\n") == 1


def test_adapters_per_expert(run, trained):
    assert main(["export", str(run), "--format", "peft-per-expert"]) == 0
    tensors = load_file(run / "adapter-per-expert" / "adapter_model.safetensors")
    assert all(tensor.ndim == 2 for tensor in tensors.values())
    base = all_tensors(run.parent / "model")
    for name, wanted in _sums(run, trained).items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"]
        assert torch.allclose(_dense(base, name) + 2.0 * (b @ a), wanted, atol=1e-6)
    expert = f"base_model.model.{LAYER}mlp.experts.5."
    gate, up = (tensors[f"{expert}{part}_proj.lora_A.weight"] for part in ("gate", "up"))
    assert torch.equal(gate, up)
    names = {key.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for key in tensors}
    assert {f"{name}.weight" for name in names} <= base.keys()
    config = json.loads((run / "adapter-per-expert" / "adapter_config.json").read_text())
    assert config["r"] == 3 and config["lora_alpha"] == 6
    assert config["target_parameters"] is None
    assert set(config["target_modules"]) == {name.rpartition(".")[2] for name in names}


def test_a_bf16_base_merges_and_cannot_become_fp8(tiny_checkpoints, tmp_path):
    model = _load(tiny_checkpoints["glm_moe_dsa"])
    inject(model, LoraConfig(r=2, alpha=2.0, targets=("o_proj",)))
    for name, parameter in trainable_parameters(model).items():
        if name.endswith("lora_b"):
            nn.init.constant_(parameter, 0.01)
    modules = adapted_modules(model)
    with pytest.raises(CheckpointError, match=r"--dtype fp8: .* has no FP8 tensor"):
        rewrite(tiny_checkpoints["glm_moe_dsa"], tmp_path / "fp8", modules, format="fp8")
    report = rewrite(tiny_checkpoints["glm_moe_dsa"], tmp_path / "bf16", modules)
    assert report.adapted == 6 and report.errors["self_attn.o_proj"].adapted == 6
    dtypes = {name: i.dtype for name, i in CheckpointFolder.open(tmp_path / "bf16").tensors.items()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert {name.split(".")[-2] for name in kept} == {"gate", "weights_proj"}
    written = all_tensors(tmp_path / "bf16")
    name = f"{LAYER}self_attn.o_proj"
    wanted = all_tensors(tiny_checkpoints["glm_moe_dsa"])[f"{name}.weight"]
    wanted = wanted + modules[name].lora_b.detach() @ modules[name].lora_a.detach() / 2 * 2
    assert relative(written[f"{name}.weight"], wanted.bfloat16()) < 1e-4


def test_a_weight_that_is_not_finite_is_not_written(tmp_path):
    init_tiny(tmp_path / "model", fp8=True)
    model = _load(tmp_path / "model")
    inject(model, LoraConfig(r=2, alpha=2.0, targets=("layers.4.self_attn.o_proj",)))
    next(iter(trainable_parameters(model).values())).data[0, 0] = float("nan")
    for format in ("bf16", "fp8"):
        with pytest.raises(CheckpointError, match=r"o_proj.weight .*not finite"):
            rewrite(tmp_path / "model", tmp_path / format, adapted_modules(model), format=format)
        assert not list((tmp_path / format).iterdir())


def test_one_shard_is_in_memory_at_a_time(run, tmp_path):
    """From shards of 64 KiB to shards of 64 KiB holds one of them and the arithmetic of one tensor;
    to a single shard, all that is written.
    """
    source = tmp_path / "small"
    rewrite(run.parent / "model", source, {}, format="fp8", max_shard_bytes=1 << 16)
    small, whole = (
        peak_bytes(
            lambda limit=limit: rewrite(source, tmp_path / str(limit), {}, max_shard_bytes=limit)
        )
        for limit in (1 << 16, 1 << 30)
    )
    written = sum(i.nbytes for i in CheckpointFolder.open(tmp_path / "65536").tensors.values())
    print(f"peak {small:,} bytes, with one shard {whole:,}, written {written:,}")
    assert small < written / 2
    assert whole - small > 0.8 * written


def test_a_full_disk_is_found_before_the_first_byte(run, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3_000_000))
    source = run.parent / "model"
    rewrite(source, tmp_path / "a" / "fp8", {}, format="fp8")
    with pytest.raises(CheckpointError, match=r"needs 0.0 GB, but 0.0 GB are free"):
        rewrite(source, tmp_path / "a" / "bf16", {})
    assert not (tmp_path / "a" / "bf16").exists()


def test_scales_that_are_powers_of_two_stay_so(run, tmp_path):
    """scale_fmt ue8m0, as DeepSeek-V3.2 has it."""
    init_tiny(tmp_path / "model", fp8=True)
    path = tmp_path / "model" / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"]["scale_fmt"] = "ue8m0"
    path.write_text(json.dumps(fields))
    for shard in (tmp_path / "model").glob("*.safetensors"):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            if name.endswith("_scale_inv"):
                tensors[name] = tensor.log2().ceil().exp2()
        save_file(tensors, shard, metadata={"format": "pt"})
    model = _load(tmp_path / "model")
    _adapt(model, run)
    rewrite(tmp_path / "model", tmp_path / "out", adapted_modules(model), format="fp8")
    scale = all_tensors(tmp_path / "out")[f"{LAYER}self_attn.q_b_proj.weight_scale_inv"]
    assert torch.equal(scale.log2(), scale.log2().round())
