"""Counted bytes against the real tensors of the tiny model, and GLM-5.2's known figures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fullspan.checkpoint.load import load_model
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import inject, trainable_parameters
from fullspan.models.common.host_inputs import PIECE_BYTES
from fullspan.models.dsa.attention import Angles
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.backend import resolve
from fullspan.ops.options import OpOptions
from fullspan.ops.rope.op import inverse_frequencies, rope_angles
from fullspan.ops.selection import Selection
from fullspan.ops.sparse_attention.chunks import span_rows
from fullspan.parallel.context import SequenceContext
from fullspan.parallel.expert import ExpertParallel
from fullspan.parallel.sequence import Partition
from fullspan.planning import memory
from fullspan.planning.activations import PLAN, Layer
from fullspan.planning.case import Case
from fullspan.planning.memory import (
    HOST_PIECE,
    Memory,
    final_norm_bytes,
    frozen_bytes,
    held_elements,
    host_bytes,
    kept_between_layers,
    phases,
)
from fullspan.train.schedule import OptimConfig
from fullspan.train.session import Session
from tests.support.memory import peak_bytes
from tests.support.ranks import run_ranks
from tests.support.runs import mesh_of
from tests.support.tiny import EVERY_TARGET, random_pack
from tests.unit.planning.conftest import glm_case, tiny_case

# The kernels' is the least there can be, so that what it takes on a CPU is no peak.
WORKSPACE, EXPERTS = 1 << 20, 1 << 21
TARGETS = {
    "every": EVERY_TARGET,
    "kv_b_proj": ("kv_b_proj",),
    "experts' down_proj": ("experts.down_proj",),
}


def case_of(folder: Path, dtype: str, targets: tuple[str, ...], **sections: Any) -> Case:
    """Of 400 rows, which go to the experts in two chunks."""
    return tiny_case(
        folder,
        **{"data": {"pack_length": 400}, **sections},
        model={"dtype": dtype},
        lora={"r": 8, "targets": list(targets)},
        ops={"workspace_bytes": WORKSPACE, "expert_bytes": EXPERTS, "attention_bytes": WORKSPACE},
    )


def model_of(case: Case, mesh=None) -> DsaForCausalLM:
    dtype = getattr(torch, case.run.model.dtype)
    ops = OpOptions(workspace_bytes=WORKSPACE, expert_bytes=EXPERTS, attention_bytes=WORKSPACE)
    options = resolve(ops, torch.device("cpu"), dtype)
    model = load_model(
        Path(case.run.model.path), dtype=dtype, device="cpu", options=options,
        recompute=case.run.train.recompute, mesh=mesh,
    )  # fmt: skip
    inject(model, LoraConfig(r=case.run.lora.r, targets=case.run.lora.targets))
    return model


class Running:
    """A model with one document of a case's pack, ready to run layer by layer on one rank."""

    def __init__(self, case: Case, *, rank: int = 0, group: Any = None, mesh: Any = None) -> None:
        self.case, self.model = case, model_of(case, mesh)
        vocab = self.model.config.vocab_size
        self.tokens, self.labels, layout = random_pack([case.pack], vocab=vocab)
        partition = Partition(mode="contiguous", size=case.cp, length=case.pack)
        experts = ExpertParallel(experts=8, rank=rank, size=case.ep, group=group)
        self.sequence = SequenceContext.create(
            layout, partition, experts=experts, rank=rank, group=group
        )
        inv_freq, factor = inverse_frequencies(*self.model.model.rope)
        self.angles = Angles(*rope_angles(self.sequence.positions, inv_freq, factor))

    def layer(self, number: int, x: torch.Tensor, selection: Selection | None, kept=None):
        return self.model.model.layers[number](x, self.angles, self.sequence, selection, kept)

    def rows(self) -> torch.Tensor:
        width, dtype = self.model.config.hidden_size, getattr(torch, self.case.run.model.dtype)
        return torch.randn(self.case.rows, width, dtype=dtype, requires_grad=True)


class Saved:
    """Bytes of the distinct storages that autograd keeps inside the block, weights aside."""

    def __init__(self, *others: torch.Tensor) -> None:
        self._others = {tensor.untyped_storage().data_ptr() for tensor in others}
        self._seen: dict[int, torch.Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._others:
            self._seen.setdefault(place, tensor)
        return tensor

    def __enter__(self) -> "Saved":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._seen.values())


def saved_by_layers(running: Running) -> list[int]:
    """Of each layer by itself, its input, selection and angles aside."""
    found, selection = [], None
    for number, layer in enumerate(running.model.model.layers):
        x = running.rows()
        with Saved(x, *running.angles, *layer.state_dict().values()) as saved:
            _, selection = running.layer(number, x, selection)
        chosen = selection.ids.untyped_storage().nbytes() + selection.counts.nbytes
        found.append(saved.bytes - chosen)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS.keys())
def test_saved_tensors_of_a_layer_are_exact(glm, targets, dtype):
    case = case_of(glm, dtype, targets, train={"recompute": False})
    assert saved_by_layers(Running(case)) == [layer.saved() for layer in Layer.all(case)]


def saved_on_a_rank(rank: int, size: int, folder: Path) -> tuple[list[int], list[list[int]]]:
    """Of each layer, and the slots that came to this rank's experts in each sparse layer."""
    mesh = mesh_of(ep=size)
    case = case_of(folder, "float32", EVERY_TARGET, world=size, parallel={"cp": size, "ep": size})
    running = Running(case, rank=rank, group=mesh.cp.group, mesh=mesh)
    slots: list[list[int]] = []
    for layer in running.model.model.layers:
        if layer.sparse:
            slots.append([])
            layer.mlp.experts.register_forward_hook(
                lambda module, given, out, of=slots[-1]: of.append(len(out))
            )
    return saved_by_layers(running), slots


def test_saved_tensors_of_a_layer_are_exact_on_two_ranks(glm):
    """With the imbalance that there was."""
    for saved, slots in run_ranks(2, saved_on_a_rank, glm):
        case = case_of(glm, "float32", EVERY_TARGET, world=2, parallel={"cp": 2, "ep": 2})
        came = iter(sum(chunks) for chunks in slots)
        for layer, found in zip(Layer.all(case), saved, strict=True):
            if layer.sparse:
                # Below 1 on the rank with less, which a user cannot ask for.
                assumed = replace(case.assumed)
                object.__setattr__(assumed, "imbalance", next(came) / case.slots)
                layer = replace(layer, case=replace(case, assumed=assumed))
            assert layer.saved() == found, layer.number


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("targets", [EVERY_TARGET, ("experts.down_proj",)], ids=["all", "late"])
def test_what_is_kept_between_layers_is_exact(glm, targets, dtype):
    """With recompute: inputs and selections, from the first layer with an adapter on."""
    case = case_of(glm, dtype, targets)
    running = Running(case)
    with Saved(*running.model.state_dict().values()) as saved:
        running.model(running.tokens, running.sequence)
    kept = kept_between_layers(case)
    assert saved.bytes == sum(kept[-1].values()) + final_norm_bytes(case)
    assert kept[0]["saved layer inputs"] == (
        0 if len(targets) == 1 else case.rows * 128 * case.item
    )


@pytest.mark.parametrize(("targets", "dtype", "within"), [
    (EVERY_TARGET, "bfloat16", 0.025),
    (("q_b_proj",), "float32", 0.005),
], ids=["every", "q_b_proj"])  # fmt: skip
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "once"])
def test_the_peak_of_a_layer(glm, targets, dtype, within, recompute, monkeypatch):
    """A dense and a sparse layer, from its second or only forward to the end of its backward pass.
    In bfloat16 a CPU makes some copies of its own, and in its strips of rows (ops/rows), kept small
    here."""
    monkeypatch.setattr("fullspan.ops.rows.reference._STRIP_ELEMENTS", 1 << 10)
    case = case_of(glm, dtype, targets, data={"pack_length": 768}, train={"recompute": recompute})
    running = Running(case)
    _, selection = running.layer(0, running.rows(), None)
    for number in (1, 3) if recompute else (3,):  # without, layer 1 would choose its keys again
        x, grad = running.rows(), running.rows().detach()
        adapters = [p for p in running.model.model.layers[number].parameters() if p.requires_grad]

        def backward(number=number, x=x, grad=grad, adapters=adapters) -> None:
            out, _ = running.layer(number, x, selection, selection if recompute else None)
            torch.autograd.grad(out, [x, *adapters], grad)

        backward()
        layer = Layer.all(case)[number]
        moments = [*layer.recompute_moments().values(), *layer.backward_moments().values()]
        # A CPU has no plan, less workspace and other spans; the output's gradient is not made here.
        beside = layer._sizes.beside
        own = {"kernel workspace": 0, PLAN: 0}
        own["attention span"] = span_rows(case.rows, beside, WORKSPACE) * beside
        planned = max(sum(own.get(name, size) for name, size in items.items()) for items in moments)
        measured = peak_bytes(backward) + grad.nbytes
        assert planned == pytest.approx(measured, rel=within), number


def test_weights_adapters_and_moments_are_exact(glm):
    case = tiny_case(glm)
    model = model_of(case)
    session = Session(model, trainable_parameters(model), optim=OptimConfig(), total_steps=1)
    elements = held_elements(case, case.adapters)
    assert elements * 4 == sum(p.nbytes for p in session.adapters.values())
    assert 2 * elements * 4 == sum(t.nbytes for t in session.optimizer.state_tensors().values())
    frozen = sum(p.nbytes for n, p in model.state_dict().items() if ".lora_" not in n)
    assert sum(frozen_bytes(case).values()) == frozen


def test_gradients_of_earlier_packs_are_there_from_the_start(glm):
    """With two packs a step the second finds all gradients; with one they come with the layers."""
    found = {}
    for packs in (1, 2):
        case = tiny_case(glm, train={"accumulation": packs})
        found[packs] = {
            (p.stage, p.name): p.items.get("adapter gradients", 0) for p in phases(case)
        }
    everything = held_elements(case, case.adapters) * 4
    assert set(found[2].values()) == {everything}
    forward = [size for (stage, _), size in found[1].items() if stage == "forward"]
    assert set(forward) == {0}
    last, first = (found[1]["backward", f"layer {n}, attention"] for n in (5, 0))
    assert 0 < last < first == everything


def test_the_ends_of_each_kind_of_layer_have_the_peak(monkeypatch):
    """Following every layer finds no higher one."""
    case = glm_case()
    short = Memory.of(case)
    monkeypatch.setattr(memory, "_ends_of_kinds", lambda layers: layers)
    whole = Memory.of(case)
    assert [s.total for s in short.stages] == [s.total for s in whole.stages]


# [index scores aside, which the workspace bounds] GB at 131k cp8, 1M cp8, 1M cp32.
ANCHORS = {
    "saved selections": (2.8, 22.5, 5.6),
    "gathered latent": (0.15, 1.21, 1.21),
    "gradient of gathered latent": (0.30, 2.42, 2.42),
    "query": (0.54, 4.29, 1.07),  # [rows, 64 heads, 192 + 64]
    "saved layer inputs": (15.7, 125.6, 31.4),
}


@pytest.mark.parametrize("column", range(3), ids=["131k, cp8", "1M, cp8", "1M, cp32"])
def test_bytes_of_glm_52_are_the_known_ones(column):
    length, ranks = ((131_072, 8), (1 << 20, 8), (1 << 20, 32))[column]
    case = glm_case("glm52_131k_8xh200", "--data.pack_length", str(length), "--parallel.cp",
                    str(ranks), "--parallel.ep", str(ranks))  # fmt: skip
    found = {**kept_between_layers(case)[-1]}
    layer = Layer.all(case)[77]
    found |= layer.backward_moments()["attention"]
    for item, figures in ANCHORS.items():
        assert found[item] / 1e9 == pytest.approx(figures[column], rel=0.02, abs=0.005), item
    assert frozen_bytes(case)["routed experts"] / 1e9 == pytest.approx(725 / ranks, rel=1e-3)


def test_one_node_at_131k():
    """725 GB over 8, the rest sharded, inputs and selections: the known 118 GB come before what a
    layer takes and what the process does."""
    case = glm_case()
    frozen, kept = frozen_bytes(case), kept_between_layers(case)[-1]
    assert frozen["other frozen weights"] * 8 / 1e9 == pytest.approx(21, abs=0.5)
    known = sum(frozen.values()) + sum(kept.values())
    peak = Memory.of(case).peak.total
    assert known / 1e9 == pytest.approx(112, abs=1)
    assert known < 118e9 < peak < 141e9


def test_inputs_that_wait_on_the_host(glm):
    """The newest input is on the device, and on the way back the next one; all but the last are in
    pieces of host memory."""
    case = case_of(glm, "bfloat16", EVERY_TARGET, train={"offload_inputs": True})
    away, here = case, case_of(glm, "bfloat16", EVERY_TARGET)
    size, last = Layer.all(case)[0].input(), case.model.num_hidden_layers - 1
    assert kept_between_layers(away)[last]["saved layer inputs"] == size
    assert kept_between_layers(here)[last]["saved layer inputs"] == (last + 1) * size
    found = {(p.stage, p.name): p.items.get("saved layer inputs", 0) for p in phases(away)}
    assert found["forward", f"layer {last}, attention"] == found["head", "head and loss"] == size
    assert found["backward", f"layer {last}, attention"] == 2 * size
    assert found["backward", "layer 0, attention"] == size
    assert HOST_PIECE == PIECE_BYTES > size and host_bytes(here) == 0
    assert host_bytes(away) == last * PIECE_BYTES
    million = glm_case("glm52_1m_32xh200", "--train.offload_inputs", "true")
    assert host_bytes(million) / 1e9 == pytest.approx(77 * 32_768 * 6144 * 2 / 1e9, rel=1e-6)
