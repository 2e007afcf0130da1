"""Fail on what the house rules forbid in Python files and that none of the linters finds.

Each module opens with a docstring; no dispatch on hasattr; a `type: ignore` names its code and has
a reason, beside it or in the comment above; modules with shape annotations do not postpone them,
since the tests check them; no path into somebody's home folder. Empty files are let through.
"""

import ast
import re
import sys
from pathlib import Path

FOLDERS = ("src", "scripts", "tests", "benchmarks")
IGNORE = re.compile(r"#\s*(type|pyright):\s*ignore(\[[\w-]+\])?(.*)")
HOME = re.compile(r"(?<![\w.])/(?:home|root|Users)/\w")


def check_source(path: Path, text: str) -> list[str]:
    """One line for each rule that the module breaks."""
    tree = ast.parse(text, filename=str(path))
    found = []
    if ast.get_docstring(tree) is None and text.strip():
        found.append(f"{path}:1 has no module docstring")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr":
            found.append(f"{path}:{node.lineno} calls hasattr")
        if isinstance(node, ast.ImportFrom) and node.module == "__future__" and "shapes" in text:
            found.append(f"{path}:{node.lineno} postpones annotations that the tests check")
    above = ""
    for number, line in enumerate(text.splitlines(), start=1):
        ignore = IGNORE.search(line)
        reason = ignore and (ignore.group(3).strip() or "#" in above)
        if ignore and not (ignore.group(2) and reason):
            found.append(f"{path}:{number} ignores a type error without a code or a reason")
        if HOME.search(line):
            found.append(f"{path}:{number} names a path in a home folder")
        above = line
    return found


def main() -> int:
    """Check every Python file of the project; 1 when a rule is broken."""
    files = sorted(path for folder in FOLDERS for path in Path(folder).rglob("*.py"))
    found = [
        line for path in files for line in check_source(path, path.read_text(encoding="utf-8"))
    ]
    for line in found:
        print(f"error: {line}", file=sys.stderr)
    print(f"{len(files)} modules, {len(found)} broken rules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
