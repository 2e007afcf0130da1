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
    cases = tomllib.loads((ROOT / "benchmarks" / "cases.toml").read_text(encoding="utf-8"))
    assert set(cases) == {"sparse_attention", "index_topk"}
    for entries in cases.values():
        assert len({tuple(entry) for entry in entries}) == 1
