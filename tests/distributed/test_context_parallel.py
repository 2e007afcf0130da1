"""One pack over 1, 2 and 4 real ranks: loss, every gradient, selections, isolation of documents."""

from pathlib import Path

import pytest
import torch

from fullspan.models.dsa.attention import Indexer
from fullspan.ops.linear_cross_entropy.op import IGNORE
from fullspan.parallel.collectives import all_reduce_gradients, all_reduce_sum
from fullspan.parallel.sequence import Partition
from tests.support.ranks import run_ranks, world_group
from tests.support.tiny import (
    FAMILIES,
    gradients,
    local_loss,
    random_pack,
    relative,
    tiny_model,
    trainable_parameters,
)

LOSS, GRADIENT = 1e-6, 1e-5
PACKS = {
    "a short, a long and a middling document": [3, 130, 70],
    "one document over all ranks": [240],
    "eight documents of 16": [16] * 8,
    "one token more than the ranks share evenly": [90, 127],
    "a rank of pure padding": [7],
}


def step(
    rank: int,
    size: int,
    folder: Path,
    lengths: list[int],
    prompt: int,
    recompute: bool,
    mode: str,
) -> dict:
    """Loss, gradients, selections and hidden rows of this rank. The first `prompt` rows are not
    trained.
    """
    model = tiny_model(folder, recompute=recompute)
    pack = random_pack(lengths, vocab=model.config.vocab_size, multiple=8)
    pack[1][:prompt] = IGNORE
    selections = []
    for module in model.modules():
        if isinstance(module, Indexer):
            module.register_forward_hook(
                lambda module, given, selection: selections.append(selection.ids)
            )
    group = None if size == 1 else world_group()
    loss, hidden = local_loss(model, pack, rank=rank, size=size, mode=mode)
    loss.backward()
    loss = loss.detach().clone()
    all_reduce_sum([loss], group)
    all_reduce_gradients(list(trainable_parameters(model).values()), group)
    return {
        "loss": loss,
        "gradients": gradients(model),
        "ids": selections,
        "hidden": hidden.detach(),
        "rows": Partition(mode=mode, size=size, length=pack[2].padded_length).rows(rank),
        "real": sum(lengths),
    }


def run(
    size: int,
    folder: Path,
    lengths: list[int],
    *,
    prompt: int = 0,
    recompute: bool = False,
    mode: str = "contiguous",
) -> list[dict]:
    return run_ranks(size, step, folder, lengths, prompt, recompute, mode)


def check(whole: dict, parts: list[dict]) -> None:
    """Every rank's sums against one rank's, and the selections of all ranks joined against one
    rank's.
    """
    for part in parts:
        assert relative(part["loss"], whole["loss"]) < LOSS
        errors = {k: relative(part["gradients"][k], g) for k, g in whole["gradients"].items()}
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < GRADIENT, f"{worst}: {errors[worst]:.2e}"
    order = torch.cat([part["rows"] for part in parts]).argsort()
    for layer, ids in enumerate(whole["ids"]):
        joined = torch.cat([part["ids"][layer] for part in parts])[order]
        assert torch.equal(joined, ids), f"full layer {layer}"
    hidden = torch.cat([part["hidden"] for part in parts])[order][: whole["real"]]
    assert relative(hidden, whole["hidden"][: whole["real"]]) < GRADIENT


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_the_split_does_not_show(tiny_checkpoints, family, lengths):
    folder = tiny_checkpoints[family]
    (whole,) = run(1, folder, lengths)
    assert whole["loss"] > 1
    assert all(
        g.norm() > 0
        for n, g in whole["gradients"].items()
        if "experts" not in n or sum(lengths) > 100
    )
    for size in (2, 4):
        check(whole, run(size, folder, lengths))
    check(whole, run(4, folder, lengths, mode="zigzag"))


def test_a_rank_of_pure_prompt(tiny_checkpoints):
    folder = tiny_checkpoints["glm_moe_dsa"]
    (whole,) = run(1, folder, [3, 130, 71], prompt=110)
    for size in (2, 4):
        parts = run(size, folder, [3, 130, 71], prompt=110, recompute=True)
        check(whole, [{**part, "ids": part["ids"][: len(whole["ids"])]} for part in parts])


def test_recompute_runs_no_indexer_and_shows_nowhere(tiny_checkpoints):
    folder = tiny_checkpoints["glm_moe_dsa"]
    (whole,) = run(1, folder, [3, 130, 70])
    parts = run(2, folder, [3, 130, 70], recompute=True)
    check(whole, parts)


@pytest.mark.parametrize("size", [1, 2])
def test_documents_do_not_see_each_other(tiny_checkpoints, size):
    """New tokens in document 1 leave document 2 equal: to the bit before the first experts, whose
    batches change shape, and to rounding at the end. At size 2, document 2 crosses the border."""
    folder = tiny_checkpoints["glm_moe_dsa"]
    before, after = (run_ranks(size, rows_of, folder, seed) for seed in (0, 1))
    dense, hidden = ((torch.cat(a), torch.cat(b)) for a, b in zip(zip(*before), zip(*after)))
    for first, second in (dense, hidden):
        assert not torch.equal(first[:90], second[:90])
    assert torch.equal(dense[0][90:], dense[1][90:])
    assert relative(hidden[1][90:], hidden[0][90:]) < 1e-6


def rows_of(rank: int, size: int, folder: Path, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input of the first layer with experts, and the final hidden rows."""
    model = tiny_model(folder)
    pack = random_pack([90, 110], vocab=model.config.vocab_size, multiple=4)
    other, *_ = random_pack([90, 110], vocab=model.config.vocab_size, multiple=4, seed=seed)
    pack[0][:90] = other[:90]
    inputs = []
    first = model.model.layers[model.config.mlp_layer_types.index("sparse")]
    first.register_forward_pre_hook(lambda layer, given: inputs.append(given[0].detach()))
    hidden = local_loss(model, pack, rank=rank, size=size)[1].detach()
    return inputs[0], hidden
