"""The configuration of a run: one section each from its owner, and what must hold between them.

A section checks its own values where it is defined; here are the rules that need two sections.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fullspan import settings
from fullspan.checkpoint.config import CheckpointConfig
from fullspan.data.config import DataConfig
from fullspan.errors import ConfigError
from fullspan.lora.config import LoraConfig
from fullspan.ops.options import OpOptions
from fullspan.ops.sizes import round_up
from fullspan.parallel.config import ParallelConfig
from fullspan.train.schedule import OptimConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The [model] section.

    path   a Hugging Face folder: config.json, safetensors, tokenizer
    dtype  of activations and of the frozen weights; adapters are float32 in any case
    latent_norm_eps   of the latent norms. None: rms_norm_eps of config.json, as servers compute;
                      `transformers` always uses 1e-6
    """

    path: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    latent_norm_eps: float | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("model.path is empty: name a folder with a checkpoint")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The [train] section.

    steps             optimizer steps of the whole run
    accumulation      packs a step (microbatches)
    seed              of the global random generators; data and adapters have their own
    recompute         run each layer again in the backward pass instead of keeping its activations
    offload_inputs    with recompute: the layers' inputs wait in pinned host memory, not on the GPU
    eval_every        steps between evaluations; 0: only before the first step and at the end
    log_every         steps between console lines
    tensorboard       also write TensorBoard files
    output_dir        folder of the run
    timeout_seconds   how long a rank waits for another before the run ends with an error
    """

    steps: int
    accumulation: int = 1
    seed: int = 0
    recompute: bool = True
    offload_inputs: bool = False
    eval_every: int = 0
    log_every: int = 1
    tensorboard: bool = False
    output_dir: str
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("accumulation", 1), ("log_every", 1), ("eval_every", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"train.{name} is {getattr(self, name)}: it must be >= {least}")
        if self.offload_inputs and not self.recompute:
            raise ConfigError(
                "train.offload_inputs is true, but without recompute layers keep more than their "
                "inputs: set train.recompute = true, or train.offload_inputs = false"
            )
        if not self.output_dir:
            raise ConfigError("train.output_dir is empty: name a folder for the run")
        if not self.timeout_seconds > 0:
            raise ConfigError(f"train.timeout_seconds is {self.timeout_seconds}: it must be > 0")


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
        multiple = self.parallel.pack_multiple(world_size)
        if self.data.pack_length % multiple:
            above = round_up(self.data.pack_length, multiple)
            raise ConfigError(
                f"data.pack_length is {self.data.pack_length}: it must be a multiple of "
                f"{multiple} for the ranks that share a pack ({self.parallel.partition}), such as "
                f"{above}"
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
