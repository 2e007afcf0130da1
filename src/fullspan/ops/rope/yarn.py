"""YaRN (Peng et al. 2023): its settings and its correction of the logits. Imports no torch."""

import math
from dataclasses import dataclass

from fullspan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN's settings under Hugging Face's names, with its defaults.

    original_max_position: positions of the pretraining context, which factor extends.
    attention_factor: multiplies cos and sin; None derives it from factor and both mscales.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_max_position < 1:
            raise ConfigError(
                f"yarn has a factor of {self.factor} over {self.original_max_position} positions; "
                "both must be at least 1"
            )


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1: YaRN's correction of the logits for a longer context."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
