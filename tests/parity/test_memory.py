"""Peak memory of a training step against the tokens that a rank holds."""

import numpy as np

from tests.support.memory import peak_bytes
from tests.support.tiny import local_loss, random_pack, tiny_model

LENGTHS = (1536, 2048, 2560, 3072)  # every budget of `ops` is spent from about 1,400 tokens on


def test_peak_memory_is_linear_in_the_tokens(tiny_checkpoints):
    """Peak = a + b tokens (c tokens^2 is of no account)."""
    model = tiny_model(tiny_checkpoints["glm_moe_dsa"], recompute=True)

    def step(length: int) -> None:
        local_loss(model, random_pack([length], vocab=model.config.vocab_size))[0].backward()

    step(256)  # gradients exist from here on, so no length pays for them
    peaks = [peak_bytes(lambda length=length: step(length)) for length in LENGTHS]
    tokens = np.array(LENGTHS, dtype=float)
    slope, offset = np.polyfit(tokens, peaks, 1)
    residual = np.abs(np.polyval([slope, offset], tokens) - peaks).max() / peaks[-1]
    square = np.polyfit(tokens, peaks, 2)[0] * tokens[-1] ** 2 / peaks[-1]
    print(
        f"peak MiB {[round(p / 2**20, 1) for p in peaks]} at {LENGTHS} tokens: {slope:.0f} bytes "
        f"a token, largest residual {residual:.2%} of the peak, quadratic share {square:.2%}"
    )
    assert residual < 1e-4
    assert abs(square) < 1e-3
    assert slope * tokens[-1] > 0.8 * peaks[-1], "the lengths are too short to show what grows"
