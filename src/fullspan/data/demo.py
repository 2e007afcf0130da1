"""Real long-document questions, as `messages` JSONL, from this Python's standard library.

One sample is the whole source of a module, a question about one function in it, and the first
paragraph of that function's docstring as the answer; every line of the answer stands in the source.
The same Python gives the same files. Held-out questions are about other functions than the training
questions, with other answers; the modules may be the same. Leaves out tests, third-party packages
and whatever is not UTF-8.
"""

import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fullspan.errors import DataError

_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo"}
_ANSWER_CHARACTERS = (20, 400)
_HELD_OUT_ONE_IN = 6


@dataclass(frozen=True, kw_only=True)
class Question:
    """One sample before it is written."""

    module: str
    function: str
    source: str
    answer: str

    @property
    def rank(self) -> int:
        """A hash of the names: the order in which questions are taken, and the split."""
        digest = hashlib.sha256(f"{self.module}:{self.function}".encode()).digest()
        return int.from_bytes(digest[:8], "big")

    @property
    def held_out(self) -> bool:
        return self.rank % _HELD_OUT_ONE_IN == 0

    def row(self) -> dict[str, list[dict[str, str]]]:
        """As a `messages` row."""
        question = (
            f"Source of the Python module {self.module}:\n\n{self.source}\n\n"
            f"What does {self.function} do?"
        )
        return {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": self.answer},
            ]
        }


@dataclass(frozen=True, kw_only=True)
class DemoFiles:
    """What write_demo wrote."""

    train: Path
    held_out: Path
    train_samples: int
    held_out_samples: int
    modules: int
    """different modules over both files"""
    longest_bytes: int
    """the longest question, in UTF-8 bytes"""


def write_demo(
    folder: Path, *, samples: int = 256, held_out: int = 32, max_context_bytes: int = 6000
) -> DemoFiles:
    """Writes train.jsonl and heldout.jsonl into `folder`: at most `samples` and `held_out` rows.

    Modules larger than max_context_bytes are left out. Raises DataError when that leaves nothing
    for a file.
    """
    for name, value in (("samples", samples), ("held-out", held_out)):
        if value < 1:
            raise DataError(f"--{name}: got {value}, it must be at least 1")
    chosen = split_questions(find_questions(max_context_bytes), samples, held_out)
    for name, questions in chosen.items():
        if not questions:
            raise DataError(
                f"no {name} questions in modules of at most {max_context_bytes} bytes; "
                "raise --max-context-bytes"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = {name: folder / f"{name}.jsonl" for name in chosen}
        for name, questions in chosen.items():
            rows = [json.dumps(q.row(), ensure_ascii=False) + "\n" for q in questions]
            paths[name].write_text("".join(rows), encoding="utf-8", newline="\n")
    except OSError as error:
        raise DataError(f"cannot write demo data to {folder}: {error.strerror}") from error
    every = [question for questions in chosen.values() for question in questions]
    return DemoFiles(
        train=paths["train"],
        held_out=paths["heldout"],
        train_samples=len(chosen["train"]),
        held_out_samples=len(chosen["heldout"]),
        modules=len({question.module for question in every}),
        longest_bytes=max(len(q.row()["messages"][0]["content"].encode()) for q in every),
    )


def split_questions(
    questions: list[Question], samples: int, held_out: int
) -> dict[str, list[Question]]:
    """{"train", "heldout"}: by hash; an answer occurs once over both, so none of the held-out ones
    is trained on.
    """
    chosen: dict[str, list[Question]] = {"train": [], "heldout": []}
    seen: set[str] = set()
    for question in sorted(questions, key=lambda q: (q.rank, q.module, q.function)):
        name, most = ("heldout", held_out) if question.held_out else ("train", samples)
        if question.answer not in seen and len(chosen[name]) < most:
            seen.add(question.answer)
            chosen[name].append(question)
    return chosen


def find_questions(max_context_bytes: int) -> list[Question]:
    """Every question that this Python's standard library gives, in order of module and line."""
    root = Path(sysconfig.get_paths()["stdlib"])
    questions: list[Question] = []
    tops = [top for top in root.iterdir() if top.name not in _SKIPPED]  # site-packages may be huge
    for file in sorted(file for top in tops for file in (top, *top.rglob("*.py"))):
        parts = file.relative_to(root).with_suffix("").parts
        if file.suffix != ".py" or not file.is_file() or not _SKIPPED.isdisjoint(parts):
            continue
        if file.stat().st_size <= max_context_bytes:
            try:
                source = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            questions += module_questions(".".join(parts).removesuffix(".__init__"), source)
    return questions


def module_questions(module: str, source: str) -> Iterator[Question]:
    """The questions that one module gives; none when it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for name, node in _functions(tree, ""):
        answer = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
        fewest, most = _ANSWER_CHARACTERS
        if fewest <= len(answer) <= most and all(line in source for line in answer.splitlines()):
            yield Question(module=module, function=name, source=source.strip(), answer=answer)


def _functions(
    node: ast.Module | ast.ClassDef, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods with their qualified names; of a name defined twice, the first."""
    names: set[str] = set()
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name not in names:
            names.add(child.name)
            yield f"{prefix}{child.name}", child
