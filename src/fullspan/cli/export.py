"""`fullspan export RUN --format NAME`: write what a training run learned for other tools, as an
adapter or merged into the base model.

It reads a checkpoint of the run, not the adapter folder that a finished run also has, so a stopped
run can be exported too. The work is checkpoint/adapter.py's and checkpoint/merge.py's.
"""

import argparse
from pathlib import Path
from typing import Any

# Folder by default, by format.
FOLDERS = {"peft": "adapter", "peft-per-expert": "adapter-per-expert", "merged": "merged"}


def add_parser(subparsers: Any) -> None:
    """Add `export` to the command line."""
    parser = subparsers.add_parser(
        "export",
        help="write the adapter of a run in PEFT's layout, or merged into the base model",
        description="Write what a training run, finished or stopped, has learned. peft: an adapter "
        "folder that stock peft loads onto the transformers model. peft-per-expert: one with 2-D "
        "keys of each routed expert, which servers read. merged: a whole checkpoint folder, the "
        "base model with the adapter added.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="train.output_dir of the run")
    parser.add_argument("--format", choices=FOLDERS, default="peft", help="layout (default: peft)")
    parser.add_argument(
        "--dtype",
        choices=["bf16", "fp8"],
        help="of --format merged: bf16 (the default), or fp8, back into the blocks of an FP8 base; "
        "the rounding error is printed and written to merge_report.json",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder to write (default: RUN/adapter, RUN/adapter-per-expert or RUN/merged, ending "
        "in -step-N with --step)",
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
    from fullspan.errors import ConfigError

    merged = args.format == "merged"
    option, value = ("--base-model", args.base_model) if merged else ("--dtype", args.dtype)
    if value is not None:
        raise ConfigError(f"{option} says nothing about --format {args.format}: leave it out")
    config = _run_config(args.folder)
    path = _checkpoint(args.folder, args.step)
    name = FOLDERS[args.format]
    default = name if args.step is None else f"{name}-{path.name}"
    output = args.output or args.folder / default
    write = _write_merged if merged else _write_adapter
    return write(args, config, path, output)


def _write_adapter(args: argparse.Namespace, config: Any, path: Path, output: Path) -> int:
    from fullspan.checkpoint.adapter import write_adapter

    written = write_adapter(
        path,
        output,
        model_path=Path(config.model.path),
        lora=config.lora,
        base_model=args.base_model,
        per_expert=args.format == "peft-per-expert",
    )
    print(
        f"{output}: {path.name}, {len(written.modules)} adapted modules, "
        f"{written.parameters:,} parameters"
    )
    return 0


def _write_merged(args: argparse.Namespace, config: Any, path: Path, output: Path) -> int:
    from fullspan.checkpoint.load import progress_bar
    from fullspan.checkpoint.merge import merge_run

    with progress_bar("Merging") as progress:
        report = merge_run(
            path,
            output,
            model_path=Path(config.model.path),
            lora=config.lora,
            format=args.dtype or "bf16",
            progress=progress,
        )
    print("\n".join(report.lines()))
    print(
        f"{output}: {path.name} merged, {report.tensors:,} tensors, {report.bytes / 1e6:,.1f} MB "
        f"of {report.format} weights, {report.adapted:,} of them changed"
    )
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
