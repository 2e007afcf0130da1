"""The [checkpoint] section. Imports no torch; writing and reading are resume.py's."""

from dataclasses import dataclass

from fullspan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The [checkpoint] section.

    every: optimizer steps between checkpoints; 0: only at the end and when told to stop.
    keep_last: complete checkpoints to keep.
    resume: true: continue from the newest in train.output_dir, if there is one; false: start anew,
    in a folder without checkpoints; a path: continue from that checkpoint, or from that run.
    """

    every: int = 0
    keep_last: int = 2
    resume: bool | str = True

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(
                f"checkpoint.every is {self.every}: it must be a number of steps, or 0 for only "
                "at the end"
            )
        if self.keep_last < 1:
            raise ConfigError(f"checkpoint.keep_last is {self.keep_last}: it must be at least 1")
        if self.resume == "":
            raise ConfigError(
                "checkpoint.resume is empty: allowed are true, false or the path of a checkpoint"
            )
