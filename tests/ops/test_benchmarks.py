"""The benchmark cases parse, and the tables in the docs are what the checked-in rows say."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_rows():
    command = [sys.executable, "benchmarks/report.py", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_case_names_the_same_settings():
    names = {"sparse_attention": set(), "index_topk": set()}
    for file in ("cases.toml", "short.toml", "optional.toml"):
        cases = tomllib.loads((ROOT / "benchmarks" / file).read_text(encoding="utf-8"))
        assert cases.keys() == names.keys()
        for op, entries in cases.items():
            names[op] |= {tuple(entry) for entry in entries}
    assert all(len(settings) == 1 for settings in names.values())
