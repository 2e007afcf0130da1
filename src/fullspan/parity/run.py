"""Each split on ranks of its own, one after the other; then all are compared with the first.

The data are those of the first training steps of the configuration, the adapters the same on every
split. Nothing is written into the run's folder and nothing is resumed.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fullspan.data.load import load_packs, load_tokenizer
from fullspan.data.loader import PackLoader
from fullspan.data.packing import Pack
from fullspan.errors import ConfigError
from fullspan.models.dsa.config import DsaConfig
from fullspan.parity.compare import TOLERANCES, Finding, Tolerances, compare, compare_bits
from fullspan.parity.group import run_group
from fullspan.parity.probe import RunSeen, join, probe
from fullspan.parity.splits import Split, common_rows
from fullspan.train.config import RunConfig

SAMPLED_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class ParityOptions:
    """steps: of training, with their updates. sample: rows of a step whose logits and selected keys
    are compared one by one. tolerance: "name=value" words over TOLERANCES of the model's dtype.
    equal_rows: matrix products see as many rows on every split, see RowBlocks."""

    steps: int = 1
    sample: int = SAMPLED_ROWS
    tolerance: Sequence[str] = ()
    equal_rows: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "sample"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}: it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """losses: of each step, by split; the first is what the others are compared with."""

    config: RunConfig
    options: ParityOptions
    packs_per_step: int
    losses: dict[Split, list[float]]
    seconds: dict[Split, float]
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)


def run_parity(
    config: RunConfig,
    splits: Sequence[Split],
    options: ParityOptions,
    say: Callable[[str], None] = lambda line: None,
) -> ParityReport:
    """Run every split and compare. say: takes a line when a split is done.

    Raises:
        FullspanError: a setting, the data, the model folder or the ranks cannot be used.
    """
    configs = [split.apply(config) for split in splits]
    tolerances = TOLERANCES[config.model.dtype].changed(options.tolerance)
    timeout = config.train.timeout_seconds
    microbatches = config.train.accumulation * config.parallel.dp
    microbatches = max(microbatches, *(split.dp for split in splits))
    # By another process: this one must not use threads of PyTorch's before it forks.
    [steps] = run_group(
        1, first_steps, config, microbatches, options.steps, timeout_seconds=timeout
    )
    block = common_rows(splits, config.data.pack_length) if options.equal_rows else None
    seconds: dict[Split, float] = {}
    with tempfile.TemporaryDirectory(prefix="fullspan-") as folder:
        paths = [Path(folder) / str(index) for index in range(len(splits))]
        for split, changed, path in zip(splits, configs, paths, strict=True):
            started = time.monotonic()
            first = None if path == paths[0] else paths[0]
            arguments = (changed, steps, options.sample, block, first)
            parts = run_group(split.ranks, probe, *arguments, timeout_seconds=timeout)
            torch.save(parts, path)
            seconds[split] = time.monotonic() - started
            say(f"{split}: loss {parts[0].steps[0].loss:.6f}, {seconds[split]:.1f} s")
        findings, losses = _compare_all(splits, paths, tolerances)
    return ParityReport(
        config=config,
        options=options,
        packs_per_step=microbatches,
        losses=losses,
        seconds=seconds,
        findings=findings,
    )


def first_steps(
    device: torch.device, config: RunConfig, microbatches: int, steps: int
) -> list[list[Pack]]:
    """The packs of the first `steps` steps of a training run, `microbatches` each."""
    folder = Path(config.model.path)
    vocab_size = DsaConfig.load(folder).vocab_size
    tokenizer = load_tokenizer(folder)
    packs, _ = load_packs(config.data.path, config.data, tokenizer, vocab_size=vocab_size)
    loader = PackLoader(
        packs, microbatches=microbatches, shuffle=config.data.shuffle, seed=config.data.seed
    )
    return [loader.next_step() for _ in range(steps)]


def _compare_all(
    splits: Sequence[Split], paths: Sequence[Path], tolerances: Tolerances
) -> tuple[list[Finding], dict[Split, list[float]]]:
    findings: list[Finding] = []
    losses: dict[Split, list[float]] = {}
    first: RunSeen | None = None
    for split, path in zip(splits, paths, strict=True):
        seen = join(torch.load(path, weights_only=False))
        losses[split] = [step.loss for step in seen.steps]
        if first is None:
            first = seen
        else:
            findings += compare(split, seen, first, tolerances)
        findings += compare_bits(split, seen)
    return findings, losses


def table(findings: Sequence[Finding]) -> str:
    """One line for each split and quantity, as the console shows it."""
    rows = [("split", "quantity", "worst", "allowed", "", "where")]
    rows += [
        (
            str(finding.split),
            finding.quantity,
            f"{finding.value:.2e}" if finding.value else "0",
            f"{finding.allowed:.0e}" if finding.allowed else "0",
            "ok" if finding.passed else "FAILED",
            finding.where,
        )
        for finding in findings
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def as_json(report: ParityReport) -> dict[str, Any]:
    """The report in JSON's types; a value that is not a finite number is its name as a string."""
    return {
        "passed": report.passed,
        "model": report.config.model.path,
        "data": report.config.data.path,
        "dtype": report.config.model.dtype,
        "torch": torch.__version__,
        "gpus": torch.cuda.device_count(),
        "pack_length": report.config.data.pack_length,
        "packs_per_step": report.packs_per_step,
        "steps": report.options.steps,
        "sampled_rows": report.options.sample,
        "equal_rows": report.options.equal_rows,
        "splits": [
            asdict(split)
            | {"losses": list(map(_number, losses)), "seconds": round(report.seconds[split], 2)}
            for split, losses in report.losses.items()
        ],
        "findings": [
            asdict(finding) | {"value": _number(finding.value), "passed": finding.passed}
            for finding in report.findings
        ],
    }


def _number(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)
