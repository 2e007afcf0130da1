"""Inputs of layers in host memory: the same gradients, and only the selections on the device."""

import gc

import pytest
import torch

from fullspan.errors import BackendError, TrainingError
from fullspan.models.common import host_inputs
from fullspan.models.common.host_inputs import HostInputs, HostMemory
from fullspan.ops.selection import Selection
from fullspan.parallel.mesh import Mesh
from fullspan.planning.stand_in import synthetic_pack
from fullspan.train.setup import open_session
from tests.support.memory import kept_bytes
from tests.support.runs import run_config
from tests.support.tiny import gradients, local_loss, random_pack, tiny_model

CPU = torch.device("cpu")
LENGTHS = ([150, 50], [200])


@pytest.fixture
def model(tiny_checkpoints):
    return tiny_model(tiny_checkpoints["glm_moe_dsa"], recompute=True)


def packs_for(model):
    vocab = model.config.vocab_size
    return [random_pack(lengths, vocab=vocab, seed=i) for i, lengths in enumerate(LENGTHS)]


def run(model, order=(0, 1)):
    """Gradients of two microbatches: both forward, then backward in `order`."""
    model.zero_grad(set_to_none=True)
    losses = [local_loss(model, pack)[0] for pack in packs_for(model)]
    for index in order:
        losses[index].backward()
    return gradients(model)


def test_the_setting_reaches_the_model(tiny_checkpoints, tmp_path):
    """And a step is the same to the bit."""
    steps = []
    for offload in (False, True):
        train = {"offload_inputs": offload}
        config = run_config(tiny_checkpoints["glm_moe_dsa"], tmp_path, "a", train=train)
        session, _ = open_session(config, Mesh.single(CPU))
        host = session.model.model.host
        assert (host is not None) == offload
        if host is not None:
            config = session.model.config
            reserved = (config.num_hidden_layers - 1) * host_inputs.PIECE_BYTES
            assert host.allocated == reserved, "before the first step"
        pack = synthetic_pack(160, document=0, trained=1.0, vocab=session.model.config.vocab_size)
        steps.append((session.forward_backward([pack]), session.optim_step()))
    assert steps[0] == steps[1]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_gradients_of_two_microbatches_are_the_same_to_the_bit(model, order):
    wanted = run(model, order)
    # Pieces that hold less than an input, the last of them in part.
    model.model.host = HostMemory(CPU, piece_bytes=1 << 14)
    for step in range(2):
        found = run(model, order)
        assert all(torch.equal(found[name], grad) for name, grad in wanted.items()), step
        if step == 0:
            allocated = model.model.host.allocated
    inputs = 2 * (model.config.num_hidden_layers - 1)
    size = 200 * model.config.hidden_size * 4
    assert allocated == model.model.host.allocated == inputs * -(-size // (1 << 14)) * (1 << 14)


def test_only_the_selections_and_the_last_input_are_kept_on_the_device(model):
    """Once the pool is there. Beside them stays what the head and the model's end keep."""
    pack = packs_for(model)[1]
    config = model.config
    inputs = config.num_hidden_layers * 200 * config.hidden_size * 4

    def forward():
        return local_loss(model, pack)[0]

    forward().backward()
    here = kept_bytes(forward)
    model.model.host = HostMemory(CPU)
    forward().backward()
    gc.collect()
    away = kept_bytes(forward)
    assert here - away == inputs * (config.num_hidden_layers - 1) // config.num_hidden_layers
    full = config.indexer_types.count("full")
    selections = full * 200 * (config.index_topk + 1) * 4
    # Outputs, the head's unit gradient, the final norm, tables of rows: nothing grows with layers.
    assert selections < away < selections + 6 * 200 * config.hidden_size * 4


def test_layers_without_a_gradient_keep_nothing(tiny_checkpoints):
    model = tiny_model(tiny_checkpoints["glm_moe_dsa"], recompute=True)
    for name, parameter in model.named_parameters():
        if "layers.5." not in name and "layers.4." not in name:
            parameter.requires_grad_(False)
    model.model.host = HostMemory(CPU, piece_bytes=1 << 20)
    local_loss(model, packs_for(model)[0])[0].backward()
    assert model.model.host.allocated == 1 << 20, "layer 4's; that of layer 5, the last, stays"


def test_graphs_that_never_run_backward_give_their_memory_back(model):
    memory = model.model.host = HostMemory(CPU, piece_bytes=1 << 18)
    for _ in range(3):
        local_loss(model, packs_for(model)[0])
    gc.collect()
    assert memory.allocated == (model.config.num_hidden_layers - 1) << 18


def test_the_backward_pass_brings_inputs_one_layer_ahead():
    """In the order of the layers backward, one beyond the layer that runs."""
    memory = HostMemory(CPU, piece_bytes=64)
    inputs = HostInputs(memory, 4)
    rows = [torch.full((3, 8), float(n)) for n in range(4)]
    kept = [inputs.keep(row, wanted=True) for row in rows]
    for each, row in zip(kept, rows, strict=True):
        each.leave()
        row.fill_(-1)
    here = [each._tensor is not None for each in kept]
    assert here == [False, False, False, True], "the last stays"
    for number in (3, 2, 1, 0):
        taken = kept[number].take()
        if number < 3:
            assert taken.tolist() == [[float(number)] * 8] * 3
        here = [each._tensor is not None for each in kept]
        assert here == [n == number - 1 for n in range(4)], number
    with pytest.raises(TrainingError, match="a second backward pass"):
        kept[1].take()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_late_copies_on_a_gpu_change_neither_values_nor_the_peak():
    """Copies that are held up: work that overwrites a tensor, or reads it, has to wait for them."""
    device, layers, rows = torch.device("cuda"), 6, 1 << 14
    memory = HostMemory(device, piece_bytes=1 << 22)
    held_up = 20_000_000  # cycles, some 10 ms
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        inputs, kept = HostInputs(memory, layers), []
        hidden = torch.zeros(rows, 1024, device=device)
        size = hidden.nbytes
        for _ in range(layers):
            kept.append(inputs.keep(hidden, wanted=True))
            with torch.cuda.stream(memory._stream):
                torch.cuda._sleep(held_up)
            hidden = hidden + 1
            kept[-1].leave()
        del hidden
        for number in reversed(range(layers)):
            with torch.cuda.stream(memory._stream):
                torch.cuda._sleep(held_up)
            taken = kept[number].take()
            assert torch.equal(taken, torch.full_like(taken, number)), number
            del taken
        # The input, the output, and what the comparison makes.
        assert torch.cuda.max_memory_allocated() - before <= 3.3 * size
    assert memory.allocated == (layers - 1) * size


@pytest.mark.parametrize("how", ["nothing left", "pinning fails"])
def test_too_little_host_memory_is_one_line(model, monkeypatch, how):
    model.model.host = HostMemory(CPU, piece_bytes=1 << 20)
    if how == "nothing left":
        monkeypatch.setattr(host_inputs, "_available_bytes", lambda: 1 << 30)
    else:

        def refuse(*args, **kwargs):
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")

        monkeypatch.setattr(host_inputs.torch, "empty", refuse)
    memory = model.model.host
    with pytest.raises(BackendError) as caught:
        memory.reserve(3, (1 << 20) + 1)
    message = str(caught.value)
    assert "\n" not in message and "train.offload_inputs = false" in message
    assert "no 0.01 GiB of" in message or how == "pinning fails"
    assert ("1.0 GiB left" if how == "nothing left" else "CUDA error: out of memory") in message


def test_what_is_available_is_what_linux_says():
    found = host_inputs._available_bytes()
    assert found is None or 1 << 20 < found < 1 << 50


def test_selections_stay_where_they_are(model):
    """They are handed on to the layers that share them."""
    model.model.host = HostMemory(CPU)
    seen: list[Selection] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda layer, given, out: seen.append(out[1]))
    local_loss(model, packs_for(model)[0])[0].backward()
    layers = model.config.num_hidden_layers
    forward, again = seen[:layers], seen[layers:][::-1]
    for first, second in zip(forward, again, strict=True):
        assert first.ids.data_ptr() == second.ids.data_ptr()
