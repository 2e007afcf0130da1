"""The Python API of training: `forward_backward`, `optim_step`, `evaluate`, `save`. The loop over
steps, its console and its files are loop.py's.

    session = Session(model, trainable_parameters(model), optim=OptimConfig(), total_steps=100)
    result = session.forward_backward(packs)    # loss of the whole step over all ranks
    update = session.optim_step()               # reduces, clips, updates

`forward_backward` takes other losses than cross-entropy too, see losses.py.

Global token normalisation: the loss of a step is the sum of the negative log likelihoods of every
trained token in all its packs and on all ranks, divided by their number in all packs and on all
ranks, and the gradients are exactly those of that loss. It therefore does not depend on how the
tokens are packed, in how many microbatches they come or how many ranks share them. Every rank knows
the whole packs, so the number needs no communication. All ranks of a mesh make the same calls with
the same packs, and enter every collective also with no trained token of their own.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullspan.checkpoint.adapter import ADAPTER_PREFIX
from fullspan.checkpoint.folders import Header, read_header
from fullspan.checkpoint.resume import load_checkpoint, save_checkpoint
from fullspan.data.packing import Pack, untrained
from fullspan.errors import ConfigError, DataError, TrainingError
from fullspan.lora.inject import adapters_off, expert_parameters
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.packed import PackedLayout
from fullspan.parallel.balance import IndexerBalance
from fullspan.parallel.collectives import all_reduce_gradients, all_reduce_sum
from fullspan.parallel.context import SequenceContext
from fullspan.parallel.expert import ExpertParallel
from fullspan.parallel.mesh import Mesh
from fullspan.parallel.sequence import Partition
from fullspan.shapes import Float, Int64, Tensor
from fullspan.train.optim import AdapterOptimizer
from fullspan.train.schedule import OptimConfig


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
of any shape, whose sum over rows, ranks and microbatches is divided by the trained tokens of all
packs, or by what a `Loss` counts. It is called on every rank, also without a trained row, and what
it returns depends on its first argument there too."""


class Loss(ABC):
    """A LossFunction that is divided by something else than the trained tokens."""

    @abstractmethod
    def __call__(self, nll: Tensor, microbatch: Microbatch) -> Tensor:
        """See LossFunction."""

    @abstractmethod
    def count(self, pack: Pack) -> float:
        """What `pack` adds to the divisor, not negative. The same on every rank, as the pack is.
        The sum over the packs of a step must be above 0."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Of all ranks together. loss: per trained token, or per what a `Loss` counts. tokens: of the
    packs, without padding."""

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
        adapters: {name: parameter}, see `trainable_parameters` in lora/inject.py.
        total_steps: where the learning rate's decay ends.
        mesh: the ranks; None: this process alone.
        partition: which rows of a pack each rank holds.
        balance_indexer: whether ranks trade rows of the indexer, see ParallelConfig.

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
        balance_indexer: str = "auto",
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
        self.mesh = mesh or Mesh.single(next(iter(adapters.values())).device)
        self.device = self.mesh.device
        self.partition = partition
        self.expert_parallel = ExpertParallel(
            experts=model.config.n_routed_experts,
            rank=self.mesh.ep.rank,
            size=self.mesh.ep.size,
            group=self.mesh.ep.group,
            backend=model.options.rows,
        )
        self.balance = IndexerBalance(
            choice=balance_indexer,
            heads=model.config.index_n_heads,
            dim=model.config.index_head_dim,
            topk=model.config.index_topk,
            itemsize=model.model.norm.weight.dtype.itemsize,
        )
        self._sharded = expert_parameters(model) if self.mesh.ep.size > 1 else frozenset()
        self._reduced = False

    @property
    def finished_steps(self) -> int:
        return self.optimizer.finished_steps

    def place(self, pack: Pack) -> Microbatch:
        """The part of a pack that this rank holds, on its device.

        Raises:
            LayoutError: the ranks cannot share the pack evenly.
        """
        cp = self.mesh.cp
        partition = Partition(mode=self.partition, size=cp.size, length=len(pack.tokens))
        layout = PackedLayout(cu_seqlens=pack.cu_seqlens, padded_length=len(pack.tokens))
        row_ids = partition.rows(cp.rank)
        return Microbatch(
            pack=pack,
            row_ids=row_ids.to(self.device),
            tokens=pack.tokens[row_ids].to(self.device),
            labels=pack.labels[row_ids].to(self.device),
            sequence=SequenceContext.create(
                layout,
                partition,
                experts=self.expert_parallel,
                rank=cp.rank,
                group=cp.group,
                device=self.device,
                balance=self.balance,
            ),
        )

    def forward(self, microbatch: Microbatch) -> Float[Tensor, "rows"]:
        """Negative log likelihood of each local row's label, 0 where untrained, with its graph.

        Any number of forwards may come before their backwards, in any order that is the same on
        every rank; `forward_backward` runs them one at a time.
        """
        hidden = self.model(microbatch.tokens, microbatch.sequence)
        return self.model.token_losses(hidden, microbatch.labels)

    @torch.no_grad()
    def base_losses(self, microbatch: Microbatch) -> Float[Tensor, "rows"]:
        """What `forward` would give without adapters, without its graph. Entered by every rank."""
        with adapters_off(self.model):
            return self.forward(microbatch)

    def forward_backward(
        self, packs: Sequence[Pack], loss_fn: LossFunction | None = None
    ) -> StepResult:
        """Adds the gradients of the loss over `packs`, all microbatches of one step, to `.grad`.

        Replica d of n takes the packs d, d + n, ...; every rank is given all of them.

        The gradients stay those of this rank's rows until `gradients` or `optim_step`.

        Raises:
            DataError: there is no pack, or nothing that the loss is divided by in any of them: a
                zero in its place would let the optimizer move on by its momentum alone. A rank, a
                replica or a pack may have nothing. Every rank raises, before any exchange.
            TrainingError: the loss is not finite. No gradient is left.
            ConfigError: `loss_fn` gave something that does not depend on the model.
        """
        if self._reduced:
            raise TrainingError(
                "the gradients are summed over the ranks already: call optim_step or zero_grad "
                "before the next forward_backward"
            )
        count = self._divisor(packs, loss_fn)
        self.mesh.watch.begin(f"step {self.finished_steps + 1}")
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for pack in self._share(packs):
            microbatch = self.place(pack)
            losses = self.forward(microbatch)
            if loss_fn is not None:
                losses = loss_fn(losses, microbatch)
                if not losses.requires_grad:
                    raise ConfigError(
                        "loss_fn must return a value computed from its first argument"
                    )
            (losses.sum() / count).backward()
            total += losses.detach().sum(dtype=torch.float64)
        return self._result(total, packs, count)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients summed over the ranks, by the adapters' names. Entered by every rank."""
        if not self._reduced:
            everywhere = [p for n, p in self.adapters.items() if n not in self._sharded]
            all_reduce_gradients(everywhere, self.mesh.world.group)
            shards = [p for n, p in self.adapters.items() if n in self._sharded]
            all_reduce_gradients(shards, self.mesh.replicas.group, "the experts' gradients")
            self._reduced = True
        return {name: p.grad for name, p in self.adapters.items() if p.grad is not None}

    def optim_step(self) -> Update:
        """Sums the gradients over the ranks, clips them, updates the adapters, drops the gradients.

        Raises:
            TrainingError: the norm of the gradients is not finite. Nothing was updated and no
                gradient is left.
        """
        self.gradients()
        norm = self._gradient_norm()
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
        self.mesh.watch.begin(f"the evaluation after step {self.finished_steps}")
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for pack in self._share(packs):
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
        """Writes a checkpoint `folder`/step-N that `load` continues from; see `save_checkpoint`."""
        self.mesh.watch.begin(f"the checkpoint of step {self.finished_steps}")
        with self.mesh.watch.exchange("the writing of a checkpoint"):
            return save_checkpoint(
                folder,
                step=self.finished_steps,
                tensors=self._state_tensors(),
                loader=loader or {},
                fingerprint=fingerprint or {},
                keep_last=keep_last,
                group=self.mesh.world.process_group,
            )

    def load(self, path: Path) -> Header:
        """Restores adapters, optimizer, step and random states from a checkpoint of `save`.

        Raises:
            CheckpointError: it does not fit or is damaged. Nothing was changed.
        """
        header = read_header(path)
        with self.mesh.watch.exchange("the reading of a checkpoint"):
            loaded = load_checkpoint(path, self._state_tensors(), self.mesh.world.process_group)
        tensors = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in loaded.items()}
        moments = {n.removeprefix("optim."): t for n, t in tensors.items() if n[:6] == "optim."}
        with torch.no_grad():
            for name, parameter in self.adapters.items():
                parameter.copy_(tensors[ADAPTER_PREFIX + name])
        self.optimizer.load_state_tensors(moments, header.step)
        self.zero_grad()
        return header

    def _state_tensors(self) -> dict[str, Tensor]:
        adapters = {ADAPTER_PREFIX + name: p.detach() for name, p in self.adapters.items()}
        moments = self.optimizer.state_tensors()
        state = adapters | {f"optim.{name}": tensor for name, tensor in moments.items()}
        return {name: self._global(name, tensor) for name, tensor in state.items()}

    def _global(self, name: str, tensor: Tensor) -> Tensor:
        """Of expert adapters the whole, of which this rank holds its experts' part: so that it can
        be saved and loaded on any number of ranks."""
        parameter = name.partition(".")[2].removesuffix(".exp_avg").removesuffix(".exp_avg_sq")
        if parameter not in self._sharded or self.mesh.experts is None:
            return tensor
        places = [Replicate(), Shard(0)]
        return DTensor.from_local(tensor, self.mesh.experts, places, run_check=False)

    def _divisor(self, packs: Sequence[Pack], loss_fn: LossFunction | None) -> float:
        """What the loss of a step is divided by, of all packs and so of all ranks. DataError: 0."""
        step = f"step {self.finished_steps + 1}"
        if not packs:
            raise DataError(f"{step}: forward_backward got no packs; a step needs at least one")
        trained = sum(pack.trained_tokens for pack in packs)
        count, what = trained, "no trained token"
        if isinstance(loss_fn, Loss):
            count = sum(loss_fn.count(pack) for pack in packs)
            what = f"{type(loss_fn).__name__} counts none of {trained} trained tokens"
        if not count:
            raise DataError(
                f"{step}: {what} in its {len(packs)} pack(s), so the loss has nothing to be "
                "divided by: leave the step out, or give its packs together with others"
            )
        return count

    def _share(self, packs: Sequence[Pack]) -> Sequence[Pack]:
        """This replica's packs: as many as any other's, the last may be an untrained filler."""
        dp = self.mesh.dp
        if odd := len(packs) % dp.size:
            packs = [*packs, *[untrained(packs[0])] * (dp.size - odd)]
        return packs[dp.rank :: dp.size]

    def _gradient_norm(self) -> Tensor:
        """Of all gradients together, those of other ranks' experts included."""
        if not self._sharded:
            return self.optimizer.gradient_norm()
        # Each at a place of its own among zeros: such a sum is exact, so every rank of every group
        # clips by the same bits, whatever order a group's transport adds in.
        experts = torch.zeros(self.mesh.ep.size, device=self.device)
        experts[self.mesh.ep.rank] = self.optimizer.gradient_norm(self._sharded).square()
        all_reduce_sum([experts], self.mesh.ep.group, "the gradient norm")
        others = self.optimizer.gradient_norm(self.adapters.keys() - self._sharded)
        return (others.square() + experts.sum()).sqrt()

    def _result(self, total: Tensor, packs: Sequence[Pack], count: float) -> StepResult:
        all_reduce_sum([total], self.mesh.world.group, "the loss")
        loss = float(total) / count
        if not math.isfinite(loss):
            self.zero_grad()
            raise TrainingError(self._not_finite("loss", loss))
        trained = sum(pack.trained_tokens for pack in packs)
        tokens = sum(int(pack.cu_seqlens[-1]) for pack in packs)
        return StepResult(loss=loss, trained_tokens=trained, tokens=tokens)

    def _not_finite(self, what: str, value: float) -> str:
        return (
            f"step {self.finished_steps + 1}: the {what} is {value}, so training stops; the "
            f"adapters are those after step {self.finished_steps} and checkpoints are untouched "
            "(try a lower optim.lr, a longer optim.warmup_steps or a smaller optim.clip_norm)"
        )
