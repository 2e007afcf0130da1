"""The bytes that a rank receives in one layer and microbatch, as docs/parallelism.md has them."""

from collections import Counter

from fullspan.models.dsa.config import DsaConfig


def layer_budget(
    config: DsaConfig,
    layer: int,
    *,
    rows: int,
    cp: int,
    ep: int,
    itemsize: int,
    slots: tuple[int, int],
    traded: tuple[int, int] = (0, 0),
    remade: bool = True,
) -> Counter[tuple[str, str]]:
    """By (pass, item), without the weights. A recompute pass is assumed.

    Args:
        rows: of this rank.
        itemsize: bytes of an activation.
        slots: (row, expert) pairs that leave this rank for another's expert, and that come here.
            Each brings its weight along; the gradient of the weight goes the other way.
        remade: whether recompute makes the experts' outputs.
        traded: rows that the indexer sends to and receives from the mirror.
    """
    latent = (cp - 1) * rows * (config.kv_lora_rank + config.qk_rope_head_dim)
    bytes_of: Counter[tuple[str, str]] = Counter()
    bytes_of["forward", "latent"] = bytes_of["recompute", "latent"] = latent * itemsize
    bytes_of["backward", "latent gradient"] = latent * 4
    if config.indexer_types[layer] == "full":
        heads, dim = config.index_n_heads, config.index_head_dim
        sends, receives = traded
        there, back = heads * (dim * itemsize + 4), 4 * (config.index_topk + 1)
        bytes_of["forward", "index keys"] = (cp - 1) * rows * dim * itemsize
        bytes_of["forward", "index rows"] = receives * there + sends * back
    if config.mlp_layer_types[layer] == "sparse":
        leave, come = slots
        for phase in ("forward", "recompute", "backward"):
            there_and_back = leave + come if remade or phase != "recompute" else come
            rows = there_and_back * config.hidden_size * itemsize
            bytes_of[phase, "expert rows"] = rows + 4 * (leave if phase == "backward" else come)
        for phase in ("forward", "recompute"):
            bytes_of[phase, "expert counts"] = (ep - 1) * config.n_routed_experts // ep * 8
    return bytes_of
