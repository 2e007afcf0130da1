"""A plan as text, as JSON, and as one line for a run that ran out of memory."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fullspan.errors import FullspanError
from fullspan.planning.case import Case
from fullspan.planning.fit import (
    Plan,
    Search,
    fewest_gpus,
    largest_items,
    longest_pack,
    setting_for,
)
from fullspan.planning.hardware import BY_BYTES, BY_HOST, GIB
from fullspan.planning.memory import Memory, host_bytes
from fullspan.planning.model_cost import (
    PASSES,
    active_parameters,
    routed_weights,
    unit_weights,
    whole_weights,
)
from fullspan.planning.times import Times
from fullspan.planning.wire import Traffic
from fullspan.planning.work import PARTS
from fullspan.train.config import RunConfig

_SMALLEST = 0.002  # of the total: smaller items are summed up in one line


def plan_text(plan: Plan) -> str:
    """Everything about one split."""
    times, traffic = plan.times(), plan.traffic()
    return "\n\n".join(
        "\n".join(lines)
        for lines in (
            [*_heading(plan.case), *_stand_ins(plan)],
            _memory(plan),
            _flops(times),
            _wire(traffic),
            _seconds(plan, times),
            _rates(plan),
        )
    )


def search_text(found: Search, gpus: int) -> str:
    """The splits that fit, fastest first; what to change where none does."""
    closest = found.closest
    memory = f"{closest.gpu.name} with {_gib(closest.gpu.memory)} GiB"
    if not found.fitting:
        lines = [f"none of {found.tried} splits of {gpus} GPUs fits: {memory}"]
        return "\n".join([*lines, *advice(closest)])
    rows = [("split", "peak GiB", "spare GiB", "s a pack", "tok/s/GPU", "MFU %")]
    for plan, times in found.fitting:
        rows.append(
            (
                split_name(plan.case), _gib(plan.memory.peak.total), _gib(plan.spare),
                f"{times.per_pack:.1f}", f"{times.tokens_per_second:.0f}", f"{100 * times.mfu:.1f}",
            )
        )  # fmt: skip
    title = f"{len(found.fitting)} of {found.tried} splits of {gpus} GPUs fit: {memory}"
    return "\n".join([title, *table(rows)])


def advice(plan: Plan) -> list[str]:
    """Why a split does not fit, and what to change: its largest items that a setting makes smaller,
    and the longest pack that would fit."""
    peak = plan.memory.peak
    lines = [
        f"{split_name(plan.case)} needs {_gib(peak.total)} GiB at its peak ({peak.stage}, "
        f"{peak.name}), {_gib(-plan.spare)} GiB more than there is; its largest items:"
    ]
    rows = [("item", "GiB", "what makes it smaller")]
    for name, size in largest_items(peak, 6):
        rows.append((name, _gib(size), setting_for(name, plan.case)))
    longest = longest_pack(plan)
    shorter = f"the longest pack that fits this split has {longest:,} rows (data.pack_length)"
    if not longest:
        shorter = "no pack fits this split, however short"
    more = fewest_gpus(plan)
    others = f"the whole pack fits {more} GPUs (parallel.cp = {more}, parallel.ep = {more})"
    if not more:
        others = "no number of GPUs up to 1,024 fits the whole pack"
    return [*lines, *(f"  {line}" for line in table(rows)), shorter, others]


def plan_json(plan: Plan) -> dict[str, Any]:
    """Every figure of one split: bytes, FLOPs, seconds."""
    case, times, traffic = plan.case, plan.times(), plan.traffic()
    peak = plan.memory.peak
    return {
        "split": {
            "world": case.world, "dp": case.dp, "cp": case.cp, "ep": case.ep,
            "shard_weights": case.run.parallel.shard_weights,
        },
        "pack_length": case.pack,
        "rows_per_rank": case.rows,
        "gpu": plan.gpu.name,
        "assumptions": vars(case.assumed),
        "fits": plan.fits,
        "memory": {
            "capacity_bytes": plan.gpu.memory,
            "peak_bytes": peak.total,
            "peak_stage": peak.stage,
            "peak_phase": peak.name,
            "host_bytes": host_bytes(case),
            "stages": {
                phase.stage: {"phase": phase.name, "bytes": phase.total, "items": dict(phase.items)}
                for phase in plan.memory.stages
            },
        },
        "flops_per_pack": {part: dict(passes) for part, passes in times.flops.parts.items()},
        "received_bytes": {
            "per_step": traffic.step_bytes,
            "per_pack": traffic.by_item(),
            "per_layer": [traffic.of_layer(n) for n in range(case.model.num_hidden_layers)],
        },
        "seconds": {
            "step": times.step,
            "compute": {phase: times.compute(phase) for phase in PASSES},
            "work": {
                phase: {" | ".join(place): s for place, s in times.work[phase].items()}
                for phase in PASSES
            },
            "exposed": times.exposed,
            "hidden": times.hidden,
        },
        "tokens_per_second_per_gpu": times.tokens_per_second,
        "mfu": times.mfu,
        "hfu": times.hfu,
        "rates": {part: vars(rate) for part, rate in plan.gpu.rates.items()},
        "links": vars(case.links),
    }  # fmt: skip


def explain_out_of_memory(
    config: RunConfig, world: int, capacity: int | None = None, *, model_config: Path | None = None
) -> str:
    """One line: the largest items of this run's plan and the setting for each.

    capacity: bytes of the GPU. Where the run cannot be planned the line says why; never raises.
    """
    try:
        case = Case.load(config, world=world, model_config=model_config)
        peak = Memory.of(case).peak
    except FullspanError as error:
        return f"no plan of this run can be made ({error})"
    there = "" if capacity is None else f" of {_gib(capacity)} GiB"
    items = [
        f"{name} {_gib(size)} GiB ({setting_for(name, case)})"
        for name, size in largest_items(peak, 4)
    ]
    return (
        f"the plan of this run peaks at {_gib(peak.total)} GiB{there}, in {peak.stage} of "
        f"{peak.name}; its largest items: {'; '.join(items)}; `fullspan plan` shows all"
    )


def split_name(case: Case) -> str:
    """The split in the words of the settings."""
    sharded = "sharded" if case.run.parallel.shard_weights else "whole"
    return f"dp {case.dp} x cp {case.cp}, ep {case.ep}, weights {sharded}"


# ---------------------------------------------------------------------------------- parts


def _heading(case: Case) -> list[str]:
    model, form, assumed = case.model, case.form, case.assumed
    every = [w for unit in unit_weights(model) for w in unit]
    every += [*whole_weights(model), *routed_weights(model)]
    count = sum(weight.numel for weight in every)
    held = {2: "bfloat16", 4: "float32"}[form.itemsize]
    if form.block:
        held = f"FP8 in blocks of {form.block[0]} x {form.block[1]}, activations {held}"
    adapted = sum(adapter.numel for adapter in case.adapters)
    documents = f"documents of {case.document:,} rows"
    forward = case.run.ops.expert_products
    products = f"experts  forward products in FP8 ({forward}): no step with them was measured"
    return [
        f"model    {Path(case.run.model.path).name} ({model.model_type}): {count / 1e9:.1f}e9 "
        f"parameters, {active_parameters(model) / 1e9:.1f}e9 active; {held}",
        f"lora     rank {case.run.lora.r}: {adapted / 1e6:.1f}e6 parameters, float32",
        f"ranks    {case.world} = {split_name(case)}; {case.run.parallel.partition}: packs of "
        f"{case.pack:,} rows, {case.rows:,} a rank",
        f"assumed  {documents}; {assumed.trained:.0%} of rows trained; the busiest rank's experts "
        f"get {assumed.imbalance:g} times the mean",
        *([products] if case.run.ops.fp8_products else []),
    ]


def _stand_ins(plan: Plan) -> Iterator[str]:
    """Where a backend that is named has the figures of another. The indexer's memory is
    ops.workspace_bytes with every backend, that of experts is counted for each, and for `reference`
    as deep_gemm's."""
    for kind, name in plan.case.named_backends.items():
        rated = plan.gpu.rates[kind].backend.removesuffix("_fp8")
        said = [] if rated == name else [f"rated as {rated or 'another backend'}'s"]
        if kind.startswith("attention") and name != "hopper":
            said.append("sized as hopper's")
        if said:
            yield f"assumed  {name}'s {kind} is {' and '.join(said)}"


def _memory(plan: Plan) -> list[str]:
    peak = plan.memory.peak
    title = f"memory of a rank at its peak: {peak.stage}, {peak.name}"
    rows = [("item", "GiB", "what makes it smaller")]
    small = 0
    for name, size in largest_items(peak, len(peak.items)):
        if size < _SMALLEST * peak.total:
            small += size
        else:
            rows.append((name, f"{_gib(size, 2)}", setting_for(name, plan.case)))
    rows.append(("everything else", f"{_gib(small, 2)}", ""))
    verdict = f"{_gib(abs(plan.spare))} GiB {'to spare' if plan.fits else 'too much'}"
    rows.append(("total", f"{_gib(peak.total, 2)}", f"of {_gib(plan.gpu.memory)}: {verdict}"))
    stages = ", ".join(f"{s.stage} {_gib(s.total)}" for s in plan.memory.stages)
    lines = [title, *table(rows), f"peak of each stage, GiB: {stages}"]
    if host := host_bytes(plan.case):
        ranks = min(plan.case.world, plan.case.links.ranks_per_node)
        lines.append(
            f"pinned host memory for layer inputs, GiB: {_gib(host)} a rank and pack, "
            f"{_gib(ranks * host)} a node of {ranks}"
        )
    longest = longest_pack(plan)
    return [*lines, f"longest pack that fits this split: {longest:,} rows"]


def _flops(times: Times) -> list[str]:
    counted = times.flops
    rows = [("part", *PASSES)]
    for part in counted.parts:
        rows.append((part, *(_number(counted.of(part, phase) / 1e15) for phase in PASSES)))
    title = f"PFLOP of a pack: {counted.total / 1e15:.1f}, without recompute"
    return [f"{title} {counted.model / 1e15:.1f}", *table(rows)]


def _wire(traffic: Traffic) -> list[str]:
    rows: list[tuple[str, ...]] = [("item", *PASSES, "step")]
    for item, phases in traffic.by_item().items():
        values = (_number(phases.get(phase, 0) / 1e9) for phase in (*PASSES, "step"))
        rows.append((item, *values))
    if len(rows) == 1:
        return ["GB that a rank receives: none"]
    total = f"GB that a rank receives in a step: {traffic.step_bytes / 1e9:.1f}"
    case = traffic.case
    layer = case.model.num_hidden_layers // 2
    named = ", ".join(f"{k} {v / 1e9:.3f}" for k, v in traffic.of_layer(layer).items())
    return [total, *table(rows), f"of layer {layer}: {named}"]


def _seconds(plan: Plan, times: Times) -> list[str]:
    rows = [("seconds", *PASSES)]
    for part in PARTS:
        seconds = [times.compute(phase).get(part, 0.0) for phase in PASSES]
        kinds: dict[str, None] = {}
        for phase in PASSES:
            kinds.update(dict.fromkeys(kind for p, kind in times.work[phase] if p == part))
        rows.append((part, *map(_number, seconds)))
        for kind in kinds if len(kinds) > 1 else ():
            of = (times.work[phase].get((part, kind), 0.0) for phase in PASSES)
            rows.append((f"  {kind}", *map(_number, of)))
    for kind, moved in (("exposed", times.exposed), ("hidden", times.hidden)):
        for item in dict.fromkeys(item for phase in PASSES for item in moved[phase]):
            values = (_number(moved[phase].get(item, 0.0)) for phase in PASSES)
            rows.append((f"{item} ({kind})", *values))
    rows.append(("all of a pass", *(_number(times.pass_seconds(phase)) for phase in PASSES)))
    packs = f"{times.packs} pack{'s' if times.packs > 1 else ''} a rank"
    return [
        f"expected seconds of a step on {plan.gpu.name}: {times.step:.1f} ({packs}); "
        f"{times.tokens_per_second:.0f} token slots a second a GPU",
        f"MFU {times.mfu:.1%} = FLOPs without recompute / (seconds x GPUs x "
        f"{plan.gpu.peak / 1e12:.0f}e12); with recompute {times.hfu:.1%}",
        *table(rows),
    ]


def _rates(plan: Plan) -> list[str]:
    links = plan.case.links
    unused = set() if plan.case.run.ops.fp8_products else {"experts fp8"}
    rows = [
        (part, _rate(part, rate.value), rate.source)
        for part, rate in plan.gpu.rates.items()
        if part not in unused
    ]
    rows.append(("NVLink", f"{links.nvlink / 1e9:.0f} GB/s", "assumed: 2/3 of 450 each way"))
    if plan.case.run.train.offload_inputs:
        rows.append(("host", f"{links.host / 1e9:.0f} GB/s", "assumed: 4/5 of PCIe 5.0 x16"))
    rows.append(("network", f"{links.network / 1e9:.0f} GB/s", "assumed: 4/5 of 400 Gbit/s a GPU"))
    return ["rates behind the seconds", *table([("kind", "rate", "source"), *rows])]


def _rate(kind: str, value: float) -> str:
    if kind in BY_HOST:
        return f"{value:.3g} /s"
    return f"{value / 1e12:.3g} {'TB/s' if kind in BY_BYTES else 'TFLOP/s'}"


def table(given: Iterable[Sequence[str]]) -> Iterator[str]:
    """Columns side by side under a heading: words to the left, figures to the right."""
    rows = list(given)
    columns = range(len(rows[0]))
    widths = [max(len(row[n]) for row in rows) for n in columns]
    figures = [all(_is_figure(row[n]) for row in rows[1:]) for n in columns]
    for row in rows:
        cells = [
            cell.rjust(width) if figure else cell.ljust(width)
            for cell, width, figure in zip(row, widths, figures, strict=True)
        ]
        yield "  " + "  ".join(cells).rstrip()


def _is_figure(cell: str) -> bool:
    return cell in ("", "-") or cell.removeprefix("-")[:1].isdigit()


def _gib(size: float, digits: int = 1) -> str:
    return f"{size / GIB:.{digits}f}"


def _number(value: float) -> str:
    return "-" if not value else f"{value:,.3f}" if value < 10 else f"{value:,.1f}"
