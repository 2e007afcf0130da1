"""What one split of the ranks computes: training steps as a run makes them, watched.

Every rank keeps what it has of a step; `join` puts the ranks together. Kept are the loss, every
gradient, and of each pack the selection of every full layer as one number a row, which is equal
where the sets are equal (up to a chance of 2^-64 each), and for a sample of trained rows the
selected keys themselves and the logits. So what is kept does not grow with rows x keys.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullspan.data.packing import IGNORE, Pack
from fullspan.lora.inject import adapted_modules, expert_parameters
from fullspan.lora.layers import LoRAGroupedLinear
from fullspan.models.dsa.attention import Indexer
from fullspan.ops.selection import Selection
from fullspan.parallel.collectives import gather_rows
from fullspan.parallel.mesh import Mesh
from fullspan.parallel.sequence import Partition
from fullspan.parallel.watch import Watch
from fullspan.parity.margins import Margin, margin
from fullspan.parity.row_blocks import RowBlocks
from fullspan.shapes import Int32, Int64, Tensor
from fullspan.train.config import RunConfig
from fullspan.train.session import Microbatch, Session
from fullspan.train.setup import open_session

# Of lora_b, which is zero in a fresh adapter: all gradients of lora_a would be zero too.
LORA_B_STD = 0.02
_HASHED_ROWS = 4096  # at once; bounds the temporaries of the hash


@dataclass(kw_only=True)
class PackSeen:
    """Of one pack, in one step.

    rows     of the pack, those that are held          sampled   those of the sample among them
    sets     layer -> a hash of each row's set         ids       layer -> keys [sampled, topk]
    logits   [sampled, vocab]
    margins  layer -> of the first row of each rank whose set is not that of another split
    """

    rows: Int64[Tensor, "rows"]
    sets: dict[str, Tensor]
    sampled: Tensor
    ids: dict[str, Tensor]
    logits: Tensor
    margins: dict[str, list[Margin]] = field(default_factory=dict)


Sets = Mapping[int, Mapping[str, Tensor]]
"""Of a step: pack -> layer -> a hash of each row's set, in the pack's order."""


@dataclass(kw_only=True)
class StepSeen:
    """Of one step. loss and gradients (by name, experts of all ranks together) are sums over the
    ranks; gradients are kept by the first rank only."""

    loss: float
    gradients: dict[str, Tensor]
    packs: dict[int, PackSeen]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything in it by a name, for bitwise comparison."""
        yield "loss", torch.tensor(self.loss, dtype=torch.float64)
        for name, gradient in self.gradients.items():
            yield f"gradient of {name}", gradient
        for index, pack in self.packs.items():
            yield f"logits, pack {index}", pack.logits
            for layer, sets in pack.sets.items():
                yield f"top-k of {layer}, pack {index}", sets


@dataclass(kw_only=True)
class RunSeen:
    """Of a split. unrepeated: names of what was not the same bits in a second run of the first
    step."""

    steps: list[StepSeen]
    unrepeated: list[str]


def probe(
    device: torch.device,
    config: RunConfig,
    steps: Sequence[Sequence[Pack]],
    sample: int,
    block: int | None = None,
    first: Path | None = None,
) -> RunSeen:
    """`watched_steps` of the configuration on this rank of its split, see run_group. first: what
    the ranks of the split have seen that it will be compared with."""
    session, _ = open_session(config, mesh_here(config, device))
    sets = None
    if first is not None:
        seen = join(torch.load(first, weights_only=False, mmap=True))
        sets = [{index: pack.sets for index, pack in s.packs.items()} for s in seen.steps]
    return watched_steps(session, steps, sample, block, sets=sets)


def mesh_here(config: RunConfig, device: torch.device) -> Mesh:
    """The mesh of this rank among those that run_group has started."""
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    watch = Watch(rank=ranks[0], size=ranks[1], timeout_seconds=config.train.timeout_seconds)
    return Mesh.create(config.parallel, device, watch)


def watched_steps(
    session: Session,
    steps: Sequence[Sequence[Pack]],
    sample: int,
    block: int | None = None,
    *,
    repeat: bool = True,
    sets: Sequence[Sets] | None = None,
) -> RunSeen:
    """Train on the packs of each of `steps`, from adapters whose every gradient is alive. The last
    makes no update.

    sample: rows of a step whose logits and selected keys are kept, over all its packs.
    block: rows of a matrix product, see RowBlocks; None: as many as there are.
    repeat: the first step is run twice, from the same adapters, and compared.
    sets: of each step on another split; where a row's differs, its margin is kept.
    """
    fill_lora_b(session.model)
    recorder = _Recorder(session, sample)
    unrepeated: list[str] = []
    seen: list[StepSeen] = []
    with nullcontext() if block is None else RowBlocks(block):
        for number, packs in enumerate(steps):
            if seen:
                session.optim_step()
            seen.append(recorder.run(packs, None if sets is None else sets[number]))
            if len(seen) == 1 and repeat:
                session.zero_grad()
                unrepeated = different(seen[0], recorder.run(packs))
    session.zero_grad()
    return RunSeen(steps=seen, unrepeated=unrepeated)


def fill_lora_b(model: nn.Module) -> None:
    """Normal values that depend on the module's name only, for the experts of whatever rank."""
    for name, module in adapted_modules(model).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        shape = tuple(module.lora_b.shape)
        grouped = isinstance(module, LoRAGroupedLinear)
        if grouped:
            shape = (module.base.experts, *shape[1:])
        drawn = torch.randn(shape, generator=generator) * LORA_B_STD
        held = drawn[module.base.held.start : module.base.held.stop] if grouped else drawn
        with torch.no_grad():
            module.lora_b.copy_(held)


def different(first: StepSeen, second: StepSeen) -> list[str]:
    """Names of the tensors that are not the same bits."""
    pairs = zip(first.tensors(), second.tensors(), strict=True)
    return [name for (name, one), (_, other) in pairs if not torch.equal(one, other)]


def join(parts: Sequence[RunSeen]) -> RunSeen:
    """What all ranks of a split have seen, `parts` in their order."""
    unrepeated = list(dict.fromkeys(name for part in parts for name in part.unrepeated))
    steps = [_join_step(step) for step in zip(*(part.steps for part in parts), strict=True)]
    return RunSeen(steps=steps, unrepeated=unrepeated)


def set_hashes(ids: Int32[Tensor, "rows topk"]) -> Int64[Tensor, "rows"]:
    """A hash of each row's set of ids, whatever their order; -1 is none.

    The sum of a 64-bit mix of each id (the finaliser of SplitMix64, Steele et al. 2014, less its
    unsigned shifts), in arithmetic modulo 2^64.
    """
    parts = [torch.empty(0, dtype=torch.int64, device=ids.device)]
    for part in ids.split(_HASHED_ROWS):
        mixed = (part.long() + 1) * -7046029254386353131
        mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
        mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
        parts.append((mixed ^ (mixed >> 31)).masked_fill_(part < 0, 0).sum(1))
    return torch.cat(parts)


def sample_rows(pack: Pack, count: int) -> Int64[Tensor, "sampled"]:
    """At most `count` trained rows of a pack, evenly over all of them, the last included."""
    trained = (pack.labels != IGNORE).nonzero()[:, 0]
    if not len(trained):
        return trained
    places = torch.linspace(0, len(trained) - 1, min(count, len(trained)), dtype=torch.float64)
    return trained[places.round().long()]


class _Recorder:
    """Runs steps of a session and keeps what its layers select, and hidden rows."""

    def __init__(self, session: Session, sample: int) -> None:
        self.session = session
        self.sample = sample
        self.layers = {n: m for n, m in session.model.named_modules() if isinstance(m, Indexer)}
        self._selections: dict[str, Selection] = {}
        self._hidden: list[Tensor] = []
        self._packs: list[PackSeen] = []
        self._margins: dict[str, list[Margin]] = {}
        self._others: Sets | None = None

    def run(self, packs: Sequence[Pack], others: Sets | None = None) -> StepSeen:
        """The gradients of a step are left with the session, summed over the ranks. others: sets to
        compare with."""
        session, mesh = self.session, self.session.mesh
        self._packs, self._hidden, self._others = [], [], others
        share = max(1, self.sample // len(packs))

        def keep(nll: Tensor, microbatch: Microbatch) -> Tensor:
            self._keep(microbatch, share)
            return nll

        hooks = list(self._watch())
        try:
            loss = session.forward_backward(packs, keep).loss
        finally:
            for hook in hooks:
                hook.remove()
        gradients = self._gradients()
        with torch.no_grad():
            for seen, hidden in zip(self._packs, self._hidden, strict=True):
                seen.logits = session.model.logits(hidden).float().cpu()
        # The last of a replica may be a filler, see Session.
        mine = range(mesh.dp.rank, len(packs), mesh.dp.size)
        return StepSeen(loss=loss, gradients=gradients, packs=dict(zip(mine, self._packs)))

    def _watch(self) -> Iterator[RemovableHandle]:
        def see_selection(name: str, module: nn.Module, given: Any, selection: Any) -> None:
            self._selections[name] = selection
            self._compare(name, module, given, selection)

        def see_hidden(module: nn.Module, given: Any, hidden: Any) -> None:
            self._hidden.append(hidden)

        for name, layer in self.layers.items():
            yield layer.register_forward_hook(partial(see_selection, name))
        yield self.session.model.register_forward_hook(see_hidden)

    def _compare(self, name: str, module: Any, given: Any, selection: Selection) -> None:
        """Keeps the margin of the first local row whose set is not that of the other split."""
        mesh = self.session.mesh
        others = (self._others or {}).get(mesh.dp.rank + mesh.dp.size * len(self._packs))
        if others is None:
            return
        length = mesh.cp.size * len(selection.ids)
        partition = Partition(mode=self.session.partition, size=mesh.cp.size, length=length)
        rows = partition.rows(mesh.cp.rank)
        differs = set_hashes(selection.ids).cpu() != others[name][rows]
        found = margin(module, given, selection, differs, rows)
        self._margins[name] = [] if found is None else [found]

    def _keep(self, microbatch: Microbatch, count: int) -> None:
        """What the forward pass of a microbatch has left, of the rows in the sample."""
        rows = microbatch.row_ids.cpu()
        sampled = torch.isin(rows, sample_rows(microbatch.pack, count)).nonzero()[:, 0]
        here = sampled.to(microbatch.row_ids.device)
        self._hidden[-1] = self._hidden[-1].detach()[here]
        selections = self._selections
        self._packs.append(
            PackSeen(
                rows=rows,
                sets={name: set_hashes(found.ids).cpu() for name, found in selections.items()},
                sampled=rows[sampled],
                ids={name: found.ids[here].cpu() for name, found in selections.items()},
                logits=torch.empty(0),
                margins=self._margins,
            )
        )
        self._selections, self._margins = {}, {}

    def _gradients(self) -> dict[str, Tensor]:
        mesh = self.session.mesh
        split = expert_parameters(self.session.model) if mesh.ep.size > 1 else frozenset()
        found: dict[str, Tensor] = {}
        for name, gradient in self.session.gradients().items():
            whole = gradient
            if name in split:
                whole = gather_rows(gradient, mesh.ep.group, "the experts' gradients")
            if mesh.is_main:
                found[name] = whole.detach().to("cpu", copy=True)
        return found


def _join_step(parts: Sequence[StepSeen]) -> StepSeen:
    of_pack: dict[int, list[PackSeen]] = {}
    for part in parts:
        for index, pack in part.packs.items():
            of_pack.setdefault(index, []).append(pack)
    return StepSeen(
        loss=parts[0].loss,
        gradients=parts[0].gradients,
        packs={index: _join_pack(packs) for index, packs in sorted(of_pack.items())},
    )


def _join_pack(parts: Sequence[PackSeen]) -> PackSeen:
    """In the order of the pack's rows."""
    order = torch.cat([part.rows for part in parts]).argsort()
    sampled = torch.cat([part.sampled for part in parts]).argsort()

    def ordered(values: Sequence[Tensor], order: Tensor) -> Tensor:
        return torch.cat(list(values))[order]

    def by_layer(values: Sequence[Mapping[str, Tensor]], order: Tensor) -> dict[str, Tensor]:
        return {layer: ordered([value[layer] for value in values], order) for layer in values[0]}

    return PackSeen(
        rows=ordered([part.rows for part in parts], order),
        sets=by_layer([part.sets for part in parts], order),
        sampled=ordered([part.sampled for part in parts], sampled),
        ids=by_layer([part.ids for part in parts], sampled),
        logits=ordered([part.logits for part in parts], sampled),
        margins={
            layer: [found for part in parts for found in part.margins.get(layer, ())]
            for layer in parts[0].sets
        },
    )
