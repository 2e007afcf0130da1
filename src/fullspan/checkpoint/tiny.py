"""Write a tiny checkpoint that has everything a released one has: the config fields, tensor names,
shards, tokenizer and chat template, with random weights.

With `fp8` the projections are block-scaled e4m3 as in GLM-5.2-FP8, in small blocks, so that weights
have several of them and ragged ones.

It is for tests and for the demo, which train on it in seconds on a CPU; it knows nothing of
language. The scales below keep every part of the model alive: no path is so weak that a mistake in
it would go unseen, and no two keys of a row get the same indexer score.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fullspan.checkpoint.load import DTYPES, meta_model
from fullspan.checkpoint.mapping import SCALE_SUFFIX
from fullspan.checkpoint.quantisation import CONFIG_KEY
from fullspan.checkpoint.safetensors_io import CONFIG_NAME, INDEX_NAME, write_checkpoint
from fullspan.data.tiny_tokenizer import TokenizerIds, write_tokenizer
from fullspan.errors import CheckpointError
from fullspan.models.dsa.checkpoint import dsa_mapping
from fullspan.models.dsa.config import DsaConfig
from fullspan.ops.fp8.op import quantise_blocks
from fullspan.ops.options import OpOptions

# Rows and columns: no divisor of most weights, and not square, so that neither can be mistaken.
FP8_BLOCK = (24, 40)
_SHARD_BYTES = 1 << 20
_PARTIAL = ".partial-checkpoint"  # subfolder in which everything is made before it is moved

Shapes = dict[str, tuple[int, ...]]


def init_tiny(
    folder: Path,
    *,
    family: str = "glm_moe_dsa",
    seed: int = 0,
    dtype: str | None = None,
    fp8: bool = False,
    mtp: bool = False,
    force: bool = False,
) -> list[Path]:
    """Write a checkpoint folder; returns the files. Equal arguments give equal files.

    Args:
        dtype: "float32" or "bfloat16" (the same weights, rounded). None: float32, and bfloat16 with
            fp8, where it is of what is not FP8.
        fp8: projections in block-scaled e4m3 beside their `weight_scale_inv`.
        mtp: add the multi-token-prediction layer that released checkpoints have. `transformers`
            reports it as unexpected at this depth, so it is off by default.
        force: write although the folder holds other files, which stay.

    Raises:
        CheckpointError: unknown family or dtype; a folder that holds other files; no space.
    """
    dtype = dtype or ("bfloat16" if fp8 else "float32")
    for setting, value, known in (("family", family, _FAMILIES), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise CheckpointError(f"{setting} is {value!r}: it must be one of {', '.join(known)}")
    partial = folder / _PARTIAL
    made = not folder.exists()
    try:
        partial.mkdir(parents=True, exist_ok=True)
        _write(partial, family, seed, DTYPES[dtype], fp8, mtp)
        return _move(partial, folder, force=force)
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint to {folder}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _write(folder: Path, family: str, seed: int, dtype: torch.dtype, fp8: bool, mtp: bool) -> None:
    fields = _FAMILIES[family](write_tokenizer(folder), str(dtype).removeprefix("torch."), mtp)
    if fp8:
        fields[CONFIG_KEY] = _quantization_config()
    (folder / CONFIG_NAME).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    config = DsaConfig.from_hf(fields)
    shapes = _shapes(config)
    if mtp:
        shapes |= _mtp_shapes(config, shapes)
    weights = _weights(shapes, config, seed, dtype)
    if fp8:
        weights = _quantised(weights, config)
    write_checkpoint(folder, weights, max_shard_bytes=_SHARD_BYTES)


def _move(partial: Path, folder: Path, *, force: bool) -> list[Path]:
    """Move all files up, the index of the weights last."""
    names = sorted((file.name for file in partial.iterdir()), key=lambda name: name == INDEX_NAME)
    others = sorted(file.name for file in folder.iterdir() if file.name not in {*names, _PARTIAL})
    if others and not force:
        raise CheckpointError(
            f"{folder} holds {others[0]}{' and more' if len(others) > 1 else ''}, no part of a "
            "tiny checkpoint: name another folder, or give --force to write beside it"
        )
    (folder / INDEX_NAME).unlink(missing_ok=True)
    return [(partial / name).rename(folder / name) for name in names]


def _shapes(config: DsaConfig) -> Shapes:
    """Checkpoint names and shapes: those of the model, through the inverse of its mapping."""
    tensors = meta_model(config, OpOptions(), recompute=False).state_dict()
    return {name: tuple(t.shape) for name, t in dsa_mapping(config).to_checkpoint(tensors)}


def _mtp_shapes(config: DsaConfig, shapes: Shapes) -> Shapes:
    """The MTP layer: a full sparse layer, and what joins a hidden state with the next token."""
    layers = list(zip(config.indexer_types, config.mlp_layer_types, strict=True))
    like = f"model.layers.{layers.index(('full', 'sparse'))}."
    mtp = f"model.layers.{config.num_hidden_layers}."
    width = config.hidden_size
    copied = {mtp + n.removeprefix(like): s for n, s in shapes.items() if n.startswith(like)}
    norms = {f"{mtp}{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return copied | norms | {f"{mtp}eh_proj.weight": (width, 2 * width)}


def _weights(
    shapes: Shapes, config: DsaConfig, seed: int, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        weight = _initial(name, torch.randn(shape, generator=generator), config.index_head_dim)
        yield name, weight if name.endswith("e_score_correction_bias") else weight.to(dtype)


def _quantised(
    weights: Iterator[tuple[str, torch.Tensor]], config: DsaConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Projections in FP8, each followed by its scale; those of the MTP layer like any other's."""
    steps = dsa_mapping(config).steps
    scaled = {piece.source for step in steps if step.scaled for piece in step.pieces()}
    kinds = {_in_layer(name) for name in scaled}
    for name, weight in weights:
        if _in_layer(name) not in kinds:
            yield name, weight
            continue
        values, scale = quantise_blocks(weight, FP8_BLOCK)
        yield name, values
        yield name + SCALE_SUFFIX, scale


def _in_layer(name: str) -> str:
    """The name without the number of its layer."""
    return ".".join(part for place, part in enumerate(name.split(".")) if place != 2)


def _quantization_config() -> dict[str, Any]:
    """As GLM-5.2-FP8 writes it. The list names what is no tensor, as released lists do."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.indexers_proj"],
        "quant_method": "fp8",
        "weight_block_size": list(FP8_BLOCK),
    }


def _initial(name: str, noise: torch.Tensor, index_dim: int) -> torch.Tensor:
    """Standard normal noise, scaled to the part that `name` plays."""
    if name.endswith("k_norm.weight"):
        return 0.8 + 0.2 * noise
    if name.endswith("k_norm.bias"):
        return 0.5 * noise
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith("e_score_correction_bias"):
        return 0.05 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    if name.endswith("indexer.wq_b.weight"):
        # Head 1 opposes head 0, so for every key one of them has a positive product. A key whose
        # products are all negative would score exactly 0, and such keys would tie.
        noise[index_dim : 2 * index_dim] = -noise[:index_dim]
    # Over 1/sqrt(inputs), with which a projection keeps the size of what it is given: averaging
    # over selected keys has shrunk o_proj's input.
    gain = 2.0 if "o_proj" in name else 1.0
    return noise * gain * noise.shape[-1] ** -0.5


def _sizes(ids: TokenizerIds) -> dict[str, Any]:
    """What both families share, by the names of the vendors' config files."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "ep_size": 1,
        "eos_token_id": ids.eos_token_id,
        "hidden_act": "silu",
        "hidden_size": 128,
        "index_head_dim": 16,
        "index_n_heads": 4,
        "index_topk": 64,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "kv_lora_rank": 32,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "pad_token_id": ids.pad_token_id,
        "pretraining_tp": 1,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": 16,
        "vocab_size": ids.vocab_size,
    }


def _glm_config(ids: TokenizerIds, dtype: str, mtp: bool) -> dict[str, Any]:
    """As GLM-5.2 writes it: one list entry a layer beside the schedule, a `head_dim` that means
    nothing, rope_parameters."""
    layers, freq, offset, dense = 6, 3, 2, 2
    shared = [max(layer - offset + 1, 0) % freq != 0 for layer in range(layers)]
    fields = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "dtype": dtype,
        "first_k_dense_replace": dense,
        "head_dim": 16,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": offset,
        "index_topk_freq": freq,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": ["shared" if is_shared else "full" for is_shared in shared],
        "max_position_embeddings": 1_048_576,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "model_type": "glm_moe_dsa",
        "moe_router_dtype": "float32",
        "n_group": 1,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": int(mtp),
        "qk_head_dim": 24,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
        "topk_group": 1,
    }
    return dict(sorted((_sizes(ids) | fields).items()))


def _deepseek_config(ids: TokenizerIds, dtype: str, mtp: bool) -> dict[str, Any]:
    """As DeepSeek-V3.2 writes it: every layer full, expert groups, yarn in rope_scaling. Yarn
    stretches 128 positions, so it changes every rotation of a pack of 200 tokens."""
    scaling = {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
        "type": "yarn",
    }
    fields = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "bos_token_id": 0,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 40 * 128,
        "model_type": "deepseek_v32",
        "n_group": 4,
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": int(mtp),
        "rms_norm_eps": 1e-6,
        "rope_scaling": scaling,
        "rope_theta": 10_000,
        "topk_group": 2,
        "torch_dtype": dtype,
    }
    return dict(sorted((_sizes(ids) | fields).items()))


_FAMILIES: dict[str, Callable[[TokenizerIds, str, bool], dict[str, Any]]] = {
    "glm_moe_dsa": _glm_config,
    "deepseek_v32": _deepseek_config,
}
