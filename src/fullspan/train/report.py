"""The start report: what a run is about to do, in lines that a person can check.

Text only, from what setup.py has built; nothing here decides anything.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fullspan.data.loader import PackLoader
from fullspan.data.report import PackingReport
from fullspan.lora.inject import LoraConfig
from fullspan.parallel.mesh import Mesh
from fullspan.train.session import Session

if TYPE_CHECKING:
    import fullspan.train.config
    import fullspan.train.loop


def _lines(*pairs: tuple[str, str]) -> str:
    return "\n".join(f"{name:<9} {text}" for name, text in pairs)


def data_lines(name: str, path: str, report: PackingReport) -> str:
    """What became of the rows of a data set; counts of zero are left out."""
    fewest, mean, most = report.documents_per_pack
    text = (
        f"{path}: {report.documents:,} documents, {report.tokens:,} tokens, "
        f"{report.trained_tokens:,} of them trained\n"
        f"{'':<9} {report.packs:,} packs of {report.pack_length:,} rows, "
        f"{report.efficiency:.1%} full, {fewest} to {most} documents each (mean {mean:.1f}), "
        f"longest document {report.longest:,}"
    )
    losses = {
        "bad rows skipped": len(report.bad_rows),
        "dropped as too long": report.dropped,
        "truncated": report.truncated,
        "split": report.split,
        "left out without a trained token": report.untrained,
    }
    told = [f"{count:,} {what}" for what, count in losses.items() if count]
    if told:
        text += f"\n{'':<9} {', '.join(told)}"
    return _lines((name, text))


def model_lines(
    config: "fullspan.train.config.ModelConfig",
    session: Session,
    lora: LoraConfig,
    adapted: Sequence[str],
) -> str:
    """Model, adapters and op backends."""
    model = session.model
    trained = sum(p.numel() for p in session.adapters.values())
    frozen = sum(p.numel() for p in model.parameters()) - trained
    targets = Counter(_short(name) for name in adapted)
    listing = ", ".join(f"{name} x{count}" for name, count in targets.items())
    options = model.options
    return _lines(
        (
            "model",
            f"{config.path}: {model.config.num_hidden_layers} layers, {frozen:,} frozen parameters "
            f"in {config.dtype} on {session.device.type}",
        ),
        (
            "lora",
            f"rank {lora.r}, alpha {lora.alpha:g}, {trained:,} trained parameters "
            f"({trained / frozen:.2%}): {listing}",
        ),
        (
            "ops",
            f"index_topk {options.index_topk}, sparse_attention {options.sparse_attention}, "
            f"workspace {options.workspace_bytes / 2**20:,.0f} MiB each",
        ),
    )


def batch_lines(
    config: "fullspan.train.loop.LoopConfig", mesh: Mesh, session: Session, loader: PackLoader
) -> str:
    """Topology and the arithmetic of a step."""
    rows = len(loader.packs[0].tokens)
    step_rows = rows * config.accumulation
    epochs = config.steps * config.accumulation / len(loader.packs)
    return _lines(
        (
            "ranks",
            f"{mesh.world_size}, each pack over {mesh.cp_size} ({session.partition}): "
            f"{rows // mesh.cp_size:,} rows a rank",
        ),
        (
            "batch",
            f"{config.accumulation} pack(s) x {rows:,} rows = {step_rows:,} rows a step; "
            f"{config.steps:,} steps = {config.steps * step_rows:,} rows = {epochs:.2f} epochs",
        ),
    )


def _short(name: str) -> str:
    """The end of a module's name; routed and shared experts with their owner."""
    parts = name.split(".")
    width = 2 if parts[-2:-1] in (["experts"], ["shared_experts"]) else 1
    return ".".join(parts[-width:])
