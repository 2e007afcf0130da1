"""Every `fullspan` command in the README and the docs is one that the parser takes, and the
README's Python example runs as it is printed."""

import json
import re
import shlex
from pathlib import Path

import pytest

from fullspan.cli.main import build_parser
from fullspan.settings import parse_overrides, split_overrides

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def documented() -> list[str]:
    """Lines of code blocks that begin with `fullspan`, without comments. Synopses, with their
    optional words in brackets, are left out.
    """
    found: list[str] = []
    for page in PAGES:
        blocks = re.findall(
            r"^```\w*\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
        )
        lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
        found += [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?fullspan ", line)]
    return sorted({line for line in found if "[" not in line})


@pytest.mark.parametrize("command", documented())
def test_the_parser_takes_it(command):
    others, overrides = split_overrides(shlex.split(command, comments=True)[1:])
    parsed = build_parser().parse_args(others)
    parse_overrides(overrides)
    assert "overrides" in parsed or not overrides


def test_there_are_commands_of_every_kind():
    words = {command.split()[1] for command in documented()}
    assert {"plan", "rehearse", "parity", "train", "export", "data"} <= words


def test_the_python_example_runs_as_printed(tmp_path, tiny_checkpoints, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGES[0].read_text("utf-8"), re.DOTALL | re.M)
    [example] = [block for block in blocks if "Session(" in block]
    (tmp_path / "demo" / "data").mkdir(parents=True)
    (tmp_path / "demo" / "model").symlink_to(tiny_checkpoints["glm_moe_dsa"])
    row = json.dumps({"text": "every rank holds its rows " * 10}) + "\n"
    (tmp_path / "demo" / "data" / "train.jsonl").write_text(row)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(example, names)
    assert names["result"].trained_tokens > 64 and names["update"].lr < 1e-4
    assert [path.name for path in (tmp_path / "demo/checkpoints").iterdir()] == ["step-3"]
