"""Adapters as tensors: the internal state that checkpoints hold, and folders in PEFT's layout.

Internally a tensor is named "<module>.lora_a" or "<module>.lora_b". A PEFT folder holds
adapter_config.json and adapter_model.safetensors; stock `peft` loads it onto the `transformers`
model. Routed experts are one 3-D parameter there and are reached through `target_parameters`:
lora_A [experts * rank, in] has its rows expert by expert, lora_B [out, rank * experts] its columns
rank by rank (column = rank index * experts + expert), and where two parameters of one module have
adapters, the first is nested in the second under "base_layer". Servers read 2-D keys of each expert
more reliably; that form can be written too. One process writes; nothing is gathered here. Reading a
folder is read.py's, merged weights are checkpoint/merge.py's.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullspan.checkpoint.safetensors_io import flush, save_tensors, writing
from fullspan.errors import CheckpointError
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import adapted_modules
from fullspan.lora.layers import LoRAGroupedLinear, LoRAModule
from fullspan.lora.per_expert import split_adapters
from fullspan.models.common.linear import GroupedLinear, Linear
from fullspan.models.dsa.attention import KVUpProjection
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.shapes import Tensor

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# PEFT turns these target_modules into the fused experts of every family whose transformers model
# maps to qwen2_moe (both of ours do), wherever they stand: dense and shared MLPs would lose their
# adapters. Named as parameters (".weight") they are left alone, and their keys are the same.
_TAKEN_FOR_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj"})


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Every adapter tensor (float32, detached, not copied) by its internal name, in model order."""
    state: dict[str, Tensor] = {}
    for name, module in adapted_modules(model).items():
        state[f"{name}.lora_a"] = module.lora_a.detach()
        state[f"{name}.lora_b"] = module.lora_b.detach()
    return state


def load_adapter_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy values into the model's adapters; names and shapes must agree exactly.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape. Nothing is changed.
    """
    own = adapter_state(model)
    check_names(state, own, "the adapter state")
    for name, tensor in own.items():
        if state[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name} has shape {list(state[name].shape)} in the adapter state, but the model "
                f"needs {list(tensor.shape)}: lora.r or the base model differs"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


def to_peft(
    model: DsaForCausalLM,
    config: LoraConfig,
    base_model_path: Path | str,
    folder: Path,
    *,
    per_expert: bool = False,
) -> None:
    """Write the model's adapters as a PEFT folder.

    Both files are complete before either gets its name, and the configuration, without which PEFT
    loads nothing, comes last: a half-written adapter is never picked up. Other files stay.

    Args:
        config: the settings that the adapters were injected with; its r and alpha are written.
        base_model_path: goes into base_model_name_or_path.
        per_expert: routed experts by the names of the checkpoint's own 2-D matrices
            ("...mlp.experts.7.gate_proj.lora_A.weight"; gate and up share A and split B), as vLLM
            and SGLang read them. Stock `peft` cannot load that form onto fused experts.

    Raises:
        CheckpointError: the model has no adapters, or a file cannot be written.
    """
    modules = adapted_modules(model)
    if not modules:
        raise CheckpointError("the model has no adapters to write")
    assert all(module.scale == config.alpha / config.r for module in modules.values())
    for name, module in modules.items():
        if isinstance(module, LoRAGroupedLinear):
            assert len(module.lora_a) == module.base.experts, f"{name} holds a part of the experts"
    if per_expert:
        tensors, targets = _per_expert(model, modules)
    else:
        tensors = {
            f"{key}.lora_{side.upper()}.weight": fold(modules[name], side).cpu().contiguous()
            for name, key in peft_keys(modules).items()
            for side in ("a", "b")
        }
        targets = _targets(model)
    _write(folder, tensors, _peft_config(config, str(base_model_path), targets))


def _per_expert(
    model: DsaForCausalLM, modules: Mapping[str, LoRAModule]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and what the configuration calls them: servers go by the last part of a name.

    Every tensor is memory of its own, on the CPU: a file holds no two names of one memory.
    """
    split = split_adapters(model.config, modules)
    matrices = {name.removesuffix(".weight"): found for name, found in split.items()}
    tensors = {
        f"{_PREFIX}{name}.lora_{side}.weight": tensor.cpu().clone()
        for name, found in matrices.items()
        for side, tensor in (("A", found.a), ("B", found.b))
    }
    endings = sorted({name.rpartition(".")[2] for name in matrices})
    return tensors, {"target_modules": endings, "target_parameters": None}


def fold(module: LoRAModule, side: str) -> Tensor:
    """One adapter matrix as PEFT holds it; that of experts loses its first dimension."""
    tensor = (module.lora_a if side == "a" else module.lora_b).detach()
    if not isinstance(module, LoRAGroupedLinear):
        return tensor
    # [experts, rank, in] -> [experts * rank, in]; [experts, out, rank] -> [out, rank * experts]
    return tensor.flatten(0, 1) if side == "a" else tensor.permute(1, 2, 0).flatten(1)


def peft_keys(modules: Mapping[str, LoRAModule]) -> dict[str, str]:
    """Adapted module -> start of its keys in a PEFT file.

    PEFT wraps the module that owns a parameter once for every parameter with an adapter, the first
    innermost: gate_up_proj is at experts.base_layer if down_proj has an adapter, else at experts.
    """
    owned: dict[str, list[str]] = {}
    for name, module in modules.items():
        if isinstance(module, LoRAGroupedLinear):
            owned.setdefault(name.rpartition(".")[0], []).append(name)
    keys = {name: f"{_PREFIX}{name}" for name in modules}
    for owner, names in owned.items():
        for depth, name in enumerate(reversed(names)):
            keys[name] = f"{_PREFIX}{owner}{'.base_layer' * depth}"
    return keys


def weight_names(model: nn.Module) -> dict[str, str]:
    """Module that could have an adapter -> its weight's name in the `transformers` model, where
    that of routed experts ends in the module's own."""
    return {
        module.removesuffix(".base"): module.removesuffix(".base") + ending
        for module, found in model.named_modules()
        for kind, ending in ((Linear, ".weight"), (KVUpProjection, ".weight"), (GroupedLinear, ""))
        if type(found) is kind
    }


def _targets(model: nn.Module) -> dict[str, Any]:
    """What `peft` is to adapt: modules, and the parameters of routed experts."""
    weights = weight_names(model)
    adapted = adapted_modules(model)
    by_module = [
        name
        for name, module in adapted.items()
        if not isinstance(module, LoRAGroupedLinear)
        and name.rpartition(".")[2] not in _TAKEN_FOR_EXPERTS
    ]
    by_parameter = [weights[name] for name in adapted if name not in set(by_module)]
    return {
        "target_modules": _shortest(by_module, weights, 1),
        "target_parameters": _shortest(by_parameter, weights.values(), 2) or None,
    }


def _peft_config(
    config: LoraConfig, base_model_path: str, targets: dict[str, Any]
) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_path,
        "r": config.r,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        **targets,
    }


def _shortest(chosen: Sequence[str], universe: Iterable[str], width: int) -> list[str]:
    """Endings of at least `width` parts that together select exactly the chosen names."""
    wanted, everything = set(chosen), list(universe)
    endings: set[str] = set()
    for name in chosen:
        parts = name.split(".")
        endings.add(
            next(
                ending
                for ending in (".".join(parts[-n:]) for n in range(width, len(parts) + 1))
                if wanted.issuperset(n for n in everything if ends(n, ending))
            )
        )
    return sorted(endings)


def ends(name: str, ending: str) -> bool:
    """Whether the last parts of a dotted name are those of `ending`."""
    return f".{name}".endswith(f".{ending}")


def check_names(state: Collection[str], own: Collection[str], where: str) -> None:
    """CheckpointError: `where` has not exactly the names of `own`."""
    for what, names in (
        ("does not hold", [name for name in own if name not in state]),
        ("holds the unknown", [name for name in state if name not in own]),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{where} {what} {names[0]}{more}: its targets or base model are not this model's"
            )


def _write(folder: Path, tensors: dict[str, Tensor], fields: dict[str, Any]) -> None:
    weights, config = folder / f".{WEIGHTS_NAME}.partial", folder / f".{CONFIG_NAME}.partial"
    try:
        with writing(f"the adapter to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors(weights, tensors)
            config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
            flush(config)
            (folder / CONFIG_NAME).unlink(missing_ok=True)
            weights.replace(folder / WEIGHTS_NAME)
            config.replace(folder / CONFIG_NAME)
    finally:
        for file in (weights, config):
            with suppress(OSError):
                file.unlink(missing_ok=True)
