"""What two splits have seen, compared: one Finding for each quantity, with its worst offender.

    loss        |got - wanted| / |wanted| of a step
    logits      ‖got - wanted‖ / ‖wanted‖ of a sampled row
    gradients   the same of a whole tensor (absolute where all of `wanted` is zero)
    top-k       share of the selected keys that differ. Counted in the sampled rows; any other row
                whose set differs has at least one. Of the first of these rows: how near it was.
                Beside the worst offender the first
    bits        tensors that differ between two runs of one split

A value that is not a number is worse than any other.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from fullspan.errors import ConfigError
from fullspan.parity.probe import PackSeen, RunSeen, StepSeen
from fullspan.parity.splits import Split
from fullspan.shapes import Tensor


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """The largest value of each quantity that still passes. Bits have none: every one counts."""

    loss: float
    logits: float
    gradients: float
    topk: float

    def changed(self, words: Sequence[str]) -> "Tolerances":
        """With "name=value" words in place. Raises ConfigError for one that cannot be used."""
        known = [field.name for field in fields(self)]
        values: dict[str, float] = {}
        for word in words:
            name, _, text = word.partition("=")
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if name not in known or not value >= 0:
                raise ConfigError(
                    f"--tolerance {word}: it must be NAME=VALUE with a value of at least 0 and a "
                    f"name of {', '.join(known)}"
                )
            values[name] = value
        return replace(self, **values)


TOLERANCES = {
    # Rounding of sums in another order.
    "float32": Tolerances(loss=1e-6, logits=1e-5, gradients=1e-5, topk=0.0),
    # A matrix product of fewer rows may round differently, and then picks near ties differ too.
    "bfloat16": Tolerances(loss=1e-4, logits=3e-2, gradients=3e-2, topk=1e-2),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The worst of one quantity on one split. where: what it is the value of, "" for none."""

    split: Split
    quantity: str
    value: float
    allowed: float
    where: str

    @property
    def passed(self) -> bool:
        return self.value <= self.allowed


Candidates = Iterable[tuple[float, str]]


def compare(
    split: Split, got: RunSeen, wanted: RunSeen, tolerances: Tolerances
) -> Iterator[Finding]:
    """`got` of `split` against `wanted` of the first split."""
    steps = list(zip(got.steps, wanted.steps, strict=True))
    for quantity, allowed, candidates in (
        ("loss", tolerances.loss, _losses),
        ("logits", tolerances.logits, _logits),
        ("gradients", tolerances.gradients, _gradients),
        ("top-k", tolerances.topk, _selections),
    ):
        found = [
            (value, f"step {number}, {name}" if name else f"step {number}")
            for number, (one, other) in enumerate(steps, start=1)
            for value, name in candidates(one, other)
        ]
        value, where = _worst(found)
        # One row that differs moves what comes after it: the first tells why.
        first = next((place for share, place in found if share), where)
        if quantity == "top-k" and first != where:
            where += f"; first in {first}"
        yield Finding(split=split, quantity=quantity, value=value, allowed=allowed, where=where)


def compare_bits(split: Split, seen: RunSeen) -> Iterator[Finding]:
    """Two runs of one split."""
    where = f"step 1, {seen.unrepeated[0]}" if seen.unrepeated else ""
    value = float(len(seen.unrepeated))
    yield Finding(split=split, quantity="bits", value=value, allowed=0.0, where=where)


def _losses(got: StepSeen, wanted: StepSeen) -> Candidates:
    yield abs(got.loss - wanted.loss) / (abs(wanted.loss) or 1.0), ""


def _logits(got: StepSeen, wanted: StepSeen) -> Candidates:
    for index, one, other in _packs(got, wanted):
        assert torch.equal(one.sampled, other.sampled), "both splits sample the same rows"
        for row, mine, theirs in zip(one.sampled.tolist(), one.logits, other.logits, strict=True):
            yield _relative(mine, theirs), f"pack {index}, row {row}"


def _gradients(got: StepSeen, wanted: StepSeen) -> Candidates:
    assert got.gradients.keys() == wanted.gradients.keys(), "both splits train the same tensors"
    for name, gradient in got.gradients.items():
        yield _relative(gradient, wanted.gradients[name]), name


def _selections(got: StepSeen, wanted: StepSeen) -> Candidates:
    for index, one, other in _packs(got, wanted):
        assert torch.equal(one.rows, other.rows), "both splits cover the pack"
        for layer, sets in one.sets.items():
            rows = one.rows[sets != other.sets[layer]].tolist()
            sampled = _share_that_differs(one.ids[layer], other.ids[layer])
            # Any row that differs does so by at least one key.
            least = len(rows) / (len(one.rows) * one.ids[layer].shape[1])
            which = f", {len(rows)} of {len(one.rows)} rows from {rows[0]} on" if rows else ""
            margins = [m for m in one.margins.get(layer, ()) if rows and m.row == rows[0]]
            which += "".join(f"; {found}" for found in margins)
            yield max(sampled, least), f"pack {index}, {layer}{which}"


def _packs(got: StepSeen, wanted: StepSeen) -> Iterator[tuple[int, PackSeen, PackSeen]]:
    assert got.packs.keys() == wanted.packs.keys(), "both splits see every pack"
    for index, pack in got.packs.items():
        yield index, pack, wanted.packs[index]


def _share_that_differs(got: Tensor, wanted: Tensor) -> float:
    """Of the keys [rows, topk] of sampled rows, -1 for none."""
    keys = max(int((got >= 0).sum()), int((wanted >= 0).sum()))
    rows = zip(got, wanted, strict=True)
    common = sum(int(torch.isin(one[one >= 0], other).sum()) for one, other in rows)
    return 1 - common / keys if keys else 0.0


def _relative(got: Tensor, wanted: Tensor) -> float:
    scale = wanted.double().norm().item()
    return (got.double() - wanted.double()).norm().item() / (scale or 1.0)


def _worst(candidates: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The first of the largest; one that is not a number before all. (0, "") where all are 0."""
    if not candidates:
        return 0.0, ""
    value, where = max(candidates, key=lambda found: math.inf if math.isnan(found[0]) else found[0])
    return (value, "") if value == 0 else (value, where)
