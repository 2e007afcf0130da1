"""`fullspan rehearse` from the command line, on a config.json alone."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from fullspan.checkpoint.tiny import init_tiny
from fullspan.cli.main import main

RUN = """
[model]
path = "{model}"
dtype = "bfloat16"
[lora]
r = 4
targets = ["q_b_proj", "kv_b_proj", "down_proj"]
[data]
path = "none.jsonl"
pack_length = 256
[parallel]
cp = 2
ep = 2
shard_weights = true
[ops]
workspace_bytes = 2097152
expert_bytes = 2097152
[train]
steps = 1
output_dir = "none"
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rehearse")
    init_tiny(folder / "whole", fp8=True)
    (folder / "alone").mkdir()
    shutil.copy(folder / "whole" / "config.json", folder / "alone")
    (folder / "run.toml").write_text(RUN.format(model=folder / "alone"))
    return folder / "run.toml"


def test_it_reports_memory_time_traffic_and_a_fit(config, tmp_path, capsys) -> None:
    report, plot = tmp_path / "report.json", tmp_path / "fit.png"
    words = ["--lengths", "128,192", "--repeat", "--warmup", "0", "--steps", "1"]
    files = ["--json", str(report), "--plot", str(plot)]
    assert main(["rehearse", str(config), *words, *files]) == 0
    text = capsys.readouterr().out
    assert "rank 1 of 2 (dp 1 x cp 2, ep 2, weights sharded)" in text
    assert "random weights" in text and "the same bits, loss and every gradient" in text
    found = json.loads(report.read_text())
    items = found["peak_by_item"]
    assert sum(items.values()) == found["peak_allocated"]
    assert all(size > 0 for size in items.values()), items
    parts = {name for name, seconds in found["seconds"].items() if seconds > 0}
    for part in ("attention", "experts", "dense"):
        assert {f"{part} {which}" for which in ("forward", "recompute", "backward")} <= parts
    assert {"indexer forward", "head forward", "update step", "loopback forward"} <= parts
    assert "indexer recompute" not in parts
    assert found["seconds_of_step"] == pytest.approx(found["seconds_by_the_host"], rel=0.05)
    _check_peaks(found)
    fields = json.loads((config.parent / "alone" / "config.json").read_text())
    width, layers = fields["kv_lora_rank"] + fields["qk_rope_head_dim"], fields["num_hidden_layers"]
    # From the other rank, in bfloat16, for every layer forward and again for its recompute.
    assert found["wire"]["all_gather of the latent"]["bytes"] == 2 * layers * 128 * width * 2
    assert plot.stat().st_size > 0


def test_one_shorter_pack_is_a_fit_that_foretells_nothing(config, tmp_path, capsys) -> None:
    report = tmp_path / "report.json"
    words = ["--lengths", "128", "--warmup", "0", "--steps", "1", "--json", str(report)]
    assert main(["rehearse", str(config), *words]) == 0
    assert "foretell" not in capsys.readouterr().out
    assert json.loads(report.read_text())["foretold_peak"] is None


def _check_peaks(found) -> None:
    """The whole step's peak is that of its highest place and stage."""
    places, fits = found["peak_by_place"], found["fits"]
    assert max(places.values()) == found["peak_allocated"] == fits["all"]["peak_allocated"][-1]
    assert set(fits) == {"all", "forward", "head", "recompute", "backward", "update"}
    for fit in fits.values():
        assert fit["rows"] == [64, 96, 128]
    stages = [fits[name]["peak_allocated"] for name in fits if name != "all"]
    assert [max(peaks) for peaks in zip(*stages, strict=True)] == fits["all"]["peak_allocated"]
    assert fits["backward"]["r2"] > 0.99 and fits["update"]["bytes_per_row"] < 100
    assert places["head forward"] == fits["head"]["peak_allocated"][-1]
    assert found["foretold_peak"] == pytest.approx(found["peak_allocated"], rel=0.1)
    assert places["update step"] < places["attention backward"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "2"], "rank 2 of 2: ranks are 0 to 1"),
        (["--fit", "0", "--plot", "x.png"], "--plot draws the fit, but --fit is 0"),
        (["--fit", "-1"], "--fit is -1; it is a number of lengths, 0 for no fit"),
        (["--json", "nowhere/x.json"], "nowhere/x.json cannot be written: there is no folder"),
        (["--fit", "200"], "200 lengths that are multiples of 2 do not fit"),
        (["--steps", "0"], "--steps is 0: it must be at least 1"),
        (["--parallel.cp", "0"], "say how many ranks there are with --world"),
        (["--imbalance", "0.5"], "imbalance is 0.5: it must be at least 1"),
    ],
)
def test_mistakes_are_one_line(config, capsys, words, message) -> None:
    assert main(["rehearse", str(config), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_a_rank_that_this_machine_has_no_memory_for_is_refused_before_it_loads(capsys) -> None:
    """One of GLM-5.2's two ranks: 400 GB of weights."""
    configs = Path(__file__).parents[2] / "configs"
    words = ["--model.path", str(configs / "models/glm-5.2"), "--parallel.cp", "2"]
    run = ["rehearse", str(configs / "glm52_131k_8xh200.toml"), *words, "--parallel.ep", "2"]
    assert main([*run, "--fit", "0"]) == 2
    said = capsys.readouterr().err
    assert re.search(r"rank 1 of 2 takes [\d.]+ GiB by its plan; there is no GPU here", said)
