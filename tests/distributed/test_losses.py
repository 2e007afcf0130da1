"""Losses beyond cross-entropy: against plain PyTorch on one process, and the same on every split.

The pack's pairs cross the borders of ranks, and its last pair has no trained token.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fullspan.data.packing import IGNORE, Pack
from fullspan.errors import ConfigError, DataError, LayoutError
from fullspan.lora.inject import trainable_parameters
from fullspan.train.losses import (
    DPO,
    PairedPack,
    PolicyGradient,
    PolicyPack,
    WeightedPack,
    WeightedTokens,
    document_sums,
)
from fullspan.train.schedule import OptimConfig
from fullspan.train.session import LossFunction, Session
from tests.support.packs import packed, random_documents
from tests.support.ranks import run_ranks
from tests.support.runs import mesh_of
from tests.support.tiny import relative, tiny_model

LOSS, GRADIENT = 1e-6, 1e-5
LENGTHS, PROMPT, ROWS = [70, 90, 66, 75, 5, 8], 9, 320  # at cp 4 the borders are 80, 160, 240
BETA, CLIP = 0.1, (0.1, 0.2)

Packs = dict[str, Pack]


def open_session(folder: Path, **parallel) -> Session:
    model = tiny_model(folder, recompute=True)
    return Session(
        model,
        trainable_parameters(model),
        optim=OptimConfig(),
        total_steps=1,
        mesh=mesh_of(**parallel),
        partition=parallel.get("partition", "contiguous"),
    )


def losses(session: Session) -> dict[str, tuple[str, LossFunction]]:
    """The pack and the loss of each case."""
    return {
        "weighted": ("weighted", WeightedTokens()),
        "dpo, reference given": ("paired", DPO(beta=BETA)),
        "dpo, adapters off": ("bare", DPO(beta=BETA, reference=session.base_losses)),
        "policy": ("policy", PolicyGradient(clip=None)),
        "policy, clipped": ("policy", PolicyGradient(clip=CLIP)),
        "policy, documents": ("policy", PolicyGradient(clip=CLIP, mean="documents")),
    }


def step(session: Session, pack: Pack, loss: LossFunction) -> dict:
    result = session.forward_backward([pack], loss)
    gradients = {name: g.clone() for name, g in session.gradients().items()}
    session.zero_grad()
    return {"loss": result.loss, "gradients": gradients}


def on_ranks(rank: int, size: int, folder: Path, packs: Packs, parallel: dict) -> dict:
    session = open_session(folder, **parallel)
    return {case: step(session, packs[k], loss) for case, (k, loss) in losses(session).items()}


@pytest.fixture(scope="module")
def session(tiny_checkpoints) -> Session:
    return open_session(tiny_checkpoints["glm_moe_dsa"])


@pytest.fixture(scope="module")
def packs(session) -> Packs:
    """One pack with what each loss needs. Importance ratios lie around 1, some beyond the clips;
    what has no meaning is NaN."""
    vocab = session.model.config.vocab_size
    documents = random_documents(LENGTHS, vocab=vocab, trained=lambda place: place > PROMPT)
    plain = packed(documents, ROWS)
    with torch.no_grad():
        nll = session.forward(session.place(plain))
        base = document_sums(-session.base_losses(session.place(plain)), session.place(plain))
    untrained = plain.labels == IGNORE
    generator = torch.Generator().manual_seed(5)
    noise = 0.2 * torch.randn(ROWS, generator=generator)
    advantages = 0.5 + torch.randn(ROWS, generator=generator)
    weights = torch.rand(ROWS, generator=generator)
    parts = {"tokens": plain.tokens, "labels": plain.labels, "cu_seqlens": plain.cu_seqlens}
    return {
        "weighted": WeightedPack(**parts, weights=weights.masked_fill(untrained, torch.nan)),
        "paired": PairedPack(**parts, reference=base.float() + torch.arange(6.0)),
        "bare": PairedPack(**parts),
        "policy": PolicyPack(
            **parts,
            behaviour=(noise - nll).masked_fill(untrained, torch.nan),
            advantages=advantages.masked_fill(untrained, torch.nan),
        ),
    }


@pytest.fixture(scope="module")
def alone(session, packs) -> dict:
    return {case: step(session, packs[k], loss) for case, (k, loss) in losses(session).items()}


# ------------------------------------------------------------------- plain PyTorch formulas


def log_probs(session: Session, pack: Pack) -> list[Tensor]:
    """Of the trained tokens of each document, from whole logits."""
    microbatch = session.place(pack)
    logits = session.model.logits(session.model(microbatch.tokens, microbatch.sequence))
    rows = F.log_softmax(logits.double(), dim=-1).gather(1, pack.labels.clamp(min=0)[:, None])[:, 0]
    return [rows[part] for part in trained_rows(pack)]


def trained_rows(pack: Pack) -> list[Tensor]:
    trained = pack.labels != IGNORE
    bounds = pack.cu_seqlens.tolist()
    return [trained[a:b].nonzero()[:, 0] + a for a, b in pairwise(bounds)]


def plain_weighted(session: Session, pack: WeightedPack) -> Tensor:
    weights = torch.cat([pack.weights[rows] for rows in trained_rows(pack)])
    return -(weights * torch.cat(log_probs(session, pack))).sum() / weights.sum()


def plain_dpo(session: Session, pack: PairedPack) -> Tensor:
    reference = pack.reference if pack.reference is not None else without_adapters(session, pack)
    gain = torch.stack([part.sum() for part in log_probs(session, pack)]) - reference
    pairs = [F.logsigmoid(BETA * (gain[i] - gain[i + 1])) for i in (0, 2)]
    return -torch.stack(pairs).mean()


def without_adapters(session: Session, pack: Pack) -> Tensor:
    """Log-probabilities of the documents with every adapter zero."""
    held = {name: p.detach().clone() for name, p in session.adapters.items()}
    with torch.no_grad():
        for parameter in session.adapters.values():
            parameter.zero_()
        sums = torch.stack([part.sum() for part in log_probs(session, pack)])
        for name, parameter in session.adapters.items():
            parameter.copy_(held[name])
    return sums


def plain_policy(clip: tuple[float, float] | None, documents: bool) -> Callable:
    def loss(session: Session, pack: PolicyPack) -> Tensor:
        gains = []
        for rows, now in zip(trained_rows(pack), log_probs(session, pack), strict=True):
            ratio = (now - pack.behaviour[rows]).exp()
            gain = ratio * pack.advantages[rows]
            if clip is not None:
                clipped = ratio.clamp(1 - clip[0], 1 + clip[1]) * pack.advantages[rows]
                assert not len(rows) or 0.1 < (clipped < gain).float().mean() < 0.9
                gain = torch.minimum(gain, clipped)
            if len(rows):
                gains.append(gain.mean(0, keepdim=True) if documents else gain)
        return -torch.cat(gains).mean()

    return loss


PLAIN: dict[str, Callable[[Session, Pack], Tensor]] = {
    "weighted": plain_weighted,
    "dpo, reference given": plain_dpo,
    "dpo, adapters off": plain_dpo,
    "policy": plain_policy(None, False),
    "policy, clipped": plain_policy(CLIP, False),
    "policy, documents": plain_policy(CLIP, True),
}


def check(got: dict, wanted: dict) -> None:
    assert got["loss"] == pytest.approx(wanted["loss"], rel=LOSS)
    errors = {n: relative(g, wanted["gradients"][n]) for n, g in got["gradients"].items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < GRADIENT, f"{worst}: {errors[worst]:.2e}"


@pytest.mark.parametrize("case", PLAIN)
def test_a_loss_is_its_plain_formula(session, packs, alone, case):
    pack = packs[losses(session)[case][0]]
    loss = PLAIN[case](session, pack)
    loss.backward()
    gradients = {name: g.clone() for name, g in session.gradients().items()}
    session.zero_grad()
    assert all(g.norm() > 0 for g in gradients.values())
    check(alone[case], {"loss": loss.item(), "gradients": gradients})


@pytest.mark.parametrize(
    "parallel",
    [{"cp": 4}, {"dp": 2, "cp": 2, "partition": "zigzag"}],
    ids=lambda parallel: "-".join(map(str, parallel.values())),
)
def test_a_loss_does_not_depend_on_the_split(tiny_checkpoints, packs, alone, parallel):
    """With dp 2, one replica has nothing but a filler."""
    for part in run_ranks(4, on_ranks, tiny_checkpoints["glm_moe_dsa"], packs, parallel):
        for case, wanted in alone.items():
            check(part[case], wanted)


def test_weights_of_one_are_the_plain_loss(session, packs):
    pack = packs["weighted"]
    ones = WeightedPack(
        tokens=pack.tokens,
        labels=pack.labels,
        cu_seqlens=pack.cu_seqlens,
        weights=torch.ones(ROWS),
    )
    got = step(session, ones, WeightedTokens())
    result = session.forward_backward([pack])
    session.zero_grad()
    assert got["loss"] == result.loss


def test_weights_that_are_all_zero_are_refused(session, packs):
    """Where one pack of the step has others, it adds nothing."""
    weighted = packs["weighted"]
    zeros = replace(weighted, weights=torch.zeros(ROWS))
    trained = weighted.trained_tokens
    words = rf"step 1: WeightedTokens counts none of {2 * trained} trained tokens in its 2 pack"
    with pytest.raises(DataError, match=words):
        session.forward_backward([zeros, zeros], WeightedTokens())
    alone = step(session, weighted, WeightedTokens())["loss"]
    assert session.forward_backward([zeros, weighted], WeightedTokens()).loss == alone
    session.zero_grad()


def test_what_a_loss_cannot_use_is_refused(session, packs):
    with pytest.raises(ConfigError, match="needs packs of PolicyPack, got PairedPack"):
        session.forward_backward([packs["bare"]], PolicyGradient())
    with pytest.raises(ConfigError, match="carries no reference"):
        session.forward_backward([packs["bare"]], DPO())
    for make in (
        lambda: DPO(beta=0.0),
        lambda: PolicyGradient(clip=(2.0, 0.1)),
        lambda: PolicyGradient(mean="rows"),
    ):
        with pytest.raises(ConfigError):
            make()


def test_packs_that_do_not_fit_are_refused(packs):
    pack = packs["bare"]
    parts = {"tokens": pack.tokens, "labels": pack.labels, "cu_seqlens": pack.cu_seqlens}
    ones, holes = torch.ones(ROWS), torch.full((ROWS,), torch.nan)
    odd = parts | {"cu_seqlens": pack.cu_seqlens[:-1]}
    for make, words in (
        (lambda: WeightedPack(**parts, weights=-ones), "must not be negative"),
        (lambda: PolicyPack(**parts, behaviour=holes, advantages=ones), "behaviour must be finite"),
        (lambda: PairedPack(**odd), "5 documents"),
        (lambda: PairedPack(**parts, reference=torch.zeros(5)), "6 finite numbers"),
    ):
        with pytest.raises(LayoutError, match=words):
            make()
