"""Which implementation of an op runs, and why. A named backend that cannot run raises; nothing
falls back to another one.

The registry is the dict below: op -> {name: check}, in the order in which "auto" tries them. A
check says why the backend cannot run on a device and dtype, or gives None when it can. It is told
the widths where they are known, since some kernels are made for the widths of one family.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fullspan.errors import BackendError
from fullspan.ops.options import OPTIONAL, OpOptions

logger = logging.getLogger(__name__)

Widths = Mapping[str, int]  # by name: index_dim, qk, value_dim, topk; what is not known is left out
Check = Callable[[torch.device, torch.dtype, Widths], str | None]

# Gluon's interface moves between releases: the one that the kernels are tested with.
GLUON_TRITON = "3.6"
E4M3 = torch.float8_e4m3fn
MOST_TOPK = 4096  # keys of a row that the Triton kernels hold in registers
UNREPEATABLE = ("sparse_attention", "cudnn")
_FORWARD = ": forward and recompute in FP8, rows rounded to e4m3; gradients as in bf16"
NOTES = {
    ("sparse_attention", "flash_mla"): ": its forward pass, hopper's backward",
    ("expert_products", "deep_gemm"): _FORWARD,
    ("expert_products", "scaled_grouped_mm"): _FORWARD,
    UNREPEATABLE: ": its backward pass, hopper's forward. It adds with float atomics: gradients "
    "differ in their last bits from run to run, and a resumed run from an uninterrupted one",
}
FLASH_MLA = ("flashmla_ops", "flash_mla", "sgl_kernel")  # modules that bring its operator
CUDNN = (1, 32)  # the first cuDNN frontend whose top-k has an order


def _check_reference(device: torch.device, dtype: torch.dtype, widths: Widths) -> str | None:
    allowed = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return None if dtype in allowed else f"computes in floating point, not in {dtype}"


def _check_nvidia(device: torch.device) -> str | None:
    cuda = device.type == "cuda" and torch.version.cuda is not None
    return None if cuda else f"needs an NVIDIA GPU, not {device}"


def _check_triton(device: torch.device, dtype: torch.dtype, widths: Widths) -> str | None:
    refusal = _check_nvidia(device)
    if refusal:
        return refusal
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 or newer"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"computes in bfloat16, float16 and float32, not in {dtype}"
    if widths.get("topk", 0) > MOST_TOPK:
        return f"holds {MOST_TOPK} keys a row at most, not {widths['topk']}"
    return None


def _check_sm90(
    fixed: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype, widths: Widths
) -> str | None:
    refusal = _check_nvidia(device)
    if refusal:
        return refusal
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if dtype != torch.bfloat16:
        return f"computes in bfloat16, not in {dtype}"
    for name, allowed in fixed.items():
        if widths.get(name, allowed[0]) not in allowed:
            return f"needs {name} {' or '.join(map(str, allowed))}, not {widths[name]}"
    return None


def _check_hopper(
    fixed: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype, widths: Widths
) -> str | None:
    refusal = _check_triton(device, dtype, widths) or _check_sm90(fixed, device, dtype, widths)
    if refusal:
        return refusal
    version = importlib.metadata.version("triton")
    if not version.startswith(f"{GLUON_TRITON}."):
        return f"needs triton {GLUON_TRITON}, not {version}"
    return None


def _check_flash_mla(device: torch.device, dtype: torch.dtype, widths: Widths) -> str | None:
    refusal = _check_hopper_attention(device, dtype, widths)
    if refusal or any(importlib.util.find_spec(name) for name in FLASH_MLA):
        return refusal
    return "needs FlashMLA, which is not here: pip install sglang-kernel (docs/benchmarks.md)"


def _check_cudnn(
    check: Check, device: torch.device, dtype: torch.dtype, widths: Widths
) -> str | None:
    refusal = check(device, dtype, widths)
    if refusal:
        return refusal
    least = ".".join(map(str, CUDNN))
    how = f"pip install 'nvidia-cudnn-frontend>={least}' (docs/benchmarks.md)"
    try:
        version = importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        return f"needs the cuDNN frontend, which is not here: {how}"
    old = tuple(map(int, re.findall(r"\d+", version)[:2])) < CUDNN
    return f"needs the cuDNN frontend {least} or newer, not {version}: {how}" if old else None


def _check_cudnn_index(device: torch.device, dtype: torch.dtype, widths: Widths) -> str | None:
    most = 2048
    if widths.get("topk", 0) > most:
        return f"chooses {most} keys a row at most, not {widths['topk']}"
    return _check_cudnn(
        functools.partial(_check_sm90, {"index_dim": (128,)}), device, dtype, widths
    )


def _check_fp8(device: torch.device, dtype: torch.dtype, widths: Widths) -> str | None:
    refusal = _check_triton(device, dtype, {})
    if refusal:
        return refusal
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "needs compute capability 8.9 or newer, whose hardware converts e4m3"
    return None


def _check_deep_gemm(device: torch.device, dtype: torch.dtype, widths: Widths) -> str | None:
    refusal = _check_fp8_products(device, dtype, widths)
    if refusal:
        return refusal
    try:
        importlib.import_module("deep_gemm").m_grouped_fp8_gemm_nt_contiguous  # noqa: B018
    except (ImportError, AttributeError, AssertionError, OSError, RuntimeError) as error:
        said = str(error.__cause__ or error).partition("\n")[0] or type(error).__name__
        return (
            f"needs DeepGEMM and cannot import it ({said}): pip install sgl-deep-gemm, of a "
            f"release for torch {torch.__version__} (docs/benchmarks.md)"
        )
    return None


def _check_fp8_products(device: torch.device, dtype: torch.dtype, widths: Widths) -> str | None:
    return _check_triton(device, dtype, {}) or _check_sm90({}, device, dtype, widths)


def _check_index(
    check: Check, device: torch.device, dtype: torch.dtype, widths: Widths
) -> str | None:
    """Scores of e4m3 queries and keys where those of bf16 ones can be."""
    return check(device, torch.bfloat16 if dtype == E4M3 else dtype, widths)


_check_hopper_index = functools.partial(_check_hopper, {"index_dim": (128,)})
_check_hopper_attention = functools.partial(_check_hopper, {"qk": (576, 512), "value_dim": (512,)})

BACKENDS: dict[str, dict[str, Check]] = {
    "index_topk": {
        "hopper": functools.partial(_check_index, _check_hopper_index),
        "triton": _check_triton,
        "reference": functools.partial(_check_index, _check_reference),
        "cudnn": functools.partial(_check_index, _check_cudnn_index),
    },
    "sparse_attention": {
        "hopper": _check_hopper_attention,
        "triton": _check_triton,
        "reference": _check_reference,
        "flash_mla": _check_flash_mla,
        "cudnn": functools.partial(_check_cudnn, _check_hopper_attention),
    },
    "fp8": {"triton": _check_fp8, "reference": _check_reference},
    "rows": {"triton": _check_triton, "reference": _check_reference},
    "expert_products": {
        "bf16": _check_reference,
        "reference": _check_reference,
        "deep_gemm": _check_deep_gemm,
        "scaled_grouped_mm": _check_fp8_products,
    },
}


def on_first_call(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of a module that is imported when it is first called."""

    def call(*arguments: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments)

    return call


def resolve(
    options: OpOptions, device: torch.device, dtype: torch.dtype, **widths: int
) -> OpOptions:
    """Options with a backend that runs on device and dtype in place of every "auto".

    widths: index_dim, qk, value_dim and topk, as far as known. Raises BackendError, with every
    known backend and what is against it, when the named one or all of them cannot run.
    """
    known = tuple(sorted(widths.items()))
    kinds = dict.fromkeys(BACKENDS, dtype)
    if options.index_scores == "fp8":
        kinds["index_topk"] = E4M3
    chosen = {op: choose(op, getattr(options, op), device, kinds[op], known) for op in BACKENDS}
    return replace(options, **chosen)


@functools.cache  # so that a choice is logged once and costs nothing per layer
def choose(
    op: str,
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    widths: tuple[tuple[str, int], ...] = (),
) -> str:
    """The backend of one op, see `resolve`."""
    known = {n: c for n, c in BACKENDS[op].items() if n == wanted or n not in OPTIONAL}
    verdicts = {name: check(device, dtype, dict(widths)) for name, check in known.items()}
    able = [name for name, refusal in verdicts.items() if refusal is None]
    listing = "; ".join(f"{name}: {refusal or 'can run'}" for name, refusal in verdicts.items())
    if wanted == "auto" and able:
        why = "%s: %s, the first backend for %s on %s (%s)"
        logger.info(why, op, able[0], dtype, device, listing)
        return able[0]
    if wanted in able:
        level = logging.WARNING if (op, wanted) == UNREPEATABLE else logging.INFO
        note = NOTES.get((op, wanted), "")
        logger.log(level, "%s: %s, named by ops.%s%s", op, wanted, op, note)
        return wanted
    kind = f"{dtype} (ops.index_scores)" if dtype == E4M3 else str(dtype)
    raise BackendError(f"ops.{op} = {wanted!r} cannot run for {kind} on {device} ({listing})")
