"""Compiles kernels without a GPU, and prints one JSON line a kernel.

    python scripts/compile_report.py hopper    registers, spilled bytes, shared memory, and whether
                                               ptxas had to serialise tensor instructions
    python scripts/compile_report.py plain     shared memory against what the device class has
    python scripts/compile_report.py rows      the same of those that only move values, and accesses
                                               to memory that are narrower than 16 bytes

Needs Triton 3.6 with the CUDA tools that it ships.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from fullspan.ops.expert_products.kernels import round_rows_kernel
from fullspan.ops.fp8.kernels import dequantise_kernel
from fullspan.ops.index_topk import kernels_hopper as index
from fullspan.ops.index_topk.hopper_backend import BF16 as BF16_SCORES
from fullspan.ops.index_topk.hopper_backend import FP8 as FP8_SCORES
from fullspan.ops.rows import kernels as of_rows
from fullspan.ops.sparse_attention import kernels_hopper_backward as backward
from fullspan.ops.sparse_attention import kernels_hopper_forward as forward
from fullspan.ops.sparse_attention import kernels_hopper_shared as shared
from fullspan.ops.sparse_attention.kernels_backward import dquery_kernel
from fullspan.ops.sparse_attention.kernels_forward import forward_kernel
from fullspan.ops.sparse_attention.launch import device_tiles

BF16, FP32, INT32, INT64 = "*bf16", "*fp32", "*i32", "*i64"
Entry = tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]


def tiles(rows: int, columns: int, swizzle: int = 128, element: str = "bf16") -> str:
    """The type of a TMA descriptor."""
    bits = 16 if element == "bf16" else 8
    layout = f"swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank=2, transposed=False"
    layout += ", fp4_padded=False, cga_layout=[]"
    return f"tensordesc<{element}[{rows}, {columns}],NVMMASharedLayout({layout})>"


def forward_kernels() -> Iterator[Entry]:
    """The forward for 64 and 128 heads, and without rope but with a sink."""
    types = {"FLAGS": INT32, "Q": BF16, "KV": BF16, "IDS": INT32, "COUNT": INT32, "SINK": FP32}
    types |= {"OUT": BF16, "LSE": FP32, "scale_log2": "fp32", "S": "i32"}
    for name, tiles_of_heads, rope in (("64", 1, True), ("128", 2, True), ("512", 1, False)):
        fixed = {"K": 2048, "BK": 64, "HT": tiles_of_heads, "ROPE": rope, "WORDS": 1}
        fixed["HAS_SINK"] = not rope
        yield f"forward {name}", forward.forward_kernel, types, fixed, {"maxnreg": 128}


def score_kernels() -> Iterator[Entry]:
    """Index scores in bf16 and fp8, with the values of their launcher."""
    types = {"W": FP32, "KS": FP32, "TAU": FP32, "SEGS": INT64}
    types |= dict.fromkeys(("START", "END", "BASE", "BEND", "NUM"), INT32)
    numbers = ("row0", "s_q", "s_kv", "lo", "span", "T", "ntiles", "seg_stride", "num_stride")
    types |= dict.fromkeys(numbers, "i32")
    for name, element, tuned in (("bf16", "bf16", BF16_SCORES), ("fp8", "fp8e4nv", FP8_SCORES)):
        queries, keys = (tiles(rows, 128, element=element) for rows in (64, 128))
        fixed = {"HI": 32, "BQ": 64, "FP8": name == "fp8", "GATE": True, **tuned}
        yield (
            f"scores {name}", index.score_kernel, types | {"qd": queries, "kd": keys}, fixed, {}
        )  # fmt: skip


def kernels() -> Iterator[Entry]:
    """Name, kernel, types of its arguments, compile-time values, compiler options."""
    yield from forward_kernels()
    types = {
        "QD": tiles(64, 128),
        "QRD": tiles(64, 64),
        "DOD": tiles(64, 128),
        "DQD": tiles(64, 128),
    }
    types |= {
        "DQRD": tiles(64, 64),
        "PD": tiles(64, 64),
        "SD": tiles(64, 64),
        "KV": BF16,
        "IDS": INT32,
    }
    types |= {
        "LIMIT": INT32,
        "LSE": FP32,
        "DELTA": FP32,
        "q0": "i32",
        "scale": "fp32",
        "scale_log2": "fp32",
    }
    types |= {"MODE": INT32, "PART": BF16, "step": "i32"}
    for name, fuse in (("dquery", False), ("dquery fused", True)):
        fixed = {"K": 2048, "HT": 1, "ROPE": True, "GROUP": 16, "FUSE": fuse, "R1": 232, "R2": 32}
        yield name, backward.dquery_kernel, types, fixed, {}
    types = dict.fromkeys(("QD", "GD"), tiles(64, 128))
    types |= dict.fromkeys(("QXD", "GXD"), tiles(64, 64))
    types |= dict.fromkeys(("PROB", "DSCORE", "PART"), BF16)
    types |= dict.fromkeys(("SLOTS", "SHARED", "ACTIVE", "ACTIVE_COUNT"), INT32)
    types |= dict.fromkeys(("row0", "step", "items"), "i32")
    fixed = {"TOPK": 2048, "GROUP": 16, "BLOCKS": 12, "R1": 224, "R2": 56}
    for name, width, heads in (("", 576, 1), (" 128", 576, 2), (" 512", 512, 1)):
        own = fixed | {"D": width, "HT": heads}
        yield f"shared keys{name}", shared.shared_kernel, types, own, {}
    yield from score_kernels()


def compiled(
    source: Any,
    kernel: Any,
    types: dict[str, str],
    fixed: dict[str, Any],
    options: dict[str, int],
    arch: int,
    multiples: Sequence[str] = (),
) -> Any:
    """A kernel compiled for sm_`arch`; pointers and the arguments in `multiples` are taken to be
    multiples of 16."""
    order = kernel.arg_names
    full = {argument: types.get(argument, "constexpr") for argument in order}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(order)
        if full[n].startswith("*") or n in multiples
    }
    constants = {(order.index(argument),): value for argument, value in fixed.items()}
    text = source(fn=kernel, signature=full, constexprs=constants, attrs=aligned)
    return triton.compile(text, target=GPUTarget("cuda", arch, 32), options=options)


def report(
    name: str, kernel: Any, types: dict[str, str], fixed: dict[str, Any], options: dict[str, int]
) -> dict[str, Any]:
    """What ptxas says of one kernel."""
    built = compiled(GluonASTSource, kernel, types, fixed, {"num_warps": 4, **options}, 90)
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(built.asm["ptx"], encoding="utf-8")
        command = [ptxas, "-arch=sm_90a", "-v", path, "-o", path.with_suffix(".o")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "kernel": name,
        "registers": max(map(int, re.findall(r"Used (\d+) registers", said))),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
        "shared": built.metadata.shared,
        "serialised": "C7512" in said,
    }


DEVICES = {
    80: 163,
    86: 99,
    90: 227,
    100: 227,
    120: 99,
}  # KiB of shared memory that a block can have


def plain_reports() -> Iterator[dict[str, Any]]:
    """Shared memory of the largest plain kernels of sparse attention on every device class."""
    forward_types = {"QUERY": BF16, "KV": BF16, "IDS": INT32, "COUNTS": INT32, "SINK": FP32}
    forward_types |= {"OUT": BF16, "LSE": FP32, "pack": "i32", "scale_log2": "fp32"}
    dquery_types = {"QUERY": BF16, "KV": BF16, "IDS": INT32, "COUNTS": INT32, "GRAD": BF16}
    dquery_types |= {"LSE": FP32, "DELTA": FP32, "DQUERY": BF16, "PROB": BF16, "DSCORE": BF16}
    dquery_types |= {"row0": "i32", "pack": "i32", "scale": "fp32"}
    for arch, limit in DEVICES.items():
        sizes = device_tiles(limit * 1024, arch // 10)
        fixed = {"HEADS": 64, "TOPK": 2048, "DV": 512, "DR": 64, "DVP": 512, "DRP": 64}
        fixed |= {"HB": sizes.heads, "BK": sizes.keys, "PRECISION": "tf32"}
        for name, kernel, types, own, (stages, warps) in (
            ("forward", forward_kernel, forward_types, {"HAS_SINK": False}, sizes.forward),
            ("dquery", dquery_kernel, dquery_types, {"HP": 64}, sizes.dquery),
        ):
            values = fixed | own | {"STAGES": stages}
            options = {"num_warps": warps, "num_stages": stages}
            built = compiled(ASTSource, kernel, types, values, options, arch)
            row = {"kernel": f"{name} sm_{arch}", "shared": built.metadata.shared}
            yield row | {"limit": limit * 1024}


def row_kernels() -> Iterator[Entry]:
    """Kernels whose time is that of the memory they read and write."""
    strides = [f"{tensor}_{axis}" for tensor in "wso" for axis in ("outer", "inner", "row")]
    types = {"WEIGHT": "*fp8e4nv", "SCALE": FP32, "OUT": BF16, **dict.fromkeys(strides, "i64")}
    types |= dict.fromkeys(("rows", "cols", "row_tiles", "col_tiles", "inner"), "i32")
    fixed = {"BR": 128, "BC": 128, "TR": 128, "TC": 128, "w_col": 1, "s_col": 1, "o_col": 1}
    yield "dequantise", dequantise_kernel, types, fixed, {"num_warps": 8}
    types = {"COUNTS": INT64, "PLACE": INT64, "EXPERT": INT32, "SCALE": FP32}
    types |= {"BLOCK_SCALE": FP32, "OUT": "*fp8e4nv"}
    types |= dict.fromkeys(("x_row", "scale_row", "scale_group", "width", "experts"), "i32")
    part, row = {"ROWS": 8, "GROUPS": 8, "PARTS": 6}, {"ROWS": 1, "GROUPS": 64, "PARTS": 1}
    for name, value, more in (
        ("spread", BF16, part | {"PADDED": True, "WHOLE": False, "SCALED": False}),
        ("again", "*fp8e4nv", row | {"PADDED": False, "WHOLE": True, "SCALED": True}),
    ):
        fixed = {"EXPERTS": 32, "ALIGN": 128, **more}
        yield name, round_rows_kernel, types | {"X": value}, fixed, {"num_warps": 8}
    tensors = ("X", "GATE", "UP", "GRAD", "OUT", "DX", "DGATE", "DUP", "WEIGHT")
    types = dict.fromkeys(tensors, BF16) | {"INDEX": INT64, "eps": "fp32"}
    types |= dict.fromkeys(("WEIGHTS", "DWEIGHTS", "RSTD"), FP32)
    strides = ("x_row", "gate_row", "up_row", "grad_row", "dgate_row", "dup_row")
    types |= dict.fromkeys(strides, "i32")
    for name, kernel, width, more, warps in (
        ("gather", of_rows.gather_rows_kernel, 6144, {"COUNT": 1}, 8),
        ("sum", of_rows.gather_rows_kernel, 6144, {"COUNT": 8}, 8),
        ("swiglu", of_rows.swiglu_kernel, 2048, {"WEIGHTED": True}, 8),
        ("swiglu backward", of_rows.swiglu_backward_kernel, 2048, {"WEIGHTED": True}, 8),
        ("norm", of_rows.rms_norm_kernel, 6144, {"BLOCK": 8192}, 8),
        ("norm backward", of_rows.rms_norm_backward_kernel, 6144, {"BLOCK": 8192}, 8),
    ):
        values = {"WIDTH": width, "BLOCK": 2048, **more}
        known = {a: types[a] for a in kernel.arg_names if a in types}
        yield name, kernel, known, values, {"num_warps": warps}


def row_reports() -> Iterator[dict[str, Any]]:
    """Of every kernel on Hopper and Blackwell. What belongs to a whole row or block (a scale, an
    index, a sum) is narrow."""
    for name, kernel, types, fixed, options in row_kernels():
        numbers = [argument for argument, kind in types.items() if kind.startswith("i")]
        for arch in (90, 100, 120):
            built = compiled(ASTSource, kernel, types, fixed, options, arch, numbers)
            accesses = re.findall(r"(?:ld|st)\.global\S*", built.asm["ptx"])
            wide = [access for access in accesses if re.search(r"v4\.b32|v2\.b64", access)]
            row = {"kernel": f"{name} sm_{arch}", "shared": built.metadata.shared}
            row |= {"limit": DEVICES[arch] * 1024, "wide": len(wide)}
            yield row | {"narrow": len(accesses) - len(wide)}


def main() -> int:
    """Report the kernels of one kind."""
    if sys.argv[1:] == ["hopper"]:
        rows = (report(*entry) for entry in kernels())
    elif sys.argv[1:] == ["plain"]:
        rows = plain_reports()
    elif sys.argv[1:] == ["rows"]:
        rows = row_reports()
    else:
        print(__doc__)
        return 2
    for row in rows:
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
