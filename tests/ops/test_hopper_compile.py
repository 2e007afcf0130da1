"""The Gluon kernels, compiled for sm_90a on a machine without a GPU: they fit, hardly spill, and no
wgmma is serialised.
"""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fullspan.ops.backend import GLUON_TRITON

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_report.py"
SHARED = 227 * 1024  # what a block can have on sm_90
SPILLED = 64  # bytes; what the measured kernels have at most


@pytest.mark.skipif(
    not importlib.metadata.version("triton").startswith(f"{GLUON_TRITON}."),
    reason=f"Gluon's interface moves: written for triton {GLUON_TRITON}",
)
def test_the_hopper_kernels_compile_without_serialised_products():
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert {row["kernel"] for row in rows} >= {"forward 64", "dquery", "dense", "scores"}
    for row in rows:
        assert not row["serialised"], row
        assert row["spilled"] <= SPILLED and row["shared"] <= SHARED, row
