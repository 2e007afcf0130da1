"""The loss curve of a run as a PNG, from its metrics records. Needs no display and
touches none of pyplot's global state."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fullspan.errors import CheckpointError
from fullspan.train.metrics import Record, smooth

PLOT_FILE = "loss.png"


def plot_losses(records: Sequence[Record], path: Path, title: str) -> None:
    """Draws `loss_figure` into the PNG `path`.

    Raises:
        CheckpointError: the file cannot be written.
    """
    figure = loss_figure(records, title)
    try:
        figure.savefig(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror} (setting train.output_dir)"
        ) from error


def loss_figure(records: Sequence[Record], title: str) -> Figure:
    """The train loss of each step (thin), its running mean, and the evaluations (marked)."""
    train = [r for r in records if r["kind"] == "train"]
    evaluations = [r for r in records if r["kind"] == "eval"]
    figure = Figure(figsize=(8, 4.8), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    if train:
        steps, losses = [r["step"] for r in train], [r["loss"] for r in train]
        window = max(1, len(losses) // 20)
        axes.plot(
            steps, losses, color="tab:blue", alpha=0.35, linewidth=1, label="train, each step"
        )
        if window > 1:
            label = f"train, mean of {window} steps"
            axes.plot(steps, smooth(losses, window), color="tab:blue", linewidth=1.8, label=label)
    if evaluations:
        axes.plot(
            [r["step"] for r in evaluations], [r["loss"] for r in evaluations],
            color="tab:orange", marker="o", markersize=4, linewidth=1.2, label="evaluation",
        )  # fmt: skip
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per trained token)")
    axes.set_title(title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if train or evaluations:
        axes.legend()
    return figure
