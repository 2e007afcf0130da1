"""`fullspan parity CONFIG.toml --cp 1,2,4`: does the split of the ranks show, on your own data?"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from fullspan.cli.case_options import numbers, write_json

EPILOG = """\
Runs the first packs of the configuration at every mix of the given sizes, on ranks that it starts
itself on this machine, with adapters whose every gradient is alive. The first mix is what the
others are compared with: loss, logits of sampled rows, every gradient and the top-k set of every
row; and of each mix the bits of two runs. Exits with 0, or with 1 where a value is past its bound.

Any setting of the file can be given on the command line, for example --model.dtype float32.
"""


def add_parser(subparsers: Any) -> None:
    """Add `parity` to the command line."""
    parser = subparsers.add_parser(
        "parity",
        help="compare the same training step over several splits of ranks",
        description="Compare the same training steps over several splits of ranks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the run's TOML file")
    for name, default, what in (
        ("cp", [1, 2], "ranks that share a pack"),
        ("ep", [1], "ranks that share the experts"),
        ("dp", [1], "replicas"),
    ):
        shown = ",".join(map(str, default))
        parser.add_argument(
            f"--{name}", type=numbers, default=default, metavar="N,...", help=f"{what} ({shown})"
        )
    parser.add_argument(
        "--partition",
        type=lambda text: text.split(","),
        default=["contiguous"],
        metavar="NAME,...",
        help="contiguous, zigzag or both (contiguous)",
    )
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="training steps (1)")
    parser.add_argument(
        "--sample", type=int, default=64, metavar="ROWS", help="rows whose logits are kept (64)"
    )
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another bound for loss, logits, gradients or topk; can be repeated",
    )
    parser.add_argument(
        "--equal-rows",
        action="store_true",
        help="cut matrix products to as many rows on every split, so that they round alike",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """Run every split, print the table."""
    from fullspan.errors import LaunchError
    from fullspan.train import ranks

    if "RANK" in os.environ:
        raise LaunchError("parity starts its ranks itself: run it without torchrun")
    # Before anything imports torch, which reads the number of threads once.
    ranks.set_threads(os.environ, max(args.cp) * max(args.dp))
    from fullspan.parity.run import ParityOptions, as_json, run_parity, table
    from fullspan.parity.splits import every_split
    from fullspan.train.config import load_run_config

    config = load_run_config(args.config, args.overrides)
    if args.json is not None:
        _check_writable(args.json)
    splits = every_split(dp=args.dp, cp=args.cp, ep=args.ep, partition=args.partition)
    options = ParityOptions(
        steps=args.steps,
        sample=args.sample,
        tolerance=args.tolerance,
        equal_rows=args.equal_rows,
    )
    report = run_parity(config, splits, options, lambda line: print(line, file=sys.stderr))
    print(f"compared with {splits[0]}, {config.model.dtype}")
    print(table(report.findings))
    write_json(args.json, as_json(report))
    failed = [finding for finding in report.findings if not finding.passed]
    print(f"FAILED: {len(failed)} of {len(report.findings)}" if failed else "passed")
    return 1 if failed else 0


def _check_writable(path: Path) -> None:
    """Raises ConfigError; what is in the file stays until the report is there."""
    from fullspan.errors import ConfigError

    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"--json: cannot write {path}: {error.strerror}") from None
