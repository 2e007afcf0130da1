"""The [optim] section, and the learning rate as a pure function of the step. Imports no torch."""

import math
from dataclasses import dataclass

from fullspan.errors import ConfigError

SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The [optim] section. `clip_norm = 0` switches clipping off; `min_lr_ratio` is where the decay
    ends, as a share of `lr`; `warmup_steps` counts optimizer steps."""

    lr: float = 1e-4
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    warmup_steps: int = 0
    schedule: str = "cosine"
    min_lr_ratio: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self):
        def require(holds: bool, name: str, allowed: str) -> None:
            if not holds:
                got = getattr(self, name)
                raise ConfigError(f"optim.{name} = {got!r} cannot be used: allowed is {allowed}")

        require(self.lr > 0 and math.isfinite(self.lr), "lr", "a number above 0")
        require(0 <= self.weight_decay < math.inf, "weight_decay", "a number of at least 0")
        require(0 <= self.beta1 < 1, "beta1", "a number in [0, 1)")
        require(0 <= self.beta2 < 1, "beta2", "a number in [0, 1)")
        require(self.eps > 0 and math.isfinite(self.eps), "eps", "a number above 0")
        require(self.warmup_steps >= 0, "warmup_steps", "a whole number of at least 0")
        require(self.schedule in SCHEDULES, "schedule", " | ".join(SCHEDULES))
        require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "a number in [0, 1]")
        require(
            0 <= self.clip_norm < math.inf, "clip_norm", "a number of at least 0 (0: no clipping)"
        )


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (from 0) of `total_steps`.

    Warm-up rises linearly and reaches `lr` at step `warmup_steps - 1`. The decay runs over the
    steps after it and would reach `min_lr_ratio * lr` at step `total_steps`, so that the last step
    still learns something.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    length = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / length)
    share = 1.0 - progress
    if config.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)
