"""Counted tensors, bytes, adapters and FLOPs against the real model, and the known totals of
GLM-5.2."""

from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fullspan.checkpoint.load import load_model, meta_model
from fullspan.checkpoint.tiny import init_tiny
from fullspan.errors import ConfigError
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import adapted_modules, expert_parameters, inject, trainable_parameters
from fullspan.models.common.frozen import BlockLayout
from fullspan.models.dsa.attention import Angles
from fullspan.models.dsa.config import DsaConfig
from fullspan.ops.options import OpOptions
from fullspan.ops.rope.op import inverse_frequencies, rope_angles
from fullspan.parallel.context import SequenceContext
from fullspan.parallel.expert import ExpertParallel
from fullspan.parallel.sequence import Partition
from fullspan.parallel.shard import FlatUnit
from fullspan.planning.memory import held_elements
from fullspan.planning.model_cost import (
    Weight,
    WeightFormat,
    Work,
    active_parameters,
    flops,
    layer_weights,
    routed_weights,
    share_bytes,
    unit_weights,
    whole_weights,
)
from tests.support.tiny import EVERY_TARGET, FAMILIES, random_pack, tiny_model
from tests.unit.planning.conftest import glm_case, tiny_case

GLM_WORK = Work.of(131_072, 131_072, 2048)


def every_weight(config):
    spread = [weight for unit in unit_weights(config) for weight in unit]
    return [*spread, *whole_weights(config), *routed_weights(config)]


def load(folder, dtype=torch.float32):
    return load_model(folder, dtype=dtype, device="cpu", options=OpOptions(), recompute=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_the_models(family, tiny_checkpoints):
    model = load(tiny_checkpoints[family])
    counted = {weight.name: weight.shape for weight in every_weight(model.config)}
    assert counted == {name: tuple(t.shape) for name, t in model.state_dict().items()}


@pytest.mark.parametrize(
    ("fp8", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=["plain", "fp8"]
)
def test_bytes_are_the_models(tmp_path, fp8, dtype):
    init_tiny(tmp_path / "model", family="glm_moe_dsa", seed=0, fp8=fp8)
    name = str(dtype).removeprefix("torch.")
    case = tiny_case(tmp_path / "model", model={"dtype": name})
    assert (case.form.block is not None) == fp8
    model = load(tmp_path / "model", dtype)
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert case.form.bytes_of(every_weight(case.model)) == held
    # And each unit's share of 4 ranks, as it is laid out.
    routed = set(expert_names(model))
    for module, counted in zip(model.units, unit_weights(case.model), strict=True):
        spread = {
            n: (tuple(p.shape), p.dtype)
            for n, p in model.named_parameters()
            if id(p) in {id(q) for q in module.parameters()} and n not in routed
        }
        unit = FlatUnit(spread, rank=1, size=4, device=torch.device("meta"))
        assert share_bytes(counted, case.form, 4) == unit.share


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_ragged_blocks_begin_anew_in_each_half(name):
    """gate above up; as models/common/frozen.py lays scales out."""
    layout = BlockLayout(block=(48, 40), parts=2 if name == "gate_up_proj" else 1)
    weight = Weight(f"mlp.experts.{name}.weight", (3, 128, 96), scaled=True, routed=True)
    form = WeightFormat(itemsize=2, block=layout.block)
    assert form.parts(weight) == [3 * 128 * 96, 4 * prod(layout.scale_shape(weight.shape))]


def expert_names(model):
    return [name for name, _ in model.named_parameters() if ".mlp.experts." in name]


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_those_that_are_injected(family, tiny_checkpoints):
    model, case = tiny_model(tiny_checkpoints[family]), tiny_case(tiny_checkpoints[family])
    counted = {adapter.module: adapter.numel for adapter in case.adapters}
    assert counted == {
        name: module.lora_a.numel() + module.lora_b.numel()
        for name, module in adapted_modules(model).items()
    }
    routed = {n.rpartition(".")[0] for n in expert_parameters(model)}
    assert {a.module for a in case.adapters if a.routed} == routed
    assert held_elements(case, case.adapters) == sum(
        p.numel() for p in trainable_parameters(model).values()
    )


def test_a_rank_holds_its_experts_adapters(glm):
    """ep 2: half of the experts, so half of their adapters; lora_a and lora_b start with the held
    experts (lora/layers.py)."""
    whole, half = tiny_case(glm), tiny_case(glm, world=2, parallel={"ep": 2})
    routed = [adapter for adapter in whole.adapters if adapter.routed]
    others = [adapter for adapter in whole.adapters if not adapter.routed]
    assert 2 * held_elements(half, routed) == held_elements(whole, routed) > 0
    assert held_elements(half, others) == held_elements(whole, others) > 0
    meta = meta_model(whole.model, OpOptions(), recompute=True, experts=range(4, 8))
    inject(meta, LoraConfig(r=3, targets=EVERY_TARGET))
    held = sum(parameter.numel() for parameter in trainable_parameters(meta).values())
    assert held_elements(half, half.adapters) == held


def test_a_target_that_names_nothing_is_refused(glm):
    for target in ("wq_b", "gate", "lm_head", "gate_up_proj", "nothing"):
        with pytest.raises(ConfigError, match=f"'{target}' names nothing"):
            _ = tiny_case(glm, lora={"targets": [target]}).adapters


def test_a_quantisation_that_is_not_in_blocks_is_refused():
    with pytest.raises(ConfigError, match="quant_method 'awq'"):
        WeightFormat.of({"quantization_config": {"quant_method": "awq"}}, "bfloat16")


# --------------------------------------------------------------------------------------- FLOPs


def test_products_are_those_that_run(glm):
    """Every layer forward and backward, its matrix products counted by PyTorch. Scores, attention
    and head are ops of our own, whose READMEs have the formulas."""
    model, case = tiny_model(glm), tiny_case(glm)
    tokens, _, layout = random_pack([case.pack], vocab=model.config.vocab_size)
    partition = Partition(mode="contiguous", size=1, length=case.pack)
    sequence = SequenceContext.create(layout, partition, experts=ExpertParallel(experts=8))
    inv_freq, factor = inverse_frequencies(*model.model.rope)
    angles = Angles(*rope_angles(sequence.positions, inv_freq, factor))
    counted = {"forward": 0, "backward": 0}
    selection = None
    for layer in model.model.layers:
        x = torch.randn(len(tokens), model.config.hidden_size, requires_grad=True)
        with FlopCounterMode(display=False) as forward:
            out, selection = layer(x, angles, sequence, selection, None)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        counted["forward"] += forward.get_total_flops()
        counted["backward"] += backward.get_total_flops()
    planned = flops(case.model, case.run.lora, case.work, recompute=True)
    products = ("projections", "experts", "LoRA")
    scores = 2 * 4 * 16 * case.work.pairs * case.model.indexer_types.count("full")
    frozen_indexer = planned.of("indexer", "forward") - scores
    for phase in ("forward", "backward"):
        wanted = sum(planned.of(part, phase) for part in products)
        assert counted[phase] == wanted + (frozen_indexer if phase == "forward" else 0), phase
    assert planned.of("projections", "recompute") == planned.of("projections", "forward")


def test_pairs_and_attended_keys_are_those_of_the_documents():
    for rows, document, topk in ((200, 200, 64), (200, 64, 64), (200, 30, 64), (7, 3, 2)):
        lengths = [place % document + 1 for place in range(rows)]
        work = Work.of(rows, document, topk)
        assert work.pairs == sum(lengths)
        assert work.attended == sum(min(length, topk) for length in lengths)


def test_flops_of_glm_52_are_the_known_ones():
    """Per token at 131,072: body 2 x 40e9, attention 2.2e10, indexer 1.1e10."""
    case = glm_case()
    planned = flops(case.model, case.run.lora, GLM_WORK, recompute=True)
    body = sum(planned.of(part, "forward") for part in ("projections", "experts"))
    head = planned.of("head", "forward") / 2
    indexer = sum(w.numel for n in range(78) for w in layer_weights(case.model, n)
                  if ".indexer." in w.name and len(w.shape) > 1)  # fmt: skip
    assert body / 131_072 + head / 131_072 + 2 * indexer == pytest.approx(
        2 * active_parameters(case.model), rel=1e-4
    )
    assert planned.of("attention", "forward") / 131_072 == pytest.approx(2.2e10, rel=0.01)
    scores = planned.of("indexer", "forward") / 131_072 - 2 * indexer
    assert scores == pytest.approx(1.1e10, rel=0.03)
    million = flops(case.model, case.run.lora, Work.of(1 << 20, 1 << 20, 2048), recompute=True)
    assert million.of("indexer", "forward") / (1 << 20) - 2 * indexer == pytest.approx(
        9e10, rel=0.01
    )


def mtp_weights(config: DsaConfig) -> list[Weight]:
    """The multi-token-prediction layer of the checkpoint, which is neither loaded nor trained: a
    full sparse layer, and what joins a hidden state with the next token (models.md)."""
    kinds = list(zip(config.indexer_types, config.mlp_layer_types, strict=True))
    width = config.hidden_size
    norms = [Weight(name, (width,)) for name in ("enorm", "hnorm", "shared_head.norm")]
    like = kinds.index(("full", "sparse"))
    bias = Weight("e_score_correction_bias", (config.n_routed_experts,), wide=True)
    joined = Weight("eh_proj.weight", (width, 2 * width), scaled=True)
    return [*layer_weights(config, like), bias, joined, *norms]


def test_totals_of_glm_52_are_the_known_ones():
    """743e9 parameters, 753e9 with the MTP layer, 40e9 active; 755.7 GB in FP8, experts 725."""
    case = glm_case()
    every, mtp = every_weight(case.model), mtp_weights(case.model)
    parameters = sum(weight.numel for weight in every)
    assert parameters == pytest.approx(743e9, rel=1e-3)
    assert parameters + sum(w.numel for w in mtp) == pytest.approx(753e9, rel=1e-3)
    assert active_parameters(case.model) == pytest.approx(40e9, rel=0.01)
    routed = routed_weights(case.model)
    assert sum(weight.numel for weight in routed) == 75 * 256 * 3 * 6144 * 2048
    assert case.form.bytes_of(routed) == pytest.approx(725e9, rel=1e-3)
    assert case.form.bytes_of([*every, *mtp]) == pytest.approx(755.7e9, rel=1e-3)
