"""What a run needs before its first step: checks, data, model, adapters, and the start report.

Everything that can be refused is refused before the weights are read: settings that differ from
those of the checkpoint to resume from, data that cannot be used, another order of the data.
"""

import hashlib
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullspan import settings
from fullspan.checkpoint.folders import Header, read_header
from fullspan.checkpoint.load import (
    DTYPES,
    Progress,
    load_model,
    meta_model,
    progress_bar,
    read_mapping,
)
from fullspan.checkpoint.resume import check_fingerprint, find_checkpoint, stored_shapes
from fullspan.checkpoint.safetensors_io import CheckpointFolder
from fullspan.data.load import load_packs, load_tokenizer
from fullspan.data.loader import PackLoader
from fullspan.data.packing import Pack
from fullspan.errors import CheckpointError, ConfigError
from fullspan.lora.inject import inject, trainable_parameters
from fullspan.models.common.host_inputs import HostMemory
from fullspan.models.dsa.config import DsaConfig
from fullspan.models.dsa.model import DsaForCausalLM
from fullspan.parallel.mesh import Mesh
from fullspan.train import report
from fullspan.train.config import RunConfig
from fullspan.train.metrics import Console
from fullspan.train.session import Session

CONFIG_FILE = "config.toml"
_SAMPLED_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What the loop runs on. fingerprint: settings that a resumed run must share. start: the
    checkpoint that the run continues from."""

    session: Session
    loader: PackLoader
    eval_packs: list[Pack]
    fingerprint: Mapping[str, Any]
    start: Path | None


def prepare(config: RunConfig, mesh: Mesh, console: Console) -> RunParts:
    """Builds the parts of a run on this rank, at the step where it starts.

    Raises:
        FullspanError: a setting, the data, the model folder or the checkpoint cannot be used.
    """
    seed_generators(config.train.seed + mesh.world.rank)
    marks = fingerprint(config)
    start, header = _start(config, mesh, console, marks)
    if mesh.is_main:
        write_config(Path(config.train.output_dir), settings.dump_toml(config))
    model_config = check_model(config)
    tokenizer = load_tokenizer(Path(config.model.path))

    def load(title: str, path: str, setting: str) -> list[Pack]:
        vocab = model_config.vocab_size
        packs, made = load_packs(path, config.data, tokenizer, vocab_size=vocab, setting=setting)
        console.print(report.data_lines(title, path, made))
        return packs

    packs, held_out = load("data", config.data.path, "data.path"), config.data.eval_path
    console.print(report.sample_lines(packs[0], tokenizer, color=sys.stdout.isatty()))
    eval_packs = [] if held_out is None else load("held out", held_out, "data.eval_path")
    loader = PackLoader(
        packs,
        microbatches=config.train.accumulation * config.parallel.dp,
        shuffle=config.data.shuffle,
        seed=config.data.seed,
    )
    if header is not None:
        loader.load_state(header.loader)
    session, adapted = open_session(config, mesh)
    console.print(report.model_lines(config.model, session, config.lora, adapted))
    console.print(report.batch_lines(config.train, mesh, session, loader))
    if start is not None:
        session.load(start)
    return RunParts(
        session=session, loader=loader, eval_packs=eval_packs, fingerprint=marks, start=start
    )


def check_model(config: RunConfig) -> DsaConfig:
    """The model's configuration, once all that its folder and the adapters' targets can be refused
    for is checked without reading a weight.

    Raises:
        CheckpointError, ConfigError: as `load_model` and `inject`.
    """
    folder = CheckpointFolder.open(Path(config.model.path))
    model_config = DsaConfig.load(folder.path)
    read_mapping(folder, model_config, config.ops)
    inject(meta_model(model_config, config.ops, recompute=False), config.lora)
    return model_config


def open_session(config: RunConfig, mesh: Mesh) -> tuple[Session, list[str]]:
    """A session with the configuration's model and fresh adapters, and what they adapt.

    Raises:
        FullspanError: the model folder, the adapters' targets or the ranks do not fit.
    """
    host = host_memory(config, mesh)
    return adapt(_load(config, mesh), config, mesh, host)


def host_memory(config: RunConfig, mesh: Mesh) -> HostMemory | None:
    """With train.offload_inputs what the inputs of one microbatch need, reserved: where it is not
    there, that shows before the weights are read.

    Raises:
        BackendError: there is too little.
    """
    if not config.train.offload_inputs:
        return None
    model, found = DsaConfig.load(Path(config.model.path)), HostMemory(mesh.device)
    rows = config.data.pack_length // mesh.cp.size
    size = rows * model.hidden_size * DTYPES[config.model.dtype].itemsize
    found.reserve(model.num_hidden_layers - 1, size)
    return found


def adapt(
    model: DsaForCausalLM, config: RunConfig, mesh: Mesh, host: HostMemory | None
) -> tuple[Session, list[str]]:
    """`open_session` on a model that is there already. host: see `host_memory`."""
    adapted = inject(model, config.lora, mesh.device)
    model.model.host = host
    session = Session(
        model,
        trainable_parameters(model),
        optim=config.optim,
        total_steps=config.train.steps,
        mesh=mesh,
        partition=config.parallel.partition,
        balance_indexer=config.parallel.balance_indexer,
    )
    return session, adapted


def seed_generators(seed: int) -> None:
    """Seeds Python's, NumPy's and PyTorch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def fingerprint(config: RunConfig) -> dict[str, Any]:
    """{setting: value} of everything that the next step of a run depends on beside its checkpoint.

    Left out are settings that change rounding at most ([parallel], [ops], train.recompute), paths,
    and the content of the data, which the loader's own state covers.
    """
    marks: dict[str, Any] = {
        "model.dtype": config.model.dtype,
        "the model's config.json": _digest(Path(config.model.path), "config.json"),
        "the model's weights": _digest(Path(config.model.path), "*.safetensors"),
        "packs a step (train.accumulation x parallel.dp)": (
            config.train.accumulation * config.parallel.dp
        ),
    }
    if config.optim.schedule != "constant":
        marks["train.steps"] = config.train.steps
    for section, values in (("lora", config.lora), ("optim", config.optim)):
        for name, value in asdict(values).items():
            marks[f"{section}.{name}"] = list(value) if isinstance(value, tuple) else value
    for name in ("format", "pack_length", "overlong", "shuffle", "seed"):
        marks[f"data.{name}"] = getattr(config.data, name)
    return marks


def _digest(folder: Path, pattern: str) -> str:
    """Of names, sizes and last bytes of files: hundreds of gigabytes cannot be read to compare."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            file.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def _start(
    config: RunConfig,
    mesh: Mesh,
    console: Console,
    marks: Mapping[str, Any],
) -> tuple[Path | None, Header | None]:
    """The checkpoint to resume from, checked against the settings."""
    folder = Path(config.train.output_dir)
    with mesh.watch.exchange("the choice of a checkpoint"):
        path, remarks = find_checkpoint(config.checkpoint, folder, mesh.world.process_group)
    for remark in remarks:
        console.print(remark)
    if path is None:
        return None, None
    header = read_header(path)
    check_fingerprint(path, header, marks)
    stored_shapes(path)  # readable at all
    if header.step > config.train.steps:
        raise ConfigError(
            f"train.steps is {config.train.steps}, but {path} is after step {header.step}: raise "
            "it, or choose another train.output_dir"
        )
    done = ": nothing is left to train" if header.step == config.train.steps else ""
    console.print(f"resuming from {path}, after step {header.step} of {config.train.steps}{done}")
    if header.world_size != mesh.world.size:
        console.print(
            f"it was written by {header.world_size} rank(s) and now there are {mesh.world.size}: "
            "losses will agree to rounding, not bit for bit"
        )
    return path, header


def _load(config: RunConfig, mesh: Mesh) -> DsaForCausalLM:
    """The frozen model; the first rank shows how far it is."""
    dtype = DTYPES[config.model.dtype]

    def load(progress: Progress | None) -> DsaForCausalLM:
        return load_model(
            Path(config.model.path),
            dtype=dtype,
            device=mesh.device,
            options=config.ops,
            recompute=config.train.recompute,
            latent_norm_eps=config.model.latent_norm_eps,
            mesh=mesh,
            shard_weights=config.parallel.shard_weights,
            progress=progress,
        )

    if not mesh.is_main:
        return load(None)
    with progress_bar("loading the model") as progress:
        return load(progress)


def write_config(folder: Path, text: str) -> None:
    """Keeps the resolved configuration with the run. Raises CheckpointError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    except OSError as error:
        why = error.strerror if folder.is_dir() or not folder.exists() else "it is no folder"
        raise CheckpointError(
            f"cannot write {folder / CONFIG_FILE}: {why} (setting train.output_dir)"
        ) from error
