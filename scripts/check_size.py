"""Fail when a module or function has outgrown the house limits; name those that are close.

A module should stay near 400 lines and stops at 600, a function near 50 and stops at 80, a Triton
kernel stops at 150. Docstrings do not count into a function. Nested functions and classes are not
judged by themselves: they count into what holds them.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MODULE_TARGET, MODULE_STOP = 400, 600
FUNCTION_TARGET, FUNCTION_STOP = 50, 80
KERNEL_STOP = 150
FOLDERS = ("src", "scripts", "tests", "benchmarks")


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a decorator is `jit` or `triton.jit`, with or without arguments."""
    names = [ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list]
    return any(name.split(".")[-1] == "jit" for name in names)


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, less the docstring's."""
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def outer_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods that lie in no other function."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from outer_functions(child)


def check_file(path: Path) -> tuple[list[str], list[str]]:
    """(what breaks a limit, what passes a target) in one module, a line each."""
    text = path.read_text(encoding="utf-8")
    stops, notes = [], []

    def judge(what: str, lines: int, target: int, stop: int) -> None:
        if lines > stop:
            stops.append(f"{what}: {lines} lines, at most {stop}")
        elif lines > target:
            notes.append(f"{what}: {lines} lines, target {target}")

    judge(str(path), text.count("\n"), MODULE_TARGET, MODULE_STOP)
    for node in outer_functions(ast.parse(text, filename=str(path))):
        kernel = is_kernel(node)
        stop = KERNEL_STOP if kernel else FUNCTION_STOP
        target = KERNEL_STOP if kernel else FUNCTION_TARGET
        judge(f"{path}:{node.lineno} {node.name}", function_lines(node), target, stop)
    return stops, notes


def main() -> int:
    """Check the folders given (default: every folder with our Python); 1 when a limit is broken."""
    parser = argparse.ArgumentParser(description="Check the size of modules and functions.")
    parser.add_argument("folders", nargs="*", type=Path)
    given = parser.parse_args().folders or [Path(name) for name in FOLDERS]
    files = sorted(path for folder in given for path in folder.rglob("*.py"))
    stops, notes = [], []
    for path in files:
        file_stops, file_notes = check_file(path)
        stops += file_stops
        notes += file_notes
    for line in notes:
        print(f"note: {line}")
    for line in stops:
        print(f"error: {line}", file=sys.stderr)
    print(f"{len(files)} modules, {len(stops)} over a limit, {len(notes)} over a target")
    return 1 if stops else 0


if __name__ == "__main__":
    sys.exit(main())
