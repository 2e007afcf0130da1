"""The model's tensors, its adapters and its FLOPs, counted from the config without building it.

Names and shapes are those of models/dsa (a test compares them with the real model). It leaves out
where the tensors are held (memory.py) and how long the work takes (times.py).
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from fullspan.errors import ConfigError
from fullspan.lora.config import LoraConfig
from fullspan.models.dsa.config import DsaConfig
from fullspan.ops.sizes import round_up
from fullspan.parallel.config import ALIGNMENT

# lora/inject.py adapts none of these.
_FROZEN_PARTS = ("indexer", "gate", "embed_tokens", "lm_head")


@dataclass(frozen=True)
class Weight:
    """A frozen tensor by its name in the model.

    scaled   it is FP8 with block scales where the checkpoint is (models/dsa/checkpoint.py)
    wide     float32 whatever the model's dtype
    routed   its first dimension is the routed experts
    """

    name: str
    shape: tuple[int, ...]
    scaled: bool = False
    wide: bool = False
    routed: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How frozen weights are held. block: rows and columns that share a float32 scale, None where
    the checkpoint has no FP8 weights; itemsize: bytes of an element of the others."""

    itemsize: int
    block: tuple[int, int] | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any], dtype: str) -> "WeightFormat":
        """From the fields of config.json and model.dtype of the run.

        Raises:
            ConfigError: a quantisation that is not FP8 in blocks.
        """
        quantisation = fields.get("quantization_config")
        itemsize = {"bfloat16": 2, "float32": 4}[dtype]
        if quantisation is None:
            return cls(itemsize=itemsize)
        method, block = quantisation.get("quant_method"), quantisation.get("weight_block_size")
        if method != "fp8" or block is None or len(block) != 2:
            raise ConfigError(
                f"quantization_config of the model config has quant_method {method!r} and "
                f"weight_block_size {block!r}: only 'fp8' in blocks of two sizes can be planned"
            )
        return cls(itemsize=itemsize, block=(int(block[0]), int(block[1])))

    def parts(self, weight: Weight) -> list[int]:
        """Bytes of the tensors that hold a weight: its values, and its scales where it is FP8."""
        if not (weight.scaled and self.block):
            return [weight.numel * (4 if weight.wide else self.itemsize)]
        *lead, rows, columns = weight.shape
        halves = 2 if weight.name.endswith("gate_up_proj.weight") else 1  # blocks begin anew
        block_rows = halves * -(-(rows // halves) // self.block[0])
        scales = prod(lead) * block_rows * -(-columns // self.block[1])
        return [weight.numel, 4 * scales]

    def bytes_of(self, weights: Sequence[Weight]) -> int:
        return sum(sum(self.parts(weight)) for weight in weights)


# ------------------------------------------------------------------------------ frozen tensors


@functools.cache
def layer_weights(config: DsaConfig, layer: int) -> tuple[Weight, ...]:
    """Every parameter of a layer, routed experts included, in the model's order."""
    prefix = f"model.layers.{layer}."
    hidden, q_latent, latent = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
    heads, rope = config.num_attention_heads, config.qk_rope_head_dim
    up = heads * (config.qk_nope_head_dim + config.v_head_dim)
    found = [
        Weight("input_layernorm.weight", (hidden,)),
        _matrix("self_attn.q_a_proj", q_latent, hidden),
        Weight("self_attn.q_a_layernorm.weight", (q_latent,)),
        _matrix("self_attn.q_b_proj", heads * config.qk_head_dim, q_latent),
        _matrix("self_attn.kv_a_proj_with_mqa", latent + rope, hidden),
        Weight("self_attn.kv_a_layernorm.weight", (latent,)),
        _matrix("self_attn.kv_b_proj", up, latent),
        _matrix("self_attn.o_proj", hidden, heads * config.v_head_dim),
    ]
    if config.indexer_types[layer] == "full":
        indexer = "self_attn.indexer."
        width = config.index_head_dim
        found += [
            _matrix(f"{indexer}wq_b", config.index_n_heads * width, q_latent),
            _matrix(f"{indexer}wk", width, hidden),
            Weight(f"{indexer}k_norm.weight", (width,)),
            Weight(f"{indexer}k_norm.bias", (width,)),
            Weight(f"{indexer}weights_proj.weight", (config.index_n_heads, hidden), wide=True),
        ]
    found.append(Weight("post_attention_layernorm.weight", (hidden,)))
    found += _mlp(config, layer)
    return tuple(replace(weight, name=prefix + weight.name) for weight in found)


def _mlp(config: DsaConfig, layer: int) -> list[Weight]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    if config.mlp_layer_types[layer] == "dense":
        return _gated("mlp", hidden, config.intermediate_size)
    experts = config.n_routed_experts
    routed = {"scaled": True, "routed": True}
    return [
        Weight("mlp.gate.weight", (experts, hidden), wide=True),
        Weight("mlp.experts.gate_up_proj.weight", (experts, 2 * inner, hidden), **routed),
        Weight("mlp.experts.down_proj.weight", (experts, hidden, inner), **routed),
        *_gated("mlp.shared_experts", hidden, inner * config.n_shared_experts),
    ]


def _gated(name: str, hidden: int, inner: int) -> list[Weight]:
    return [
        _matrix(f"{name}.gate_proj", inner, hidden),
        _matrix(f"{name}.up_proj", inner, hidden),
        _matrix(f"{name}.down_proj", hidden, inner),
    ]


def _matrix(name: str, rows: int, columns: int) -> Weight:
    return Weight(f"{name}.weight", (rows, columns), scaled=True)


def unit_weights(config: DsaConfig) -> list[list[Weight]]:
    """The parameters of each unit of a WeightStore: embedding, layers, head; without routed
    experts, which are never spread (parallel/shard.py)."""
    table = (config.vocab_size, config.hidden_size)
    layers = range(config.num_hidden_layers)
    inner = [[w for w in layer_weights(config, n) if not w.routed] for n in layers]
    embedding, head = Weight("model.embed_tokens.weight", table), Weight("lm_head.weight", table)
    return [[embedding], *inner, [head]]


def whole_weights(config: DsaConfig) -> list[Weight]:
    """What is in no unit and every rank holds: the final norm, the routers' correction biases."""
    sparse = [n for n, kind in enumerate(config.mlp_layer_types) if kind == "sparse"]
    bias = "mlp.gate.e_score_correction_bias"
    return [
        Weight("model.norm.weight", (config.hidden_size,)),
        *(
            Weight(f"model.layers.{n}.{bias}", (config.n_routed_experts,), wide=True)
            for n in sparse
        ),
    ]


def routed_weights(config: DsaConfig) -> list[Weight]:
    """The routed experts of all layers."""
    layers = range(config.num_hidden_layers)
    return [w for n in layers for w in layer_weights(config, n) if w.routed]


@functools.cache
def unit_shares(config: DsaConfig, form: WeightFormat, ranks: int) -> tuple[int, ...]:
    """Bytes of each unit that each of `ranks` holds."""
    return tuple(share_bytes(unit, form, ranks) for unit in unit_weights(config))


@functools.cache
def stored_bytes(config: DsaConfig, form: WeightFormat) -> tuple[int, int, int]:
    """Bytes of the routed experts, of all units, and of what is in no unit."""
    units = sum(form.bytes_of(unit) for unit in unit_weights(config))
    return form.bytes_of(routed_weights(config)), units, form.bytes_of(whole_weights(config))


def share_bytes(weights: Sequence[Weight], form: WeightFormat, ranks: int) -> int:
    """Bytes of one unit that each of `ranks` holds, as parallel/shard.FlatUnit lays them out."""
    end = 0
    for weight in weights:
        for size in form.parts(weight):
            end = round_up(end, ALIGNMENT) + size
    return round_up(end, ALIGNMENT * ranks) // ranks


# ------------------------------------------------------------------------------------ adapters


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """LoRA on one module: elements of lora_a and lora_b together, float32 (lora/layers.py).

    routed: `numel` is that of all experts, of which a rank holds its share.
    products: multiplications of one row with it. In the absorbed form kv_b_proj's lora_a meets
    every head, on the query's side and on the output's.
    """

    module: str
    layer: int
    numel: int
    routed: bool
    products: float

    @property
    def down(self) -> bool:
        """Whether it is on a second projection."""
        return self.module.endswith("down_proj")


@functools.cache
def adapters(config: DsaConfig, lora: LoraConfig) -> tuple[Adapter, ...]:
    """Every adapter that lora.targets makes, chosen by name as lora/inject.py does.

    Raises:
        ConfigError: a target names nothing that can be adapted.
    """
    known = list(_adaptable(config))
    chosen: dict[str, Adapter] = {}
    for target in lora.targets:
        named = [
            (layer, weight, module)
            for layer, weight, module in known
            if (module == target or module.endswith("." + target))
            and ("." in target or not weight.routed)
        ]
        if not named:
            raise ConfigError(f"lora.targets: {target!r} names nothing that can be adapted")
        for layer, weight, module in named:
            chosen[module] = _adapter(config, lora.r, layer, weight, module)
    return tuple(chosen[module] for _, _, module in known if module in chosen)


def _adapter(config: DsaConfig, rank: int, layer: int, weight: Weight, module: str) -> Adapter:
    *lead, rows, columns = weight.shape
    times = 2 * config.num_attention_heads if module.endswith("kv_b_proj") else 1
    products = float(rank * (rows + times * columns))
    if weight.routed:
        products *= config.num_experts_per_tok
    return Adapter(
        module=module,
        layer=layer,
        numel=prod(lead) * rank * (rows + columns),
        routed=weight.routed,
        products=products,
    )


def _adaptable(config: DsaConfig) -> Iterator[tuple[int, Weight, str]]:
    for layer in range(config.num_hidden_layers):
        for weight in layer_weights(config, layer):
            module = weight.name.removesuffix(".weight")
            frozen = any(part in _FROZEN_PARTS for part in module.split("."))
            if weight.scaled and not frozen:
                yield layer, weight, module


# --------------------------------------------------------------------------------------- FLOPs


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a pack holds for attention and indexer. rows: of the pack; pairs: (query, key) pairs
    that the indexer of one full layer scores; attended: those that one layer attends to."""

    rows: int
    pairs: int
    attended: int

    @classmethod
    def of(cls, rows: int, document: int, topk: int) -> "Work":
        """Of a pack of `rows` in documents of `document` rows, the last one shorter."""
        whole, rest = divmod(rows, document)
        return cls(
            rows=rows,
            pairs=whole * _triangle(document, document) + _triangle(rest, rest),
            attended=whole * _triangle(document, topk) + _triangle(rest, topk),
        )


def _triangle(rows: int, most: int) -> int:
    """sum over rows t from 0 of min(t + 1, most)."""
    ramp = min(rows, most)
    return ramp * (ramp + 1) // 2 + (rows - ramp) * most


PASSES: tuple[str, ...] = ("forward", "recompute", "backward")


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one pack by part and pass, over all its ranks: {part: {pass: FLOPs}}."""

    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def of(self, part: str, phase: str) -> float:
        return self.parts[part].get(phase, 0.0)

    @property
    def total(self) -> float:
        """All that is computed."""
        return sum(sum(passes.values()) for passes in self.parts.values())

    @property
    def model(self) -> float:
        """What the training step needs: all but the recompute. Frozen weights have no gradient, so
        their backward counts once, the input's; the frozen indexer has none at all."""
        return self.total - sum(passes.get("recompute", 0.0) for passes in self.parts.values())


def flops(
    config: DsaConfig, lora: LoraConfig, work: Work, *, recompute: bool, trained: float = 1.0
) -> Flops:
    """FLOPs of one pack.

    projections, experts   2 FLOPs per active weight, row and pass (anchors: "body 2 x 40e9 per
                pass"); kv_b_proj counts once, absorbed or not: its halves act on query and output.
                Backward absorbs the query once more (models/dsa/absorbed.py), recompute leaves out
                the experts' second projection unless it has an adapter
    attention   2 K heads (qk + value) forward, 2 K heads (3 qk + 2 value) backward for each row
                and the K keys it attends to (ops/sparse_attention/README.md)
    indexer     2 index_heads index_dim per (query, key) pair, in the forward pass alone, on full
                layers (ops/index_topk/README.md; 8,192 for GLM-5.2)
    LoRA        2 per product of an adapter forward, twice that backward (input and weight); for
                kv_b_proj also those of both halves' inputs, and of the query absorbed once more
    head        2 vocab hidden per trained row for logits, as many for their gradient, both in the
                forward pass (ops/linear_cross_entropy/README.md)
    """
    share = config.num_experts_per_tok / config.n_routed_experts
    layers = [layer_weights(config, layer) for layer in range(config.num_hidden_layers)]
    every = [w for layer in layers for w in layer if len(w.shape) > 1]
    indexer = sum(w.numel for w in every if ".indexer." in w.name)
    routed = sum(w.numel for w in every if w.routed) * share
    remade = {a.layer for a in adapters(config, lora) if a.routed and a.down}
    unread = share * sum(
        w.numel
        for n, layer in enumerate(layers)
        for w in layer
        if w.routed and "down_proj" in w.name and n not in remade
    )
    dense = sum(w.numel for w in every if not w.routed) - indexer
    found = adapters(config, lora)
    adapted = sum(adapter.products for adapter in found)
    beside = sum(adapter.module.endswith("kv_b_proj") for adapter in found) * lora.r
    beside *= 2.0 * config.num_attention_heads * (config.qk_nope_head_dim + config.kv_lora_rank)
    again = absorbing(config) * config.num_hidden_layers
    heads, value = config.num_attention_heads, config.kv_lora_rank
    qk = value + config.qk_rope_head_dim
    attended = 2.0 * work.attended * heads * config.num_hidden_layers
    score = 2.0 * config.index_n_heads * config.index_head_dim * work.pairs
    full = config.indexer_types.count("full")
    head = 2.0 * trained * work.rows * config.vocab_size * config.hidden_size

    def passes(forward: float, backward: float, unread: float = 0.0) -> dict[str, float]:
        return {
            "forward": forward,
            "recompute": forward - unread if recompute else 0.0,
            "backward": backward,
        }

    rows = 2.0 * work.rows
    return Flops(
        parts={
            "projections": passes(rows * dense, rows * (dense + again)),
            "experts": passes(rows * routed, rows * routed, rows * unread),
            "attention": passes(attended * (qk + value), attended * (3 * qk + 2 * value)),
            "indexer": {"forward": score * full + rows * indexer},
            "LoRA": passes(rows * adapted, rows * (2 * adapted + beside)),
            "head": {"forward": 2 * head},
        }
    )


def absorbing(config: DsaConfig) -> float:
    """Products of a row with the key half of kv_b_proj."""
    return float(config.num_attention_heads * config.qk_nope_head_dim * config.kv_lora_rank)


def active_parameters(config: DsaConfig) -> float:
    """Weights that one token passes through, the head included, the embedding's table not."""
    share = config.num_experts_per_tok / config.n_routed_experts
    layers = range(config.num_hidden_layers)
    every = [w for n in layers for w in layer_weights(config, n)]
    head = config.vocab_size * config.hidden_size
    return sum(w.numel * (share if w.routed else 1) for w in every) + head
