"""Write a whole checkpoint folder again: adapters added to its weights, in BF16 or back in FP8.

Tensors are read one at a time in the order of the files and written as they come, so one shard is
in memory, whatever the checkpoint's size. What no adapter changed and whose dtype stays is copied
bit for bit, the multi-token-prediction layer too. Where a weight is rounded, to BF16 or to FP8, the
error against the exact sum (in float32) is measured and reported by kind of tensor: e4m3 steps can
be larger than what training changed, and a user should see that before serving the result.

Without adapters this dequantises a checkpoint. Adapters in PEFT's layout are lora/state.py's.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fullspan.checkpoint.adapter import adapted_model
from fullspan.checkpoint.load import READABLE, Progress
from fullspan.checkpoint.quantisation import CONFIG_KEY, Quantisation
from fullspan.checkpoint.safetensors_io import (
    CONFIG_NAME,
    INDEX_NAME,
    WEIGHT_SUFFIXES,
    CheckpointFolder,
    TensorReader,
    write_checkpoint,
)
from fullspan.errors import CheckpointError
from fullspan.lora.config import LoraConfig
from fullspan.lora.inject import adapted_modules
from fullspan.lora.layers import LoRAModule
from fullspan.lora.per_expert import split_adapters
from fullspan.models.dsa.checkpoint import dsa_mapping
from fullspan.models.dsa.config import DsaConfig
from fullspan.ops.fp8.op import dequantise_blocks, quantise_blocks
from fullspan.shapes import Tensor

FORMATS = ("bf16", "fp8")
REPORT_NAME = "merge_report.json"


@dataclass(frozen=True, kw_only=True)
class RoundingError:
    """Over the tensors of one kind that were rounded: |written - exact|.

    largest     of any value
    relative    Frobenius norm over that of the exact tensors
    of_change   Frobenius norm, of adapted tensors, over that of what the adapters changed; None
                without such
    """

    tensors: int
    adapted: int
    largest: float
    relative: float
    of_change: float | None


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """What was written: format ("bf16" or "fp8"), tensors, bytes, tensors with an adapter, errors
    by kind of tensor ("self_attn.q_b_proj")."""

    format: str
    tensors: int
    bytes: int
    adapted: int
    errors: Mapping[str, RoundingError]

    def lines(self) -> list[str]:
        """The errors as a table."""
        width = max(map(len, self.errors), default=0)
        rows = [f"{'rounding error':{width}}  tensors  adapted   largest  relative  of change"]
        for kind, e in self.errors.items():
            change = "        -" if e.of_change is None else f"{e.of_change:9.1e}"
            rows.append(
                f"{kind:{width}}  {e.tensors:7}  {e.adapted:7}  {e.largest:8.1e}  "
                f"{e.relative:8.1e}  {change}"
            )
        return rows if self.errors else ["no tensor was rounded"]


def merge_run(
    checkpoint: Path,
    output: Path,
    *,
    model_path: Path,
    lora: LoraConfig,
    format: str = "bf16",
    progress: Progress | None = None,
) -> MergeReport:
    """The base model of a run with the adapters of one of its checkpoints added, see `rewrite`."""
    modules = adapted_modules(adapted_model(checkpoint, model_path, lora))
    return rewrite(model_path, output, modules, format=format, progress=progress)


def rewrite(
    source: Path,
    output: Path,
    adapters: Mapping[str, LoRAModule],
    *,
    format: str = "bf16",
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> MergeReport:
    """Write the checkpoint folder `source` to the new folder `output`, adapters added.

    Args:
        adapters: by the name of the module in the base model; none: the weights as they are.
        format: "bf16", floating-point weights in bfloat16 (what the mapping keeps in float32, and
            the MTP layer where it is no FP8, keep their dtype); "fp8", FP8 tensors in FP8 with
            their blocks and names, others in their own dtype.
        progress: called after each tensor with bytes read.

    Raises:
        CheckpointError: `source` is damaged or has no FP8 tensor to go back to; `output` holds
            files, or its disk is too full; a merged weight is not finite; a file cannot be written.
    """
    folder = CheckpointFolder.open(source)
    fields = folder.read_config()
    quantisation = Quantisation.of(folder, fields, folder.tensors)
    assert format in FORMATS, format
    if format == "fp8" and not quantisation.suffixes:
        raise CheckpointError(
            f"--dtype fp8: {source} has no FP8 tensor, so no blocks to go back to; use --dtype bf16"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} is not an empty folder: name another one to write to")
    _check_space(folder, output, quantisation, format)
    job = _Rewrite(folder, DsaConfig.load(source), quantisation, adapters, format)
    write_checkpoint(output, job.tensors(progress), max_shard_bytes=max_shard_bytes)
    report = job.report()
    _write_rest(folder, output, fields, report)
    return report


class _Rewrite:
    """One pass over a folder's tensors, and the errors it made."""

    def __init__(
        self,
        folder: CheckpointFolder,
        config: DsaConfig,
        quantisation: Quantisation,
        adapters: Mapping[str, LoRAModule],
        format: str,
    ) -> None:
        self.folder, self.quantisation, self.format = folder, quantisation, format
        self.mapping = dsa_mapping(config)
        wide = (step for step in self.mapping.steps if step.dtype is not None)
        self.kept = {piece.source for step in wide for piece in step.pieces()}
        self.changes = split_adapters(config, adapters)
        self.sums: dict[str, _Sums] = {}
        self.written = self.bytes = 0

    def tensors(self, progress: Progress | None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the new checkpoint, in the order of the old one's files."""
        total = sum(info.nbytes for info in self.folder.tensors.values())
        done = 0
        scales = self.quantisation.names - self.quantisation.suffixes.keys()
        with self.folder.reader() as reader:
            for name, info in self.folder.tensors.items():
                if name not in scales:  # they are written after their weights
                    for written, tensor in self._tensor(reader, name):
                        self.written += 1
                        self.bytes += tensor.nbytes
                        yield written, tensor
                done += info.nbytes
                if progress is not None:
                    progress(done, total)

    def _tensor(self, reader: TensorReader, name: str) -> Iterator[tuple[str, Tensor]]:
        values = reader.read(name)
        suffix = self.quantisation.suffixes.get(name)
        scale = None if suffix is None else reader.read(name + suffix)
        target = self._dtype(name, values.dtype)
        if name not in self.changes and values.dtype == target:
            yield name, values
            if suffix is not None and scale is not None:
                yield name + suffix, scale
            return
        block = self.quantisation.block
        exact = _exact(values, scale, block)
        change = None
        if name in self.changes:
            low, high, factor = self.changes[name]
            change = high @ low * factor
            exact += change
        if suffix is not None and values.dtype == target:
            power_of_two = self.quantisation.power_of_two
            values, scale = quantise_blocks(exact, block, power_of_two=power_of_two)
            back = dequantise_blocks(values, scale, block, torch.float32)
            yield name, values
            yield name + suffix, scale
        else:
            rounded = exact.to(target)
            back = rounded.float()
            yield name, rounded
        self._note(name, exact, back, change)

    def _dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """What a tensor becomes."""
        if self.format == "fp8" or name in self.kept:
            return dtype
        if name in self.quantisation.suffixes:
            return torch.bfloat16
        return dtype if dtype not in READABLE or self.mapping.is_ignored(name) else torch.bfloat16

    def _note(self, name: str, exact: Tensor, back: Tensor, change: Tensor | None) -> None:
        error = back.sub_(exact)
        size, missed = _norm(exact), _norm(error)
        if not math.isfinite(size) or not math.isfinite(missed):
            raise CheckpointError(
                f"{name} with its adapter is not finite: nothing is written for it to be served"
            )
        sums = self.sums.setdefault(_kind(name, self.mapping.is_ignored(name)), _Sums())
        sums.tensors += 1
        sums.largest = max(sums.largest, float(error.abs().max()) if error.numel() else 0.0)
        sums.exact += size**2
        sums.error += missed**2
        if change is not None:
            sums.adapted += 1
            sums.change += _norm(change) ** 2
            sums.adapted_error += missed**2

    def report(self) -> MergeReport:
        return MergeReport(
            format=self.format,
            tensors=self.written,
            bytes=self.bytes,
            adapted=len(self.changes),
            errors={kind: sums.result() for kind, sums in sorted(self.sums.items())},
        )


@dataclass(kw_only=True)
class _Sums:
    """Squared norms over the tensors of a kind."""

    tensors: int = 0
    adapted: int = 0
    largest: float = 0.0
    exact: float = 0.0
    error: float = 0.0
    change: float = 0.0
    adapted_error: float = 0.0

    def result(self) -> RoundingError:
        return RoundingError(
            tensors=self.tensors,
            adapted=self.adapted,
            largest=self.largest,
            relative=math.sqrt(self.error / self.exact) if self.exact else 0.0,
            of_change=math.sqrt(self.adapted_error / self.change) if self.change else None,
        )


def _check_space(
    folder: CheckpointFolder, output: Path, quantisation: Quantisation, format: str
) -> None:
    """A full disk is found now and not after hours."""
    values = sum(folder.tensors[name].nbytes for name in quantisation.suffixes)
    needed = sum(info.nbytes for info in folder.tensors.values())
    needed += values if format == "bf16" else 0  # two bytes for one
    place = next(path for path in (output, *output.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise CheckpointError(
            f"{output} needs {needed / 1e9:,.1f} GB, but {free / 1e9:,.1f} GB are free there: name "
            "another folder with --output"
        )


def _exact(values: Tensor, scale: Tensor | None, block: tuple[int, int]) -> Tensor:
    """A weight in float32, as memory of its own."""
    if scale is None:
        return values.to(torch.float32, copy=True)
    return dequantise_blocks(values, scale.float(), block, torch.float32)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _kind(name: str, mtp: bool) -> str:
    """The name without layer and expert: model.layers.3.mlp.experts.7.up_proj.weight is
    mlp.experts.up_proj.
    """
    parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
    short = ".".join(parts[2:] if parts[:2] == ["model", "layers"] else parts)
    return f"{short} (MTP)" if mtp else short


def _write_rest(
    folder: CheckpointFolder, output: Path, fields: dict[str, Any], report: MergeReport
) -> None:
    """The tokenizer and whatever else is no weight, the report, and config.json last: without it a
    folder is no checkpoint.
    """
    if report.format == "bf16":
        fields = {name: value for name, value in fields.items() if name != CONFIG_KEY}
        name = "torch_dtype" if "torch_dtype" in fields else "dtype"
        fields[name] = "bfloat16"
    skipped = {CONFIG_NAME, INDEX_NAME, REPORT_NAME}
    try:
        for file in sorted(folder.path.iterdir()):
            if file.is_file() and file.suffix not in WEIGHT_SUFFIXES and file.name not in skipped:
                shutil.copyfile(file, output / file.name)
        for name, content in ((REPORT_NAME, asdict(report)), (CONFIG_NAME, fields)):
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (output / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write to {output}: {error}") from None
