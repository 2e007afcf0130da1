"""`fullspan rehearse CONFIG.toml --rank R`: the steps of one rank of many, on this one device."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from fullspan.cli.case_options import add_case_options, assumptions, numbers, write_json

EPILOG = """\
Builds rank R of the run as it is among real ranks, with an answer to every exchange made up here,
and measures its memory, its time and the bytes that it would receive. Weights are those of
model.path, or random ones of the same size and dtype where that folder has only a config.json (FP8
where it has a quantization_config). Tokens are random; data.path is not read. --document,
--imbalance and --trained are assumed as `fullspan plan` assumes them.

  fullspan rehearse run.toml --rank 7            rank 7, with the fit of peak memory over 6 lengths
  fullspan rehearse run.toml --fit 0 --repeat    the last rank, no fit, two runs compared by the bit

Of contiguous rows the last rank has the most work for the indexer; it is the default. Any setting
of the file can be given on the command line, as for train.

Exit codes: 0 done, 1 two runs of a step gave different bits, 2 an error, such as too little memory.
"""


def add_parser(subparsers: Any) -> None:
    """Add `rehearse` to the command line."""
    parser = subparsers.add_parser(
        "rehearse",
        help="run the real steps of one rank of many on one device",
        description="Run the real steps of one rank of many on one device.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_case_options(parser)
    add("--rank", type=int, metavar="R", help="the rank (default: the last)")
    add("--warmup", type=int, default=1, metavar="N", help="steps before the measured ones (1)")
    add("--steps", type=int, default=2, metavar="N", help="measured steps (2)")
    add("--fit", type=int, default=6, metavar="N", help="lengths of the fit, 0 for none (6)")
    add("--lengths", type=numbers, metavar="N,...", help="these packs for the fit instead")
    add("--repeat", action="store_true", help="run a pack twice and compare the bits")
    add("--plot", type=Path, metavar="FILE", help="draw the fit into this PNG")
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """Rehearse, print the report."""
    from fullspan.errors import ConfigError, LaunchError
    from fullspan.train.config import load_run_config

    if "RANK" in os.environ:
        raise LaunchError("rehearse is one process: run it without torchrun")
    config = load_run_config(args.config, args.overrides)
    for path in filter(None, (args.json, args.plot)):
        if not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if args.fit < 0:
        raise ConfigError(f"--fit is {args.fit}; it is a number of lengths, 0 for no fit")
    if args.plot is not None and not (args.fit or args.lengths):
        raise ConfigError("--plot draws the fit, but --fit is 0")

    import torch

    from fullspan.planning.case import Case
    from fullspan.planning.linear_fit import plot_fit
    from fullspan.planning.rehearsal_report import rehearsal_json, rehearsal_text
    from fullspan.planning.rehearse import RehearsalOptions, fit_lengths, rehearse

    lengths = args.lengths or []
    if args.fit and not lengths:
        lengths = fit_lengths(Case.load(config, world=args.world), args.fit)
    options = RehearsalOptions(
        rank=args.rank,
        world=args.world,
        warmup=args.warmup,
        steps=args.steps,
        lengths=lengths,
        repeat=args.repeat,
        assumed=assumptions(args),
    )
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s  {line}", file=sys.stderr, flush=True)

    found = rehearse(config, options, device, say)
    print(rehearsal_text(found, args.rates))
    write_json(args.json, rehearsal_json(found, args.rates))
    if args.plot is not None and found.fits:
        plot_fit(found.fits["all"], args.plot, f"rank {found.rank} of {found.case.world}")
    return 1 if found.unrepeated else 0
