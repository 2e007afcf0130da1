"""A straight line through measured bytes: does memory grow with the rows and nothing else?"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from fullspan.errors import ConfigError
from fullspan.planning.hardware import GIB


@dataclass(frozen=True, kw_only=True)
class LinearFit:
    """bytes = base + slope * rows, by least squares.

    rows, measured: the points. r2: share of the variance that the line explains; 1 where nothing
    varies.
    """

    rows: Sequence[int]
    measured: Sequence[int]
    base: float
    slope: float
    r2: float

    @classmethod
    def of(cls, rows: Sequence[int], measured: Sequence[int]) -> "LinearFit":
        """At least two unlike numbers of rows."""
        mean_x, mean_y = sum(rows) / len(rows), sum(measured) / len(rows)
        pairs = [(x - mean_x, y - mean_y) for x, y in zip(rows, measured, strict=True)]
        slope = sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)
        total = sum(y * y for _, y in pairs)
        left = sum((y - slope * x) ** 2 for x, y in pairs)
        return cls(
            rows=tuple(rows),
            measured=tuple(measured),
            base=mean_y - slope * mean_x,
            slope=slope,
            r2=1 - left / total if total else 1.0,
        )

    @property
    def residuals(self) -> list[float]:
        """Measured less the line, in bytes."""
        return [y - self.at(x) for x, y in zip(self.rows, self.measured, strict=True)]

    def at(self, rows: int) -> float:
        return self.base + self.slope * rows


def plot_fit(fit: LinearFit, path: Path, title: str) -> None:
    """Points, line and residuals as a PNG.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = Figure(figsize=(8, 5.6), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    unit, name = memory_unit(max(fit.measured))
    ends = [0, max(fit.rows)]
    upper.plot(fit.rows, [y / unit for y in fit.measured], "o", color="tab:blue", label="measured")
    line = f"{fit.base / unit:.3g} {name} + {fit.slope / 1024:.4g} KiB a row, R² {fit.r2:.5f}"
    upper.plot(ends, [fit.at(x) / unit for x in ends], color="tab:orange", label=line)
    upper.set_ylim(bottom=0)
    upper.set_ylabel(f"peak allocated, {name}")
    upper.set_title(title)
    shares = [100 * left / y for left, y in zip(fit.residuals, fit.measured)]
    lower.bar(fit.rows, shares, width=max(fit.rows) / 40, color="tab:blue")
    lower.axhline(0, color="black", linewidth=0.8)
    lower.set_ylabel("residual, %")
    lower.set_xlabel("rows of the pack on this rank")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    upper.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror}") from None


def memory_unit(size: float) -> tuple[int, str]:
    return (GIB, "GiB") if size >= GIB else (1 << 20, "MiB")
