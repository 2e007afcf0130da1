"""Build a model on the meta device and fill it from a checkpoint folder, one parameter at a time.

Every name and shape is checked before the first byte is read. A piece of a parameter goes from the
mapped file straight into its place, converted on the way: no second copy of the weights exists. A
rank reads only what it holds: its experts, and its share of what is spread over the ranks. FP8
weights (quantisation.py) and their scales are tensors like any other and stay as they are.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from fullspan.checkpoint.mapping import CheckpointMapping, Piece
from fullspan.checkpoint.quantisation import Quantisation
from fullspan.checkpoint.safetensors_io import CheckpointFolder, TensorReader
from fullspan.errors import CheckpointError
from fullspan.models.common.linear import GroupedLinear
from fullspan.models.dsa.checkpoint import dsa_mapping
from fullspan.models.dsa.config import DsaConfig
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.backend import resolve
from fullspan.ops.options import OpOptions
from fullspan.parallel.expert import ExpertParallel
from fullspan.parallel.mesh import Mesh
from fullspan.parallel.shard import FlatUnit, ShardedWeights

Progress = Callable[[int, int], None]  # bytes read so far, bytes to read

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of a model, by name
READABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    options: OpOptions,
    recompute: bool,
    latent_norm_eps: float | None = None,
    mesh: Mesh | None = None,
    shard_weights: bool = False,
    progress: Progress | None = None,
) -> DsaForCausalLM:
    """The frozen model of a Hugging Face folder, or this rank's part of it.

    Args:
        dtype: of the weights; those that the mapping keeps in float32 stay so. FP8 weights stay
            FP8 and become this dtype when they are used.
        latent_norm_eps: instead of the config's own (`transformers` always uses 1e-6).
        mesh: this rank's place; it reads and holds its share of the routed experts only.
        shard_weights: spread the other weights over all ranks too, see parallel/shard.py.
        progress: called after each tensor with this rank's bytes.

    Raises:
        CheckpointError: the folder is incomplete or damaged, or does not match the config.
        ConfigError: config.json asks for what is not implemented, or the ranks cannot share it.
    """
    mesh = mesh or Mesh.single(torch.device(device))
    folder = CheckpointFolder.open(path)
    config = DsaConfig.load(path, latent_norm_eps=latent_norm_eps)
    options = resolve(options, mesh.device, dtype, **op_widths(config))
    mapping, quantisation = read_mapping(folder, config, options)
    model, units = empty_model(
        config, mapping, quantisation, dtype=dtype, options=options, recompute=recompute,
        mesh=mesh, shard_weights=shard_weights,
    )  # fmt: skip
    held = _held_experts(config, mesh)
    _fill(model, folder, mapping, dtype, held, units, mesh.device, progress)
    model.requires_grad_(False)
    return model


def op_widths(config: DsaConfig) -> dict[str, int]:
    """What decides which kernels fit (see ops/backend.py)."""
    return {
        "qk": config.kv_lora_rank + config.qk_rope_head_dim,
        "value_dim": config.kv_lora_rank,
        "index_dim": config.index_head_dim,
        "topk": config.index_topk,
    }


def empty_model(
    config: DsaConfig,
    mapping: CheckpointMapping,
    quantisation: Quantisation,
    *,
    dtype: torch.dtype,
    options: OpOptions,
    recompute: bool,
    mesh: Mesh,
    shard_weights: bool,
) -> tuple[DsaForCausalLM, dict[str, FlatUnit]]:
    """The meta model of this rank, with room for FP8 where the mapping has it, and the unit that
    each tensor which is spread over the ranks belongs to. Units have storage, the model has none:
    `assign` gives it.
    """
    held = _held_experts(config, mesh)
    model = meta_model(config, options, recompute=recompute, experts=held)
    quantisation.make_room(model, mapping, options)
    return model, _shard(model, mapping, dtype, mesh) if shard_weights else {}


def _held_experts(config: DsaConfig, mesh: Mesh) -> range:
    ep = mesh.ep
    return ExpertParallel(
        experts=config.n_routed_experts, rank=ep.rank, size=ep.size, group=ep.group
    ).local


def read_mapping(
    folder: CheckpointFolder, config: DsaConfig, options: OpOptions
) -> tuple[CheckpointMapping, Quantisation]:
    """The mapping of this folder's tensors, all checked by name, dtype and shape, and which of them
    are FP8.

    Raises:
        CheckpointError: they do not fit the config or one another.
    """
    mapping = dsa_mapping(config)
    names = [name for name in folder.tensors if not mapping.is_ignored(name)]
    quantisation = Quantisation.of(folder, folder.read_config(), names)
    mapping = quantisation.extend(mapping)
    _check_dtypes(folder, mapping, quantisation)
    whole = meta_model(config, options, recompute=False)
    quantisation.make_room(whole, mapping, options)
    found = {name: info.shape for name, info in folder.tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.state_dict().items()}
    mapping.check(found, shapes, where=str(folder.path))
    return mapping, quantisation


def meta_model(
    config: DsaConfig, options: OpOptions, *, recompute: bool, experts: range | None = None
) -> DsaForCausalLM:
    """The model without storage: names and shapes only. experts: those held; None: all."""
    with torch.device("meta"):
        return DsaForCausalLM(config, options, recompute=recompute, experts=experts)


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A progress callback that draws bytes, rate and time left on a terminal, else nothing."""
    with tqdm(desc=title, unit="B", unit_scale=True, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _check_dtypes(
    folder: CheckpointFolder, mapping: CheckpointMapping, quantisation: Quantisation
) -> None:
    for name, info in folder.tensors.items():
        if info.dtype in READABLE or name in quantisation.names or mapping.is_ignored(name):
            continue
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in READABLE)
        raise CheckpointError(
            f"{name} in {info.file} has dtype {str(info.dtype).removeprefix('torch.')}: "
            f"weights can be loaded from {allowed}, and float8_e4m3fn with block scales"
        )


def _shard(
    model: DsaForCausalLM, mapping: CheckpointMapping, dtype: torch.dtype, mesh: Mesh
) -> dict[str, FlatUnit]:
    """Give a meta model a ShardedWeights store; the unit of each tensor that is spread."""
    always = {step.target: step.dtype or dtype for step in mapping.steps}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    grouped = [module for module in model.modules() if isinstance(module, GroupedLinear)]
    experts = {id(parameter) for module in grouped for parameter in module.parameters()}
    units, parameters, unit_of = [], [], {}
    for module in model.units:
        spread = {names[id(p)]: p for p in module.parameters() if id(p) not in experts}
        shapes = {name: (tuple(p.shape), always[name]) for name, p in spread.items()}
        unit = FlatUnit(shapes, rank=mesh.world.rank, size=mesh.world.size, device=mesh.device)
        units.append(unit)
        parameters.append(spread)
        unit_of |= dict.fromkeys(spread, unit)
    model.weights = ShardedWeights(units, parameters, mesh.world.group)
    return unit_of


def _fill(
    model: DsaForCausalLM,
    folder: CheckpointFolder,
    mapping: CheckpointMapping,
    dtype: torch.dtype,
    held: range,
    units: Mapping[str, FlatUnit],
    device: torch.device,
    progress: Progress | None,
) -> None:
    """Read this rank's part of every tensor of a meta model into its place."""
    steps = [  # without the experts of other ranks
        (step, [piece for piece in step.pieces() if not piece.lead or piece.lead[0] in held])
        for step in mapping.steps
    ]
    wanted = {step.target: _share(units.get(step.target), step.target) for step, _ in steps}
    sizes = {p.source: folder.tensors[p.source].nbytes for _, pieces in steps for p in pieces}
    total = sum(int(wanted[s.target] * sizes[p.source]) for s, pieces in steps for p in pieces)
    done = 0
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    with folder.reader() as reader:
        for step, pieces in steps:
            unit = units.get(step.target)
            if unit is None:
                kept = step.dtype or dtype
                target = torch.empty(shapes[step.target], dtype=kept, device=device)
                assign(model, step.target, target)
                place = partial(_read_whole, reader, target, held.start)
            else:
                place = partial(_read_share, reader, unit, step.target)
            for piece in pieces:
                place(piece)
                done += int(wanted[step.target] * sizes[piece.source])
                if progress is not None:
                    progress(done, total)


def _share(unit: FlatUnit | None, name: str) -> float:
    """How much of a tensor this rank reads."""
    if unit is None:
        return 1.0
    first, last = unit.wanted(name)
    return max(last - first, 0) / prod(unit.tensors[name].shape)


def _read_whole(reader: TensorReader, target: torch.Tensor, first: int, piece: Piece) -> None:
    """A checkpoint tensor into its place in a target whose first expert is `first`."""
    local = piece._replace(lead=tuple(expert - first for expert in piece.lead))
    local.of(target).copy_(reader.read(piece.source))


def _read_share(reader: TensorReader, unit: FlatUnit, name: str, piece: Piece) -> None:
    """The rows that hold this rank's run of elements, and of them the run."""
    first, last = unit.wanted(name)
    if first >= last:
        return
    width = prod(unit.tensors[name].shape[1:])
    start, end = first // width, -(-last // width)
    rows = reader.read(piece.source, (slice(start, end),)).flatten()
    unit.store(name, rows[first - start * width : last - start * width])


def assign(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in the place of the frozen parameter or buffer `name` of a meta model."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    is_parameter = isinstance(getattr(module, leaf), nn.Parameter)
    setattr(module, leaf, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
