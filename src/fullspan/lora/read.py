"""PEFT folders read back: into the adapters that a model has, or into new ones.

The form that state.py writes for stock `peft`, not that with 2-D keys of each expert. Every key of
a file is used and every adapter is filled; whatever stands for another computation than plain LoRA
is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fullspan.errors import CheckpointError, ConfigError
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import adapted_modules, inject
from fullspan.lora.layers import LoRAGroupedLinear, LoRAModule
from fullspan.lora.state import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    check_names,
    ends,
    fold,
    load_adapter_state,
    peft_keys,
    weight_names,
)
from fullspan.shapes import Tensor

# Options with one value that is understood, and those whose value changes nothing that is read
# here. Of every other one only null, false or nothing is: it stands for more than plain LoRA.
_ONLY = {"peft_type": "LORA", "bias": "none"}
_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "layers_pattern",
    "lora_alpha", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "r",
    "revision", "runtime_config", "target_modules", "target_parameters", "task_type",
})  # fmt: skip
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")  # that leave the base as it is


def from_peft(folder: Path, model: nn.Module) -> LoraConfig:
    """Read a PEFT folder into the model, which is given the adapters if it has none yet.

    Returns the settings that the folder stands for; its targets are full module names.

    Raises:
        CheckpointError: a file is missing or damaged, asks for what is not implemented, or fits
            neither the model nor the adapters that it already has.
    """
    fields = _read_config(folder)
    tensors = _read_weights(folder)
    try:
        config = LoraConfig(
            r=fields["r"], alpha=fields["lora_alpha"], targets=_named_modules(model, fields)
        )
        if not adapted_modules(model):
            inject(model, config)
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG_NAME}: {error}") from None
    modules = adapted_modules(model)
    _check_same(folder, config, modules)
    keys = {
        f"{key}.lora_{side.upper()}.weight": (name, side)
        for name, key in peft_keys(modules).items()
        for side in ("a", "b")
    }
    check_names(tensors, keys, str(folder / WEIGHTS_NAME))
    state = {
        f"{name}.lora_{side}": _unfold(key, modules[name], side, tensors[key])
        for key, (name, side) in keys.items()
    }
    load_adapter_state(model, state)
    return config


def _unfold(key: str, module: LoRAModule, side: str, tensor: Tensor) -> Tensor:
    """The inverse of `fold`."""
    expected = fold(module, side).shape
    if tensor.shape != expected:
        raise CheckpointError(
            f"{key} has shape {list(tensor.shape)}, but the model needs {list(expected)}: "
            "the adapter belongs to another base model"
        )
    if not isinstance(module, LoRAGroupedLinear):
        return tensor
    experts = module.lora_a.shape[0]
    if side == "a":
        return tensor.unflatten(0, (experts, -1))
    return tensor.unflatten(1, (-1, experts)).permute(2, 0, 1)


def _named_modules(model: nn.Module, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that a PEFT configuration selects, by PEFT's rules."""
    chosen: set[str] = set()
    weights = weight_names(model)
    modules = {name: name for name, weight in weights.items() if name != weight}
    for option, names in (("target_modules", modules), ("target_parameters", weights)):
        endings = fields.get(option) or []
        if not isinstance(endings, list):
            raise ConfigError(f"{option} is {endings!r}: only a list of names can be read")
        chosen |= {n for n, named in names.items() if any(ends(named, end) for end in endings)}
    if not chosen:
        raise ConfigError("target_modules and target_parameters name no module of this model")
    return tuple(name for name in weights if name in chosen)


def _check_same(folder: Path, config: LoraConfig, modules: Mapping[str, LoRAModule]) -> None:
    """The adapters that the model already has must be those of the folder."""
    differing = set(config.targets).symmetric_difference(modules)
    if differing:
        name = min(differing)
        has, lacks = ("the model", folder) if name in modules else (folder, "the model")
        raise CheckpointError(f"{has} has an adapter on {name}, {lacks} has none: targets differ")
    for name, module in modules.items():
        if module.scale != config.alpha / config.r:
            raise CheckpointError(
                f"{folder} scales its adapters by lora_alpha / r = {config.alpha / config.r}, the "
                f"model's {name} by {module.scale}: lora.alpha and lora.r must be the folder's"
            )


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_NAME
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no {CONFIG_NAME} in {folder}: not a PEFT adapter folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    for option, value in fields.items():
        only = _ONLY.get(option, False if value is True else None)
        if option == "init_lora_weights":
            understood = value in _INITIAL
        else:
            understood = option in _HARMLESS or value == only or not (value or option in _ONLY)
        if not understood:
            raise CheckpointError(f"{file}: {option} is {value!r}, only {only!r} can be read")
    if type(fields.get("r")) is not int or type(fields.get("lora_alpha")) not in (int, float):
        got = f"{fields.get('r')!r} and {fields.get('lora_alpha')!r}"
        raise CheckpointError(f"{file}: r and lora_alpha are {got}, they must be numbers")
    return fields


def _read_weights(folder: Path) -> dict[str, Tensor]:
    file = folder / WEIGHTS_NAME
    try:
        return load_file(file)
    except FileNotFoundError:
        raise CheckpointError(f"no {WEIGHTS_NAME} in {folder}") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged or cannot be read: {error}") from None
