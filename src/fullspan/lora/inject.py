"""Where adapters go: the settings, the choice of modules by name, and the wrapping.

A target names every module whose dotted name equals it or ends with "." + target, as PEFT's
target_modules do. Routed experts count only when written with their owner ("experts.down_proj"), so
"down_proj" means the plain projections, as it does for PEFT. Nothing is skipped silently: a target
without an adaptable module is an error that says why and what would match. Reading and writing
adapters is in state.py.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import torch
from torch import nn

from fullspan.errors import ConfigError
from fullspan.lora.config import LoraConfig
from fullspan.lora.layers import LoRAGroupedLinear, LoRAKVUpProjection, LoRALinear, LoRAModule
from fullspan.models.common.linear import GroupedLinear, Linear
from fullspan.models.dsa.attention import KVUpProjection

_WRAPPERS: dict[type[nn.Module], Callable[..., LoRAModule]] = {
    Linear: LoRALinear,
    GroupedLinear: LoRAGroupedLinear,
    KVUpProjection: LoRAKVUpProjection,
}
# A part of a module's dotted name, and why nothing under it takes an adapter.
_FROZEN = {
    "indexer": "the indexer is frozen: its top-k choice has no gradient, an adapter cannot learn",
    "gate": "the router is frozen: adapters train the experts it chooses, not the choice",
    "embed_tokens": "the embedding is frozen and takes no adapter",
    "lm_head": "the output layer is frozen: the chunked loss needs its plain weight",
}
_NORM = "norms are frozen: they have no matrix to adapt"


def inject(model: nn.Module, config: LoraConfig, device: torch.device | None = None) -> list[str]:
    """Freeze the model and wrap every module that a target names; their names in model order.

    A module that two targets name ("q_b_proj" and "self_attn.q_b_proj") gets one adapter. Initial
    values depend on the seed and the module's name only, so every rank draws the same bits.
    Adapters live on `device`; None: beside the weights that they adapt, or on the CPU where these
    have no storage. Sharded weights have none between uses, so there it must be given.

    Raises:
        ConfigError: a target names nothing adaptable, or the model has adapters already.
    """
    if adapted_modules(model):
        raise ConfigError(
            "the model already has adapters: inject them once into a freshly loaded model"
        )
    modules = dict(model.named_modules())
    chosen = {name for target in config.targets for name in _select(modules, target)}
    model.requires_grad_(False)
    names = [name for name in modules if name in chosen]
    for name in names:
        base = modules[name]
        wrapper = _WRAPPERS[type(base)]
        generator = torch.Generator().manual_seed(_seed_of(config.seed, name))
        parent, _, leaf = name.rpartition(".")
        adapter = wrapper(
            base, r=config.r, alpha=float(config.alpha), generator=generator, device=device
        )
        setattr(model.get_submodule(parent), leaf, adapter)
    return names


def adapted_modules(model: nn.Module) -> dict[str, LoRAModule]:
    """Every wrapped module by its name in the base model, in model order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRAModule)}


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters by name ("<module>.lora_a", "<module>.lora_b"), in model order.

    The order and the names depend on the model and the targets only, so they agree on every rank.
    """
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def expert_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the adapter parameters whose first dimension is the routed experts of this rank."""
    grouped = [n for n, m in adapted_modules(model).items() if isinstance(m, LoRAGroupedLinear)]
    return frozenset(f"{name}.{part}" for name in grouped for part in ("lora_a", "lora_b"))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what it would without adapters."""
    modules = adapted_modules(model).values()
    scales = [module.scale for module in modules]
    try:
        for module in modules:
            module.scale = 0.0
        yield
    finally:
        for module, scale in zip(modules, scales, strict=True):
            module.scale = scale


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _select(modules: dict[str, nn.Module], target: str) -> list[str]:
    """Names of the adaptable modules that a target names: at least one, or ConfigError."""
    named = [name for name in modules if name == target or name.endswith("." + target)]
    adaptable = [
        name
        for name in named
        if type(modules[name]) in _WRAPPERS
        and _frozen_reason(name) is None
        and ("." in target or type(modules[name]) is not GroupedLinear)
    ]
    if not adaptable:
        raise ConfigError(f"lora.targets: {_complaint(modules, target, named)}")
    return adaptable


def _frozen_reason(name: str) -> str | None:
    for part in name.split("."):
        if part in _FROZEN:
            return _FROZEN[part]
        if part.endswith("norm"):
            return _NORM
    return None


def _complaint(modules: dict[str, nn.Module], target: str, named: list[str]) -> str:
    """Why a target names nothing adaptable, and what to write instead."""
    known = _targets_of(modules)
    for name in named:
        if (reason := _frozen_reason(name)) is not None:
            return f"{target!r} names {name}, and {reason}. These match: {', '.join(known)}"
        if type(modules[name]) is GroupedLinear:
            owner = ".".join(name.split(".")[-2:])
            return f"{target!r} names routed experts only; write them with their owner: {owner!r}"
    if named:
        return f"{target!r} names {named[0]}, a group of modules. These match: {', '.join(known)}"
    near = get_close_matches(target, known, n=3, cutoff=0.5)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return f"{target!r} matches no module{hint}. These match: {', '.join(known)}"


def _targets_of(modules: dict[str, nn.Module]) -> list[str]:
    """The short names that match something, in model order."""
    known: dict[str, None] = {}
    for name, module in modules.items():
        if type(module) not in _WRAPPERS or _frozen_reason(name) is not None:
            continue
        parts = name.split(".")
        width = 2 if type(module) is GroupedLinear or "shared_experts" in parts else 1
        known.setdefault(".".join(parts[-width:]))
    return list(known)
