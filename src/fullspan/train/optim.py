"""AdamW over the adapters, its learning rate as a pure function of the step, and clipping by the
global norm.

Leaves out: the reduction of gradients over ranks (parallel/collectives.py; it has happened before
`AdapterOptimizer.step` sees them) and writing to disk (checkpoint/resume.py). Adapters are
replicated, so every rank computes the same norm, the same rate and the same update, and nothing
here communicates.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullspan.errors import CheckpointError, ConfigError

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


class AdapterOptimizer:
    """AdamW that knows its parameters by name.

    `parameters` are all the trainable ones, {name: parameter}; anything frozen among them is a bug.
    Moments exist from the start, so a checkpoint before the first step has the same keys as any
    other.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimConfig, total_steps: int
    ):
        assert parameters and all(p.requires_grad for p in parameters.values())
        self.config = config
        self.total_steps = total_steps
        self.finished_steps = 0
        self._parameters = dict(parameters)
        on_gpu = all(p.is_cuda for p in parameters.values())
        # foreach fuses launches over tensors; it is elementwise, so the bits do not depend on it.
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=on_gpu,
        )
        for parameter in self._parameters.values():
            self._adamw.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def gradient_norm(self, names: Collection[str] | None = None) -> Tensor:
        """The 2-norm over the gradients of `names` (None: of all) together, a scalar in fp32.
        Missing gradients count as zero."""
        chosen = self._parameters if names is None else names
        gradients = [self._parameters[name].grad for name in chosen]
        return torch.nn.utils.get_total_norm([g for g in gradients if g is not None])

    def step(self, norm: Tensor) -> float:
        """Clips by `norm` (of all gradients together), updates the parameters, frees the gradients;
        returns the rate used."""
        if self.config.clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(
                self._parameters.values(), self.config.clip_norm, norm
            )
        rate = learning_rate(self.config, self.finished_steps, self.total_steps)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.zero_grad()
        self.finished_steps += 1
        return rate

    def zero_grad(self) -> None:
        """Sets every gradient to None."""
        self._adamw.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """{"<parameter>.exp_avg" | "<parameter>.exp_avg_sq": tensor}, the live tensors."""
        return {
            f"{name}.{moment}": self._adamw.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in ("exp_avg", "exp_avg_sq")
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor], finished_steps: int) -> None:
        """Puts back what `state_tensors` gave after `finished_steps` steps."""
        mine = self.state_tensors()
        if mine.keys() != tensors.keys():
            name = sorted(mine.keys() ^ tensors.keys())[0]
            raise CheckpointError(
                f"optimizer state does not fit the adapters: {name} has no partner"
            )
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
        for parameter in self._parameters.values():
            self._adamw.state[parameter]["step"].fill_(float(finished_steps))
        self.finished_steps = finished_steps
