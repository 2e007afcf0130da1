"""Build a model on the meta device and fill it from a checkpoint folder, one parameter at a time.

Every name and shape is checked before the first byte is read. A piece of a parameter goes from the
mapped file straight into its place, converted on the way: no second copy of the weights exists. It
leaves out quantised weights and reading one rank's part only; both have their place in `_fill`,
where each piece of a tensor is read on its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from fullspan.checkpoint.mapping import CheckpointMapping, Tensors
from fullspan.checkpoint.safetensors_io import CheckpointFolder
from fullspan.errors import CheckpointError
from fullspan.models.dsa.checkpoint import dsa_mapping
from fullspan.models.dsa.config import DsaConfig
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.backend import OpOptions, resolve

Progress = Callable[[int, int], None]  # bytes read so far, bytes to read

_READABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    options: OpOptions,
    recompute: bool,
    latent_norm_eps: float | None = None,
    progress: Progress | None = None,
) -> DsaForCausalLM:
    """The frozen model of a Hugging Face folder.

    Args:
        dtype: of the weights; those that the mapping keeps in float32 stay so.
        latent_norm_eps: instead of the config's own (`transformers` always uses 1e-6).
        progress: called after each tensor.

    Raises:
        CheckpointError: the folder is incomplete or damaged, or does not match the config.
        ConfigError: config.json asks for what is not implemented.
    """
    folder = CheckpointFolder.open(path)
    overrides = {} if latent_norm_eps is None else {"latent_norm_eps": latent_norm_eps}
    config = DsaConfig.load(path, **overrides)
    options = resolve(options, torch.device(device), dtype, **_op_widths(config))
    model = meta_model(config, options, recompute=recompute)
    mapping = dsa_mapping(config)
    _check_dtypes(folder, mapping)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: info.shape for name, info in folder.tensors.items()}
    mapping.check(found, shapes, where=str(path))
    _fill(model, folder, mapping, dtype, torch.device(device), progress)
    model.requires_grad_(False)
    return model


def _op_widths(config: DsaConfig) -> dict[str, int]:
    """What decides which kernels fit (see ops/backend.py)."""
    return {
        "qk": config.kv_lora_rank + config.qk_rope_head_dim,
        "value_dim": config.kv_lora_rank,
        "index_dim": config.index_head_dim,
        "topk": config.index_topk,
    }


def meta_model(config: DsaConfig, options: OpOptions, *, recompute: bool) -> DsaForCausalLM:
    """The model without storage: names and shapes only."""
    with torch.device("meta"):
        return DsaForCausalLM(config, options, recompute=recompute)


def checkpoint_tensors(
    tensors: Tensors, mapping: CheckpointMapping, source: CheckpointFolder
) -> Iterator[tuple[str, torch.Tensor]]:
    """What a whole checkpoint holds after `tensors` (by model name) replaced those of `source`.

    Names and dtypes are those of the source; tensors that the mapping ignores are copied through.
    """
    for name, tensor in mapping.to_checkpoint(tensors):
        yield name, tensor.to(source.tensors[name].dtype)
    with source.reader() as reader:
        for name in source.tensors:
            if mapping.is_ignored(name):
                yield name, reader.read(name)


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A progress callback that draws bytes, rate and time left on a terminal, else nothing."""
    with tqdm(desc=title, unit="B", unit_scale=True, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _check_dtypes(folder: CheckpointFolder, mapping: CheckpointMapping) -> None:
    for name, info in folder.tensors.items():
        if info.dtype not in _READABLE and not mapping.is_ignored(name):
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _READABLE)
            raise CheckpointError(
                f"{name} in {info.file} has dtype {str(info.dtype).removeprefix('torch.')}: "
                f"weights can be loaded from {allowed}"
            )


def _fill(
    model: nn.Module,
    folder: CheckpointFolder,
    mapping: CheckpointMapping,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> None:
    """Give every tensor of a meta model its storage and values."""
    total = sum(folder.tensors[name].nbytes for name in mapping.sources)
    done = 0
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    with folder.reader() as reader:
        for step in mapping.steps:
            target = torch.empty(shapes[step.target], dtype=step.dtype or dtype, device=device)
            for piece in step.pieces():
                piece.of(target).copy_(reader.read(piece.source))
                done += folder.tensors[piece.source].nbytes
                if progress is not None:
                    progress(done, total)
            _assign(model, step.target, target)


def _assign(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    is_parameter = isinstance(getattr(module, leaf), nn.Parameter)
    setattr(module, leaf, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
