"""The work of a rank in each pass, by the part of the model where a rehearsal measures it and by
the kind whose rate it has (hardware.py): FLOPs of products and kernels, bytes of everything else.

Bytes are those that an operator must read and write, for the fused operators of a GPU (ops/rows);
what is small beside the rows (router scores, sorting, tables) is left out, as are launches.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from fullspan.planning.activations import Layer
from fullspan.planning.case import Case
from fullspan.planning.model_cost import Flops, Weight, absorbing, layer_weights

Work = Mapping[tuple[str, str], float]  # {(part, kind): FLOPs or bytes}
PARTS = ("attention", "indexer", "experts", "dense", "head", "other")


def work(case: Case, counted: Flops, phase: str, *, scored: float) -> Work:
    """Of one pack in one pass, on the slowest rank.

    counted: FLOPs over all ranks. scored: share of the (query, key) pairs of the indexer that the
    slowest rank scores.
    """
    if phase == "recompute" and not case.run.train.recompute:
        return {}
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    share, back = 1 / case.cp, phase == "backward"
    kernel = "attention backward" if back else "attention forward"
    found["attention", kernel] = counted.of("attention", phase) * share
    found["head", "head"] = counted.of("head", phase) * share
    if phase == "forward":
        found["indexer", "indexer"] = counted.of("indexer", phase) * scored
    for adapted, layers in _alike(case):
        weights = layer_weights(case.model, layers[0])
        unread = phase == "recompute" and not case.remakes_outputs(layers[0])
        sparse = case.model.mlp_layer_types[layers[0]] == "sparse"
        for place, amount in (
            *_products(case, weights, phase, unread=unread),
            *_adapters(case, weights, adapted, back=back),
            *_rows(case, sparse=sparse, back=back, unread=unread),
        ):
            found[place] += amount * len(layers)
    return {place: amount for place, amount in found.items() if amount}


def _alike(case: Case) -> Iterator[tuple[frozenset[str], Sequence[int]]]:
    """Numbers of layers with the same weights and adapters, the names of these inside a layer."""
    kinds: dict[tuple, list[int]] = {}
    for layer in Layer.all(case):
        kinds.setdefault(layer.kind, []).append(layer.number)
    return ((names, layers) for (*_, names), layers in kinds.items())


def _part(weight: Weight) -> str:
    """Where a layer's projection runs."""
    if "self_attn." in weight.name:
        return "indexer" if ".indexer." in weight.name else "attention"
    return "experts" if weight.routed or weight.name.endswith("mlp.gate.weight") else "dense"


def _rows_of(case: Case, weight: Weight) -> float:
    """Rows that meet a weight; of the experts' weights, slots for each of the experts held."""
    held = case.model.n_routed_experts // case.ep
    return case.busiest_slots / held if weight.routed else case.rows


def _products(case: Case, weights: Sequence[Weight], phase: str, *, unread: bool) -> Iterator:
    """A frozen weight meets its rows in each pass, kv_b_proj's key half twice in the backward one,
    and is dequantised for it where it is FP8: an element read, one of the activations' written;
    those of experts for every chunk of rows. FP8 products of the experts round their rows instead
    and move their outputs once more, or round the weights again. unread: the outputs of the experts
    are, and are not made. The indexer's products are counted with its scores (model_cost.flops)."""
    for weight in weights:
        part = _part(weight)
        if len(weight.shape) < 2 or (part == "indexer" and phase != "forward"):
            continue
        if unread and weight.routed and "down_proj" in weight.name:
            continue
        held = weight.numel // (case.ep if weight.routed else 1)
        fp8 = weight.routed and phase != "backward" and case.run.ops.fp8_products
        kind = "float32" if weight.wide else "experts" if weight.routed else "projections"
        kind = "experts fp8" if fp8 else kind
        used = float(held)
        if "kv_b_proj" in weight.name:
            kind = "products by head"
            used += absorbing(case.model) if phase == "backward" else 0
        if part != "indexer":
            yield (part, kind), 2 * used * _rows_of(case, weight)
        if fp8:
            yield from _fp8_operands(case, weight, held)
        elif weight.scaled and case.form.block is not None:
            times = case.chunks if weight.routed else 1
            yield (part, "dequantise"), held * (1 + case.item) * times


def _fp8_operands(case: Case, weight: Weight, held: int) -> Iterator:
    """Bytes that a forward product of the experts moves beside its own (ops/expert_products)."""
    *_, out, inner = weight.shape
    yield ("experts", "elementwise"), case.busiest_slots * inner * (case.item + 1)
    if case.run.ops.expert_products == "scaled_grouped_mm":
        yield ("experts", "dequantise"), held * 2 * case.chunks
    else:
        yield ("experts", "permute"), case.busiest_slots * out * 2 * case.item


def _adapters(
    case: Case, weights: Sequence[Weight], adapted: frozenset[str], *, back: bool
) -> Iterator:
    """Thin products, bound by memory. Forward: the input is read, and the base's output is read and
    written. Backward: the gradient is read twice, the input once, and its gradient by the base read
    and written. Experts' changes are written apart first, then added. kv_b_proj acts on the query
    and on the output, head by head, in the backward pass once more on the query
    (models/dsa/absorbed.py)."""
    model, item = case.model, case.item
    heads, latent = model.num_attention_heads, model.kv_lora_rank
    for weight in weights:
        name = weight.name.split(".", 3)[3].removesuffix(".weight")
        if name not in adapted:
            continue
        sides = [(weight.shape[-1], weight.shape[-2])]
        if name.endswith("kv_b_proj"):
            sides = [(heads * model.qk_nope_head_dim, heads * latent)]
            sides += [(heads * latent, heads * model.v_head_dim)]
        here = case.busiest_slots if weight.routed else case.rows
        for inner, out in sides:
            apart = 2 * weight.routed
            moved = 2 * out + (3 + apart) * inner if back else inner + (2 + apart) * out
            if back and out == heads * latent:
                moved += inner + 2 * out
            yield (_part(weight), "elementwise"), here * moved * item


def _rows(case: Case, *, sparse: bool, back: bool, unread: bool) -> Iterator:
    """Bytes of what is no product, adapters aside. A norm reads and writes a row, and reads another
    in the backward pass; gate, up and their product likewise."""
    model, rows, item = case.model, case.rows, case.item
    hidden, heads, latent = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
    rope = model.qk_rope_head_dim
    norm, gated = (3, 5) if back else (2, 3)
    # Norms of the latents, the key put together, the query's rope part turned; backward that again.
    attention = norm * (model.q_lora_rank + latent) + 2 * (latent + rope)
    attention += heads * 2 * rope * (1 + back)
    yield ("attention", "elementwise"), rows * attention * item
    # Two norms and two sums of a layer.
    yield ("other", "elementwise"), rows * 2 * (norm + 3) * hidden * item
    if not sparse:
        yield ("dense", "elementwise"), rows * gated * model.intermediate_size * item
        return
    inner = model.moe_intermediate_size
    yield ("dense", "elementwise"), rows * gated * model.n_shared_experts * inner * item
    # Gated products; routed and shared outputs summed.
    moved = case.busiest_slots * gated * inner + rows * 3 * hidden
    yield ("experts", "elementwise"), moved * item
    if not back and case.ep > 1:
        yield ("experts", "waits"), 1
    # Rows into the experts' order; among ranks also into the order of arrival. Then the way back.
    among = 2 * case.busiest_slots if case.ep > 1 else 0
    there, away = 2 * case.slots + among, 0 if unread else case.slots + rows + among
    yield ("experts", "permute"), (there + away) * hidden * item
