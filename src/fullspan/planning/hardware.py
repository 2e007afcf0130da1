"""What GPUs and links give: a table of stated rates with their sources, and how rows of
measurements replace them.

Rates of one H200 were measured (PyTorch 2.11, Triton 3.6, one GPU at its power cap). Those of other
GPUs are scaled by their nominal peaks and were not measured.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from fullspan.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True)
class Rate:
    """FLOPs or bytes per second, and where the figure comes from."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """memory: bytes that PyTorch reports in total; peak: nominal dense bf16 FLOPs per second."""

    name: str
    memory: int
    peak: float
    rates: Mapping[str, Rate]


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second that one GPU receives, and how many GPUs share a node.

    The two figures are parallel/balance.py's: two thirds of an H200's 450 GB/s each way over
    NVLink, four fifths of a 400 Gbit/s InfiniBand adapter for each GPU. host: from and to pinned
    host memory, four fifths of PCIe 5.0 x16's 63 GB/s each way.
    """

    ranks_per_node: int = 8
    nvlink: float = 300e9
    network: float = 40e9
    host: float = 50e9


_MEASURED = "measured on one H200"
_PROTOTYPE = "prototype kernels, measured on one H200 at 4096 rows and 131,072 keys"
_H200_RATES = {
    "projections": Rate(707e12, f"bf16 8192^3 matrix product, {_MEASURED}"),
    "experts": Rate(677e12, f"grouped_mm of 8 x 4096 rows, {_MEASURED}"),
    "attention forward": Rate(525e12, f"{_PROTOTYPE}: 525 (random keys) to 590"),
    "attention backward": Rate(300e12, f"{_PROTOTYPE}: 300 (random keys) to 440"),
    "attention plan": Rate(4096 / 6.5e-3, f"{_PROTOTYPE}: 6 to 7 ms for 4096 rows; rows a second"),
    "indexer": Rate(562e12, f"{_PROTOTYPE}: 7.7 ms with its exact top-k; scores alone 605"),
    "LoRA": Rate(100e12, "assumed: matrix products as thin as the rank are bound by memory"),
    "head": Rate(487e12, f"32 ms for 4096 rows x 154,880 words in chunks of 1024, {_MEASURED}"),
    "copy": Rate(4.24e12, f"bytes read and written by a copy, {_MEASURED}"),
    "dequantise": Rate(3.9e12, f"bytes read and written, FP8 blocks to bf16, {_MEASURED}"),
}
# GPU: (GiB as PyTorch reports them, nominal bf16 FLOPs a second, nominal bytes a second).
_NOMINAL = {
    "h200": (139.8, 989e12, 4.8e12),
    "h100": (79.1, 989e12, 3.35e12),
    "b200": (178.4, 2250e12, 8.0e12),
}
_BY_BYTES = ("copy", "dequantise", "LoRA")


def gpu(name: str) -> Gpu:
    """A known GPU. Raises ConfigError, which lists them."""
    if name not in _NOMINAL:
        raise ConfigError(f"no figures for a GPU {name!r}: known are {', '.join(_NOMINAL)}")
    gib, peak, bandwidth = _NOMINAL[name]
    _, base_peak, base_bandwidth = _NOMINAL["h200"]
    rates = {}
    for part, rate in _H200_RATES.items():
        factor = bandwidth / base_bandwidth if part in _BY_BYTES else peak / base_peak
        note = "" if name == "h200" else f"; times {factor:.2f}, the ratio of nominal peaks"
        rates[part] = Rate(rate.value * factor, rate.source + note)
    return Gpu(name=name, memory=int(gib * GIB), peak=peak, rates=rates)


# op of a row of benchmarks/results -> the rate that it replaces
_ROWS = {
    "forward": "attention forward",
    "backward": "attention backward",  # its plan included
    "index_topk": "indexer",
}
_BACKENDS = ("hopper", "triton")


def with_measurements(
    known: Gpu,
    folder: Path | None,
    *,
    keys: int,
    workspace: int,
    attention: Mapping[str, int],
    indexer: Mapping[str, int],
) -> Gpu:
    """`known` with the rates that rows in `folder`/*.jsonl give for it, as they are present.

    Of the rows of an op on this GPU at the model's widths (`attention`, `indexer`: by their names
    in a row): those of the best backend, of them those whose number of keys is nearest to `keys`
    and whose workspace is nearest to `workspace` bytes, and of these the median rate. No folder or
    no such row changes nothing.

    Raises:
        ConfigError: a file holds a line that is no row.
    """
    rows = [row for row in _read(folder) if known.name in str(row.get("gpu", "")).lower()]
    rates = dict(known.rates)
    for op, part in _ROWS.items():
        widths = {"op": op, **(indexer if op == "index_topk" else attention)}
        found = [
            row
            for row in rows
            if row.get("ms")
            and {"keys", "workspace_gib"} <= row.keys()
            and all(row.get(name) == value for name, value in widths.items())
        ]
        backend = next((b for b in _BACKENDS if any(r.get("backend") == b for r in found)), None)
        found = [row for row in found if row.get("backend") == backend]
        if not found:
            continue

        def distance(row: Mapping[str, Any]) -> tuple[float, float]:
            return abs(row["keys"] - keys), abs(row["workspace_gib"] * GIB - workspace)

        nearest = min(found, key=distance)
        alike = [row for row in found if distance(row) == distance(nearest)]
        value = median(row["flops"] / row["ms"] * 1e3 for row in alike)
        rows_of = f"{len(alike)} row{'s' if len(alike) > 1 else ''} of {folder}"
        rates[part] = Rate(value, f"{rows_of}, median: {backend}, {nearest['keys']:,} keys")
        if op == "backward":
            rates.pop("attention plan")
    return replace(known, rates=rates)


def _read(folder: Path | None) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(folder.glob("*.jsonl")) if folder else ():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                rows.append({**json.loads(line)})
            except (ValueError, TypeError):
                raise ConfigError(f"{path}, line {number}: not a row of measurements") from None
    return rows
