"""AdamW over the adapters, and clipping by the global norm.

Leaves out: settings and learning rate (schedule.py), the reduction of gradients over ranks
(parallel/collectives.py; it has happened before `AdapterOptimizer.step` sees them) and writing to
disk (checkpoint/resume.py). Nothing here communicates: the norm that clips is handed in, the same
on every rank (session.py), so replicated adapters get the same update everywhere.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from fullspan.errors import CheckpointError
from fullspan.train.schedule import OptimConfig, learning_rate


class AdapterOptimizer:
    """AdamW that knows its parameters by name.

    `parameters` are all the trainable ones, {name: parameter}; anything frozen among them is a bug.
    Moments exist from the start, so every checkpoint has the same keys, also one before step 1.
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
        """The 2-norm of this rank's gradients of `names` (None: of all) together, a scalar in fp32.
        Missing gradients count as zero. Summed in the parameters' order: that of a set of names
        differs between processes, and with it the last bit that every rank clips by."""
        chosen = self._parameters if names is None else names
        gradients = [p.grad for name, p in self._parameters.items() if name in chosen]
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
