"""Makes the tables of docs/benchmarks.md from the checked-in rows.

    python benchmarks/report.py            rewrite the tables
    python benchmarks/report.py --check    1 when the file does not hold what the rows say

Of rows that differ in nothing but when they were measured, the last one counts.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- tables: benchmarks/report.py -->", "<!-- end of tables -->"
MEASURED = {
    "ms", "ms_p10", "ms_p90", "peak_bytes", "tflops", "peak_share", "flops", "failed",
    "commit", "date", "torch", "triton", "cuda", "gpu", "nccl", "package",
    "ms_min", "ms_max", "tokens_per_second_per_rank", "exchange_ms", "loopback_ms", "rehearsed_ms",
    "rehearsed_peak_bytes", "loss", "loss_difference", "logits_difference", "gradients_difference",
    "topk_difference", "bits_difference", "judged", "passed", "planned_ms", "planned_bytes",
    "host_bytes", "r2", "foretold_bytes", "fullspan", "seconds", "floor", "error",
}  # fmt: skip
# Of rates.py.
KINDS = (
    "projections", "products by head", "experts", "head", "float32", "elementwise", "permute",
    "dequantise", "pin host memory", "to host", "from host",
)  # fmt: skip
RANKS = ("model", "layers", "dtype", "transport", "gpu", "cp")
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
    "products of the routed experts, forward": ("backend", "experts", "slots", "inner", "out"),
    "several ranks: parity with one rank": (*RANKS, "partition", "tokens", "product_rows"),
    "several ranks: a step": (*RANKS, "tokens", "rows"),
    "several ranks: a rank and its rehearsal": (*RANKS, "tokens", "rank"),
    "rehearsals of GLM-5.2 at full size, one rank on one GPU": ("row", "tokens", "ranks", "rows"),
    "seconds of these rehearsals by part, and how many times the floor they are": ("row", "part"),
    "rates of plans": ("op", "shape", "rows", "beside"),
}
TITLES = {
    "forward": "sparse attention",
    "backward": "sparse attention",
    "backward_planned": "sparse attention",
    "plan": "sparse attention",
    "index_topk": "index top-k",
    "attention_layer": "one attention layer of GLM-5.2, forward and backward",
    "expert_product": "products of the routed experts, forward",
    "multi_gpu_parity": "several ranks: parity with one rank",
    "multi_gpu_step": "several ranks: a step",
    "multi_gpu_rehearsal": "several ranks: a rank and its rehearsal",
    "rehearsal": "rehearsals of GLM-5.2 at full size, one rank on one GPU",
    "rehearsal_part": "seconds of these rehearsals by part, and how many times the floor they are",
    **dict.fromkeys(KINDS, "rates of plans"),
}

Row = dict[str, Any]


def rows() -> list[Row]:
    """All rows, of repeated measurements the last."""
    last: dict[str, Row] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            for each in of_rehearsal(row) if "row" in row else [row]:
                case = {key: value for key, value in each.items() if key not in MEASURED}
                last[json.dumps(case, sort_keys=True)] = each
    return list(last.values())


def of_rehearsal(row: Row) -> list[Row]:
    """A row of rehearse_glm52.py as the others are, what was measured in "ms" and "peak_bytes";
    then one for each part that the plan knows."""
    found = {"op": "rehearsal", "row": row["row"], "date": row["date"], "commit": row["commit"]}
    if "error" in row:
        return [found | {"failed": row["error"]}]
    ranks, seconds = row["rehearsal"], row["seconds_of_step"] - row["seconds_of_loopback"]
    planned = row["plan_seconds"] or {}
    whole = found | row["versions"] | {
        "gpu": row["device"],
        "tokens": row["pack"],
        "ranks": f"cp {ranks['cp']}, ep {ranks['ep']}",
        "rows": row["rows"],
        "ms": seconds * 1e3,
        "planned_ms": 1e3 * sum(sum(parts.values()) for parts in planned.values()),
        "peak_bytes": row["peak_allocated"],
        "planned_bytes": row["plan_peak_allocated"],
        "host_bytes": row["host_bytes"],
        "r2": {name: fit["r2"] for name, fit in row["fits"].items()},
        "foretold_bytes": row["foretold_peak"],
    }  # fmt: skip
    floor = row.get("floor_seconds") or {}
    parts = dict.fromkeys(part for parts in floor.values() for part in parts)
    return [whole] + [
        {
            "op": "rehearsal_part",
            "row": row["row"],
            "part": part,
            "seconds": {which: row["seconds"].get(f"{part} {which}", 0.0) for which in floor},
            "floor": {which: floor[which].get(part, 0.0) for which in floor},
        }
        for part in parts
    ]


def table(columns: tuple[str, ...], body: list[Row]) -> list[str]:
    """Markdown lines."""
    measured = CELLS.get(body[0]["op"], call_cells)
    # Of what failed there is the reason alone.
    names = next((list(measured(row)) for row in body if "failed" not in row), ["ms"])
    cells = [{names[0]: row["failed"]} if "failed" in row else measured(row) for row in body]
    head = [*columns, *names]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row, values in zip(body, cells, strict=True):
        shown = {column: row.get(column) for column in columns} | values
        texts = ["" if shown.get(name) is None else f"{shown[name]}" for name in head]
        lines.append("| " + " | ".join(texts) + " |")
    return lines


Cells = dict[str, str]


def call_cells(row: Row) -> Cells:
    """Of a call on one GPU."""
    share = row.get("peak_share")
    return {
        "ms": f"{row['ms']:.2f}",
        "10th-90th": f"{row['ms_p10']:.2f}-{row['ms_p90']:.2f}",
        "TFLOP/s": f"{row['tflops']:.0f}" if "tflops" in row else "",
        "share of peak": "" if share is None else f"{100 * share:.0f} %",
        "peak MiB": f"{row['peak_bytes'] / 2**20:,.0f}",
    }


def parity_cells(row: Row) -> Cells:
    """Differences from the first split, which has none."""
    names = ("loss", "logits", "gradients", "topk")
    cells = {name: row.get(f"{name}_difference") for name in names}
    bits = row.get("bits_difference")
    return {
        **{name: "" if value is None else f"{value:.1e}" for name, value in cells.items()},
        "tensors that do not repeat": "" if bits is None else f"{bits:.0f}",
        "judged": row["judged"],
        "passed": "yes" if row["passed"] else "no",
    }


def step_cells(row: Row) -> Cells:
    """Of a step of all ranks."""
    return {
        "ms": f"{row['ms']:,.0f}",
        "least-most": f"{row['ms_min']:,.0f}-{row['ms_max']:,.0f}",
        "tok/s a rank": f"{row['tokens_per_second_per_rank']:,.0f}",
        "exchanges not hidden": f"{row['exchange_ms'] / row['ms']:.1%}",
        "peak MiB": f"{row['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in row else "",
    }


def rehearsal_cells(row: Row) -> Cells:
    """The real rank, its rehearsal, and what the rehearsal is off by."""
    peak, ms = row["rehearsed_peak_bytes"], row["rehearsed_ms"]
    return {
        "peak MiB": f"{row['peak_bytes'] / 2**20:,.1f}",
        "rehearsed MiB": f"{peak / 2**20:,.1f}",
        "off": f"{peak / row['peak_bytes'] - 1:+.2%}",
        "ms": f"{row['ms']:,.0f}",
        "in exchanges": f"{row['exchange_ms']:,.0f}",
        "rehearsed ms": f"{ms:,.0f}",
        "off by": f"{ms / row['ms'] - 1:+.1%}",
    }


def full_size_cells(row: Row) -> Cells:
    """A rehearsal at full size beside its plan. Lines: R² of the whole step's and the worst stage's
    peaks, and what the lines through the shorter packs are off by."""
    peak, r2 = row["peak_bytes"], row["r2"]
    foretold = row["foretold_bytes"]
    return {
        "peak GiB": f"{peak / 2**30:.2f}",
        "the plan's": f"{row['planned_bytes'] / peak - 1:+.1%}",
        "host GiB": f"{row['host_bytes'] / 2**30:.1f}" if row["host_bytes"] else "",
        "s": f"{row['ms'] / 1e3:.2f}",
        "the plan's s": f"{row['planned_ms'] / row['ms'] - 1:+.0%}",
        "R²": f"{r2['all']:.5f}, {min(r2.values()):.5f}" if r2 else "",
        "foretold": f"{foretold / peak - 1:+.2%}" if foretold else "",
    }


def part_cells(row: Row) -> Cells:
    """Seconds of each pass, then how many times the floor: work at the GPU's nominal rates."""
    pairs = {which: (row["seconds"][which], floor) for which, floor in row["floor"].items()}
    # Of passes that were measured: a norm's backward pass is in the part that runs before it.
    pairs["all"] = sum(s for s, _ in pairs.values()), sum(floor for s, floor in pairs.values() if s)
    return {
        which: f"{s:.2f} ({s / floor:.1f}x)" if s and floor else ""
        for which, (s, floor) in pairs.items()
    }


def product_cells(row: Row) -> Cells:
    """From rows in bfloat16 and weights in e4m3 on; error against float32 products."""
    return {
        "ms": f"{row['ms']:.2f}",
        "TFLOP/s": f"{row['tflops']:.0f}",
        "error": f"{100 * row['error']:.2f} %",
        "peak MiB": f"{row['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in row else "",
    }


def rate_cells(row: Row) -> Cells:
    """FLOPs or bytes a second."""
    work, unit = (row["flops"], "TFLOP/s") if "flops" in row else (row["bytes"], "TB/s")
    return {"ms": f"{row['ms']:.3f}", "rate": f"{work / row['ms'] / 1e9:.3g} {unit}"}


CELLS = {
    "rehearsal": full_size_cells,
    "expert_product": product_cells,
    "rehearsal_part": part_cells,
    **dict.fromkeys(KINDS, rate_cells),
    "multi_gpu_parity": parity_cells,
    "multi_gpu_step": step_cells,
    "multi_gpu_rehearsal": rehearsal_cells,
}


def tables() -> str:
    """Everything between the markers."""
    everything = rows()
    lines: list[str] = []
    for title, columns in COLUMNS.items():
        body = [row for row in everything if TITLES[row["op"]] == title]
        if body:
            lines += [f"### {title[0].upper()}{title[1:]}", "", *table(columns, body), ""]
    fields = ("gpu", "torch", "triton", "cuda", "date", "commit")
    sources = {
        tuple(str(row[field])[:12] for field in fields) for row in everything if "gpu" in row
    }
    lines += [f"Measured with {', '.join(source)}." for source in sorted(sources)]
    packages = {(row["backend"], row["package"]) for row in everything if "package" in row}
    lines += [f"{backend}: {package}." for backend, package in sorted(packages)] + [""]
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
