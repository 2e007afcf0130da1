"""`fullspan init-tiny DIR`: write a tiny random checkpoint with all that a released one has."""

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add `init-tiny` to the command line."""
    parser = subparsers.add_parser(
        "init-tiny",
        help="write a tiny random checkpoint to try everything on",
        description="Write a tiny random checkpoint: config, sharded weights, tokenizer, chat "
        "template. It loads like a released one, here and in transformers.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--family",
        default="glm_moe_dsa",
        metavar="NAME",
        help="glm_moe_dsa (GLM-5.2, the default) or deepseek_v32 (DeepSeek-V3.2)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument(
        "--dtype",
        default="float32",
        metavar="NAME",
        help="of the weights in the files: float32 (the default) or bfloat16",
    )
    parser.add_argument(
        "--force", action="store_true", help="write although DIR holds other files (they stay)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the folder and say what is in it."""
    from fullspan.checkpoint.safetensors_io import CheckpointFolder
    from fullspan.checkpoint.tiny import init_tiny

    files = init_tiny(
        args.folder, family=args.family, seed=args.seed, dtype=args.dtype, force=args.force
    )
    tensors = CheckpointFolder.open(args.folder).tensors.values()
    size = sum(info.nbytes for info in tensors)
    print(
        f"{args.folder}: {args.family}, {len(tensors)} tensors, {size / 1e6:.1f} MB of "
        f"{args.dtype} weights from seed {args.seed}, {len(files)} files"
    )
    return 0
