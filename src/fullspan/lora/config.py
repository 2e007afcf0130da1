"""The [lora] section. Imports no torch; where adapters go is inject.py's."""

import math
from dataclasses import dataclass

from fullspan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The [lora] section.

    r        rank of every adapter
    alpha    an adapter's output is scaled by alpha / r
    targets  module names or endings of them, such as "q_b_proj" or "experts.gate_up_proj"
    seed     of lora_a's initial values; together with a module's name it fixes them
    """

    r: int = 16
    alpha: int | float = 32.0
    targets: tuple[str, ...] = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    seed: int = 0

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ConfigError(f"lora.r is {self.r}: it must be at least 1")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"lora.alpha is {self.alpha}: it must be a finite number above 0")
        if not self.targets:
            raise ConfigError('lora.targets is empty: name at least one module, such as "q_b_proj"')
        for index, target in enumerate(self.targets):
            if not all(target.split(".")):
                raise ConfigError(
                    f"lora.targets[{index}] is {target!r}: it must be a module name or its ending"
                )
            if target in self.targets[:index]:
                raise ConfigError(f"lora.targets names {target!r} twice: remove one")
