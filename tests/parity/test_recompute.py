"""Activation recompute with a selection shared from layer to layer."""

from dataclasses import replace

import pytest

from fullspan.models.dsa.attention import Indexer
from fullspan.ops import backend
from fullspan.ops.selection import Selection
from tests.support.tiny import gradients, local_loss, random_pack, relative, tiny_model


def test_two_microbatches_in_flight_with_recompute(tiny_checkpoints):
    """Forward A, forward B, backward A, backward B: as the same microbatches without recompute."""
    folder = tiny_checkpoints["glm_moe_dsa"]
    kept, recomputed = tiny_model(folder), tiny_model(folder, recompute=True)
    packs = [
        random_pack(lengths, vocab=kept.config.vocab_size, seed=i)
        for i, lengths in enumerate(([150, 50], [200]))
    ]
    for model, order in ((kept, (0, 1)), (recomputed, (0, 1)), (recomputed, (1, 0))):
        model.zero_grad(set_to_none=True)
        losses = [local_loss(model, pack)[0] for pack in packs]
        for index in order:
            losses[index].backward()
        if model is kept:
            wanted = gradients(model)
            continue
        errors = {name: relative(got, wanted[name]) for name, got in gradients(model).items()}
        worst = max(errors, key=errors.__getitem__)
        print(f"backward in order {order}: worst {worst} {errors[worst]:.2e}")
        assert errors[worst] < 1e-6


def test_the_indexer_runs_once_a_microbatch(tiny_checkpoints):
    model = tiny_model(tiny_checkpoints["glm_moe_dsa"], recompute=True)
    runs = []
    for module in model.modules():
        if isinstance(module, Indexer):
            module.register_forward_hook(lambda module, given, selection: runs.append(module))
    local_loss(model, random_pack([200], vocab=model.config.vocab_size))[0].backward()
    assert len(runs) == model.config.indexer_types.count("full") < model.config.num_hidden_layers


def test_a_wrong_microbatch_selection_would_be_seen(tiny_checkpoints):
    """Planted: every layer keeps its last selection, so recompute of A reads that of B."""
    model = tiny_model(tiny_checkpoints["glm_moe_dsa"], recompute=True)
    packs = [random_pack([200], vocab=model.config.vocab_size, seed=seed) for seed in (0, 1)]
    losses = [local_loss(model, pack)[0] for pack in packs]
    losses[0].backward()
    losses[1].backward()
    wanted = gradients(model)
    model.zero_grad(set_to_none=True)
    last: dict[int, object] = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(
            lambda layer, given, index=index: (
                (*given[:4], last[index]) if given[4] is not None else None
            )
        )
        layer.register_forward_hook(
            lambda layer, given, out, index=index: last.update({index: out[1]})
        )
    losses = [local_loss(model, pack)[0] for pack in packs]
    losses[0].backward()
    losses[1].backward()
    assert max(relative(got, wanted[name]) for name, got in gradients(model).items()) > 1e-2


def seen_selections(model) -> list[Selection]:
    """Every selection that a layer hands on from now on."""
    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda layer, given, out: seen.append(out[1]))
    return seen


@pytest.mark.parametrize("recompute", [True, False])
def test_a_selection_is_planned_once_a_microbatch(tiny_checkpoints, monkeypatch, recompute):
    """By the Triton kernels, interpreted, with two microbatches in flight: one plan for all layers
    and passes that share a selection, gone when the layer that chose the keys is done.
    """
    pytest.importorskip("tests.support.triton_interpreter")
    from fullspan.ops.sparse_attention import launch

    monkeypatch.setitem(backend.BACKENDS["sparse_attention"], "triton", lambda *given: None)
    backend.choose.cache_clear()
    made, build = [], launch.build_plan

    def counted(*given):
        made.append(build(*given))
        return made[-1]

    monkeypatch.setattr(launch, "build_plan", counted)
    found = {}
    for name in ("reference", "triton"):
        model = tiny_model(tiny_checkpoints["glm_moe_dsa"], recompute=recompute)
        layers = model.model.layers = model.model.layers[1:4]  # full, shared, shared
        layers[0].self_attn.indexer.topk = 16  # the interpreter is slow
        selections = seen_selections(model)
        for layer in layers:
            layer.self_attn.options = replace(model.options, sparse_attention=name)
        packs = [random_pack([24], vocab=model.config.vocab_size, seed=seed) for seed in (0, 1)]
        losses = [local_loss(model, pack)[0] for pack in packs]
        for loss in losses:
            loss.backward()
            assert not any(selection.plans for selection in selections)
        found[name] = gradients(model)
    backend.choose.cache_clear()
    assert len(made) == 2
    errors = {
        name: relative(got, found["reference"][name]) for name, got in found["triton"].items()
    }
    assert max(errors.values()) < 1e-5


def test_nothing_depends_on_the_spans_of_rows(tiny_checkpoints):
    """Attention of 500 rows in one span, and in four of which the last is short."""
    pack = random_pack([300, 200], vocab=300)
    found = []
    for size in (1 << 30, 1 << 20):
        model = tiny_model(tiny_checkpoints["glm_moe_dsa"], recompute=True)
        for layer in model.model.layers:
            layer.self_attn.options = replace(model.options, attention_bytes=size)
        loss, _ = local_loss(model, pack)
        loss.backward()
        found.append((loss.item(), gradients(model)))
    (loss, wanted), (again, got) = found
    assert again == pytest.approx(loss, rel=1e-6)
    errors = {name: relative(got[name], value) for name, value in wanted.items()}
    assert 0 < max(errors.values()) < 1e-6, "some sums are in another order"
