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
        "template. It loads like a released one, here and, unless it is FP8, in transformers.",
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
        metavar="NAME",
        help="of the weights in the files: float32 (the default) or bfloat16 (with --fp8 the "
        "default, of what is not FP8)",
    )
    parser.add_argument(
        "--fp8",
        action="store_true",
        help="write projections as block-scaled FP8 (e4m3) with weight_scale_inv, as GLM-5.2-FP8 "
        "has them",
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
        args.folder,
        family=args.family,
        seed=args.seed,
        dtype=args.dtype,
        fp8=args.fp8,
        force=args.force,
    )
    tensors = CheckpointFolder.open(args.folder).tensors.values()
    size = sum(info.nbytes for info in tensors)
    kind = args.dtype or ("bfloat16" if args.fp8 else "float32")
    print(
        f"{args.folder}: {args.family}, {len(tensors)} tensors, {size / 1e6:.1f} MB of "
        f"{'FP8 and ' if args.fp8 else ''}{kind} weights from seed {args.seed}, {len(files)} files"
    )
    return 0
