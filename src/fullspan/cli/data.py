"""`fullspan data inspect PATH --tokenizer DIR` and `fullspan data demo DIR`."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add `data` to the command line."""
    parser = subparsers.add_parser(
        "data",
        help="look at training data, or write demo data",
        description="Look at training data, or write demo data.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_inspect(commands)
    _add_demo(commands)


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="report what a data set packs to, and show one sample",
        description="Read, check and pack a data set as training would, print the report and one "
        "sample. Trained tokens stand between {+ and +}, or in green on a terminal.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="JSONL file, folder or glob")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="DIR", help="the model's folder"
    )
    parser.add_argument(
        "--pack-length", type=int, metavar="N", help="rows of a pack (default: longest document)"
    )
    parser.add_argument("--format", default="auto", metavar="NAME", help="default: auto")
    parser.add_argument(
        "--overlong",
        default="error",
        metavar="NAME",
        help="documents longer than a pack: error (the default), truncate, split or drop",
    )
    parser.add_argument("--max-bad-rows", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="I", help="the sample to show, from 0"
    )
    parser.add_argument("--full", action="store_true", help="show all of a long sample")
    parser.set_defaults(run=run_inspect)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="write questions about the Python standard library",
        description="Write train.jsonl and heldout.jsonl: the source of a module of this Python's "
        "standard library, a question about a function in it, its docstring as the answer. "
        "Held-out questions are about other functions; modules may be the same.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write")
    parser.add_argument("--samples", type=int, default=256, metavar="N", help="default: 256")
    parser.add_argument("--held-out", type=int, default=32, metavar="N", help="default: 32")
    parser.add_argument(
        "--max-context-bytes",
        type=int,
        default=6000,
        metavar="N",
        help="leave out larger modules (default: 6000)",
    )
    parser.set_defaults(run=run_demo)


def run_inspect(args: argparse.Namespace) -> int:
    """Print the report and one sample."""
    from fullspan.data.inspect import inspect_data

    text = inspect_data(
        args.path,
        args.tokenizer,
        pack_length=args.pack_length,
        settings={
            "format": args.format,
            "overlong": args.overlong,
            "max_bad_rows": args.max_bad_rows,
        },
        sample=args.sample,
        color=sys.stdout.isatty(),
        full=args.full,
    )
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))
    return 0


def run_demo(args: argparse.Namespace) -> int:
    """Write the demo data and say what it is."""
    from fullspan.data.demo import write_demo

    made = write_demo(
        args.folder,
        samples=args.samples,
        held_out=args.held_out,
        max_context_bytes=args.max_context_bytes,
    )
    print(
        f"{made.train}: {made.train_samples} questions\n"
        f"{made.held_out}: {made.held_out_samples} questions about other functions\n"
        f"from {made.modules} modules of this Python's standard library, "
        f"questions of at most {made.longest_bytes:,} bytes"
    )
    return 0
