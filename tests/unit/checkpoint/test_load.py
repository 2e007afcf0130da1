"""Loading a model: values, dtypes and devices are right, memory is bounded, faults are told."""

import json
from pathlib import Path

import pytest
import torch

from fullspan.checkpoint.load import load_model, meta_model, progress_bar
from fullspan.checkpoint.safetensors_io import CheckpointFolder, write_checkpoint
from fullspan.checkpoint.tiny import init_tiny
from fullspan.errors import CheckpointError
from fullspan.models.dsa.checkpoint import dsa_mapping
from fullspan.models.dsa.config import DsaConfig
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.options import OpOptions
from tests.support.memory import peak_bytes
from tests.support.tiny import FAMILIES
from tests.unit.checkpoint.conftest import all_tensors, edit, shards


def load(folder: Path, dtype: torch.dtype = torch.float32, **options) -> DsaForCausalLM:
    return load_model(
        folder, dtype=dtype, device="cpu", options=OpOptions(), recompute=False, **options
    )


def refused(folder: Path, *told: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in told:
        assert part in message, message


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_has_the_value_of_the_file(tiny_checkpoints, family):
    folder = tiny_checkpoints[family]
    files = all_tensors(folder)
    for name, tensor in load(folder).state_dict().items():
        assert tensor.device.type == "cpu"
        if ".mlp.experts." in name:
            prefix, kind = name.removesuffix(".weight").rsplit(".", 1)
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            experts = [[files[f"{prefix}.{e}.{part}.weight"] for part in parts] for e in range(8)]
            wanted = torch.stack([torch.cat(expert) for expert in experts])
        else:
            wanted = files[name]
        assert torch.equal(tensor, wanted), name


def test_everything_is_frozen(tiny_checkpoints):
    model = load(tiny_checkpoints["glm_moe_dsa"])
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_bfloat16_model_keeps_router_and_head_weights_in_float32(folder):
    """Their values too: not rounded to bfloat16 on the way."""
    model = load(folder, torch.bfloat16)
    files = all_tensors(folder)
    kept = {n for n, t in model.state_dict().items() if t.dtype == torch.float32}
    assert kept == {
        *(f"model.layers.{i}.self_attn.indexer.weights_proj.weight" for i in (0, 1, 4)),
        *(f"model.layers.{i}.mlp.gate.weight" for i in range(2, 6)),
        *(f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in range(2, 6)),
    }
    for name in kept:
        assert torch.equal(model.state_dict()[name], files[name])
    embedding = model.state_dict()["model.embed_tokens.weight"]
    assert torch.equal(embedding, files["model.embed_tokens.weight"].bfloat16())


def test_bfloat16_files_load_in_float32(tmp_path):
    init_tiny(tmp_path, dtype="bfloat16")
    head = load(tmp_path).lm_head.weight
    assert head.dtype == torch.float32
    assert torch.equal(head, all_tensors(tmp_path)["lm_head.weight"].float())


def test_the_mtp_layer_is_not_loaded(tmp_path):
    init_tiny(tmp_path, mtp=True)
    assert any(name.startswith("model.layers.6.") for name in all_tensors(tmp_path))
    assert len(load(tmp_path).model.layers) == 6


def test_latent_norm_eps_can_be_set(tiny_checkpoints):
    folder = tiny_checkpoints["glm_moe_dsa"]
    assert load(folder).config.latent_norm_eps == 1e-5
    assert load(folder, latent_norm_eps=1e-6).config.latent_norm_eps == 1e-6


def test_progress_counts_every_byte_once(tiny_checkpoints):
    folder = tiny_checkpoints["glm_moe_dsa"]
    calls: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: calls.append((done, total)))
    total = sum(info.nbytes for info in CheckpointFolder.open(folder).tensors.values())
    assert calls == sorted(calls) and calls[-1] == (total, total)
    assert {whole for _, whole in calls} == {total}
    with progress_bar("Loading") as show:
        load(folder, progress=show)


def test_truncated_shard(folder):
    file = shards(folder)[1]
    file.write_bytes(file.read_bytes()[:-1])
    refused(folder, str(file), "truncated")


def test_missing_shard(folder):
    shards(folder)[1].unlink()
    refused(folder, shards(folder)[0].parent.name, "is missing")


def test_missing_tensor(folder):
    edit(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.kv_b_proj.weight"))
    refused(folder, "1 missing tensor: model.layers.1.self_attn.kv_b_proj.weight")


def test_extra_tensor(folder):
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.ones(2)}))
    refused(folder, "1 unexpected tensor: model.layers.0.self_attn.q_proj.weight")


def test_indexer_on_a_shared_layer(folder):
    name = "model.layers.2.self_attn.indexer.wk.weight"
    edit(folder, lambda t: t.update({name: t["model.layers.1.self_attn.indexer.wk.weight"] + 0}))
    refused(folder, name, "layer 2 a shared layer, which owns no indexer")


def test_wrong_shape(folder):
    name = "model.layers.3.mlp.experts.7.up_proj.weight"
    edit(folder, lambda t: t.update({name: torch.zeros(63, 128)}))
    refused(folder, f"{name} in {folder} has shape [63, 128]", "[64, 128]")


def test_config_of_another_width(folder):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"vocab_size": 321}))
    refused(folder, "model.embed_tokens.weight", "[320, 128]", "[321, 128]")


def test_fp8_without_a_scale_is_refused_by_name(folder):
    name = "model.layers.0.self_attn.o_proj.weight"
    edit(folder, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    refused(folder, name, "float8_e4m3fn without a scale", f"{name}_scale_inv")


def test_loading_holds_one_copy(tmp_path):
    """Loading 100 MB costs the weights and a few open shards: a second copy would be found."""
    init_tiny(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text()) | {"moe_intermediate_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = DsaConfig.load(tmp_path)
    model = meta_model(config, OpOptions(), recompute=False).state_dict()
    zeros = ((n, torch.zeros(t.shape)) for n, t in dsa_mapping(config).to_checkpoint(model))
    write_checkpoint(tmp_path, zeros, max_shard_bytes=4 << 20)
    weights = sum(info.nbytes for info in CheckpointFolder.open(tmp_path).tensors.values())

    assert weights > 100e6
    assert weights <= peak_bytes(lambda: load(tmp_path)) < 1.3 * weights
