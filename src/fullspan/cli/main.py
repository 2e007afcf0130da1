"""The `fullspan` command: parses the words, runs one sub-command, turns errors into one line.

Exit codes: 0 done, 2 something the user can mend (one line on stderr), 130 interrupted, and
whatever a sub-command returns. A bug of ours keeps its traceback. Each sub-command is a module with
add_parser(subparsers) and run(args) -> int; its heavy imports are inside run, so that `--help` and
`--version` answer at once.
"""

import argparse
import sys
from collections.abc import Sequence

from fullspan import __version__
from fullspan.cli import data, export, init_tiny, parity, plan, rehearse, train
from fullspan.errors import FullspanError
from fullspan.settings import split_overrides

COMMANDS = (init_tiny, data, plan, rehearse, train, parity, export)

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of every sub-command."""
    parser = argparse.ArgumentParser(
        prog="fullspan",
        description="LoRA fine-tuning of sparse-attention models at their full context length.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fullspan {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line `words` (default: sys.argv) and return the exit code."""
    parser = build_parser()
    # Dotted options are settings, known only once the configuration's classes are imported.
    others, overrides = split_overrides(sys.argv[1:] if words is None else words)
    args = parser.parse_args(others)
    if overrides and "overrides" not in args:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    if "overrides" in args:
        args.overrides = overrides
    try:
        return args.run(args)
    except FullspanError as error:
        print(f"fullspan: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("fullspan: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
