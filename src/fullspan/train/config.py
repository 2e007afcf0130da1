"""The configuration of a run: one section each from its owner, and what must hold between them.

A section checks its own values where it is defined; here are the rules that need two sections.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fullspan import settings
from fullspan.checkpoint.resume import CheckpointConfig
from fullspan.data.config import DataConfig
from fullspan.errors import ConfigError
from fullspan.lora.inject import LoraConfig
from fullspan.ops.backend import OpOptions
from fullspan.parallel.mesh import ParallelConfig
from fullspan.train.loop import LoopConfig
from fullspan.train.optim import OptimConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The [model] section.

    path   a Hugging Face folder: config.json, safetensors, tokenizer
    dtype  of activations and of the frozen weights; adapters are float32 in any case
    """

    path: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("model.path is empty: name a folder with a checkpoint")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a training run is told. Sections without a required key may be left out."""

    model: ModelConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    ops: OpOptions = field(default_factory=OpOptions)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: LoopConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        if self.parallel.cp:
            self._check_divides(self.parallel.cp)
        if self.train.eval_every > 0 and self.data.eval_path is None:
            raise ConfigError(
                f"train.eval_every is {self.train.eval_every}, but there is no held-out data: "
                "set data.eval_path, or train.eval_every = 0"
            )
        if self.optim.warmup_steps > self.train.steps:
            raise ConfigError(
                f"optim.warmup_steps is {self.optim.warmup_steps}: it must be at most "
                f"train.steps, {self.train.steps}"
            )

    def check_ranks(self, world_size: int) -> None:
        """Raise ConfigError unless `world_size` ranks can run this."""
        if self.parallel.cp not in (0, world_size):
            raise ConfigError(
                f"parallel.cp is {self.parallel.cp}, but the run has {world_size} "
                f"rank{'s' if world_size > 1 else ''}: set parallel.cp (0 takes them all) or "
                f"--nproc-per-node {self.parallel.cp}"
            )
        self._check_divides(world_size)

    def _check_divides(self, ranks: int) -> None:
        if self.data.pack_length % ranks:
            below = self.data.pack_length // ranks * ranks
            raise ConfigError(
                f"data.pack_length is {self.data.pack_length}: it must be a multiple of the "
                f"{ranks} ranks that share a pack, such as {below or ranks} or {below + ranks}"
            )


def load_run_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's TOML file, apply command-line overrides, check everything.

    Relative paths, in the file too, start from the working directory; the result holds absolute
    ones, so that the copy saved with the run means the same everywhere.
    """
    config = settings.load(RunConfig, path, overrides)
    resume, held_out = config.checkpoint.resume, config.data.eval_path
    return replace(
        config,
        model=replace(config.model, path=_absolute(config.model.path)),
        data=replace(
            config.data,
            path=_absolute(config.data.path),
            eval_path=None if held_out is None else _absolute(held_out),
        ),
        train=replace(config.train, output_dir=_absolute(config.train.output_dir)),
        checkpoint=replace(
            config.checkpoint, resume=_absolute(resume) if isinstance(resume, str) else resume
        ),
    )


def _absolute(path: str) -> str:
    return str(Path.cwd() / Path(path).expanduser())
