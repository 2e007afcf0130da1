"""`fullspan plan CONFIG.toml`: what a run will take, before anything is loaded."""

import argparse
from pathlib import Path
from typing import Any

from fullspan.cli.case_options import add_case_options, assumptions, write_json

EPILOG = """\
Any setting of the file can be given on the command line, as for train: --parallel.ep 8. --dp, --cp,
--ep and --pack-length are short for the settings of these names. Reads the TOML file and the
model's config.json, nothing else; needs neither a GPU nor the checkpoint.

  fullspan plan run.toml                         the run as it is, on dp x cp ranks
  fullspan plan run.toml --gpus 16 --gpu h100    the splits of 16 GPUs that fit, fastest first

Exit codes: 0 it fits (some split does), 1 it does not.
"""
_SHORT = {"dp": "parallel.dp", "cp": "parallel.cp", "ep": "parallel.ep"}


def add_parser(subparsers: Any) -> None:
    """Add `plan` to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="memory, FLOPs, traffic and time of a run, without a GPU",
        description="Memory by item, FLOPs, bytes on the wire and expected time of a run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_case_options(parser)
    for name in _SHORT:
        add(f"--{name}", metavar="N", help=f"parallel.{name}")
    add("--pack-length", metavar="N", help="data.pack_length")
    add("--gpus", type=int, metavar="N", help="find the splits of N GPUs that fit")
    add("--gpu", default="h200", metavar="NAME", help="h200 (default), h100 or b200")
    add(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="the model's config.json (default: that of model.path)",
    )
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """Print the plan, or the splits that fit and the plan of the fastest."""
    from fullspan.planning import report
    from fullspan.planning.case import Case
    from fullspan.planning.fit import Plan, search
    from fullspan.train.config import load_run_config

    short = {f"parallel.{name}": getattr(args, name) for name in _SHORT}
    short["data.pack_length"] = args.pack_length
    words = [word for key, value in short.items() if value for word in (f"--{key}", value)]
    case = Case.load(
        load_run_config(args.config, [*args.overrides, *words]),
        world=args.world,
        model_config=args.model_config,
        assumed=assumptions(args),
    )
    known = case.gpu(args.gpu, args.rates)
    if args.gpus is None:
        plan = Plan.of(case, known)
        print(report.plan_text(plan))
        if not plan.fits:
            print("\n" + "\n".join(report.advice(plan)))
        written = report.plan_json(plan)
    else:
        found = search(case, known, args.gpus)
        print(report.search_text(found, args.gpus))
        plan = found.fitting[0][0] if found.fitting else found.closest
        if found.fitting:
            print(f"\nthe fastest of them\n\n{report.plan_text(plan)}")
        written = [report.plan_json(p) for p, _ in found.fitting] or [report.plan_json(plan)]
    write_json(args.json, written)
    return 0 if plan.fits else 1
