"""Which tensors of a checkpoint folder are FP8, in which blocks, and room for them in a model.

A tensor X is FP8 when the folder also holds X_scale_inv (or X_scale, as some exports name it): the
tensors decide, and `modules_to_not_convert` in config.json, which names things that are no tensor
in released files, is not read. Of config.json's `quantization_config` the block size is used, and a
scheme other than block-scaled e4m3 is refused by name. What one value becomes is ops/fp8's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fullspan.checkpoint.mapping import CheckpointMapping, Step
from fullspan.checkpoint.safetensors_io import CheckpointFolder, TensorInfo
from fullspan.errors import CheckpointError
from fullspan.models.common.frozen import BlockLayout, FrozenProjection
from fullspan.models.common.linear import GroupedLinear
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.expert_products.op import check_weight
from fullspan.ops.fp8.op import E4M3, scale_shape
from fullspan.ops.options import OpOptions

CONFIG_KEY = "quantization_config"
SCALE_SUFFIXES = ("_scale_inv", "_scale")
# Fields that decide what the values mean, with what can be read. Others (modules_to_not_convert,
# bookkeeping of the tool that wrote it) do not.
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": ("ue8m0", "float", None),
}
_DEFAULT_BLOCK = (128, 128)
# float32, or what becomes float32 exactly.
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """The FP8 tensors of a folder.

    block          rows and columns that share a scale
    power_of_two   the scales are powers of two (scale_fmt ue8m0)
    suffixes       FP8 tensor -> what the name of its scale has more
    """

    block: tuple[int, int]
    power_of_two: bool
    suffixes: Mapping[str, str]

    @classmethod
    def of(
        cls, folder: CheckpointFolder, fields: Mapping[str, Any], names: Iterable[str]
    ) -> "Quantisation":
        """Of those tensors of the folder that `names` lists, scales among them.

        Args:
            fields: those of config.json.

        Raises:
            CheckpointError: another scheme; an FP8 tensor without a scale, a scale without an FP8
                tensor, or one of another shape or dtype. The message names the tensor.
        """
        block, power_of_two = read_scheme(fields)
        suffixes: dict[str, str] = {}
        for name in names:
            weight, suffix = _split(name)
            if suffix:
                _check_scale(folder, name, weight, block)
                if weight in suffixes:
                    raise CheckpointError(
                        f"{weight} in {folder.path} has two scales, {weight}{suffixes[weight]} and "
                        f"{name}: it must have one"
                    )
                suffixes[weight] = suffix
        for name in names:
            if folder.tensors[name].dtype == E4M3 and name not in suffixes:
                file = folder.tensors[name].file
                wanted = " or ".join(name + suffix for suffix in SCALE_SUFFIXES)
                raise CheckpointError(
                    f"{name} in {file} is float8_e4m3fn without a scale: {wanted} must be there too"
                )
        return cls(block=block, power_of_two=power_of_two, suffixes=suffixes)

    @cached_property
    def names(self) -> frozenset[str]:
        """The FP8 tensors and their scales."""
        return frozenset(n for w, suffix in self.suffixes.items() for n in (w, w + suffix))

    def extend(self, mapping: CheckpointMapping) -> CheckpointMapping:
        """The mapping with the scales' steps, and FP8 kept for what they belong to.

        Raises:
            CheckpointError: what is never FP8 has a scale, or only some tensors that make one model
                tensor have one, or their names end differently.
        """
        found = {step.target: self._suffix(step) for step in mapping.steps}
        return mapping.with_scales({name: s for name, s in found.items() if s}, E4M3)

    def make_room(
        self, model: DsaForCausalLM, mapping: CheckpointMapping, options: OpOptions
    ) -> None:
        """Give the modules of a meta model FP8 weights and scales where the mapping has them.

        Raises:
            ConfigError: ops.expert_products takes no such weights of experts.
        """
        for step in mapping.steps:
            fp8, parts = step.dtype == E4M3, step.pieces()[0].parts
            module = model.get_submodule(step.target.rpartition(".")[0])
            products = "bf16"
            if isinstance(module, GroupedLinear) and step.target.endswith(".weight"):
                products = options.expert_products
                block = self.block if fp8 else None
                check_weight(step.target, module.weight.shape, block, parts, products)
            if fp8:
                assert isinstance(module, FrozenProjection), f"{step.target} is no projection"
                module.hold_fp8(
                    BlockLayout(
                        block=self.block,
                        parts=parts,
                        workspace_bytes=options.expert_bytes,
                        backend=options.fp8,
                        products=products,
                    )
                )

    def _suffix(self, step: Step) -> str | None:
        """What the scales of a step's tensors are named, None where they are not FP8."""
        sources = [piece.source for piece in step.pieces()]
        suffixes = {source: self.suffixes.get(source) for source in sources}
        first, suffix = next(iter(suffixes.items()))
        for other, its in suffixes.items():
            if its != suffix:
                raise CheckpointError(
                    f"{other} has {_named(its)}, but {first} has {_named(suffix)}: the tensors of "
                    f"{step.target} must all be FP8, with scales of one name, or none"
                )
        if suffix and not step.scaled:
            raise CheckpointError(
                f"{first} is FP8 with the scale {first}{suffix}: only projections can be"
            )
        return suffix


def read_scheme(fields: Mapping[str, Any]) -> tuple[tuple[int, int], bool]:
    """Block size and whether scales are powers of two, by config.json.

    Raises:
        CheckpointError: a scheme other than block-scaled e4m3 with dynamic activations.
    """
    scheme = fields.get(CONFIG_KEY) or {}
    if not isinstance(scheme, Mapping):
        raise CheckpointError(f"{CONFIG_KEY} in config.json is {scheme!r}: it must be an object")
    for field, allowed in _ONLY_VALUES.items() if scheme else ():
        value = scheme.get(field)
        if value not in allowed:
            known = " or ".join(repr(option) for option in allowed if option is not None)
            raise CheckpointError(
                f"{CONFIG_KEY}.{field} in config.json is {value!r}: only {known} can be read, "
                "with a scale for every block of a weight"
            )
    block = scheme.get("weight_block_size") or _DEFAULT_BLOCK
    sound = isinstance(block, list | tuple) and len(block) == 2
    if not sound or not all(type(size) is int and size > 0 for size in block):
        raise CheckpointError(
            f"{CONFIG_KEY}.weight_block_size in config.json is {block!r}: it must be two positive "
            "integers, rows and columns"
        )
    return (block[0], block[1]), scheme.get("scale_fmt") == "ue8m0"


def _split(name: str) -> tuple[str, str]:
    """(tensor, suffix) of a scale's name; (name, "") of any other."""
    for suffix in SCALE_SUFFIXES:
        if name.endswith(f".weight{suffix}"):
            return name.removesuffix(suffix), suffix
    return name, ""


def _check_scale(folder: CheckpointFolder, name: str, weight: str, block: tuple[int, int]) -> None:
    scale = folder.tensors[name]
    values = folder.tensors.get(weight)
    if values is None:
        raise CheckpointError(f"{name} in {scale.file} is a scale without its tensor {weight}")
    if values.dtype != E4M3:
        raise CheckpointError(
            f"{weight} in {values.file} has the scale {name}, but is {_dtype(values)}: only "
            "float8_e4m3fn has block scales"
        )
    if scale.dtype not in _SCALE_DTYPES:
        raise CheckpointError(f"{name} in {scale.file} is {_dtype(scale)}: it must be float32")
    wanted = scale_shape(values.shape, block) if len(values.shape) == 2 else None
    if scale.shape != wanted:
        raise CheckpointError(
            f"{name} in {scale.file} has shape {list(scale.shape)}, but {list(values.shape)} in "
            f"blocks of {block[0]} x {block[1]} ({CONFIG_KEY}.weight_block_size) has scales "
            f"{list(wanted or ())}"
        )


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def _named(suffix: str | None) -> str:
    return f"a scale named {suffix}" if suffix else "no scale"
