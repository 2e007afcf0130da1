"""Weights and rows that nobody has: random values of the true sizes and dtypes, the same on every
run.

Values come from small banks of a fixed seed that are repeated over a tensor, from a place that
depends on its name. A bank's length is a prime, so rows and experts differ, and filling 100 GB
costs one write of them. The sizes of values are those of a trained model as far as it matters:
projections and embedding normal with deviation 0.02 (FP8: e4m3 times scales), norms 1, biases 0. So
activations stay finite, routing is uneven as that of data is, and no two keys score alike. No
weight means anything: losses and selections are those of an untrained model.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fullspan.checkpoint.load import assign, empty_model
from fullspan.checkpoint.quantisation import CONFIG_KEY, Quantisation, read_scheme
from fullspan.data.packing import IGNORE, Pack
from fullspan.models.dsa.checkpoint import dsa_mapping
from fullspan.models.dsa.config import DsaConfig
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.fp8.op import E4M3
from fullspan.ops.options import OpOptions
from fullspan.parallel.loopback import Others
from fullspan.parallel.mesh import Mesh
from fullspan.parallel.shard import FlatUnit
from fullspan.planning.case import read_fields
from fullspan.shapes import Tensor

WEIGHT_STD = 0.02
FP8_STD = 112.0  # a quarter of the largest e4m3, as quantisation by the largest value leaves it
_BANK = 65537  # elements; a prime
_ROWS_AT_ONCE = 256  # of made-up selections; bounds the temporaries


class Values:
    """Random values by name and dtype, on one device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self._device = device
        generator = torch.Generator().manual_seed(seed)
        self._normal = torch.randn(_BANK, generator=generator).clamp_(-4, 4)
        self._banks: dict[tuple[torch.dtype, float], Tensor] = {}

    def fill(self, name: str, tensor: Tensor, part: int = 0) -> None:
        """What a frozen weight called `name` may hold, in place. `tensor` is contiguous.

        part: which of some equal parts of the weight it is, of experts that ranks share.
        """
        if "norm" in name.rpartition(".")[0].rpartition(".")[2]:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name.endswith("_scale_inv"):
            tensor.fill_(WEIGHT_STD / FP8_STD)
        elif name.endswith("bias"):
            tensor.zero_()
        else:
            self.normal(name, tensor, FP8_STD if tensor.dtype == E4M3 else WEIGHT_STD, part)

    def normal(self, name: str, tensor: Tensor, std: float, part: int = 0) -> None:
        """Normal values of deviation `std`, in place; part: as for `fill`."""
        start = (zlib.crc32(name.encode()) + part * tensor.numel()) % _BANK
        period = self._bank(tensor.dtype, std)[start : start + _BANK]
        flat = tensor.view(-1).view(_bits(tensor.dtype))
        whole = len(flat) // _BANK * _BANK
        flat[:whole].view(-1, _BANK).copy_(period)
        flat[whole:].copy_(period[: len(flat) - whole])

    def _bank(self, dtype: torch.dtype, std: float) -> Tensor:
        """The bank twice, so that a period can start anywhere."""
        if (dtype, std) not in self._banks:
            once = (self._normal * std).to(dtype).view(_bits(dtype))
            self._banks[dtype, std] = once.repeat(2).to(self._device)
        return self._banks[dtype, std]


def random_model(
    folder: Path,
    values: Values,
    *,
    dtype: torch.dtype,
    options: OpOptions,
    recompute: bool,
    latent_norm_eps: float | None,
    mesh: Mesh,
    shard_weights: bool,
) -> DsaForCausalLM:
    """What `load_model` gives, from config.json alone: projections are FP8 where it has a
    quantization_config. The same model on any number of ranks.

    Raises:
        ConfigError, CheckpointError: config.json asks for what cannot be read.
    """
    config = DsaConfig.load(folder, latent_norm_eps=latent_norm_eps)
    mapping = dsa_mapping(config)
    fields = read_fields(folder / "config.json")
    block, power_of_two = read_scheme(fields)
    scaled = [step for step in mapping.steps if step.scaled and fields.get(CONFIG_KEY)]
    suffixes = {piece.source: "_scale_inv" for step in scaled for piece in step.pieces()}
    quantisation = Quantisation(block=block, power_of_two=power_of_two, suffixes=suffixes)
    mapping = quantisation.extend(mapping)
    model, units = empty_model(
        config, mapping, quantisation, dtype=dtype, options=options, recompute=recompute,
        mesh=mesh, shard_weights=shard_weights,
    )  # fmt: skip
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for step in mapping.steps:
        if step.target not in units:
            kept = step.dtype or dtype
            tensor = torch.empty(shapes[step.target], dtype=kept, device=mesh.device)
            values.fill(step.target, tensor, mesh.ep.rank if step.pieces()[0].lead else 0)
            assign(model, step.target, tensor)
    for unit in dict.fromkeys(units.values()):
        whole = unit.shard.new_zeros(unit.share * mesh.world.size)
        fill_unit(values, unit, whole)
        unit.shard.copy_(whole[unit.start : unit.start + unit.share])
    model.requires_grad_(False)
    return model


def fill_unit(values: Values, unit: FlatUnit, gathered: Tensor) -> None:
    """A whole unit's bytes, in place."""
    for name, tensor in unit.views(gathered).items():
        values.fill(name, tensor)


@dataclass(kw_only=True)
class SyntheticRanks(Others):
    """Other ranks of a rehearsal.

    units    of the rank's sharded weights; what others hold of them is filled like its own
    index    (bytes of the query, dtype of the query) of a row of the indexer
    first    the first row of the pack on this rank: selections that come from elsewhere are spread
             evenly over the keys before it, jittered
    """

    values: Values
    units: Sequence[FlatUnit] = ()
    index: tuple[int, torch.dtype] = (0, torch.float32)
    first: int = 0

    def weights(self, gathered: Tensor, own: Tensor, rank: int) -> None:
        """See Others."""
        unit = next((u for u in self.units if u.shard.data_ptr() == own.data_ptr()), None)
        if unit is None:
            super().weights(gathered, own, rank)
            return
        fill_unit(self.values, unit, gathered)
        gathered[unit.start : unit.start + unit.share].copy_(own)

    def index_rows(self, out: Tensor) -> None:
        """See Others."""
        width, dtype = self.index
        for name, part, kind in (
            ("q", out[:, :width], dtype),
            ("w", out[:, width:], torch.float32),
        ):
            values = torch.empty(part.shape, dtype=torch.uint8, device=out.device)
            self.values.normal(name, values.view(kind), 1.0)
            part.copy_(values)

    def selections(self, out: Tensor) -> None:
        """See Others."""
        topk = out.shape[1] - 1
        keys = self.first + 1
        count = min(topk, keys)
        place = torch.arange(count, device=out.device)
        start, width = place * keys // count, keys // count
        out.fill_(-1)
        out[:, topk] = count
        for number, part in enumerate(out.split(_ROWS_AT_ONCE)):
            rows = torch.arange(len(part), device=out.device) + number * _ROWS_AT_ONCE
            jitter = (rows[:, None] * 7919 + place * 104729) % width
            part[:, :count] = (start + jitter).to(out.dtype)


def synthetic_pack(
    length: int, *, document: int, trained: float, vocab: int, seed: int = 0
) -> Pack:
    """Random tokens in documents of `document` rows (0: one fills the pack), of which about
    `trained` have a label."""
    generator = torch.Generator().manual_seed(seed)
    document = min(document or length, length)
    tokens = torch.randint(0, vocab, (length,), generator=generator)
    labels = tokens.roll(-1)
    labels[torch.rand(length, generator=generator) >= trained] = IGNORE
    bounds = torch.tensor([*range(0, length, document), length])
    labels[bounds[1:] - 1] = IGNORE
    return Pack(tokens=tokens, labels=labels, cu_seqlens=bounds)


def _bits(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of an FP8 dtype are copied."""
    return torch.uint8 if dtype == E4M3 else dtype
