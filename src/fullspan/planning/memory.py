"""Bytes that one rank holds, by item: through a step, and at its peak.

A step is followed through its phases (each layer forward, the head, each layer's second forward and
backward, the update); what is resident is the same in all, what layers keep grows and shrinks.
Sizes of a layer's own tensors are in activations.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fullspan.planning.activations import WIDE, Layer
from fullspan.planning.case import Case
from fullspan.planning.model_cost import Adapter, stored_bytes, unit_shares

HOST_PIECE = 64 << 20  # models/common/host_inputs.py (a test compares them)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Bytes by item at one point of a step. stage: forward, head, recompute, backward or update."""

    stage: str
    name: str
    items: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The fullest phase of a step, and the fullest of each stage."""

    peak: Phase
    stages: Sequence[Phase]

    @classmethod
    def of(cls, case: Case) -> "Memory":
        """Follow one step of `case`."""
        fullest: dict[str, Phase] = {}
        for phase in phases(case):
            if phase.stage not in fullest or phase.total > fullest[phase.stage].total:
                fullest[phase.stage] = phase
        stages = list(fullest.values())
        return cls(peak=max(stages, key=lambda phase: phase.total), stages=stages)


# What is not given out by PyTorch's allocator.
_OUTSIDE = ("allocator slack", "CUDA context", "NCCL buffers")


def allocated_bytes(phase: Phase) -> int:
    """What PyTorch's allocator gives out of it."""
    return sum(size for name, size in phase.items.items() if name not in _OUTSIDE)


def phases(case: Case) -> Iterator[Phase]:
    """Every phase of a step whose bytes differ, with all items of each."""
    frozen = frozen_bytes(case)
    for stage, name, changing in _changing(case):
        items = {k: v for k, v in {**frozen, **changing}.items() if v}
        busy = sum(v for k, v in items.items() if k not in frozen)
        items["allocator slack"] = int(busy * case.assumed.slack)
        items["CUDA context"] = case.assumed.context
        if case.world > 1:
            items["NCCL buffers"] = case.assumed.channels
        yield Phase(stage=stage, name=name, items=items)


def frozen_bytes(case: Case) -> dict[str, int]:
    """Frozen weights as a rank holds them: routed experts / ep; the others whole, or their share of
    all ranks with parallel.shard_weights (parallel/shard.py)."""
    routed, units, whole = stored_bytes(case.model, case.form)
    if case.run.parallel.shard_weights:
        units = sum(unit_shares(case.model, case.form, case.world))
    return {"routed experts": routed // case.ep, "other frozen weights": units + whole}


def held_elements(case: Case, chosen: Sequence[Adapter]) -> int:
    """Elements of adapters on one rank: of the experts' its share (lora/layers.py)."""
    return sum(a.numel // (case.ep if a.routed else 1) for a in chosen)


def kept_between_layers(case: Case) -> list[dict[str, int]]:
    """What the layers up to each one keep for the backward pass, by item.

    With recompute that is each layer's input and each full layer's selection, which the layers
    that share it hold too (models/common/recompute.py). Of inputs that wait in host memory the
    newest is here (the last layer's stays). Layers below the first adapter keep nothing: no
    gradient reaches them.
    """
    recompute, first = case.run.train.recompute, _first_adapted(case)
    layers = Layer.all(case)
    kept = {"saved layer inputs": 0, "saved selections": 0, "saved activations": 0}
    found = []
    for layer in layers:
        if layer.number >= first:
            # Without recompute it is the norm that keeps it.
            inputs = 1 if case.run.train.offload_inputs else layer.number - first + 1
            kept["saved layer inputs"] = inputs * layer.input()
            if layer.full or layer.number == first:
                kept["saved selections"] += layer.selection()
            if not recompute:
                kept["saved activations"] += layer.saved()
        found.append(dict(kept))
    return found


def host_bytes(case: Case) -> int:
    """Pinned host memory of a rank for one pack: inputs of all adapted layers but the last, in
    whole pieces (models/common/host_inputs.py)."""
    if not case.run.train.offload_inputs:
        return 0
    pieces = -(-Layer.all(case)[0].input() // HOST_PIECE)
    return (case.model.num_hidden_layers - 1 - _first_adapted(case)) * pieces * HOST_PIECE


def final_norm_bytes(case: Case) -> int:
    """What the norm before the head keeps: its input and 1/rms."""
    return case.rows * (case.model.hidden_size * case.item + WIDE)


def _first_adapted(case: Case) -> int:
    return min(adapter.layer for adapter in case.adapters)


def _changing(case: Case) -> Iterator[tuple[str, str, dict[str, int]]]:
    """(stage, name, items that change)."""
    every, layers = case.adapters, Layer.all(case)
    last = len(layers) - 1
    kept_upto = [{}, *kept_between_layers(case)]
    elements = held_elements(case, every)
    several = case.run.train.accumulation > 1
    resident = {
        "adapters": elements * WIDE,
        "Adam moments": 2 * elements * WIDE,
        "row tables": case.rows * (6 * 8 + case.model.qk_rope_head_dim * WIDE),
    }
    gathered = _gathered(case)
    recompute = case.run.train.recompute
    for layer in _ends_of_kinds(layers):
        unit, number = layer.number + 1, layer.number
        above = every if several else [a for a in every if a.layer >= number]
        gradients = held_elements(case, above) * WIDE
        before = elements * WIDE if several else 0
        kept = kept_upto[number + 1 if recompute else number]
        for name, items in layer.forward_moments().items():
            whole = gathered(*range(unit, min(unit + 1, len(layers)) + 1))
            changing = {**resident, "adapter gradients": before, **kept, **whole, **items}
            yield "forward", f"layer {number}, {name}", changing
        back = {
            **resident,
            "adapter gradients": gradients,
            **kept,
            **gathered(*range(max(unit - 1, 1), unit + 1)),
        }
        if number < _first_adapted(case):
            continue
        if case.run.train.offload_inputs and number > _first_adapted(case):
            back["saved layer inputs"] += layer.input()  # the next one, on its way
        for name, items in layer.recompute_moments().items():
            stage = "recompute" if recompute else "forward"
            yield stage, f"layer {number}, {name}", {**back, **items}
        for name, items in layer.backward_moments().items():
            yield "backward", f"layer {number}, {name}", {**back, **items}
    kept = kept_upto[-1]
    gradients = {"adapter gradients": elements * WIDE if several else 0}
    head = gathered(last + 2)
    yield "head", "head and loss", {**resident, **gradients, **kept, **head, **_head(case)}
    # The gradients joined in one message, and what AdamW makes beside them (train/optim.py).
    update = {"adapter gradients": elements * WIDE, "update": 2 * elements * WIDE}
    yield "update", "optimizer step", {**resident, **update}


def _ends_of_kinds(layers: Sequence[Layer]) -> list[Layer]:
    """The first and the last layer of every kind, its neighbours' kinds included. In between, what
    is kept and the gradients change by the same from one layer of a kind to the next."""
    padded = [None, *(layer.kind for layer in layers), None]
    ends: dict[tuple, list[int]] = {}
    for number in range(len(layers)):
        ends.setdefault(tuple(padded[number : number + 3]), []).append(number)
    chosen = {number for numbers in ends.values() for number in (numbers[0], numbers[-1])}
    return [layers[number] for number in sorted(chosen)]


def _gathered(case: Case) -> Callable[..., dict[str, int]]:
    """Bytes of units while they are whole: a function of their numbers."""
    sizes: list[int] = []
    if case.run.parallel.shard_weights and case.world > 1:
        sizes = [case.world * n for n in unit_shares(case.model, case.form, case.world)]

    def whole(*numbers: int) -> dict[str, int]:
        return {"gathered units": sum(sizes[n] for n in numbers if 0 <= n < len(sizes))}

    return whole


def _head(case: Case) -> dict[str, int]:
    """ops/linear_cross_entropy: logits of a chunk in float32, the unit gradient of all rows."""
    model, item = case.model, case.item
    rows = min(case.run.ops.loss_chunk_rows, case.rows)
    narrow = rows * model.vocab_size * item if item != WIDE else 0  # rounded probabilities
    return {
        "final norm": final_norm_bytes(case),
        "head logits": rows * model.vocab_size * WIDE,
        "head unit gradient": case.rows * model.hidden_size * item,
        "head rows": case.rows * model.hidden_size * item
        + 2 * rows * model.hidden_size * WIDE
        + narrow,
    }
