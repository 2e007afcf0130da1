"""The Python API of training: `forward_backward`, `optim_step`, `evaluate`, `save`. The loop over
steps, its console and its files are loop.py's.

    session = Session(model, trainable_parameters(model), optim=OptimConfig(), total_steps=100)
    result = session.forward_backward(packs)    # loss of the whole step over all ranks
    update = session.optim_step()               # reduces, clips, updates

Global token normalisation: the loss of a step is the sum of the negative log likelihoods of every
trained token in all its packs and on all ranks, divided by their number in all packs and on all
ranks, and the gradients are exactly those of that loss. It therefore does not depend on how the
tokens are packed, in how many microbatches they come or how many ranks share them. Every rank knows
the whole packs, so the number needs no communication. All ranks of a mesh make the same calls with
the same packs, and enter every collective also with no trained token of their own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullspan.checkpoint.folders import Header, read_header
from fullspan.checkpoint.resume import load_checkpoint, save_checkpoint
from fullspan.data.packing import Pack
from fullspan.errors import ConfigError, DataError, TrainingError
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.linear_cross_entropy.op import linear_cross_entropy
from fullspan.ops.packed import PackedLayout
from fullspan.parallel.collectives import all_reduce_gradients, all_reduce_sum
from fullspan.parallel.context import SequenceContext
from fullspan.parallel.mesh import Mesh
from fullspan.parallel.sequence import Partition
from fullspan.shapes import Float, Int64, Tensor
from fullspan.train.optim import AdapterOptimizer, OptimConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """One pack as this rank holds it.

    row_ids: places of the local rows in the pack. labels: -100 where a row is not trained. pack:
    the whole of it, the same on every rank.
    """

    pack: Pack
    row_ids: Int64[Tensor, "rows"]
    tokens: Int64[Tensor, "rows"]
    labels: Int64[Tensor, "rows"]
    sequence: SequenceContext


LossFunction = Callable[[Tensor, Microbatch], Tensor]
"""(negative log likelihood of each local row [rows], 0 where untrained; its microbatch) -> losses,
of any shape, whose sum over rows, ranks and microbatches is divided by the trained tokens."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Of all ranks together. loss: per trained token. tokens: of the packs, without padding."""

    loss: float
    trained_tokens: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Update:
    """lr: the rate that the step used. grad_norm: of all gradients together, before clipping."""

    lr: float
    grad_norm: float


class Session:
    """A model with adapters in training.

    Args:
        model: from `load_model` and `inject`; nothing but the adapters requires a gradient.
        adapters: {name: parameter}, see `fullspan.lora.inject.trainable_parameters`.
        total_steps: where the learning rate's decay ends.
        mesh: the ranks; None: this process alone.
        partition: which rows of a pack each rank holds.

    Raises:
        ConfigError: `adapters` are not exactly what requires a gradient in `model`.
    """

    def __init__(
        self,
        model: DsaForCausalLM,
        adapters: Mapping[str, nn.Parameter],
        *,
        optim: OptimConfig,
        total_steps: int,
        mesh: Mesh | None = None,
        partition: str = "contiguous",
    ):
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        if trainable != set(adapters) or not adapters:
            odd = sorted(trainable ^ set(adapters))
            raise ConfigError(
                "the adapters are not exactly the model's trainable parameters: "
                f"{len(odd)} differ, such as {odd[0]}"
                if odd
                else "the model has no adapters"
            )
        self.model = model
        self.adapters = dict(adapters)
        self.optimizer = AdapterOptimizer(adapters, optim, total_steps)
        self.device = model.lm_head.weight.device
        self.cp_rank, self.cp_size, self.group = 0, 1, None
        if mesh is not None:
            self.cp_rank, self.cp_size, self.group = mesh.cp_rank, mesh.cp_size, mesh.cp_group
        self.partition = partition
        self._reduced = False

    @property
    def finished_steps(self) -> int:
        return self.optimizer.finished_steps

    def place(self, pack: Pack) -> Microbatch:
        """The part of a pack that this rank holds, on its device.

        Raises:
            LayoutError: the ranks cannot share the pack evenly.
        """
        partition = Partition(mode=self.partition, size=self.cp_size, length=len(pack.tokens))
        layout = PackedLayout(cu_seqlens=pack.cu_seqlens, padded_length=len(pack.tokens))
        row_ids = partition.rows(self.cp_rank)
        return Microbatch(
            pack=pack,
            row_ids=row_ids.to(self.device),
            tokens=pack.tokens[row_ids].to(self.device),
            labels=pack.labels[row_ids].to(self.device),
            sequence=SequenceContext.create(
                layout, partition, rank=self.cp_rank, group=self.group, device=self.device
            ),
        )

    def forward(self, microbatch: Microbatch) -> Float[Tensor, "rows"]:
        """Negative log likelihood of each local row's label, 0 where untrained, with its graph.

        Any number of forwards may come before their backwards, in any order that is the same on
        every rank; `forward_backward` runs them one at a time.
        """
        hidden = self.model(microbatch.tokens, microbatch.sequence)
        return linear_cross_entropy(
            hidden, self.model.lm_head.weight, microbatch.labels, options=self.model.options
        )

    def forward_backward(
        self, packs: Sequence[Pack], loss_fn: LossFunction | None = None
    ) -> StepResult:
        """Adds the gradients of the loss over `packs`, the microbatches of one step, to `.grad`.

        The gradients stay those of this rank's rows until `gradients` or `optim_step`.

        Raises:
            TrainingError: the loss is not finite. No gradient is left.
            ConfigError: `loss_fn` gave something that does not depend on the model.
        """
        if self._reduced:
            raise TrainingError(
                "the gradients are summed over the ranks already: call optim_step or zero_grad "
                "before the next forward_backward"
            )
        trained = sum(pack.trained_tokens for pack in packs)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for pack in packs:
            microbatch = self.place(pack)
            losses = self.forward(microbatch)
            if loss_fn is not None:
                losses = loss_fn(losses, microbatch)
                if not losses.requires_grad:
                    raise ConfigError(
                        "loss_fn must return a value computed from its first argument"
                    )
            (losses.sum() / max(trained, 1)).backward()
            total += losses.detach().sum(dtype=torch.float64)
        return self._result(total, packs, trained)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients summed over the ranks, by the adapters' names. Entered by every rank."""
        if not self._reduced:
            all_reduce_gradients(list(self.adapters.values()), self.group)
            self._reduced = True
        return {name: p.grad for name, p in self.adapters.items() if p.grad is not None}

    def optim_step(self) -> Update:
        """Sums the gradients over the ranks, clips them, updates the adapters, drops the gradients.

        Raises:
            TrainingError: the norm of the gradients is not finite. Nothing was updated and no
                gradient is left.
        """
        self.gradients()
        norm = self.optimizer.gradient_norm()
        value = float(norm)
        if not math.isfinite(value):
            self.zero_grad()
            raise TrainingError(self._not_finite("gradient norm", value))
        self._reduced = False
        return Update(lr=self.optimizer.step(norm), grad_norm=value)

    def zero_grad(self) -> None:
        """Drops the gradients (sets them to None)."""
        self.optimizer.zero_grad()
        self._reduced = False

    @torch.no_grad()
    def evaluate(self, packs: Sequence[Pack]) -> StepResult:
        """The cross-entropy over `packs` as they are; changes nothing.

        Raises:
            DataError: no pack has a trained token.
            TrainingError: the loss is not finite.
        """
        trained = sum(pack.trained_tokens for pack in packs)
        if not trained:
            raise DataError("the evaluation packs have no trained token (setting data.eval_path)")
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for pack in packs:
            total += self.forward(self.place(pack)).sum(dtype=torch.float64)
        return self._result(total, packs, trained)

    def save(
        self,
        folder: Path,
        *,
        loader: Mapping[str, Any] | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        keep_last: int = 2,
    ) -> Path:
        """Writes a checkpoint `folder`/step-N that `load` continues from exactly; see
        `fullspan.checkpoint.resume.save_checkpoint`."""
        return save_checkpoint(
            folder,
            step=self.finished_steps,
            tensors=self._state_tensors(),
            loader=loader or {},
            fingerprint=fingerprint or {},
            keep_last=keep_last,
            group=self.group,
        )

    def load(self, path: Path) -> Header:
        """Restores adapters, optimizer, step and random states from a checkpoint of `save`.

        Raises:
            CheckpointError: it does not fit or is damaged. Nothing was changed.
        """
        header = read_header(path)
        tensors = load_checkpoint(path, self._state_tensors(), self.group)
        moments = {n.removeprefix("optim."): t for n, t in tensors.items() if n[:6] == "optim."}
        with torch.no_grad():
            for name, parameter in self.adapters.items():
                parameter.copy_(tensors[f"adapter.{name}"])
        self.optimizer.load_state_tensors(moments, header.step)
        self.zero_grad()
        return header

    def _state_tensors(self) -> dict[str, Tensor]:
        adapters = {f"adapter.{name}": p.detach() for name, p in self.adapters.items()}
        moments = self.optimizer.state_tensors()
        return adapters | {f"optim.{name}": tensor for name, tensor in moments.items()}

    def _result(self, total: Tensor, packs: Sequence[Pack], trained: int) -> StepResult:
        all_reduce_sum([total], self.group)
        loss = float(total) / max(trained, 1)
        if not math.isfinite(loss):
            self.zero_grad()
            raise TrainingError(self._not_finite("loss", loss))
        tokens = sum(int(pack.cu_seqlens[-1]) for pack in packs)
        return StepResult(loss=loss, trained_tokens=trained, tokens=tokens)

    def _not_finite(self, what: str, value: float) -> str:
        return (
            f"step {self.finished_steps + 1}: the {what} is {value}, so training stops; the "
            f"adapters are those after step {self.finished_steps} and checkpoints are untouched "
            "(try a lower optim.lr, a longer optim.warmup_steps or a smaller optim.clip_norm)"
        )
