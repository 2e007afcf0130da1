"""What GPUs and links give. The rates of one H200 are the rows of rates.jsonl, in the format of
benchmarks/results, measured where they do not say "assumed"; rows of a folder come before them.
Those of other GPUs are scaled by their nominal peaks and were not measured.

A kind of work has a rate in FLOPs or in bytes (read and written) per second:

    projections          matrix products with 2-D weights
    products by head     kv_b_proj's halves: a product for each head, bound by memory
    experts              grouped products of the routed experts
    experts fp8          the same with both operands in FP8 (ops.expert_products)
    attention forward, attention backward, indexer, head     their ops (ops/*/README.md)
    float32              products in float32: the router's
    elementwise          bytes: norms, gated products, sums, rotations, copies
    permute              bytes: rows brought into the order of the experts and back
    dequantise           bytes: FP8 blocks to the activations' dtype
    waits                times that the GPU is idle while the host reads how many rows have come
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from fullspan.errors import ConfigError
from fullspan.parallel.config import (
    NETWORK_BYTES_PER_SECOND,
    NVLINK_BYTES_PER_SECOND,
    RANKS_PER_NODE,
)

GIB = 1 << 30
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Rate:
    """FLOPs or bytes per second, where the figure comes from, and of whose kernels it is: "" where
    there is one of a kind."""

    value: float
    source: str
    backend: str = ""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """memory: bytes that PyTorch reports in total; peak, bandwidth: nominal dense bf16 FLOPs and
    nominal bytes per second."""

    name: str
    memory: int
    peak: float
    bandwidth: float
    rates: Mapping[str, Rate]

    def nominal(self) -> "Gpu":
        """With nominal rates: no work takes less time. FP8 products (of experts, of index scores by
        ops.index_scores) are twice as fast as those in bf16, float32 ones are three of them
        (models/common/linear.py), and the host is free."""
        scores = 2 if self.rates["indexer"].backend.endswith("_fp8") else 1
        rates = dict.fromkeys(KINDS, self.peak) | dict.fromkeys(BY_BYTES, self.bandwidth)
        rates |= dict.fromkeys(BY_HOST, math.inf)
        rates |= {"experts fp8": 2 * self.peak, "float32": self.peak / 3}
        rates["indexer"] = scores * self.peak
        return replace(self, rates={kind: Rate(rate, "nominal") for kind, rate in rates.items()})


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second that one GPU receives, and how many GPUs share a node.

    The figures are those of parallel/config.py. host: from and to pinned host memory, four fifths
    of PCIe 5.0 x16's 63 GB/s each way.
    """

    ranks_per_node: int = RANKS_PER_NODE
    nvlink: float = NVLINK_BYTES_PER_SECOND
    network: float = NETWORK_BYTES_PER_SECOND
    host: float = 50e9


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What rows of kernels are chosen by. By kind of work: workspaces in bytes; widths of a row, by
    the names in it; backends, the best first, where they are not those of most."""

    keys: int = 131_072
    workspaces: Mapping[str, int] = field(default_factory=dict)
    widths: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    backends: Mapping[str, Sequence[str]] = field(default_factory=dict)


# op of a row -> the kind of work whose rate it is, where the two are named otherwise
_OPS = {
    "forward": "attention forward",
    "backward": "attention backward",
    "index_topk": "indexer",
}
KINDS = (
    "projections", "products by head", "experts", "experts fp8", "attention forward",
    "attention backward", "indexer", "head", "float32", "elementwise", "permute", "dequantise",
    "waits",
)  # fmt: skip
BY_BYTES = ("elementwise", "permute", "dequantise")
BY_HOST = ("waits",)
BACKENDS = ("hopper", "triton", "deep_gemm")  # whose rates a kind has, the first that has any
# GPU: (GiB as PyTorch reports them, nominal bf16 FLOPs a second, nominal bytes a second).
_NOMINAL = {
    "h200": (139.8, 989e12, 4.8e12),
    "h100": (79.1, 989e12, 3.35e12),
    "b200": (178.4, 2250e12, 8.0e12),
}
NAMES = tuple(_NOMINAL)
HOPPER = ("h200", "h100")  # whose kernels of ops/*/kernels_hopper*.py run nowhere else


def gpu(name: str, shape: Shape | None = None, folder: Path | None = None) -> Gpu:
    """A known GPU with its rates for kernels of `shape`; rows in `folder`/*.jsonl that were
    measured on it come before those that the package has.

    Raises:
        ConfigError: an unknown GPU (it lists the known ones), no rows in the folder, or a line that
            is none.
    """
    name = name.lower()
    if name not in _NOMINAL:
        raise ConfigError(f"no figures for a GPU {name!r}: known are {', '.join(_NOMINAL)}")
    gib, peak, bandwidth = _NOMINAL[name]
    _, base_peak, base_bandwidth = _NOMINAL["h200"]
    known = _read(Path(__file__).with_name("rates.jsonl"))
    paths = sorted(folder.glob("*.jsonl")) if folder else []
    if folder and not paths:
        raise ConfigError(f"{folder} holds no *.jsonl with measured rows (option --rates)")
    own = [row for path in paths for row in _read(path)]
    own = [row for row in own if name in str(row.get("gpu", "")).lower()]
    rates = {}
    for kind in KINDS:
        shape = shape or Shape()
        rate = _rate(kind, own, shape, f"rows of {folder}")
        if rate is None:
            # A model of other widths has the rates of those that were measured.
            other = replace(shape, widths={})
            rate = _rate(kind, known, shape, "rows") or _rate(kind, known, other, "rows")
            assert rate is not None, f"rates.jsonl has no row for {kind}"
            factor = bandwidth / base_bandwidth if kind in BY_BYTES else peak / base_peak
            if name != "h200" and kind not in BY_HOST:
                note = f"; times {factor:.2f}, the ratio of nominal peaks"
                rate = replace(rate, value=rate.value * factor, source=rate.source + note)
        rates[kind] = rate
    memory = int(gib * GIB)
    return Gpu(name=name, memory=memory, peak=peak, bandwidth=bandwidth, rates=rates)


def _rate(kind: str, rows: Sequence[Row], shape: Shape, name: str) -> Rate | None:
    """The median over the rows that are nearest: of the model's widths, of the best backend, with
    random keys rather than neighbours that share theirs, with the nearest number of keys, and then
    the nearest workspace."""
    found = [row for row in rows if _OPS.get(row.get("op", ""), row.get("op")) == kind]
    widths = shape.widths.get(kind, {})
    found = [row for row in found if all(row.get(n, size) == size for n, size in widths.items())]
    found = [row for row in found if _value(row)]
    backends = shape.backends.get(kind, BACKENDS)
    for field_name, order in (("backend", backends), ("ids", ("random",))):
        best = next((b for b in order if any(row.get(field_name) == b for row in found)), None)
        if best is not None:
            found = [row for row in found if row[field_name] == best]

    def distance(row: Row) -> tuple[float, float]:
        workspace = row.get("workspace_gib", 0) * GIB
        wanted = shape.workspaces.get(kind, GIB)
        return abs(row.get("keys", 0) - shape.keys), abs(workspace - wanted)

    if not found:
        return None
    least = min(map(distance, found))
    alike = [row for row in found if distance(row) == least]
    first = alike[0]
    if "source" in first:
        source = first["source"]
    else:
        keys = f", {first['keys']:,} keys" if "keys" in first else ""
        source = f"{len(alike)} of the {name}: {first.get('backend', 'measured')}{keys}"
    return Rate(median(map(_value, alike)), source, first.get("backend", ""))


def _value(row: Row) -> float:
    """FLOPs or bytes a second of a row; 0 where it has none."""
    work = row.get("flops", row.get("bytes", 0))
    return row.get("rate", 0) or (work / row["ms"] * 1e3 if row.get("ms") else 0)


def _read(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append({**json.loads(line)})
        except (ValueError, TypeError):
            raise ConfigError(f"{path}, line {number}: not a row of measurements") from None
    return rows
