"""What is planned: a run's configuration, its model and a number of ranks, with every assumption
that the two files do not settle.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fullspan.errors import ConfigError
from fullspan.models.dsa.config import DsaConfig
from fullspan.ops.options import OPTIONAL
from fullspan.planning.hardware import BACKENDS, HOPPER, Gpu, Links, Shape, gpu
from fullspan.planning.model_cost import Adapter, WeightFormat, Work, adapters
from fullspan.train.config import RunConfig

# Backends of ops.sparse_attention that bring one pass (ops/backend.py).
_OPTIONAL_PASS = {"flash_mla": ("attention forward",), "cudnn": ("attention backward",)}
# Backends that run on sm_90 alone (ops/backend.py).
_HOPPER_ONLY = ("hopper", *OPTIONAL)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a plan cannot know.

    imbalance   rows that the busiest rank's experts get, over the mean of the ranks
    document    rows of a document; 0: one document fills the pack, the most work there is
    trained     share of the rows that have a label
    slack       share of everything but the frozen weights that the allocator holds and cannot use
    context     bytes of the CUDA context, loaded kernels and libraries
    channels    bytes of NCCL's buffers, where there is more than one rank
    """

    imbalance: float = 1.3
    document: int = 0
    trained: float = 1.0
    slack: float = 0.04
    context: int = 600 << 20
    channels: int = 1 << 30

    def __post_init__(self) -> None:
        for name, holds, allowed in (
            ("imbalance", self.imbalance >= 1, "at least 1"),
            ("document", self.document >= 0, "0, or the rows of a document"),
            ("trained", 0 < self.trained <= 1, "above 0 and at most 1"),
            ("slack", 0 <= self.slack < 1, "at least 0 and below 1"),
        ):
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be {allowed}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run on `world` ranks.

    Raises:
        ConfigError: the ranks cannot share the pack or the experts.
    """

    run: RunConfig
    model: DsaConfig
    form: WeightFormat
    world: int
    assumed: Assumptions = field(default_factory=Assumptions)
    links: Links = field(default_factory=Links)

    def __post_init__(self) -> None:
        self.run.check_ranks(self.world)
        if self.model.n_routed_experts % self.ep:
            raise ConfigError(
                f"parallel.ep is {self.ep}, which does not divide the model's "
                f"{self.model.n_routed_experts} routed experts"
            )
        if self.run.ops.fp8_products and self.form.block != (128, 128):
            rows, columns = self.form.block or (0, 0)
            found = f"FP8 in blocks of {rows} x {columns}" if rows else "not FP8"
            raise ConfigError(
                f"ops.expert_products is {self.run.ops.expert_products!r}, which multiplies e4m3 "
                f"weights in blocks of 128 x 128, but the model's are {found}: set "
                'ops.expert_products = "bf16"'
            )

    @classmethod
    def load(
        cls,
        run: RunConfig,
        *,
        world: int | None,
        model_config: Path | None = None,
        assumed: Assumptions | None = None,
    ) -> "Case":
        """Read the model's config.json: of the folder model.path, or `model_config`.

        world: None takes dp x cp of the run.

        Raises:
            ConfigError: the number of ranks is not given, the file is missing or not usable.
        """
        if world is None:
            if not run.parallel.cp:
                raise ConfigError(
                    "parallel.cp is 0, all ranks of a replica: say how many ranks there are with "
                    "--world, or set parallel.cp"
                )
            world = run.parallel.dp * run.parallel.cp
        fields = read_fields(model_config or Path(run.model.path) / "config.json")
        eps = run.model.latent_norm_eps
        named = fields if eps is None else {**fields, "latent_norm_eps": eps}
        return cls(
            run=run,
            model=DsaConfig.from_hf(named),
            form=WeightFormat.of(fields, run.model.dtype),
            world=world,
            assumed=assumed or Assumptions(),
        )

    def split(self, world: int, **parallel: Any) -> "Case":
        """The same run on `world` ranks with other [parallel] settings."""
        changed = replace(self.run.parallel, **parallel)
        return replace(self, world=world, run=replace(self.run, parallel=changed))

    def packed(self, length: int) -> "Case":
        """The same run with another data.pack_length."""
        return replace(self, run=replace(self.run, data=replace(self.run.data, pack_length=length)))

    @cached_property
    def cp(self) -> int:
        return self.run.parallel.resolve_cp(self.world)

    @property
    def dp(self) -> int:
        return self.run.parallel.dp

    @property
    def ep(self) -> int:
        return self.run.parallel.ep

    @property
    def pack(self) -> int:
        """Rows of a pack."""
        return self.run.data.pack_length

    @cached_property
    def rows(self) -> int:
        """Rows of a pack on each rank."""
        return self.pack // self.cp

    @property
    def item(self) -> int:
        """Bytes of an activation's element."""
        return self.form.itemsize

    @property
    def document(self) -> int:
        """Rows of a document."""
        return min(self.assumed.document or self.pack, self.pack)

    @cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        """Every adapter of the run."""
        return adapters(self.model, self.run.lora)

    def gpu(self, name: str, folder: Path | None = None) -> Gpu:
        """A known GPU with the rates that fit this run, see hardware.gpu. ConfigError: [ops] names
        a backend that does not run on it.
        """
        hopper = name.lower() in HOPPER
        for kind, backend in self.named_backends.items():
            if backend in _HOPPER_ONLY and not hopper:
                raise ConfigError(
                    f"[ops] names {backend!r} for {kind}, which runs on {' and '.join(HOPPER)}, "
                    f'not on {name}: set it to "auto" (expert_products: "bf16"), or plan for '
                    "another GPU"
                )
        model = self.model
        attention = {
            "heads": model.num_attention_heads,
            "qk": model.kv_lora_rank + model.qk_rope_head_dim,
            "topk": model.index_topk,
        }
        widths = {
            "attention forward": attention,
            "attention backward": attention,
            "indexer": {"heads": model.index_n_heads, "topk": model.index_topk},
        }
        ops = self.run.ops
        workspaces = {
            "attention forward": ops.attention_bytes,
            "attention backward": ops.attention_bytes,
            "indexer": ops.workspace_bytes,
        }
        usual = BACKENDS if hopper else BACKENDS[::-1]
        backends: dict[str, tuple[str, ...]] = dict.fromkeys(widths, usual)
        backends |= {kind: (name, *usual) for kind, name in self.named_backends.items()}
        if ops.index_scores == "fp8":
            names = backends.get("indexer", BACKENDS)
            backends["indexer"] = tuple(f"{name}_fp8" for name in names)
        shape = Shape(keys=self.pack, workspaces=workspaces, widths=widths, backends=backends)
        return gpu(name, shape, folder)

    @property
    def named_backends(self) -> dict[str, str]:
        """{kind of work: its backend} where [ops] names one for attention, the indexer or the FP8
        products of experts."""
        ops = self.run.ops
        both = ("attention forward", "attention backward")
        kinds = _OPTIONAL_PASS.get(ops.sparse_attention, both)
        named = {**dict.fromkeys(kinds, ops.sparse_attention), "indexer": ops.index_topk}
        if ops.fp8_products:
            named["experts fp8"] = ops.expert_products
        return {kind: name for kind, name in named.items() if name != "auto"}

    def remakes_outputs(self, layer: int) -> bool:
        """Whether recompute makes the outputs of a layer's experts: where their second projection
        has an adapter, which keeps what it reads (models/common/moe.py)."""
        return any(a.routed and a.down and a.layer == layer for a in self.adapters)

    @cached_property
    def work(self) -> Work:
        """Attention and indexer of one pack."""
        return Work.of(self.pack, self.document, self.model.index_topk)

    @property
    def slots(self) -> int:
        """Rows times experts of each: what a rank sends to experts."""
        return self.rows * self.model.num_experts_per_tok

    @property
    def busiest_slots(self) -> int:
        """What the busiest rank's experts get."""
        return self._busiest(self.slots)

    @cached_property
    def chunk_rows(self) -> int:
        """Rows whose slots go to the experts at once (models/common/moe.py)."""
        model = self.model
        slot = (4 * model.hidden_size + 3 * model.moe_intermediate_size) * self.item
        fitting = self.run.ops.expert_bytes // (model.num_experts_per_tok * slot)
        chunks = -(-self.rows // max(1, fitting))
        return -(-self.rows // chunks)

    @property
    def chunks(self) -> int:
        """How often a layer's rows are sent to the experts."""
        return -(-self.rows // self.chunk_rows)

    @property
    def chunk_slots(self) -> int:
        """Slots of one chunk."""
        return self.chunk_rows * self.model.num_experts_per_tok

    @property
    def busiest_chunk_slots(self) -> int:
        """What the busiest rank's experts get of one chunk of every rank."""
        return self._busiest(self.chunk_slots)

    def _busiest(self, slots: int) -> int:
        """Nobody else's slots come where ep is 1."""
        return round(slots * self.assumed.imbalance) if self.ep > 1 else slots


def read_fields(path: Path) -> Mapping[str, Any]:
    """The fields of a config.json. Raises ConfigError."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the model's configuration: {error.strerror}; name another with "
            "--model-config (setting model.path)"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds no JSON object: it is no model configuration")
    return fields
