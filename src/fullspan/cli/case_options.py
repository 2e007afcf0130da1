"""What sub-commands share: for `plan` and `rehearse` the run, its ranks, what is assumed; lists of
numbers; the JSON file.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullspan.planning.case import Assumptions


def add_case_options(parser: argparse.ArgumentParser) -> None:
    """CONFIG and the shared options."""
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="the run's TOML file")
    add("--world", type=int, metavar="N", help="ranks (default: parallel.dp x parallel.cp)")
    add("--document", type=int, default=0, metavar="N", help="rows of a document (0: the pack)")
    add("--imbalance", type=float, default=1.3, metavar="X", help="busiest rank's expert rows")
    add("--trained", type=float, default=1.0, metavar="X", help="share of rows with a label")
    add(
        "--rates",
        type=Path,
        metavar="FOLDER",
        help="rows of measured kernels that come before those of the package",
    )
    add("--json", type=Path, metavar="FILE", help="also write every figure here")


def assumptions(args: argparse.Namespace) -> "Assumptions":
    """What the options assume. Raises ConfigError."""
    from fullspan.planning.case import Assumptions

    return Assumptions(imbalance=args.imbalance, document=args.document, trained=args.trained)


def numbers(text: str) -> list[int]:
    """The numbers of a text such as 1,2,4, for argparse."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        message = f"{text!r}: it must be whole numbers with commas between them, such as 1,2"
        raise argparse.ArgumentTypeError(message) from None


def write_json(path: Path | None, value: Any) -> None:
    """The figures, where --json asks for them. Raises ConfigError."""
    from fullspan.errors import ConfigError

    if path is None:
        return
    try:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror} (option --json)") from None
