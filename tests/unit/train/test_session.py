"""The session on one rank: what the loss is divided by, what it does not depend on, the seam for
other losses, and what happens when something is not finite.
"""

import pytest
import torch

from fullspan.data.packing import IGNORE
from fullspan.errors import ConfigError, DataError, LayoutError, TrainingError
from fullspan.lora.inject import trainable_parameters
from fullspan.train.schedule import OptimConfig
from fullspan.train.session import Session
from tests.support.packs import packed, random_documents
from tests.support.tiny import relative, tiny_model

LOSS, GRADIENT = 1e-6, 1e-5


@pytest.fixture
def session(tiny_checkpoints) -> Session:
    model = tiny_model(tiny_checkpoints["glm_moe_dsa"], recompute=True)
    return make(model)


def make(model, **options) -> Session:
    options = {"optim": OptimConfig(lr=1e-3), "total_steps": 10} | options
    return Session(model, trainable_parameters(model), **options)


def documents(session: Session, lengths=(90, 30, 70), **options):
    return random_documents(lengths, vocab=session.model.config.vocab_size, **options)


def gradients_of(session: Session, packs, loss_fn=None):
    """(result, gradients), and the session is as before."""
    result = session.forward_backward(packs, loss_fn)
    gradients = {name: grad.clone() for name, grad in session.gradients().items()}
    session.zero_grad()
    return result, gradients


def assert_same_gradients(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert relative(one[name], two[name]) < GRADIENT, name


def test_the_loss_is_the_mean_over_all_trained_tokens_of_the_step(session):
    """Two packs with 1 and about 60 trained tokens: each token counts the same."""
    few = documents(session, [80], trained=lambda place: place == 40)
    many = documents(session, [90], seed=1)
    packs = [packed(few, 96), packed(many, 96)]
    assert packs[0].trained_tokens == 1 and packs[1].trained_tokens > 50
    total, count = 0.0, 0
    with torch.no_grad():
        for pack in packs:
            microbatch = session.place(pack)
            hidden = session.model(microbatch.tokens, microbatch.sequence)
            log_p = session.model.logits(hidden).double().log_softmax(-1)
            rows = (pack.labels != IGNORE).nonzero()[:, 0]
            total -= float(log_p[rows, pack.labels[rows]].sum())
            count += len(rows)
    result, _ = gradients_of(session, packs)
    assert result.trained_tokens == count and result.tokens == 170
    assert result.loss == pytest.approx(total / count, rel=LOSS)


def test_gradients_are_those_of_the_loss_that_is_reported(session):
    """A central difference along the gradient, over two microbatches. The step is so short that no
    discrete choice (of a key, of an expert) changes; what is left of 32 bits then is the 1 %.
    """
    packs = [packed(documents(session, [80], seed=s), 80) for s in (1, 2)]
    _, gradients = gradients_of(session, packs)
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    losses = []
    with torch.no_grad():
        for shift in (1e-4, -2e-4):
            for name, parameter in session.adapters.items():
                parameter += shift * gradients[name] / norm
            losses.append(session.evaluate(packs).loss)
    assert (losses[0] - losses[1]) / 2e-4 == pytest.approx(float(norm), rel=1e-2)


def test_neither_accumulation_nor_packing_changes_the_step(session):
    first, second, third = documents(session)
    together = gradients_of(session, [packed([first, second, third], 192)])
    for packs in (
        [packed([first, second], 128), packed([third], 96)],
        [packed([third], 80), packed([second], 32), packed([first], 90)],
        [packed([third, first, second], 190)],
    ):
        result, gradients = gradients_of(session, packs)
        assert result.trained_tokens == together[0].trained_tokens
        assert result.tokens == together[0].tokens
        assert result.loss == pytest.approx(together[0].loss, rel=LOSS)
        assert_same_gradients(gradients, together[1])


def test_two_microbatches_in_flight(session):
    packs = [packed(documents(session, [90], seed=s), 96) for s in (1, 2)]
    _, expected = gradients_of(session, packs)
    count = sum(pack.trained_tokens for pack in packs)
    losses = [session.forward(session.place(pack)).sum() / count for pack in packs]
    for loss in losses:
        loss.backward()
    assert_same_gradients(session.gradients(), expected)


def test_a_loss_function_sees_rows_and_gives_losses(session):
    packs = [packed(documents(session, [90]), 96), packed(documents(session, [40], seed=1), 48)]
    default = gradients_of(session, packs)
    seen = []

    def same(nll, microbatch):
        assert nll.shape == microbatch.labels.shape == microbatch.row_ids.shape
        assert not nll[microbatch.labels == IGNORE].any()
        seen.append(microbatch.pack)
        return nll

    result, gradients = gradients_of(session, packs, same)
    assert seen == packs and result.loss == default[0].loss
    assert all(torch.equal(gradients[n], default[1][n]) for n in gradients)

    result, gradients = gradients_of(session, packs, lambda nll, _: 3 * nll.sum())
    assert result.loss == pytest.approx(3 * default[0].loss, rel=LOSS)
    assert_same_gradients(gradients, {n: 3 * g for n, g in default[1].items()})

    def weighted(nll, microbatch):
        return nll * (microbatch.row_ids % 2 == 0)

    result, gradients = gradients_of(session, packs, weighted)
    assert 0 < result.loss < default[0].loss
    with pytest.raises(ConfigError, match="loss_fn"):
        session.forward_backward(packs, lambda nll, _: torch.zeros(()))


def test_a_step_updates_adapters_only_and_drops_the_gradients(session):
    frozen = {
        n: p.clone() for n, p in session.model.named_parameters() if n not in session.adapters
    }
    before = {n: p.detach().clone() for n, p in session.adapters.items()}
    packs = [packed(documents(session), 192)]
    losses = []
    for _ in range(4):
        losses.append(session.forward_backward(packs).loss)
        update = session.optim_step()
        assert update.grad_norm > 0 and update.lr > 0
        assert all(p.grad is None for p in session.model.parameters())
    assert session.finished_steps == 4 and losses[-1] < losses[0]
    assert all((p != before[n]).any() for n, p in session.adapters.items())
    for name, parameter in session.model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name])


def test_gradients_add_up_until_the_step(session):
    packs = [packed(documents(session, [70], seed=s), 72) for s in (1, 2)]
    parts = [gradients_of(session, [pack])[1] for pack in packs]
    for pack in packs:
        session.forward_backward([pack])
    assert_same_gradients(session.gradients(), {n: g + parts[1][n] for n, g in parts[0].items()})
    with pytest.raises(TrainingError, match="optim_step or zero_grad"):
        session.forward_backward(packs)


def test_evaluation_changes_nothing_and_is_the_same_loss(session):
    packs = [packed(documents(session), 192)]
    result = session.evaluate(packs)
    assert all(p.grad is None for p in session.adapters.values())
    assert result.loss == pytest.approx(session.forward_backward(packs).loss, rel=LOSS)


def test_a_step_without_a_trained_token_is_refused(session):
    """As a loss of 0 the optimizer would go on by its momentum, and nobody would know."""
    nothing = packed(documents(session, [70], trained=lambda place: False), 72)
    session.forward_backward([packed(documents(session), 192)])
    session.optim_step()
    with pytest.raises(DataError, match="step 2: forward_backward got no packs"):
        session.forward_backward([])
    for loss_fn in (None, lambda nll, _: nll):
        with pytest.raises(DataError, match=r"^step 2: no trained token in its 2 pack\(s\), so "):
            session.forward_backward([nothing, nothing], loss_fn)
    assert all(parameter.grad is None for parameter in session.adapters.values())
    with pytest.raises(DataError, match="no trained token"):
        session.evaluate([nothing])
    session.forward_backward([packed(documents(session), 192)])


def test_a_pack_without_a_trained_token_adds_nothing_to_a_step(session):
    pack = packed(documents(session), 192)
    nothing = packed(documents(session, [70], trained=lambda place: False), 72)
    alone, gradients = gradients_of(session, [pack])
    for packs in ([pack, nothing], [nothing, pack]):
        result, with_both = gradients_of(session, packs)
        assert (result.loss, result.trained_tokens) == (alone.loss, alone.trained_tokens)
        assert result.tokens == alone.tokens + 70
        assert all(torch.equal(with_both[name], gradients[name]) for name in gradients)


def test_a_loss_that_is_not_finite_stops_before_the_update(session):
    packs = [packed(documents(session), 192)]
    session.forward_backward(packs)
    session.optim_step()
    with torch.no_grad():
        next(iter(session.adapters.values()))[0, 0] = float("inf")
    before = {n: p.detach().clone() for n, p in session.adapters.items()}
    with pytest.raises(TrainingError, match=r"step 2: the loss is nan.*after step 1 .*optim\.lr"):
        session.forward_backward(packs)
    with pytest.raises(TrainingError, match="step 2: the loss is nan"):
        session.evaluate(packs)
    assert all(torch.equal(p, before[n]) for n, p in session.adapters.items())
    assert all(p.grad is None for p in session.adapters.values())


def test_a_gradient_that_is_not_finite_stops_before_the_update(session):
    before = {n: p.detach().clone() for n, p in session.adapters.items()}
    packs = [packed(documents(session), 192)]
    session.forward_backward(packs, lambda nll, _: (nll.sum() * 0).sqrt() + nll.sum().detach())
    with pytest.raises(TrainingError, match="step 1: the gradient norm is nan"):
        session.optim_step()
    assert session.finished_steps == 0
    assert all(torch.equal(p, before[n]) for n, p in session.adapters.items())
    assert not any(moment.any() for moment in session.optimizer.state_tensors().values())


def test_what_trains_must_be_exactly_the_adapters(session):
    model = session.model
    adapters = trainable_parameters(model)
    options = {"optim": OptimConfig(), "total_steps": 1}
    dropped = dict(list(adapters.items())[1:])
    with pytest.raises(ConfigError, match=f"1 differ, such as {next(iter(adapters))}"):
        Session(model, dropped, **options)
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"1 differ, such as model\.norm\.weight"):
        Session(model, adapters, **options)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no adapters"):
        Session(model, {}, **options)


def test_an_unknown_partition_is_refused(session):
    other = make(session.model, partition="zig")
    with pytest.raises(LayoutError, match="unknown partition 'zig'"):
        other.forward_backward([packed(documents(session), 192)])


def test_save_and_load_continue_exactly(session, tiny_checkpoints, tmp_path):
    packs = [packed(documents(session), 192)]
    session.forward_backward(packs)
    session.optim_step()
    path = session.save(tmp_path)
    assert path == tmp_path / "step-1"
    expected = []
    for _ in range(2):
        expected.append(session.forward_backward(packs).loss)
        session.optim_step()
    other = make(tiny_model(tiny_checkpoints["glm_moe_dsa"], recompute=True))
    other.forward_backward(packs)
    assert other.load(path).step == other.finished_steps == 1
    assert all(p.grad is None for p in other.adapters.values())
    for loss in expected:
        assert other.forward_backward(packs).loss == loss
        other.optim_step()
    for name, parameter in session.adapters.items():
        assert torch.equal(parameter, other.adapters[name]), name
