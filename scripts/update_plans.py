"""Rewrite the plans that docs/planning.md shows: under each "$ fullspan plan ..." what it prints.

python scripts/update_plans.py        from the root of the repository
"""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

from fullspan.cli.main import main as fullspan

PAGE = Path("docs/planning.md")
BLOCK = re.compile(r"^```console\n\$ (fullspan plan [^\n]*)\n.*?^```", re.M | re.S)


def show(match: re.Match[str]) -> str:
    """The block of one command with what it prints now."""
    command = match.group(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        fullspan(shlex.split(command)[1:])
    return f"```console\n$ {command}\n{printed.getvalue()}```"


def main() -> int:
    """Rewrite the page, or check it."""
    text = PAGE.read_text(encoding="utf-8")
    found, count = BLOCK.subn(show, text)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(found, encoding="utf-8")
    elif found != text:
        print(f"{PAGE} is not up to date: run python scripts/update_plans.py", file=sys.stderr)
        return 1
    print(f"{count} plans in {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
