"""Measures the rates that `fullspan plan` prices work with, on one GPU: a row a kind and shape, of
GLM-5.2's widths.

    python -m benchmarks.rates --out benchmarks/results/rates_h200.jsonl --commit COMMIT

Kinds are those of planning/hardware.py; attention and indexer are measured by run.py. Beside them
what pinned host memory costs and gives (train.offload_inputs). `fullspan plan --rates` takes the
folder as it is, and planning/rates.jsonl is where rows that hold go. Takes a minute.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.run import machine, measure
from fullspan.models.common.host_inputs import PIECE_BYTES, HostMemory
from fullspan.models.common.linear import grouped_linear
from fullspan.ops.fp8.op import E4M3, dequantise_blocks
from fullspan.ops.linear_cross_entropy.op import linear_cross_entropy
from fullspan.ops.options import OpOptions
from fullspan.ops.rows.op import gather_rows, rms_norm, swiglu

# (kind, shape in words, "flops" or "bytes", how many, call)
Case = tuple[str, str, str, float, Callable[[], object]]
HIDDEN, Q_LATENT, LATENT, HEADS, NOPE, VALUE = 6144, 2048, 512, 64, 192, 256
INNER, CHOSEN, HELD = 2048, 8, 8


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02


def products(rows: int) -> Iterator[Case]:
    """Frozen products, each way that the passes use them."""
    for out, inner in ((Q_LATENT, HIDDEN), (HEADS * 256, Q_LATENT), (HIDDEN, HEADS * VALUE)):
        x, weight, grad = _bf16(rows, inner), _bf16(out, inner), _bf16(rows, out)
        flops = 2.0 * rows * out * inner
        yield (
            "projections",
            f"{inner} -> {out}",
            "flops",
            flops,
            lambda x=x, w=weight: F.linear(x, w),
        )
        yield "projections", f"{out} <- {inner}", "flops", flops, lambda g=grad, w=weight: g @ w
    for inner, out in ((NOPE, LATENT), (LATENT, VALUE)):
        x, weight = _bf16(rows, HEADS, inner).transpose(0, 1), _bf16(HEADS, inner, out)
        flops = 2.0 * rows * HEADS * inner * out
        name = f"{HEADS} x {inner} -> {out}"
        yield "products by head", name, "flops", flops, lambda x=x, w=weight: torch.bmm(x, w)
    slots = rows * CHOSEN
    counts = torch.full((HELD,), slots // HELD, device="cuda")
    for inner, out in ((HIDDEN, 2 * INNER), (INNER, HIDDEN)):
        x, weight = _bf16(slots, inner), _bf16(HELD, out, inner)
        flops = 2.0 * slots * inner * out
        name = f"{HELD} experts, {inner} -> {out}"
        yield "experts", name, "flops", flops, lambda x=x, w=weight: grouped_linear(x, w, counts)
    x, weight = _bf16(rows, HIDDEN).float(), _bf16(256, HIDDEN).float()
    yield "float32", "router", "flops", 2.0 * rows * 256 * HIDDEN, lambda: F.linear(x, weight)


def head(rows: int) -> Iterator[Case]:
    """Loss and gradient of every row."""
    vocab, options = 154_880, OpOptions()
    x, weight = _bf16(rows, HIDDEN).requires_grad_(), _bf16(vocab, HIDDEN)
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    flops = 4.0 * rows * vocab * HIDDEN
    yield (
        "head",
        f"{vocab} words",
        "flops",
        flops,
        lambda: linear_cross_entropy(x, weight, labels, options=options),
    )


def moved(rows: int) -> Iterator[Case]:
    """Bytes read and written."""
    item, slots = 2, rows * CHOSEN
    x, y, weight = _bf16(rows, HIDDEN), _bf16(rows, HIDDEN), _bf16(HIDDEN)
    size = float(rows * HIDDEN * item)
    yield "elementwise", "norm", "bytes", 2 * size, lambda: rms_norm(x, weight, 1e-6)
    yield "elementwise", "sum", "bytes", 3 * size, lambda: x + y
    gate, up = _bf16(rows, 12_288), _bf16(rows, 12_288)
    yield "elementwise", "gated", "bytes", 3.0 * gate.nbytes, lambda: swiglu(gate, up)
    key, rope = _bf16(HEADS, rows, LATENT).transpose(0, 1), _bf16(rows, HEADS, 64)
    joined = 2.0 * (key.nbytes + rope.nbytes)
    yield "elementwise", "query joined", "bytes", joined, lambda: torch.cat([key, rope], dim=-1)
    value = _bf16(HEADS, rows, VALUE).transpose(0, 1)
    yield "elementwise", "output flattened", "bytes", 2.0 * value.nbytes, lambda: value.flatten(1)
    order = torch.randperm(slots, device="cuda")
    back = torch.empty_like(order)
    back[order] = torch.arange(slots, device="cuda")
    into, out_of = (order // CHOSEN)[:, None], back.view(rows, CHOSEN)
    wide = _bf16(slots, HIDDEN)
    yield (
        "permute",
        "rows to slots",
        "bytes",
        2.0 * wide.nbytes,
        lambda: gather_rows(x, into, out_of),
    )
    both = 2.0 * wide.nbytes
    yield (
        "permute",
        "slots",
        "bytes",
        both,
        lambda: gather_rows(wide, order[:, None], back[:, None]),
    )
    few = float(wide.nbytes + x.nbytes)
    yield "permute", "slots to rows", "bytes", few, lambda: gather_rows(wide, out_of, into)
    values = torch.randn(HELD, 2 * INNER, HIDDEN, device="cuda").to(E4M3)
    scale = torch.rand(HELD, 2 * INNER // 128, HIDDEN // 128, device="cuda")
    name = f"{HELD} experts"
    yield (
        "dequantise",
        name,
        "bytes",
        3.0 * values.numel(),
        lambda: dequantise_blocks(values, scale, (128, 128), torch.bfloat16),
    )


def host(pieces: int) -> Iterator[dict[str, object]]:
    """Seconds to pin memory, and its copies each way, alone and beside a product."""
    memory = HostMemory(torch.device("cuda"))
    size = pieces * PIECE_BYTES
    begin = time.perf_counter()
    memory.reserve(1, size)
    seconds = time.perf_counter() - begin
    yield {"op": "pin host memory", "bytes": size, "ms": round(seconds * 1e3, 3)}
    tensor, taken = torch.empty(size, dtype=torch.uint8, device="cuda"), memory.take(size)
    x = _bf16(8192, 8192)
    for beside in (False, True):
        for back in (False, True):
            for _ in range(2):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                done = memory.copy(tensor, taken, back=back)
                assert done is not None
                products = 0
                while beside and not done.query() and products < 1000:
                    x @ x
                    products += 1
                done.synchronize()
                seconds = time.perf_counter() - begin
                torch.cuda.synchronize()
            op = "from host" if back else "to host"
            yield {"op": op, "bytes": size, "beside": beside, "ms": round(seconds * 1e3, 3)}


def main() -> int:
    """Measure everything."""
    parser = argparse.ArgumentParser(description="Measure the rates of a plan on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--host-pieces", type=int, default=64, help="of 64 MiB")
    given = parser.parse_args()
    fixed = machine(given.commit)
    begin = time.monotonic()

    def write(row: dict[str, object]) -> None:
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | fixed) + "\n")
        rate = float(str(row.get("flops", row.get("bytes")))) / float(str(row["ms"])) / 1e9
        unit = "TFLOP/s" if "flops" in row else "TB/s"
        name = f"{row['op']}, {row.get('shape', '')}{' beside products' * bool(row.get('beside'))}"
        print(f"{name:44} {row['ms']:10.3f} ms {rate:9.3f} {unit}", flush=True)

    for make in (products, head, moved):
        for op, shape, unit, work, call in make(given.rows):
            times = measure(call, 50, 100)
            write({"op": op, "shape": shape, "rows": given.rows, unit: work, **times})
        torch.cuda.empty_cache()
    for row in host(given.host_pieces):
        write(row)
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
