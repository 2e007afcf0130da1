"""A rehearsal as text and as JSON, beside the plan of the same rank and the stated links."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fullspan import __version__
from fullspan.parallel.loopback import Transfer
from fullspan.planning import wire
from fullspan.planning.hardware import NAMES, Links
from fullspan.planning.linear_fit import LinearFit, memory_unit
from fullspan.planning.memory import Memory, allocated_bytes
from fullspan.planning.phases import PARTS, PASSES, named
from fullspan.planning.rehearse import Rehearsal
from fullspan.planning.report import split_name, table
from fullspan.planning.times import Times, link_seconds

_MIB = 1 << 20
# Seconds that are shown beside the measured ones.
_BESIDE = {
    "plan": "the plan's seconds",
    "floor": "the floor's seconds (the same work at the GPU's nominal rates)",
}


def rehearsal_text(found: Rehearsal, rates: Path | None = None) -> str:
    """Everything that was measured. rates: a folder of measured rows for the plan."""
    case = found.case
    weights = "random weights" if found.random_weights else "weights of the checkpoint"
    dp, ranks = case.dp, case.world
    lines = [
        f"rank {found.rank} of {ranks} ({split_name(case)}) rehearsed on one {found.device}, "
        f"PyTorch {torch.__version__}",
        f"{case.pack:,} tokens a pack, {case.rows:,} rows on this rank, {weights}, "
        f"{dp} pack{'s' if dp > 1 else ''} a step",
    ]
    if found.rank != case.world - 1:
        lines.append("of contiguous rows the last rank has the most work for the indexer")
    lines += ["", "memory", *table(_memory(found))]
    if found.usage.peaks:
        lines += ["", f"{memory_unit(found.peak)[1]} at most allocated, by part and pass"]
        lines += table(_places(found))
    lines += ["", "seconds of a step by part and pass", *table(_seconds(found))]
    work = sum(found.seconds.values()) - _of_part(found, "loopback")
    lines.append(f"  {work:.3f} s without the loopback group's copies")
    lines.append(f"  {found.wall:.3f} s by the host's clock")
    for name, wanted in seconds_beside(found, rates).items():
        lines += ["", f"{_BESIDE[name]} and the measured ones over them"]
        lines += table(_beside(found, wanted))
    lines += ["", "what communication would add, if nothing overlapped it", *table(_wire(found))]
    links = case.links
    lines.append(
        f"  at {links.nvlink / 1e9:.0f} GB/s inside a node of {links.ranks_per_node}, "
        f"{links.network / 1e9:.0f} GB/s between nodes"
    )
    if found.usage.flops is not None:
        lines += ["", f"{found.usage.flops:.4g} FLOPs of matrix products in a step, counted"]
    if found.fits:
        lines += ["", "peak over rows", *table(_fit(found))]
        lines += ["", "lines through the peaks of each stage", *table(_stages(found))]
        if (foretold := foretold_peak(found)) is not None:
            off = 100 * (foretold / found.fits["all"].measured[-1] - 1)
            lines.append(
                f"  those of the shorter packs foretell {foretold / _MIB:,.2f} MiB at "
                f"{found.case.rows:,} rows ({off:+.2f} %)"
            )
    if found.unrepeated is not None:
        lines += ["", _repeat(found.unrepeated)]
    return "\n".join(lines)


def rehearsal_json(found: Rehearsal, rates: Path | None = None) -> dict[str, Any]:
    """Every figure: one row of a results file. Bytes and seconds."""
    case = found.case
    return {
        "rehearsal": {"rank": found.rank, "world": case.world, "dp": case.dp, "cp": case.cp,
                      "ep": case.ep, "shard_weights": case.run.parallel.shard_weights},
        "device": found.device,
        "versions": {"fullspan": __version__, "torch": torch.__version__,
                     "triton": version("triton") if find_spec("triton") else None,
                     "cuda": torch.version.cuda},
        "model": Path(case.run.model.path).name,
        "random_weights": found.random_weights,
        "pack": case.pack,
        "rows": case.rows,
        "assumed": asdict(case.assumed),
        "settings": {"lora": asdict(case.run.lora), "ops": asdict(found.ops),
                     "recompute": case.run.train.recompute},
        "peak_allocated": found.peak,
        "peak_reserved": found.usage.reserved,
        "peak_by_item": memory_items(found),
        "peak_by_place": {place: found.before + p for place, p in found.usage.peaks.items()},
        "host_bytes": found.host,
        "plan_peak_allocated": planned_bytes(found),
        "plan_by_item": dict(Memory.of(case).peak.items),
        "seconds": {f"{part} {which}": s for (part, which), s in found.seconds.items()},
        "seconds_of_step": sum(found.seconds.values()),
        "seconds_of_loopback": _of_part(found, "loopback"),
        "seconds_by_the_host": found.wall,
        **{f"{name}_seconds": None for name in _BESIDE},
        **{f"{name}_seconds": s for name, s in seconds_beside(found, rates).items()},
        "flops": found.usage.flops,
        "wire": {what: {"bytes": size, "seconds": s} for what, (size, s) in wire_items(found)},
        "fits": {name: {
            "rows": list(fit.rows), "peak_allocated": list(fit.measured), "base": fit.base,
            "bytes_per_row": fit.slope, "r2": fit.r2, "residuals": fit.residuals,
        } for name, fit in found.fits.items()},
        "foretold_peak": foretold_peak(found),
        "unrepeated": None if found.unrepeated is None else list(found.unrepeated),
    }  # fmt: skip


def memory_items(found: Rehearsal) -> dict[str, int]:
    """The peak by item. Transient is what is left of it: the work of the busiest moment, less
    what is not there yet at that moment."""
    known = {
        **found.resident,
        "adapter gradients": found.gradients,
        "kept for the backward pass": found.kept,
    }
    return {**known, "transient": found.peak - sum(known.values())}


def planned_bytes(found: Rehearsal) -> int:
    """What the plan says that PyTorch's allocator gives out at the peak."""
    return allocated_bytes(Memory.of(found.case).peak)


def seconds_beside(found: Rehearsal, rates: Path | None) -> dict[str, dict[str, dict[str, float]]]:
    """{of _BESIDE: {pass: {part: seconds}}} of the work of a pack. Empty on a device that the plan
    has no rates for."""
    name = next((name for name in NAMES if name in found.device.lower()), None)
    if name is None:
        return {}
    known, traffic = found.case.gpu(name, rates), wire.Traffic(found.case)
    by_rates = {"plan": known, "floor": known.nominal()}
    times = {which: Times.of(found.case, gpu, traffic) for which, gpu in by_rates.items()}
    return {name: {which: t.compute(which) for which in t.work} for name, t in times.items()}


def wire_items(found: Rehearsal) -> list[tuple[str, tuple[int, float]]]:
    """(what, (bytes received, seconds on the stated links)) of a step, the longest first."""
    total: dict[str, tuple[int, float]] = {}
    for transfer in found.transfers:
        what = transfer.what.split(", unit")[0]
        size, seconds = total.get(what, (0, 0.0))
        size += transfer.near + transfer.far
        total[what] = (size, seconds + _link_seconds(transfer, found.case.links))
    return sorted(total.items(), key=lambda item: -item[1][1])


def _link_seconds(transfer: Transfer, links: Links) -> float:
    """By the plan's rule, from the bytes that were counted."""
    exchange = transfer.what.startswith("all_to_all")
    return link_seconds(
        wire.Transfer(
            phase="",
            unit=0,
            item=transfer.what,
            received=transfer.near + transfer.far,
            pattern=wire.EXCHANGE if exchange else wire.GATHER,
            ranks=transfer.ranks,
        ),
        links,
    )


def foretold_peak(found: Rehearsal) -> float | None:
    """Of the run's own rows, by the lines through the shorter packs alone: the highest stage. None
    where these are too few for a line.
    """
    shorter = {name: (fit.rows[:-1], fit.measured[:-1]) for name, fit in _of_stages(found).items()}
    lines = [LinearFit.of(*points) for points in shorter.values() if len(points[0]) > 1]
    return max((line.at(found.case.rows) for line in lines), default=None)


def _of_stages(found: Rehearsal) -> dict[str, LinearFit]:
    return {name: fit for name, fit in found.fits.items() if name != "all"}


def _memory(found: Rehearsal) -> Iterator[Sequence[str]]:
    unit, name = memory_unit(found.peak)
    planned = planned_bytes(found)
    sizes = {**memory_items(found), "peak allocated": found.peak}
    if found.usage.reserved is not None:
        sizes["peak reserved"] = found.usage.reserved
    sizes[f"the plan's peak allocated ({100 * (planned / found.peak - 1):+.1f} %)"] = planned
    if found.host:
        sizes["pinned host memory"] = found.host
    yield "item", name
    for item, size in sizes.items():
        yield item, f"{size / unit:.3f}"


def _seconds(found: Rehearsal) -> Iterator[Sequence[str]]:
    yield "part", *PASSES, "all"
    for part in PARTS:
        cells = [found.seconds.get((part, which), 0.0) for which in PASSES]
        if any(cells):
            yield part, *map(_seconds_cell, cells), f"{sum(cells):.3f}"
    sums = [sum(found.seconds.get((p, which), 0.0) for p in PARTS) for which in PASSES]
    yield "all", *(f"{s:.3f}" for s in sums), f"{sum(sums):.3f}"


def _beside(found: Rehearsal, wanted: Mapping[str, Mapping[str, float]]) -> Iterator[Sequence[str]]:
    """Of each part and pass the wanted seconds, and measured / wanted: against the plan, what is
    far from 1 has a rate that is off, or work that the plan does not know."""
    yield "part", *(word for which in (*wanted, "all") for word in (which, "x"))
    every = {part: [] for part in PARTS}
    for part in every:
        for which, parts in wanted.items():
            every[part].append((parts.get(part, 0.0), found.seconds.get((part, which), 0.0)))
    rows = {part: pairs for part, pairs in every.items() if any(map(sum, pairs))}
    rows["all"] = [_added(column) for column in zip(*rows.values(), strict=True)]
    for part, pairs in rows.items():
        cells = []
        # Over the passes that were measured: others have their time in the part that ran before.
        known = _added([pair for pair in pairs if pair[1]])
        for plan, measured in (*pairs, known):
            cells += [_seconds_cell(plan), f"{measured / plan:.2f}" if plan and measured else "-"]
        yield part, *cells


def _added(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(plan for plan, _ in pairs), sum(measured for _, measured in pairs)


def _seconds_cell(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds else "-"


def _wire(found: Rehearsal) -> Iterator[Sequence[str]]:
    yield "exchange", "GB received", "seconds"
    items = wire_items(found)
    for what, (size, seconds) in items:
        yield what, f"{size / 1e9:.4f}", f"{seconds:.4f}"
    sizes, seconds = sum(size for _, (size, _) in items), sum(s for _, (_, s) in items)
    yield "all", f"{sizes / 1e9:.4f}", f"{seconds:.4f}"


def _places(found: Rehearsal) -> Iterator[Sequence[str]]:
    unit, _ = memory_unit(found.peak)
    yield "part", *PASSES
    for part in PARTS:
        peaks = [found.usage.peaks.get(named((part, which))) for which in PASSES]
        if any(peak is not None for peak in peaks):
            yield part, *("-" if p is None else f"{(found.before + p) / unit:.3f}" for p in peaks)


def _fit(found: Rehearsal) -> Iterator[Sequence[str]]:
    fit, stages = found.fits["all"], _of_stages(found)
    yield "rows", "peak, MiB", "line, MiB", "residual, MiB", "%", "in"
    for n, (rows, size, left) in enumerate(zip(fit.rows, fit.measured, fit.residuals, strict=True)):
        shown = [f"{mib / _MIB:,.2f}" for mib in (size, fit.at(rows), left)]
        highest = max(stages, key=lambda name: stages[name].measured[n])
        yield f"{rows:,}", *shown, f"{100 * left / size:.3f}", highest


def _stages(found: Rehearsal) -> Iterator[Sequence[str]]:
    yield "stage", "MiB", "KiB a row", "R²", "largest residual, MiB"
    for name, fit in found.fits.items():
        left = max(map(abs, fit.residuals)) / _MIB
        figures = f"{fit.base / _MIB:,.2f}", f"{fit.slope / 1024:.2f}", f"{fit.r2:.6f}"
        yield name, *figures, f"{left:.2f}"


def _repeat(unrepeated: Sequence[str]) -> str:
    if not unrepeated:
        return "a second run of the same step: the same bits, loss and every gradient"
    return f"a second run of the same step: {len(unrepeated)} differ, such as {unrepeated[0]}"


def _of_part(found: Rehearsal, part: str) -> float:
    return sum(seconds for (p, _), seconds in found.seconds.items() if p == part)
