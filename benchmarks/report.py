"""Makes the tables of docs/benchmarks.md from the checked-in rows.

    python benchmarks/report.py            rewrite the tables
    python benchmarks/report.py --check    1 when the file does not hold what the rows say

Of rows that differ in nothing but when they were measured, the last one counts.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- tables: benchmarks/report.py -->", "<!-- end of tables -->"
MEASURED = {
    "ms", "ms_p10", "ms_p90", "peak_bytes", "tflops", "peak_share", "flops", "failed",
    "commit", "date", "torch", "triton", "cuda", "gpu",
}  # fmt: skip
COLUMNS = {
    "sparse attention": (
        "op",
        "backend",
        "rows",
        "keys",
        "heads",
        "qk",
        "topk",
        "ids",
        "workspace_gib",
    ),
    "index top-k": ("backend", "rows", "keys", "heads", "topk", "ranges", "workspace_gib"),
    "one attention layer of GLM-5.2, forward and backward": ("backend", "rows"),
}
TITLES = {
    "forward": "sparse attention",
    "backward": "sparse attention",
    "backward_planned": "sparse attention",
    "plan": "sparse attention",
    "index_topk": "index top-k",
    "attention_layer": "one attention layer of GLM-5.2, forward and backward",
}

Row = dict[str, Any]


def rows() -> list[Row]:
    """All rows, of repeated measurements the last."""
    last: dict[str, Row] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            case = {key: value for key, value in row.items() if key not in MEASURED}
            last[json.dumps(case, sort_keys=True)] = row
    return list(last.values())


def table(columns: tuple[str, ...], body: Iterable[Row]) -> list[str]:
    """Markdown lines."""
    head = [*columns, "ms", "10th-90th", "TFLOP/s", "share of peak", "peak MiB"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in body:
        cells = [f"{row.get(column, '')}" for column in columns]
        if "failed" in row:
            cells += [row["failed"], "", "", "", ""]
        else:
            share = row.get("peak_share")
            cells += [
                f"{row['ms']:.2f}",
                f"{row['ms_p10']:.2f}-{row['ms_p90']:.2f}",
                f"{row['tflops']:.0f}" if "tflops" in row else "",
                "" if share is None else f"{100 * share:.0f} %",
                f"{row['peak_bytes'] / 2**20:,.0f}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def tables() -> str:
    """Everything between the markers."""
    everything = rows()
    lines: list[str] = []
    for title, columns in COLUMNS.items():
        body = [row for row in everything if TITLES[row["op"]] == title]
        if body:
            lines += [f"### {title[0].upper()}{title[1:]}", "", *table(columns, body), ""]
    fields = ("gpu", "torch", "triton", "cuda", "date", "commit")
    sources = {tuple(str(row[field])[:12] for field in fields) for row in everything}
    lines += [f"Measured with {', '.join(source)}." for source in sorted(sources)] + [""]
    formulas = {row["formula"]: row["op"] for row in everything if "formula" in row}
    lines += [f"FLOPs of {op}: `{formula}`." for formula, op in sorted(formulas.items())]
    return "\n".join(lines)


def main() -> int:
    """Rewrite or check the page."""
    parser = argparse.ArgumentParser(description="Make the benchmark tables.")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    fresh = f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"
    if given.check:
        print("up to date" if fresh == text else f"{PAGE.name} is not what the rows say")
        return int(fresh != text)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
