"""Runs a few layers of GLM-5.2 on several GPUs of one machine: does the split show in loss and
gradients, how fast is it, and does the rehearsal of a rank say what the real rank takes?

    python -m benchmarks.multi_gpu --out benchmarks/results/NAME.jsonl --commit COMMIT
    python -m benchmarks.multi_gpu --cp 1,2 --backend gloo          two processes on one GPU
    python -m benchmarks.multi_gpu --cp 1,2,4 --device cpu          a tiny model, without a GPU

Ranks that share a pack share the experts too, and the other weights. Weights are random, of the
true widths and dtypes (FP8): nobody's checkpoint is needed. One group of ranks a split, one after
the other, does all parts: parity, speed, rehearsal; depth makes the model of as many layers as fit.
Exit code 1 where a value is past its bound, 2 for what the user can mend. What is measured and how:
docs/benchmarks.md. Any setting of the run can be given, as to `fullspan train`.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch.cuda import nccl

from benchmarks.multi_gpu_rank import Job, RankSeen, cut, work
from fullspan.checkpoint.tiny import init_tiny
from fullspan.errors import ConfigError, FullspanError, LaunchError
from fullspan.models.dsa.config import DsaConfig
from fullspan.parallel.config import check_partition
from fullspan.parity.compare import TOLERANCES, compare, compare_bits
from fullspan.parity.group import choose_backend, run_group
from fullspan.parity.probe import RunSeen, join
from fullspan.parity.run import table
from fullspan.parity.splits import Split, common_rows
from fullspan.planning.case import Case, read_fields
from fullspan.planning.rehearse import has_weights
from fullspan.settings import split_overrides
from fullspan.train.config import RunConfig, load_run_config

ROOT = Path(__file__).resolve().parent.parent
GLM = str(ROOT / "configs" / "models" / "glm-5.2")
# Of every run here. A rank waits that long for another.
SETTINGS = ("--parallel.cp", "0", "--train.timeout_seconds", "300")
PARTS = ("parity", "speed", "rehearsal", "depth")
# Layers of GLM-5.2 that are one of each kind: dense with an indexer, experts that share its
# selection, experts with an indexer.
LAYERS = (2, 3, 6)
PEAK_BOUND, TIME_BOUND = 0.03, 0.15  # of the rehearsal against the real rank

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What suits a place: tokens of the parity pack, packs by the clock, settings of the run."""

    file: str
    tokens: int
    lengths: tuple[int, ...]
    settings: tuple[str, ...] = ()


SETUPS = {
    "nccl": Setup(
        file="glm52_131k_8xh200.toml",
        tokens=16_384,
        lengths=(16_384, 32_768, 65_536, 131_072),
        settings=("--model.path", GLM),
    ),
    # Exchanges go through the host: whole weights, a short pack.
    "gloo": Setup(
        file="glm52_131k_8xh200.toml",
        tokens=8_192,
        lengths=(8_192,),
        settings=("--model.path", GLM, "--parallel.shard_weights", "false"),
    ),
    "cpu": Setup(
        file="tiny_cpu.toml",
        tokens=512,
        lengths=(512, 1024),
        settings=("--parallel.shard_weights", "true", "--ops.workspace_bytes", "2097152"),
    ),
}


@dataclass(kw_only=True)
class Results:
    """Of the splits so far. rows: as in the file; first: the parity runs that others are compared
    with; failed: what is past its bound, or did not run."""

    rows: list[Row] = field(default_factory=list)
    first: "list[RunSeen]" = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def main(words: Sequence[str] | None = None) -> int:
    """Run every split, print what was found, add the rows to --out."""
    others, settings = split_overrides(sys.argv[1:] if words is None else words)
    args = _parser().parse_args(others)
    try:
        return _run(args, settings)
    except FullspanError as error:
        print(f"multi_gpu: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="multi_gpu",
        description="Parity, speed and rehearsal of a few layers of GLM-5.2 on several GPUs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cp", type=_numbers, help="ranks that share a pack: 1,2,.. GPUs there are"
    )
    parser.add_argument("--partition", default="contiguous,zigzag")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda where there is one")
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="nccl, on the CPU gloo")
    parser.add_argument("--parts", help=f"of {','.join(PARTS)}: all; depth from 8 GPUs on")
    parser.add_argument("--tokens", type=int, help="of the pack of the parity part")
    parser.add_argument("--lengths", type=_numbers, help="packs by the clock: 16384,..,131072")
    parser.add_argument(
        "--layers", type=_numbers, default=LAYERS, help="of GLM-5.2, that make the model: 2,3,6"
    )
    parser.add_argument("--steps", type=int, default=3, help="by the clock, after one more")
    parser.add_argument("--out", type=Path, help="JSON-lines file to append to")
    parser.add_argument("--commit", default="unknown", help="noted in every row")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _run(args: argparse.Namespace, settings: Sequence[str]) -> int:
    if "RANK" in os.environ:
        raise LaunchError("multi_gpu starts its ranks itself: run it without torchrun")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gpus = torch.cuda.device_count()
    for option, wanted in (("--device", "cuda"), ("--backend", "nccl")):
        if wanted in (args.device, args.backend) and not gpus:
            raise ConfigError(f"{option} {wanted}: PyTorch sees no GPU")
    if args.steps < 1:
        raise ConfigError(f"--steps is {args.steps}: it must be at least 1")
    place = (args.backend or "nccl") if gpus else "cpu"
    results = Results()
    if args.out is not None:
        _write(args.out, [])
    torch.set_num_threads(1)  # ranks are forked from here, see run_group
    with tempfile.TemporaryDirectory(prefix="fullspan-") as folder:
        if place == "cpu":
            tiny = Path(folder, "tiny")
            init_tiny(tiny)
            settings = ("--model.path", str(tiny), *settings)
        for split, job in _jobs(args, place, settings, gpus):
            _measure(split, job, place, args, results)
    for line in _scaling(results.rows):
        print(line)
    print("\n".join(["FAILED", *results.failed]) if results.failed else "passed")
    return 1 if results.failed else 0


def _jobs(
    args: argparse.Namespace, place: str, settings: Sequence[str], gpus: int
) -> list[tuple[Split, Job]]:
    """What every split does. Raises ConfigError for what cannot be run."""
    parts, setup = _parts(args.parts, gpus), SETUPS[place]
    most = gpus if place == "nccl" else 2
    splits = _splits(args.cp or [2**n for n in range(most.bit_length())], args.partition)
    for split in splits:
        choose_backend(split.ranks, None if place == "cpu" else place)
    words = (*SETTINGS, *setup.settings, *settings)
    config = load_run_config(ROOT / "configs" / setup.file, words)
    tokens, lengths = args.tokens or setup.tokens, args.lengths or setup.lengths
    whole = has_weights(Path(config.model.path))
    if parts != {"depth"} and not whole:
        DsaConfig.from_hf(cut(read_fields(Path(config.model.path, "config.json")), args.layers))
    configs = {split: _packed(config, split, tokens) for split in splits}
    products: tuple[int | None, ...] = ()
    if "parity" in parts:
        if len(splits) < 2:
            raise ConfigError("--cp: parity compares two sizes or more, such as 1,2")
        rows = common_rows(splits, tokens)
        products = (None,) if config.model.dtype == "float32" else (None, rows)
    jobs: list[tuple[Split, Job]] = []
    for split in splits:
        timed = {"speed", "rehearsal"} & parts and split.partition == splits[0].partition
        job = Job(
            config=configs[split],
            layers=() if whole else args.layers,
            products=products,
            lengths=lengths if timed else (),
            rehearse="rehearsal" in parts and split.cp > 1,
            steps=args.steps,
        )
        if job.products or job.lengths:
            for length in job.lengths:
                _packed(config, split, length)
            jobs.append((split, job))
    if "depth" in parts:
        split = max(splits, key=lambda split: (split.cp, split.partition == splits[0].partition))
        config = _packed(config, split, max(lengths))
        layers = () if whole else None
        job = Job(config=config, layers=layers, lengths=(max(lengths),), steps=min(args.steps, 2))
        jobs.append((split, job))
    return jobs


def _packed(config: RunConfig, split: Split, tokens: int) -> RunConfig:
    """The run of one split with packs of so many tokens. Raises ConfigError where the ranks cannot
    share them, or the experts."""
    packed = split.apply(replace(config, data=replace(config.data, pack_length=tokens)))
    return Case.load(packed, world=split.ranks).run


def _parts(text: str | None, gpus: int) -> set[str]:
    if text is None:
        return {part for part in PARTS if part != "depth" or gpus >= 8}
    parts = set(text.split(","))
    if not parts <= set(PARTS):
        raise ConfigError(f"--parts {text}: allowed are {', '.join(PARTS)}")
    return parts


def _splits(sizes: Sequence[int], partitions: str) -> list[Split]:
    """Each number of ranks with each partition; one rank has one."""
    if min(sizes) < 1:
        raise ConfigError(f"--cp {','.join(map(str, sizes))}: sizes must be at least 1")
    modes = partitions.split(",")
    for mode in modes:
        check_partition(mode)
    every = [
        Split(cp=size, ep=size, partition=mode if size > 1 else modes[0])
        for mode in modes
        for size in sizes
    ]
    return list(dict.fromkeys(every))


# --------------------------------------------------------------------------------- one split


def _measure(
    split: Split, job: Job, place: str, args: argparse.Namespace, results: Results
) -> None:
    """Run one job, say what came of it, keep its rows."""
    backend = None if place == "cpu" else place
    timeout = job.config.train.timeout_seconds
    began = time.monotonic()
    try:
        seen = run_group(split.ranks, work, job, timeout_seconds=timeout, backend=backend)
    except (LaunchError, RuntimeError) as error:  # the other splits may still run
        print(f"== {split}: {error}", flush=True)
        results.failed.append(f"{split}: {error}")
        return
    print(f"== {split}, {seen[0].layers} layers, {time.monotonic() - began:.0f} s")
    rows = []
    if job.products:
        runs = [join([rank.parity[n] for rank in seen]) for n in range(len(job.products))]
        rows += _compare(split, job, runs, results)
    rows += _times(split, job, seen)
    rows += _rehearsals(split, seen, place, results)
    fixed = _shape(split, job, place, seen[0]) | _machine(seen[0], place, args.commit)
    rows = [row | fixed for row in rows]
    if args.out is not None:
        _write(args.out, rows)
    results.rows += rows
    sys.stdout.flush()


def _write(path: Path, rows: Sequence[Row]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise ConfigError(f"--out: cannot write {path}: {error.strerror}") from None


def _shape(split: Split, job: Job, place: str, seen: RankSeen) -> Row:
    config = job.config
    return {
        "model": Path(config.model.path).name,
        "layers": seen.layers,
        "dtype": config.model.dtype,
        "transport": "gloo" if place == "cpu" else place,
        "cp": split.cp,
        "partition": split.partition if split.cp > 1 else "",
        "ep": split.ep,
        "shard_weights": config.parallel.shard_weights,
    }


def _machine(seen: RankSeen, place: str, commit: str) -> Row:
    """Hardware and versions, by the names that the other rows have."""
    triton = importlib.util.find_spec("triton") and importlib.metadata.version("triton")
    return {
        "gpu": seen.device,
        "torch": torch.__version__,
        "triton": triton or "none",
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, nccl.version())) if place == "nccl" else "",
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _compare(split: Split, job: Job, runs: list[RunSeen], results: Results) -> Iterator[Row]:
    """The parity of one split with the first, for each kind of products.

    Where there are two kinds, the products of training are shown: what they differ by is the
    library's rounding, as often as the random model makes it another expert or key. Judged are
    those of equal rows, and that the step repeats.
    """
    first = results.first = results.first or runs
    for number, (block, got, wanted) in enumerate(zip(job.products, runs, first, strict=True)):
        bounds = TOLERANCES[job.config.model.dtype]
        found = [] if got is wanted else list(compare(split, got, wanted, bounds))
        judged = found if number == len(runs) - 1 else []
        if number == 0:
            bits = list(compare_bits(split, got))
            found, judged = found + bits, judged + bits
        kind = f"products of {block:,} rows" if block else "products as they come"
        print(f"parity of {job.config.data.pack_length:,} tokens, {kind}")
        shown = [f"{f.quantity} {f.value:.1e}" for f in found if f not in judged]
        if shown:
            print(f"shown only: {', '.join(shown)}")
        if judged:
            print(table(judged))
        failed = [f for f in judged if not f.passed]
        results.failed += [f"{kind}: {split} {f.quantity} {f.value:.2e}, {f.where}" for f in failed]
        if not found:  # the first of equal rows: what the others are compared with
            continue
        yield {
            "op": "multi_gpu_parity",
            "tokens": job.config.data.pack_length,
            "product_rows": block,
            "loss": got.steps[0].loss,
            **{f"{f.quantity.replace('-', '')}_difference": f.value for f in found},
            "judged": "all" if judged == found else "bits",
            "passed": not failed,
        }


def _times(split: Split, job: Job, seen: Sequence[RankSeen]) -> Iterator[Row]:
    """Steps by the clock: a step takes as long as its slowest rank."""
    for tokens in job.lengths:
        row: Row = {"op": "multi_gpu_step", "tokens": tokens, "rows": tokens // split.cp}
        if tokens in seen[0].skipped:
            print(f"{tokens:,} tokens: {seen[0].skipped[tokens]}")
            yield row | {"failed": seen[0].skipped[tokens]}
            continue
        taken = [rank.real[tokens] for rank in seen]
        walls = [max(steps) for steps in zip(*(rank.walls for rank in taken), strict=True)]
        wall, exchange = median(walls), mean(rank.part("exchange") for rank in taken)
        row |= {
            "ms": round(1e3 * wall, 3),
            "ms_min": round(1e3 * min(walls), 3),
            "ms_max": round(1e3 * max(walls), 3),
            "tokens_per_second_per_rank": round(tokens / wall / split.cp, 1),
            "exchange_ms": round(1e3 * exchange, 3),
        }
        counted = [rank.peak for rank in taken if rank.peak is not None]
        if counted:
            row["peak_bytes"] = max(counted)
        print(
            f"{tokens:,} tokens: {wall:.3f} s ({min(walls):.3f} to {max(walls):.3f}), "
            f"{row['tokens_per_second_per_rank']:,.0f} tok/s a rank, "
            f"{exchange / wall:.1%} in exchanges that nothing hides"
            + (f", peak {row['peak_bytes'] / 2**20:,.1f} MiB" if counted else "")
        )
        yield row


def _rehearsals(
    split: Split, seen: Sequence[RankSeen], place: str, results: Results
) -> Iterator[Row]:
    """Each rank beside its rehearsal; rows of the first and the last.

    gloo brings its exchanges over the host: only with NCCL is their time what was rehearsed.
    """
    for tokens in seen[0].rehearsed:
        for number, rank in enumerate(seen):
            real, rehearsed = rank.real[tokens], rank.rehearsed[tokens]
            assert real.peak is not None and rehearsed.peak is not None, "both were counted"
            own, made_up = real.part("exchange"), rehearsed.part("loopback")
            alone = (rehearsed.wall - made_up) / (real.wall - own) - 1
            off = {"peak": rehearsed.peak / real.peak - 1, "time": rehearsed.wall / real.wall - 1}
            print(
                f"{tokens:,} tokens, rank {number} rehearsed: "
                f"peak {rehearsed.peak / 2**20:,.1f} of {real.peak / 2**20:,.1f} MiB "
                f"({off['peak']:+.2%}), time {rehearsed.wall:.3f} of {real.wall:.3f} s "
                f"({off['time']:+.1%}; without exchanges {alone:+.1%})"
            )
            held = {"peak": PEAK_BOUND} | ({"time": TIME_BOUND} if place == "nccl" else {})
            results.failed += [
                f"{split}, {tokens:,} tokens, rank {number}: rehearsed {what} {off[what]:+.2%}"
                for what, bound in held.items()
                if not abs(off[what]) <= bound
            ]
            if number in (0, len(seen) - 1):
                yield {
                    "op": "multi_gpu_rehearsal",
                    "tokens": tokens,
                    "rank": number,
                    "peak_bytes": real.peak,
                    "rehearsed_peak_bytes": rehearsed.peak,
                    "ms": round(1e3 * real.wall, 3),
                    "rehearsed_ms": round(1e3 * rehearsed.wall, 3),
                    "exchange_ms": round(1e3 * own, 3),
                    "loopback_ms": round(1e3 * made_up, 3),
                }


def _scaling(rows: Sequence[Row]) -> Iterator[str]:
    """Throughput of a GPU against the first split's, with as many rows on each."""
    steps = [row for row in rows if row["op"] == "multi_gpu_step" and "ms" in row]
    first: dict[tuple[int, int], Row] = {}
    for row in steps:
        base = first.setdefault((row["layers"], row["rows"]), row)
        if base["cp"] != row["cp"]:
            rate = row["tokens_per_second_per_rank"] / base["tokens_per_second_per_rank"]
            yield (
                f"{row['rows']:,} rows a rank: throughput of a rank of cp {row['cp']} is "
                f"{rate:.1%} of that of cp {base['cp']}"
            )


if __name__ == "__main__":
    sys.exit(main())
