"""`fullspan export RUN --format peft`: write the adapter of a training run for other tools.

It reads a checkpoint of the run, not the adapter folder that a finished run also has, so a stopped
run can be exported too. The work is checkpoint/adapter.py's.
"""

import argparse
from pathlib import Path
from typing import Any


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
    from fullspan.checkpoint.adapter import write_adapter

    config = _run_config(args.folder)
    path = _checkpoint(args.folder, args.step)
    default = "adapter" if args.step is None else f"adapter-{path.name}"
    output = args.output or args.folder / default
    written = write_adapter(
        path,
        output,
        model_path=Path(config.model.path),
        lora=config.lora,
        base_model=args.base_model,
    )
    print(
        f"{output}: {path.name}, {len(written.modules)} adapted modules, "
        f"{written.parameters:,} parameters"
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
