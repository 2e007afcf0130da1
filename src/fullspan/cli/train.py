"""`fullspan train CONFIG.toml`: one training run, in this process or on several ranks."""

import argparse
import os
from pathlib import Path
from typing import Any

EPILOG = """\
Any setting of the file can be given on the command line: --optim.lr 1e-4, or --lora.r=8. Paths, in
the file too, are relative to the working directory.

Ranks: --nproc-per-node N starts N of them here. Under torchrun or Slurm, which start the ranks
themselves, leave it out:
  torchrun --nproc-per-node 8 -m fullspan.cli.main train CONFIG.toml
  srun --ntasks-per-node 8 fullspan train CONFIG.toml
"""


def add_parser(subparsers: Any) -> None:
    """Add `train` to the command line."""
    parser = subparsers.add_parser(
        "train",
        help="fine-tune a model as a TOML file says",
        description="Fine-tune a model as a TOML file says.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="fullspan train [-h] [--nproc-per-node N] [--master-port PORT] "
        "CONFIG [--section.key VALUE ...]",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the run's TOML file")
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="ranks to start on this machine (default: 1, or those of torchrun or Slurm)",
    )
    parser.add_argument(
        "--master-port",
        type=int,
        metavar="PORT",
        help="port where the ranks meet (default: MASTER_PORT, or a free one)",
    )
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """Start the ranks, or be one."""
    from fullspan.train import ranks

    # Before anything imports torch, which reads the number of threads once.
    found = ranks.prepare(
        os.environ, nproc_per_node=args.nproc_per_node, master_port=args.master_port
    )
    from fullspan.planning.report import explain_out_of_memory
    from fullspan.train import launch

    return launch.run(
        args.config,
        args.overrides,
        found,
        master_port=args.master_port,
        explain=explain_out_of_memory,
    )
