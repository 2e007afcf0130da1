"""From a training checkpoint to an adapter folder in PEFT's layout, by one process.

A checkpoint holds every expert's adapter whatever ranks wrote it, where a rank in training holds
its own experts' only; so both the end of a run and `fullspan export` write from a checkpoint. The
model is built without storage: of the base model only config.json is read.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fullspan.checkpoint.load import meta_model
from fullspan.checkpoint.resume import alone
from fullspan.errors import CheckpointError
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import adapted_modules, inject, trainable_parameters
from fullspan.lora.state import load_adapter_state, to_peft
from fullspan.models.dsa.config import DsaConfig
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.options import OpOptions
from fullspan.shapes import Tensor

ADAPTER_PREFIX = "adapter."  # of adapter tensors in a training checkpoint, before their names


@dataclass(frozen=True, kw_only=True)
class WrittenAdapter:
    """What is in the folder: adapted modules by name, and their parameters together."""

    modules: tuple[str, ...]
    parameters: int


def write_adapter(
    checkpoint: Path,
    output: Path,
    *,
    model_path: Path,
    lora: LoraConfig,
    base_model: str | None = None,
    per_expert: bool = False,
) -> WrittenAdapter:
    """Write the adapter of a complete checkpoint into the folder `output`, see `to_peft`.

    Args:
        model_path: the base model's folder, for its config.json.
        lora: the settings that the run was trained with.
        base_model: base_model_name_or_path of the adapter; None: `model_path`.
        per_expert: keys of each expert, see `to_peft`.

    Raises:
        CheckpointError: the checkpoint is damaged or not this model's, or a file cannot be written.
    """
    model = adapted_model(checkpoint, model_path, lora)
    to_peft(model, lora, base_model or str(model_path), output, per_expert=per_expert)
    count = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    return WrittenAdapter(modules=tuple(adapted_modules(model)), parameters=count)


def adapted_model(checkpoint: Path, model_path: Path, lora: LoraConfig) -> DsaForCausalLM:
    """The base model without storage, with the adapters of a complete checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged or not of this model.
    """
    model = meta_model(DsaConfig.load(model_path), OpOptions(), recompute=False)
    inject(model, lora)
    load_adapter_state(model, read_adapters(checkpoint))
    return model


def read_adapters(checkpoint: Path) -> dict[str, Tensor]:
    """Every adapter tensor of a checkpoint by its internal name; optimizer moments stay on disk.

    Raises:
        CheckpointError: it is damaged.
    """
    reader = FileSystemReader(checkpoint)
    try:
        stored = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
            for name, entry in stored.items()
            if name.startswith(ADAPTER_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }
        with alone():
            state_dict_loader.load(dict(state), storage_reader=reader, no_dist=True)
    # A damaged pickle can raise nearly anything, and CheckpointException is no Exception.
    except (Exception, CheckpointException) as error:
        if isinstance(error, CheckpointException):
            error = next(iter(error.failures.values()))[0]
        reason = getattr(error, "strerror", None) or f"damaged ({type(error).__name__})"
        raise CheckpointError(f"cannot read the adapters in {checkpoint}: {reason}") from None
    return {name.removeprefix(ADAPTER_PREFIX): tensor for name, tensor in state.items()}
