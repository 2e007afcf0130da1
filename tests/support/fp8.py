"""A tiny FP8 checkpoint and its twin, which holds the same weights dequantised to bfloat16."""

from pathlib import Path

from fullspan.checkpoint.merge import rewrite
from fullspan.checkpoint.tiny import init_tiny


def write_twins(folder: Path) -> tuple[Path, Path]:
    """The FP8 checkpoint, with the MTP layer, and its twin."""
    fp8, twin = folder / "fp8", folder / "twin"
    init_tiny(fp8, fp8=True, mtp=True)
    rewrite(fp8, twin, {}, max_shard_bytes=1 << 20)
    return fp8, twin
