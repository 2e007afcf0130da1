"""Measures the kernels on one NVIDIA GPU and appends a row a measurement to a JSON-lines file.

    python benchmarks/run.py --out benchmarks/results/h200.jsonl --commit "$(git rev-parse HEAD)"
    python benchmarks/run.py --cases benchmarks/short.toml --compile --warm 100 --repeat 200 ...

Cases are data (cases.toml; short.toml has the aims of the Hopper kernels, for one and a half
minutes; optional.toml the optional backends beside them). Times are medians over at least half a
second of runs back to back, after a quarter of a second of warm-up, the cache flushed between runs:
sustained clocks. report.py makes the tables. Left out: whole training steps.
"""

import argparse
import datetime
import gc
import importlib.metadata
import itertools
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from fullspan.ops.index_topk import cudnn_backend as index_cudnn
from fullspan.ops.index_topk import hopper_backend as index_hopper
from fullspan.ops.index_topk import triton_backend as index_triton
from fullspan.ops.index_topk.op import index_topk
from fullspan.ops.options import OpOptions
from fullspan.ops.selection import Selection
from fullspan.ops.sparse_attention import flash_mla_backend, hopper_backend, triton_backend
from fullspan.ops.sparse_attention.chunks import choose_rows
from fullspan.ops.sparse_attention.op import AttentionCall, row_products

ROUNDED = "hopper_fp8_of_bf16"  # by ops.index_scores, which rounds the inputs first
CASES = Path(__file__).parent / "cases.toml"
VALUE = 512
FORWARD = {
    "hopper": hopper_backend.forward,
    "triton": triton_backend.forward,
    "flash_mla": flash_mla_backend.forward,  # has this pass alone
    "cudnn": hopper_backend.forward,  # has the other one
}
INDEX = {
    "hopper": index_hopper.index_topk,
    "triton": index_triton.index_topk,
    "cudnn": index_cudnn.index_topk,
}
PACKAGES = {"flash_mla": ("sglang-kernel", "flash_mla"), "cudnn": ("nvidia-cudnn-frontend",)}
# What one H200 gives, TFLOP/s: nominal dense rates; a floor is work over these.
PEAK = {"bf16": 989.0, "fp8": 1979.0}
FORMULA = {
    "forward": "2*rows*topk*heads*(qk+512)",
    "backward": "2*rows*topk*heads*(3*qk+2*512)",
    "backward_planned": "2*rows*topk*heads*(3*qk+2*512)",
    "index_topk": "2*pairs*heads*128",
}

Case = dict[str, Any]
Run = Callable[[], Any]


def cases(path: Path, op: str) -> Iterator[Case]:
    """Every combination of every entry of op."""
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get(op, []):
        for values in itertools.product(*entry.values()):
            yield dict(zip(entry, values))


def compile_apart(path: Path, wanted: str | None, only: str) -> None:
    """Fill Triton's cache: a process for each op and backend, side by side, runs each kernel."""
    started = []
    for op in RUNS if wanted is None else (wanted,):
        for backend in sorted({case["backend"] for case in cases(path, op)}):
            command = [sys.executable, __file__, "--cases", path, "--op", op, "--only", only]
            command += ["--backend", backend, "--repeat", "0", "--out", "unused"]
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    for process in started:
        if process.wait():
            print("did not compile:", process.args, process.returncode, flush=True)


def choose_ids(case: Case) -> torch.Tensor:
    """int32 [rows, topk], ascending."""
    rng = torch.Generator(device="cuda").manual_seed(0)
    rows, keys, topk = case["rows"], case["keys"], case["topk"]
    out = torch.empty(rows, topk, dtype=torch.int32, device="cuda")
    block = 64
    for first in range(0, rows, block):
        here = min(block, rows - first)
        if case["ids"] == "overlapping":
            pool = torch.rand(keys, generator=rng, device="cuda").topk(topk * 5 // 4).indices
            at = torch.rand(here, pool.numel(), generator=rng, device="cuda").topk(topk, 1).indices
            ids = pool[at]
        else:
            ids = torch.rand(here, keys, generator=rng, device="cuda").topk(topk, 1).indices
        out[first : first + here] = ids.sort(1).values.int()
    return out


def attention_runs(case: Case) -> Iterator[tuple[str, float, Run]]:
    """(what, floating point operations, call) for the forward, the backward and the plan."""
    rng = torch.Generator(device="cuda").manual_seed(1)
    rows, heads, qk, topk = case["rows"], case["heads"], case["qk"], case["topk"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=rng)

    query, kv, grad = normal(rows, heads, qk), normal(case["keys"], qk), normal(rows, heads, VALUE)
    ids = choose_ids(case)
    counts = torch.full((rows,), topk, dtype=torch.int32, device="cuda")
    name, workspace = case["backend"], case["workspace_gib"] << 30
    inputs = (query, kv, ids, counts, None, qk**-0.5, VALUE, workspace)
    out, lse = FORWARD[name](*inputs)
    work = 2.0 * rows * topk * heads
    if name != "cudnn":
        yield "forward", work * (qk + VALUE), lambda: FORWARD[name](*inputs)
    if name == "flash_mla":
        return
    work *= 3 * qk + 2 * VALUE

    dkv = torch.empty(kv.shape, device="cuda")

    def backward(selection: Selection, *, last: bool) -> None:
        call = AttentionCall(
            selection=selection, pack=case["keys"], heads=heads, qk=qk, value_dim=VALUE,
            dtype=query.dtype, scale=qk**-0.5, backend=name, workspace=workspace,
            last=last,
        )  # fmt: skip
        delta = row_products(grad, out, name)
        for span in call.spans:
            call.backward(span, grad[span], query[span], kv, delta[span], lse[span], dkv)

    yield "backward", work, lambda: backward(Selection(ids, counts), last=True)
    if name == "cudnn":
        return
    backend = hopper_backend if name == "hopper" else triton_backend
    sizes = backend.sizes(query.device, query.dtype, (heads, qk, topk), VALUE, case["keys"], 0)
    chunk, _, block = choose_rows(sizes, rows, workspace)

    def plan_all() -> None:
        for first in range(0, rows, block):
            part = slice(first, first + block)
            backend.plan(ids[part], counts[part], sizes, chunk)

    yield "plan", 0.0, plan_all
    planned = Selection(ids, counts)
    backward(planned, last=False)
    if planned.plans:
        yield "backward_planned", work, lambda: backward(planned, last=False)


def index_runs(case: Case) -> Iterator[tuple[str, float, Run]]:
    """(what, floating point operations, call)."""
    rng = torch.Generator(device="cuda").manual_seed(1)
    rows, keys, heads = case["rows"], case["keys"], case["heads"]
    name, _, scores = case["backend"].partition("_")
    fp8 = scores == "fp8"
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    query = torch.randn(rows, heads, 128, generator=rng, device="cuda").to(kind)
    key = torch.randn(keys, 128, generator=rng, device="cuda").to(kind)
    weights = torch.randn(rows, heads, generator=rng, device="cuda") * 0.05
    scale = [torch.rand(keys, generator=rng, device="cuda") + 0.5] if fp8 else []
    end = torch.arange(keys - rows + 1, keys + 1, device="cuda")
    start = torch.zeros_like(end) if case["ranges"] == "last" else (end - 1) // 8192 * 8192
    work = 2.0 * float((end - start).sum()) * heads * 128
    if case["backend"] == ROUNDED:
        options = OpOptions(index_scores="fp8", workspace_bytes=case["workspace_gib"] << 30)
        given = (query, key, weights, start, end)
        yield "index_topk", work, lambda: index_topk(*given, topk=case["topk"], options=options)
        return
    inputs = (query, key, weights, start, end, case["topk"], case["workspace_gib"] << 30, *scale)
    yield "index_topk", work, lambda: INDEX[name](*inputs)


RUNS = {"sparse_attention": attention_runs, "index_topk": index_runs}


def measure(call: Run, warm: int, repeat: int) -> dict[str, float] | None:
    """Milliseconds (median, 10th, 90th percentile), and peak bytes above what was there before.
    None for no repeats: the kernels are compiled then."""
    call()
    torch.cuda.synchronize()
    if not repeat:
        return None
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    quantiles = triton.testing.do_bench(call, warmup=warm, rep=repeat, quantiles=[0.5, 0.1, 0.9])
    median, low, high = (round(float(value), 4) for value in quantiles)
    return {"ms": median, "ms_p10": low, "ms_p90": high, "peak_bytes": peak}


def package(backend: str) -> dict[str, str]:
    """The package and version behind an optional backend, for its rows."""
    for name in PACKAGES.get(backend.removesuffix("_fp8"), ()):
        try:
            return {"package": f"{name} {importlib.metadata.version(name)}"}
        except importlib.metadata.PackageNotFoundError:
            continue
    return {}


def machine(commit: str) -> dict[str, str]:
    """Hardware and versions, the same for every row of a run."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main() -> int:
    """Measure every case, or those of --op and --only."""
    parser = argparse.ArgumentParser(description="Measure the kernels on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--op", choices=tuple(RUNS))
    parser.add_argument("--backend")
    parser.add_argument("--only", default="", help="cases whose text holds this")
    parser.add_argument("--compile", action="store_true", help="in parallel, before measuring")
    parser.add_argument("--warm", type=int, default=250, help="milliseconds")
    parser.add_argument("--repeat", type=int, default=500, help="milliseconds; 0: only compile")
    given = parser.parse_args()
    if given.compile:
        compile_apart(given.cases, given.op, given.only)
    fixed = machine(given.commit)
    for op, runs in RUNS.items():
        for case in cases(given.cases, op) if given.op in (None, op) else ():
            if given.only not in json.dumps(case) or given.backend not in (None, case["backend"]):
                continue
            if not given.repeat and case.get("ids") == "random":
                continue  # the kernels are those of overlapping ids
            for what, work, call in runs(case):
                measured = measure(call, given.warm, given.repeat)
                if measured is None:
                    continue
                row = {"op": what, **case, **measured, **fixed, **package(case["backend"])}
                if work:
                    rate = PEAK["fp8" if "fp8" in case["backend"] else "bf16"]
                    row |= {"flops": work, "formula": FORMULA[what]}
                    row["tflops"] = round(work / row["ms"] / 1e9, 1)
                    row["peak_share"] = round(row["tflops"] / rate, 3)
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    what,
                    case,
                    row["ms"],
                    row.get("tflops", ""),
                    row["peak_bytes"] >> 20,
                    flush=True,
                )
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
