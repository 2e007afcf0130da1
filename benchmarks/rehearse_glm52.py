"""Rehearses GLM-5.2-FP8 at full size on one GPU: 78 layers, random FP8 weights of the true size.

    python benchmarks/rehearse_glm52.py --out benchmarks/results/rehearsal_h200.jsonl
    python benchmarks/rehearse_glm52.py --rows 131k-cp8 --out ... -- --lora.r 32

Each row is one `fullspan rehearse` of the last rank of a run in configs/, in a process of its own,
and adds one JSON row to the file: its report, or, where it does not fit or fails, the message,
which names the plan's items. Everything after -- goes to every run, settings included. Short packs
run first and warm up, each once; the run's own length is measured once where a step takes long.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The targets of the configs, and the routed experts.
WITH_EXPERTS = (
    '["q_a_proj","q_b_proj","kv_a_proj_with_mqa","kv_b_proj","o_proj","gate_proj","up_proj",'
    '"down_proj","experts.gate_up_proj","experts.down_proj"]'
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rehearsal: a file in configs/ and what is added to the command."""

    config: str
    words: tuple[str, ...] = ()


ONCE = ("--warmup", "0", "--steps", "1")


def _short(first: int, step: int) -> tuple[str, ...]:
    """Five packs for the fit, long enough for one stage to be the highest in all of them."""
    return ("--lengths", ",".join(str(first + step * turn) for turn in range(5)))


ROWS = {
    "131k-cp32": Row(
        config="glm52_131k_32xh200.toml",
        words=("--steps", "1", "--repeat", *_short(98_304, 6_144)),
    ),
    "131k-cp32-experts": Row(
        config="glm52_131k_32xh200.toml", words=("--fit", "0", "--lora.targets", WITH_EXPERTS)
    ),
    "131k-cp8": Row(config="glm52_131k_8xh200.toml", words=(*ONCE, *_short(16_384, 4_096))),
    "1m-cp32": Row(config="glm52_1m_32xh200.toml", words=(*ONCE, *_short(131_072, 32_768))),
    "512k-cp8": Row(config="glm52_512k_8xh200.toml", words=(*ONCE, *_short(16_384, 4_096))),
}


def main() -> int:
    """Run the chosen rows one after the other; 1 if one failed."""
    parser = argparse.ArgumentParser(description="Rehearse GLM-5.2-FP8 at full size on one GPU.")
    known = ", ".join(ROWS)
    parser.add_argument("--rows", default="131k-cp32,131k-cp8,1m-cp32,512k-cp8", help=known)
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file to append to")
    parser.add_argument("--commit", default="", help="noted in every row")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for a row")
    parser.add_argument("extra", nargs="*", help="after --: added to every run")
    args = parser.parse_args()
    failed = 0
    for name in args.rows.split(","):
        if name not in ROWS:
            parser.error(f"no row {name!r}: known are {known}")
        row = rehearse(name, args.extra, args.limit)
        row["commit"] = args.commit
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        failed += "error" in row
    return 1 if failed else 0


def rehearse(name: str, extra: list[str], limit: float) -> dict[str, Any]:
    """The row of one rehearsal, its report or its error."""
    row = ROWS[name]
    print(f"== {name}", flush=True)
    words = [
        "rehearse", f"configs/{row.config}", "--model.path", "configs/models/glm-5.2",
        *row.words, *extra,
    ]  # fmt: skip
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        code, error = _run([*words, "--json", str(report)], limit)
        found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    seconds = time.monotonic() - begin
    if not found:
        found = {"error": error or f"ended with {code}"}
        print(found["error"], flush=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"row": name, "date": date, "seconds_in_all": seconds, "command": words, **found}


def _run(words: list[str], limit: float) -> tuple[int, str]:
    """Exit code and the last line of stderr; what it prints is shown."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # Segments that grow: reserved memory stays close to what is allocated.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    command = [sys.executable, "-m", "fullspan.cli.main", *words]
    try:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, timeout=limit, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stderr or b""
        text = said.decode() if isinstance(said, bytes) else said
        return 1, f"not done after {limit:.0f} s: {(text.strip().splitlines() or [''])[-1]}"
    print(done.stderr, file=sys.stderr, end="", flush=True)
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


if __name__ == "__main__":
    sys.exit(main())
