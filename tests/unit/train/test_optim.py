"""The schedule against its closed form, AdamW against PyTorch's own, clipping, exact restarts."""

import math

import pytest
import torch
from torch import nn

from fullspan.errors import CheckpointError, ConfigError
from fullspan.train.optim import AdapterOptimizer, learning_rate
from fullspan.train.schedule import OptimConfig


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x.lora_a": (3, 8), "x.lora_b": (8, 3), "experts.lora_a": (4, 2, 5)}
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}


def set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def norm_of(parameters: dict[str, nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in parameters.values()]).norm()


def test_warm_up_reaches_the_rate_at_its_last_step():
    config = OptimConfig(lr=0.8, warmup_steps=4, schedule="constant")
    rates = [learning_rate(config, step, 10) for step in range(7)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8])


def test_cosine_and_linear_decay_follow_their_formulas():
    for schedule, share in (
        ("cosine", lambda x: 0.5 * (1 + math.cos(math.pi * x))),
        ("linear", lambda x: 1 - x),
    ):
        config = OptimConfig(lr=2.0, warmup_steps=2, schedule=schedule, min_lr_ratio=0.1)
        for step in range(2, 12):
            expected = 2.0 * (0.1 + 0.9 * share((step - 2) / 10))
            assert learning_rate(config, step, 12) == pytest.approx(expected, rel=1e-12)
        assert learning_rate(config, 12, 12) == pytest.approx(0.2)
        assert learning_rate(config, 500, 12) == pytest.approx(0.2)


def test_every_step_of_a_run_without_floor_learns():
    config = OptimConfig(lr=1.0, warmup_steps=3)
    assert all(learning_rate(config, step, 3 + 5) > 0 for step in range(8))
    assert all(learning_rate(config, step, 3) > 0 for step in range(3)), "only warm-up"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", 0.0),
        ("lr", math.inf),
        ("lr", math.nan),
        ("weight_decay", -0.1),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("warmup_steps", -1),
        ("schedule", "cosin"),
        ("min_lr_ratio", 1.5),
        ("clip_norm", -1.0),
    ],
)
def test_a_bad_setting_is_named_with_its_value(setting, value):
    with pytest.raises(ConfigError, match=rf"optim\.{setting} = .*{value!r}.*allowed"):
        OptimConfig(**{setting: value})


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_updates_are_those_of_adamw_with_a_schedule_and_clipping(clip_norm):
    config = OptimConfig(lr=0.01, weight_decay=0.1, warmup_steps=2, clip_norm=clip_norm)
    mine, plain = parameters(), parameters()
    optimizer = AdapterOptimizer(mine, config, 6)
    adamw = torch.optim.AdamW(plain.values(), lr=0.01, weight_decay=0.1, betas=(0.9, 0.999))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        adamw, lambda step: learning_rate(config, step, 6) / 0.01
    )
    for step in range(6):
        set_gradients(mine, step)
        set_gradients(plain, step)
        norm = norm_of(mine)
        assert norm > 1, "clipping must matter here"
        rate = optimizer.step(norm)
        assert rate == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(plain.values(), clip_norm)
        adamw.step()
        schedule.step()
        assert all(p.grad is None for p in mine.values())
        for name in mine:
            torch.testing.assert_close(mine[name], plain[name], rtol=1e-6, atol=1e-7)
    assert optimizer.finished_steps == 6


def test_the_norm_has_the_same_bits_in_whatever_order_names_come():
    """Names come as sets of strings, whose order Python draws anew for every process, so for every
    rank: ranks that clip by unlike bits train unlike adapters."""
    generator = torch.Generator().manual_seed(1)
    mine = {f"layer.{n}": nn.Parameter(torch.zeros(7)) for n in range(24)}
    for parameter in mine.values():
        parameter.grad = torch.randn(7, generator=generator)
    optimizer = AdapterOptimizer(mine, OptimConfig(), 1)
    orders = [[list(mine)[n] for n in torch.randperm(24, generator=generator)] for _ in range(100)]
    sums = {float(torch.nn.utils.get_total_norm([mine[n].grad for n in o])) for o in orders}
    assert len(sums) > 1, "the order of a sum must matter here"
    assert {float(optimizer.gradient_norm(order)) for order in orders} == {
        float(optimizer.gradient_norm())
    }


def test_a_restored_optimizer_continues_with_the_same_bits():
    config = OptimConfig(lr=0.01, warmup_steps=1, weight_decay=0.05)
    straight = parameters()
    whole = AdapterOptimizer(straight, config, 6)
    for step in range(6):
        if step == 3:
            saved = {n: t.clone() for n, t in whole.state_tensors().items()}
            weights = {n: p.detach().clone() for n, p in straight.items()}
        set_gradients(straight, step)
        whole.step(norm_of(straight))

    resumed = {n: nn.Parameter(w) for n, w in weights.items()}
    second = AdapterOptimizer(resumed, config, 6)
    second.load_state_tensors(saved, 3)
    for step in range(3, 6):
        set_gradients(resumed, step)
        second.step(norm_of(resumed))
    for name in straight:
        assert torch.equal(straight[name], resumed[name]), name


def test_state_exists_before_the_first_step_and_must_fit():
    optimizer = AdapterOptimizer(parameters(), OptimConfig(), 3)
    state = optimizer.state_tensors()
    assert len(state) == 6 and all((t == 0).all() for t in state.values())
    state.pop("x.lora_a.exp_avg")
    with pytest.raises(CheckpointError, match=r"x\.lora_a\.exp_avg"):
        optimizer.load_state_tensors(state, 1)
