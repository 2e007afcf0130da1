"""The start report: what a run is about to do, in lines that a person can check.

Text only, from what setup.py has built; nothing here decides anything.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from fullspan.checkpoint.mapping import SCALE_SUFFIX
from fullspan.data.inspect import report_lines, sample_text
from fullspan.data.loader import PackLoader
from fullspan.data.packing import IGNORE, Document, Pack
from fullspan.data.report import PackingReport
from fullspan.lora.config import LoraConfig
from fullspan.models.common.frozen import FrozenProjection
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.ops.options import BACKEND_NAMES
from fullspan.parallel.mesh import Mesh
from fullspan.train.config import LoopConfig, ModelConfig
from fullspan.train.session import Session

_SHOWN_TOKENS = 200
"""on either side of where the training starts"""


def _lines(*pairs: tuple[str, str]) -> str:
    return "\n".join(f"{name:<9} {text}" for name, text in pairs)


def data_lines(name: str, path: str, report: PackingReport) -> str:
    """What became of the rows of a data set."""
    return "\n  ".join([f"{name:<9} {path}", *report_lines(report)])


def sample_lines(pack: Pack, tokenizer: PreTrainedTokenizerBase, *, color: bool) -> str:
    """The surroundings of the first trained token of a pack, decoded, trained tokens marked."""
    predicted = pack.labels != IGNORE
    trained = torch.cat([torch.zeros(1, dtype=torch.bool), predicted[:-1]])
    first = int(trained.nonzero()[0])
    document = int(torch.searchsorted(pack.cu_seqlens, first, right=True)) - 1
    start, end = (int(bound) for bound in pack.cu_seqlens[document : document + 2])
    start, end = max(start, first - _SHOWN_TOKENS), min(end, first + _SHOWN_TOKENS)
    shown = Document(tokens=pack.tokens[start:end], trained=trained[start:end], source="")
    text = sample_text(shown, tokenizer, color=color)
    title = f"rows {start:,} to {end:,} of the first pack, trained tokens marked:"
    return _lines(("sample", title)) + "\n  " + text.replace("\n", "\n  ")


def model_lines(
    config: ModelConfig,
    session: Session,
    lora: LoraConfig,
    adapted: Sequence[str],
) -> str:
    """Model, adapters and op backends."""
    model = session.model
    trained = sum(p.numel() for p in session.adapters.values())
    scales = sum(p.numel() for name, p in model.named_parameters() if name.endswith(SCALE_SUFFIX))
    frozen = sum(p.numel() for p in model.parameters()) - trained - scales
    targets = Counter(_short(name) for name in adapted)
    listing = ", ".join(f"{name} x{count}" for name, count in targets.items())
    options = model.options
    return _lines(
        (
            "model",
            f"{config.path}: {model.config.num_hidden_layers} layers, {frozen:,} frozen parameters "
            f"in {config.dtype} on {session.device.type}",
        ),
        *_fp8_pairs(model),
        (
            "lora",
            f"rank {lora.r}, alpha {lora.alpha:g}, {trained:,} trained parameters "
            f"({trained / frozen:.2%}): {listing}",
        ),
        (
            "ops",
            "".join(f"{op} {getattr(options, op)}, " for op in BACKEND_NAMES)
            + f"workspace {options.workspace_bytes / 2**20:,.0f} MiB, "
            f"attention {options.attention_bytes / 2**20:,.0f} MiB",
        ),
    )


def _fp8_pairs(model: DsaForCausalLM) -> list[tuple[str, str]]:
    """Which weights stay FP8, where any do."""
    names: list[str] = []
    values, block = 0, None
    for name, module in model.named_modules():
        if isinstance(module, FrozenProjection) and module.layout is not None:
            names.append(_short(name.removesuffix(".base")))
            values += module.weight.numel()
            block = module.layout.block
    if block is None:
        return []
    rows, cols = block
    listing = ", ".join(f"{name} x{count}" for name, count in Counter(names).items())
    return [("fp8", f"{values:,} of them stay e4m3 in blocks of {rows} x {cols}: {listing}")]


def batch_lines(config: LoopConfig, mesh: Mesh, session: Session, loader: PackLoader) -> str:
    """Topology and the arithmetic of a step."""
    rows = len(loader.packs[0].tokens)
    packs = config.accumulation * mesh.dp.size
    step_rows = rows * packs
    epochs = config.steps * packs / len(loader.packs)
    return _lines(
        (
            "ranks",
            f"{mesh.world.size} = dp {mesh.dp.size} x cp {mesh.cp.size}, ep {mesh.ep.size}; "
            f"{session.partition}: {rows // mesh.cp.size:,} rows a rank",
        ),
        (
            "batch",
            f"{packs} pack(s) x {rows:,} rows = {step_rows:,} rows a step; "
            f"{config.steps:,} steps = {config.steps * step_rows:,} rows = {epochs:.2f} epochs",
        ),
    )


def _short(name: str) -> str:
    """The end of a module's name; routed and shared experts with their owner."""
    parts = name.split(".")
    width = 2 if parts[-2:-1] in (["experts"], ["shared_experts"]) else 1
    return ".".join(parts[-width:])
