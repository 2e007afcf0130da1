"""`fullspan export RUN --format peft`: write the adapter of a training run for other tools.

It reads a checkpoint of the run, not the adapter folder that a finished run also has, so a stopped
run can be exported too. The base model is built without storage: only its config.json is read.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

ADAPTER_PREFIX = "adapter."  # of adapter tensors in a training checkpoint (train/session.py)


def add_parser(subparsers: Any) -> None:
    """Add `export` to the command line."""
    parser = subparsers.add_parser(
        "export",
        help="write the adapter of a run in PEFT's layout",
        description="Write the adapter of a training run, finished or stopped, as a folder that "
        "stock peft loads onto the transformers model.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="train.output_dir of the run")
    parser.add_argument("--format", choices=["peft"], default="peft", help="layout (default: peft)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder to write (default: RUN/adapter, or RUN/adapter-step-N with --step)",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="checkpoint to export (default: the newest)"
    )
    parser.add_argument(
        "--base-model",
        metavar="NAME",
        help="base_model_name_or_path of the adapter (default: model.path of the run)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the folder and say what is in it."""
    from fullspan.checkpoint.load import meta_model
    from fullspan.lora.inject import inject, trainable_parameters
    from fullspan.lora.state import load_adapter_state, to_peft
    from fullspan.models.dsa.config import DsaConfig

    config = _run_config(args.folder)
    path = _checkpoint(args.folder, args.step)
    model = meta_model(DsaConfig.load(Path(config.model.path)), config.ops, recompute=False)
    names = inject(model, config.lora)
    load_adapter_state(model, _read_adapters(path))
    default = "adapter" if args.step is None else f"adapter-{path.name}"
    output = args.output or args.folder / default
    to_peft(model, config.lora, args.base_model or config.model.path, output)
    count = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    print(f"{output}: {path.name}, {len(names)} adapted modules, {count:,} parameters")
    return 0


def _run_config(folder: Path) -> Any:
    """The resolved configuration that the run left."""
    from fullspan.errors import CheckpointError
    from fullspan.train.config import load_run_config
    from fullspan.train.setup import CONFIG_FILE

    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"no {CONFIG_FILE} in {folder}: RUN must be the train.output_dir of a training run"
        )
    return load_run_config(folder / CONFIG_FILE)


def _checkpoint(folder: Path, step: int | None) -> Path:
    """The complete checkpoint of a step, or the newest."""
    from fullspan.checkpoint.folders import newest_checkpoint, read_header, step_folder
    from fullspan.checkpoint.resume import FOLDER
    from fullspan.errors import CheckpointError

    if step is not None:
        path = step_folder(folder / FOLDER, step)
        read_header(path)
        return path
    path, remarks = newest_checkpoint(folder / FOLDER)
    if path is None:
        hint = f" ({'; '.join(remarks)})" if remarks else ""
        raise CheckpointError(f"{folder} has no complete checkpoint yet{hint}")
    return path


def _read_adapters(path: Path) -> dict[str, Any]:
    """Every adapter tensor of a checkpoint by its internal name; optimizer moments stay on disk."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from fullspan.errors import CheckpointError

    reader = FileSystemReader(path)
    try:
        stored = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
            for name, entry in stored.items()
            if name.startswith(ADAPTER_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            state_dict_loader.load(dict(state), storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"cannot read the adapters in {path}: {error}") from error
    return {name.removeprefix(ADAPTER_PREFIX): tensor for name, tensor in state.items()}
