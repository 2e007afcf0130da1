"""Names of a checkpoint file <-> names of the model, declared once and read in both directions.

A mapping is a list of steps. Each step makes one model tensor from one or more checkpoint tensors
by placing them side by side, nothing else, so it inverts exactly and every piece of it can be read
on its own. Checkpoint names that no step claims are ignored on purpose, refused with a
reason, or refused as unexpected.

A step may be `scaled`: its tensors can be FP8 in a checkpoint, each beside a tensor of scales.
`with_scales` adds a step for those of a given checkpoint, so that scales are placed, counted and
written back like any other tensor.

Leaves out dtypes, devices and files (load.py). A family declares its names beside its model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from typing import NamedTuple

import torch

from fullspan.errors import CheckpointError

SCALE_SUFFIX = "_scale_inv"  # model tensor X.weight -> its scale X.weight_scale_inv
_SHOWN = 4  # names an error lists before it only counts


class Piece(NamedTuple):
    """One checkpoint tensor and its place in a model tensor."""

    source: str
    lead: tuple[int, ...] = ()  # index into the leading dimensions: the expert
    part: int = 0  # which of `parts` equal parts of the dimension after them
    parts: int = 1

    def source_shape(self, target: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the checkpoint tensor, given that of the model tensor."""
        shape = target[len(self.lead) :]
        return shape if self.parts == 1 else (shape[0] // self.parts, *shape[1:])

    def of(self, target: torch.Tensor) -> torch.Tensor:
        """The place itself, as a view of the model tensor."""
        view = target[self.lead] if self.lead else target
        return view if self.parts == 1 else view.chunk(self.parts)[self.part]


@dataclass(frozen=True, kw_only=True)
class Rename:
    """One checkpoint tensor is one model tensor. `dtype` is kept whatever the model's dtype is;
    `scaled`: it may be FP8.
    """

    source: str
    target: str
    dtype: torch.dtype | None = None
    scaled: bool = False

    def pieces(self) -> tuple[Piece, ...]:
        return (Piece(self.source),)

    def scales(self, suffix: str) -> "Rename":
        """The step of the scale, whose checkpoint name is longer by `suffix`."""
        source, target = self.source + suffix, self.target + SCALE_SUFFIX
        return Rename(source=source, target=target, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class StackExperts:
    """2-D tensors of each expert <-> one 3-D tensor [experts, parts * rows, columns].

    `sources` name one expert's tensors in the order of their rows, with `{expert}` for its number.
    `dtype`, `scaled`: as for Rename.
    """

    sources: tuple[str, ...]
    target: str
    experts: int
    dtype: torch.dtype | None = None
    scaled: bool = False

    def pieces(self) -> tuple[Piece, ...]:
        parts = len(self.sources)
        return tuple(
            Piece(source.format(expert=expert), (expert,), part, parts)
            for expert in range(self.experts)
            for part, source in enumerate(self.sources)
        )

    def scales(self, suffix: str) -> "StackExperts":
        """The step of the scales, whose checkpoint names are longer by `suffix`."""
        return StackExperts(
            sources=tuple(source + suffix for source in self.sources),
            target=self.target + SCALE_SUFFIX,
            experts=self.experts,
            dtype=torch.float32,
        )


Step = Rename | StackExperts
Shapes = Mapping[str, tuple[int, ...]]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class CheckpointMapping:
    """All steps of a model. No two steps may claim the same name on either side.

    ignored: prefixes of checkpoint names that belong to no part of the model. They are not loaded,
    and copied through when a whole checkpoint is written back. forbidden: {prefix: how names under
    it contradict the config}.
    """

    steps: tuple[Step, ...]
    ignored: tuple[str, ...] = ()
    forbidden: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sources = [piece.source for step in self.steps for piece in step.pieces()]
        targets = [step.target for step in self.steps]
        assert len(sources) == len(set(sources)), "two steps read the same checkpoint tensor"
        assert len(targets) == len(set(targets)), "two steps fill the same model tensor"
        assert not any(self.is_ignored(name) for name in sources), "a step reads an ignored name"

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint tensor is passed over."""
        return name.startswith(self.ignored)

    @cached_property
    def sources(self) -> frozenset[str]:
        """Every checkpoint name that the steps read."""
        return frozenset(piece.source for step in self.steps for piece in step.pieces())

    def with_scales(self, suffixes: Mapping[str, str], dtype: torch.dtype) -> "CheckpointMapping":
        """For a checkpoint in which some model tensors are FP8.

        Args:
            suffixes: model tensor -> what its scales' checkpoint names have more than its own.
            dtype: of those tensors, kept whatever the model's dtype is.
        """
        steps: list[Step] = []
        for step in self.steps:
            suffix = suffixes.get(step.target)
            if suffix is None:
                steps.append(step)
            else:
                assert step.scaled, f"{step.target} is never FP8"
                steps += [replace(step, dtype=dtype), step.scales(suffix)]
        return replace(self, steps=tuple(steps))

    def check(self, checkpoint: Shapes, model: Shapes, *, where: str) -> None:
        """Compare names and shapes of both sides, consuming every name once.

        Args:
            checkpoint: shape by name of what the files hold.
            model: shape by name of what the model needs.
            where: what the message calls the checkpoint.

        Raises:
            CheckpointError: names are missing or unexpected (with near misses), or a shape differs.
        """
        apart = {step.target for step in self.steps} ^ set(model)
        assert not apart, f"the mapping and the model disagree about {sorted(apart)[:_SHOWN]}"
        missing = sorted(self.sources - set(checkpoint))
        extra = set(checkpoint) - self.sources
        unexpected = sorted(name for name in extra if not self.is_ignored(name))
        if missing or unexpected:
            faults = [self._missing(missing, unexpected), self._unexpected(unexpected, missing)]
            told = "; ".join(filter(None, faults))
            raise CheckpointError(f"{where} does not match its config.json: {told}")
        for step in self.steps:
            for piece in step.pieces():
                got, expected = checkpoint[piece.source], piece.source_shape(model[step.target])
                if got != expected:
                    raise CheckpointError(
                        f"{piece.source} in {where} has shape {list(got)}, "
                        f"but its config.json asks for {list(expected)}"
                    )

    def to_checkpoint(self, model: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """The inverse: every checkpoint tensor, a view of the model tensor it is a piece of."""
        for step in self.steps:
            for piece in step.pieces():
                yield piece.source, piece.of(model[step.target])

    def _missing(self, missing: list[str], unexpected: list[str]) -> str:
        named = [name + _near(name, unexpected, "found instead: ") for name in missing[:_SHOWN]]
        return _listed(named, len(missing), "missing")

    def _unexpected(self, unexpected: list[str], missing: list[str]) -> str:
        named = [name + self._why(name, missing) for name in unexpected[:_SHOWN]]
        return _listed(named, len(unexpected), "unexpected")

    def _why(self, name: str, missing: list[str]) -> str:
        for prefix, reason in self.forbidden.items():
            if name.startswith(prefix):
                return f" ({reason})"
        return _near(name, missing or sorted(self.sources), "near: ")


def _near(name: str, others: list[str], label: str) -> str:
    near = get_close_matches(name, others, 1, 0.85)
    return f" ({label}{near[0]})" if near else ""


def _listed(named: list[str], count: int, kind: str) -> str:
    if not count:
        return ""
    more = f" and {count - len(named)} more" if count > len(named) else ""
    return f"{count} {kind} tensor{'s' if count > 1 else ''}: {', '.join(named)}{more}"
