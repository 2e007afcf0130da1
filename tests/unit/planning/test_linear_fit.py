"""A line through peaks, and its picture."""

from pathlib import Path

import pytest

from fullspan.errors import ConfigError
from fullspan.planning.linear_fit import LinearFit, plot_fit


def test_a_line_is_found_exactly() -> None:
    rows = [128, 256, 384, 512]
    fit = LinearFit.of(rows, [1000 + 7 * r for r in rows])
    assert (fit.base, fit.slope, fit.r2) == (pytest.approx(1000), pytest.approx(7), 1.0)
    assert fit.residuals == pytest.approx([0] * 4, abs=1e-9)


def test_what_is_no_line_shows_in_r2_and_residuals() -> None:
    fit = LinearFit.of([1, 2, 3], [1, 4, 9])  # 4 x - 10/3: residuals 1/3, -2/3, 1/3
    assert fit.residuals == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert fit.r2 == pytest.approx(1 - (6 / 9) / (98 / 3))


def test_it_is_drawn(tmp_path: Path) -> None:
    fit = LinearFit.of([1, 2, 3], [3 << 30, 5 << 30, 7 << 30])
    plot_fit(fit, tmp_path / "fit.png", "a rank")
    assert (tmp_path / "fit.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ConfigError, match="cannot write"):
        plot_fit(fit, tmp_path / "none" / "fit.png", "a rank")
