"""The loss plot: what it draws, and that it is a picture."""

import matplotlib.image
import pytest

from fullspan.errors import CheckpointError
from fullspan.train.plot import loss_figure, plot_losses


def train(step, loss):
    return {"kind": "train", "step": step, "loss": loss, "trained_tokens": 5}


def evaluation(step, loss):
    return {"kind": "eval", "step": step, "loss": loss, "trained_tokens": 5}


RECORDS = [evaluation(0, 9.0), *[train(s, 10.0 - s / 10) for s in range(1, 61)], evaluation(60, 4)]


def test_the_figure_has_every_curve_and_labelled_axes():
    axes = loss_figure(RECORDS, "a title").axes[0]
    raw, mean, held_out = axes.lines
    assert list(raw.get_xdata()) == list(range(1, 61))
    assert raw.get_ydata()[10] == 10.0 - 1.1
    assert mean.get_ydata()[-1] == pytest.approx((4.0 + 4.1 + 4.2) / 3)
    assert list(held_out.get_xdata()) == [0, 60] and list(held_out.get_ydata()) == [9.0, 4.0]
    assert axes.get_xlabel() == "optimizer step" and "nats" in axes.get_ylabel()
    assert axes.get_title() == "a title"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["train, each step", "train, mean of 3 steps", "evaluation"]


@pytest.mark.parametrize("records", [RECORDS, [train(1, 2.0)], []])
def test_the_file_is_a_picture(records, tmp_path):
    plot_losses(records, tmp_path / "loss.png", "a run")
    image = matplotlib.image.imread(tmp_path / "loss.png")
    assert image.shape[:2] == (576, 960)
    assert (image[..., :3] < 0.9).any()


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot write .*loss\.png.*train\.output_dir"):
        plot_losses(RECORDS, tmp_path / "missing" / "loss.png", "a run")
