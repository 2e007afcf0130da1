"""What config.json says of GLM-5.x (`glm_moe_dsa`) and DeepSeek-V3.2 (`deepseek_v32`).

Every field of the file is either used, known to be without influence on training, or refused by
name: a field that is read but ignored would train another model than the one that was released.
Of two habits of released files: `head_dim` says 192 in GLM-5.2 and means nothing, and the list
`indexer_types` wins over the schedule (`index_topk_freq`, `index_skip_topk_offset`) beside it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fullspan.errors import CheckpointError, ConfigError
from fullspan.ops.rope.yarn import Yarn, yarn_mscale

# Fields without influence on what is computed here (bookkeeping, inference, initialisation, MTP,
# Hugging Face's own). quantization_config says how files hold it: checkpoint/quantisation.py's.
_WITHOUT_INFLUENCE = frozenset((
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype",
    "ep_size", "head_dim", "initializer_range", "max_position_embeddings", "num_key_value_heads",
    "num_nextn_predict_layers", "output_attentions", "output_hidden_states",
    "output_router_logits", "pretraining_tp", "problem_type", "quantization_config",
    "return_dict", "torch_dtype", "transformers_version", "use_cache",
    "chunk_size_feed_forward", "id2label", "label2id",
    "is_encoder_decoder", "index_share_for_mtp_iteration",
))  # fmt: skip
# Fields that may be present only with the one value that is implemented.
_ONLY_VALUE = {
    "attention_bias": False,
    "attention_dropout": 0,
    "hidden_act": "silu",
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
_REQUIRED_INTEGERS = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
    "num_hidden_layers", "num_attention_heads", "n_routed_experts", "n_shared_experts",
    "num_experts_per_tok", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "index_topk", "index_n_heads", "index_head_dim",
)  # fmt: skip
_USED = frozenset((
    "model_type", "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob",
    "first_k_dense_replace", "mlp_layer_types", "rms_norm_eps", "latent_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "indexer_types", "index_topk_freq",
    "index_skip_topk_offset", "indexer_rope_interleave", "eos_token_id", "pad_token_id",
    "num_experts", "num_local_experts", "qk_head_dim", "layer_types", "index_topk_pattern",
))  # fmt: skip
# Two names of one thing: those that transformers 5.17 and later releases write.
_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")
# Family: whether the indexer's RoPE is interleaved where the config does not say.
_FAMILIES = {"glm_moe_dsa": True, "deepseek_v32": False}


@dataclass(frozen=True, kw_only=True)
class DsaConfig:
    """What the model needs to know. Widths are in elements, token ids are vocabulary ids.

    indexer_types     per layer: "full" owns an indexer, "shared" uses the selection of the last
                      full layer before it
    mlp_layer_types   per layer: "dense" or "sparse" (mixture of experts)
    latent_norm_eps   eps of the norms of the compressed query and key/value. Servers use the
                      config's rms_norm_eps, `transformers` its class default 1e-6; the default
                      here is the servers'.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    rms_norm_eps: float
    latent_norm_eps: float
    rope_theta: float
    yarn: Yarn | None
    indexer_rope_interleave: bool
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in _REQUIRED_INTEGERS:
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)} in the model config: it must be at least 1"
                )
        _check_layers(
            "indexer_types", self.indexer_types, ("full", "shared"), self.num_hidden_layers
        )
        _check_layers(
            "mlp_layer_types", self.mlp_layer_types, ("dense", "sparse"), self.num_hidden_layers
        )
        if self.indexer_types[0] != "full":
            raise ConfigError(
                "indexer_types starts with a shared layer: there is no full layer before it to "
                "share from"
            )
        if self.n_routed_experts % self.n_group or not 1 <= self.topk_group <= self.n_group:
            raise ConfigError(
                f"n_group {self.n_group} and topk_group {self.topk_group} do not fit "
                f"{self.n_routed_experts} routed experts: n_group must divide n_routed_experts and "
                "topk_group lie in 1..n_group"
            )
        choosable = self.n_routed_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > choosable:
            raise ConfigError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, but topk_group leaves "
                f"{choosable} experts to choose from"
            )
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.index_head_dim:
            raise ConfigError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}: it must be even and at most "
                f"index_head_dim ({self.index_head_dim})"
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of the attention logits; yarn with `mscale_all_dim` raises it (DeepSeek-V3)."""
        scale = self.qk_head_dim**-0.5
        if self.yarn is None or not self.yarn.mscale_all_dim:
            return scale
        return scale * yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim) ** 2

    @classmethod
    def load(cls, folder: Path, **overrides: Any) -> "DsaConfig":
        """Read `folder`/config.json. `overrides` replace fields of the file; None: none.

        Raises:
            CheckpointError: the file is missing or is no JSON.
            ConfigError: see `from_hf`.
        """
        path = folder / "config.json"
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"no config.json in {folder}: model.path must name a Hugging Face folder"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
        given = {name: value for name, value in overrides.items() if value is not None}
        return cls.from_hf({**fields, **given})

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> "DsaConfig":
        """Build from the fields of a Hugging Face `config.json`.

        Raises:
            ConfigError: a field that is unknown, missing, contradicts another, or asks for what is
            not implemented.
        """
        family = fields.get("model_type")
        if family not in _FAMILIES:
            raise ConfigError(f"model_type {family!r} is not one of {', '.join(_FAMILIES)}")
        _refuse_unknown(fields)
        for name, only in _ONLY_VALUE.items():
            if fields.get(name, only) != only:
                raise ConfigError(
                    f"{name} is {fields[name]!r} in the model config: only {only!r} is implemented"
                )
        for index, kind in enumerate(fields.get("layer_types") or ()):
            if kind not in _LAYER_TYPES:
                raise ConfigError(
                    f"layer_types[{index}] is {kind!r} in the model config: "
                    f"allowed are {' and '.join(_LAYER_TYPES)}"
                )
        integers = {name: _integer(fields, name) for name in _REQUIRED_INTEGERS}
        for alias in ("num_experts", "num_local_experts"):
            if fields.get(alias, integers["n_routed_experts"]) != integers["n_routed_experts"]:
                raise ConfigError(
                    f"{alias} is {fields[alias]} but n_routed_experts is "
                    f"{integers['n_routed_experts']} in the model config: they must agree"
                )
        head = integers["qk_nope_head_dim"] + integers["qk_rope_head_dim"]
        if fields.get("qk_head_dim", head) != head:
            raise ConfigError(
                f"qk_head_dim is {fields['qk_head_dim']} but qk_nope_head_dim + qk_rope_head_dim "
                f"is {head}"
            )
        theta, yarn = _rope(fields)
        eps = float(fields.get("rms_norm_eps", 1e-6))
        return cls(
            model_type=family,
            **integers,
            n_group=_integer(fields, "n_group"),
            topk_group=_integer(fields, "topk_group"),
            routed_scaling_factor=float(fields.get("routed_scaling_factor", 1.0)),
            norm_topk_prob=bool(fields.get("norm_topk_prob", True)),
            rms_norm_eps=eps,
            latent_norm_eps=float(fields.get("latent_norm_eps", eps)),
            rope_theta=theta,
            yarn=yarn,
            indexer_rope_interleave=bool(fields.get("indexer_rope_interleave", _FAMILIES[family])),
            indexer_types=_indexer_types(fields, integers["num_hidden_layers"]),
            mlp_layer_types=_mlp_layer_types(fields, integers["num_hidden_layers"]),
        )


def _refuse_unknown(fields: Mapping[str, Any]) -> None:
    known = _USED | _WITHOUT_INFLUENCE | set(_ONLY_VALUE) | set(_REQUIRED_INTEGERS)
    for name in fields:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; the nearest known field is {near[0]}" if near else ""
            raise ConfigError(
                f"the model config has an unknown field {name!r} (value {fields[name]!r}){hint}"
            )


def _integer(fields: Mapping[str, Any], name: str) -> int:
    if name not in fields:
        raise ConfigError(f"the model config has no field {name}")
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r} in the model config: it must be an integer")
    return value


def _check_layers(name: str, kinds: tuple[str, ...], allowed: tuple[str, str], layers: int) -> None:
    if len(kinds) != layers:
        raise ConfigError(
            f"{name} has {len(kinds)} entries in the model config, num_hidden_layers is {layers}"
        )
    for index, kind in enumerate(kinds):
        if kind not in allowed:
            raise ConfigError(
                f"{name}[{index}] is {kind!r} in the model config: allowed are "
                f"{' and '.join(allowed)}"
            )


def _indexer_types(fields: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """The list itself, else a pattern of F and S, else the schedule.

    By the schedule layer i is full where max(i - offset + 1, 0) % freq == 0.
    """
    if (kinds := fields.get("indexer_types")) is not None:
        return tuple(kinds)
    if (pattern := fields.get("index_topk_pattern")) is not None:
        letters = {"F": "full", "S": "shared"}
        return tuple(letters.get(kind, str(kind)) for kind in pattern)
    freq = fields.get("index_topk_freq") or 1
    offset = fields.get("index_skip_topk_offset", 2)
    return tuple("shared" if max(i - offset + 1, 0) % freq else "full" for i in range(layers))


def _mlp_layer_types(fields: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    first = fields.get("first_k_dense_replace")
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        dense = min(3 if first is None else first, layers)
        return ("dense",) * dense + ("sparse",) * (layers - dense)
    if first is not None and list(kinds).count("dense") != min(first, layers):
        raise ConfigError(
            f"first_k_dense_replace is {first}, but mlp_layer_types has "
            f"{list(kinds).count('dense')} dense layers: the model config contradicts itself"
        )
    return tuple(kinds)


def _rope(fields: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """theta and yarn: of `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope = dict(given)
    theta = rope.pop("rope_theta", fields.get("rope_theta"))
    if theta is None:
        raise ConfigError("the model config gives no rope_theta (in rope_parameters or on its own)")
    if fields.get("rope_theta", theta) != theta:
        raise ConfigError(
            f"rope_theta is {fields['rope_theta']} but rope_parameters says {theta}: "
            "they must agree"
        )
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if kind == "default":
        return float(theta), None
    if kind != "yarn":
        raise ConfigError(
            f"rope_type {kind!r} is not implemented: allowed are 'default' and 'yarn'"
        )
    return float(theta), _yarn(rope)


def _yarn(rope: dict[str, Any]) -> Yarn:
    """From the fields that are left of `rope_parameters` once theta and type are taken out."""
    if "original_max_position_embeddings" not in rope or "factor" not in rope:
        raise ConfigError(
            "yarn in the model config needs both factor and original_max_position_embeddings"
        )
    length = rope.pop("original_max_position_embeddings")
    allowed = {field.name for field in dataclass_fields(Yarn)}
    if unknown := sorted(set(rope) - allowed):
        raise ConfigError(f"unknown field(s) {', '.join(unknown)} of yarn in the model config")
    return Yarn(
        original_max_position=length,
        **{name: value for name, value in rope.items() if value is not None},
    )
