"""`fullspan parity`: a clean run passes, planted faults are found and named.

The faults are planted in functions of the product, in this process, from which the ranks are
forked; they act where there is a process group only, so that the first split stays right.
"""

import json
import os
import random
import re
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from fullspan.cli.main import main
from fullspan.errors import DataError, LaunchError
from fullspan.models.dsa.attention import Indexer
from fullspan.ops.packed import PackedLayout
from fullspan.parallel import context
from fullspan.parallel.collectives import PendingTensor
from fullspan.parity.compare import TOLERANCES, Finding, compare
from fullspan.parity.group import run_group
from fullspan.parity.margins import Margin
from fullspan.parity.margins import _margin as margin_of_row
from fullspan.parity.probe import PackSeen, RunSeen, StepSeen, set_hashes
from fullspan.parity.row_blocks import RowBlocks
from fullspan.parity.run import ParityOptions, ParityReport, as_json
from fullspan.parity.splits import Split, common_rows, every_split
from fullspan.train.config import load_run_config
from fullspan.train.session import Session

RUN = """
[model]
path = "{model}"
dtype = "float32"
[lora]
r = 2
targets = ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "experts.down_proj"]
[data]
path = "train.jsonl"
pack_length = 160
[train]
steps = 3
output_dir = "out"
"""

MARGIN = (
    r"rows from (\d+) on; in row (\d+) the last key chosen and the next score \S+ apart, "
    r"(\S+) times their rounding$"
)


@pytest.fixture
def folder(tmp_path, tiny_checkpoints, monkeypatch) -> Path:
    """The working folder, with run.toml and its data: documents longer than index_topk, 64."""
    monkeypatch.chdir(tmp_path)
    pick = random.Random(1)
    words = ("span", "rank", "pack", "key", "row", "sum", "loss")
    texts = [" ".join(pick.choice(words) for _ in range(32)) for _ in range(4)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    (tmp_path / "run.toml").write_text(RUN.format(model=tiny_checkpoints["glm_moe_dsa"]))
    return tmp_path


def parity(*words: str) -> tuple[int, dict]:
    """The exit code and the report; findings by (cp, quantity)."""
    code = main(["parity", "run.toml", "--json", "out.json", *words])
    report = json.loads(Path("out.json").read_text())
    findings = {(f["split"]["cp"], f["quantity"]): f for f in report["findings"]}
    assert report["passed"] == all(f["passed"] for f in report["findings"]) == (code == 0)
    return code, findings


def test_a_clean_run_passes_at_every_split(folder, capsys):
    words = ["--dp", "2", "--cp", "1,2", "--ep", "1,2", "--partition", "zigzag"]
    code = main(["parity", "run.toml", "--steps", "2", "--json", "out.json", *words])
    report = json.loads((folder / "out.json").read_text())
    assert code == 0 and report["passed"]
    assert [split["cp"] * split["ep"] for split in report["splits"]] == [1, 2, 2, 4]
    assert {f["quantity"] for f in report["findings"]} == {
        "loss", "logits", "gradients", "top-k", "bits",
    }  # fmt: skip
    assert report["packs_per_step"] == 2
    out = capsys.readouterr().out
    assert out.startswith("compared with dp 2 cp 1, float32\nsplit ")
    assert "\ndp 2 cp 2 ep 2 zigzag  bits       0         0        ok\n" in out
    assert out.endswith("\npassed\n")
    assert not (folder / "out").exists()


def test_a_flipped_rope_of_the_indexer_is_found(folder, monkeypatch, capsys):
    rotate = Indexer._rotate

    def flipped(self, *given):
        self.interleaved = self.interleaved != dist.is_initialized()
        try:
            return rotate(self, *given)
        finally:
            self.interleaved = self.interleaved != dist.is_initialized()

    monkeypatch.setattr(Indexer, "_rotate", flipped)
    code, findings = parity()
    assert code == 1
    topk = findings[2, "top-k"]
    assert topk["value"] > 0.01 and "self_attn.indexer" in topk["where"]
    row, again, times = re.search(MARGIN, topk["where"]).groups()
    assert row == again and float(times) > 100, "no near tie"
    assert findings[1, "bits"]["passed"] and findings[2, "bits"]["passed"]
    out = capsys.readouterr().out
    assert "FAILED: 4 of 6" in out and "\ncp 2   top-k " in out


@pytest.mark.parametrize("partition", ["contiguous", "zigzag"])
def test_a_near_tie_is_told_from_a_mistake(folder, monkeypatch, partition):
    """Keys come in pairs that are alike but for their last bits: which of two is better depends on
    the split. A row with an odd number of keys may choose one of a pair."""
    gather = context.SequenceContext.start_index_gather

    def in_pairs(self, keys):
        gathered = gather(self, keys).wait()
        if self.order is not None:
            gathered = gathered[self.order.places]
        other = 1 + (1e-6 if dist.is_initialized() else -1e-6)
        gathered = gathered[: len(gathered) // 2].repeat_interleave(2, dim=0)
        gathered[1::2] *= other
        if self.order is not None:
            gathered = gathered[self.order.gathered]
        return PendingTensor(gathered, None)

    monkeypatch.setattr(context.SequenceContext, "start_index_gather", in_pairs)
    code, findings = parity("--partition", partition)
    assert code == 1
    row, again, times = re.search(MARGIN, findings[2, "top-k"]["where"]).groups()
    assert row == again and abs(float(times)) < 20


@pytest.mark.parametrize("fact", ["positions", "key_ranges"])
def test_a_rank_offset_off_by_one_is_found(folder, monkeypatch, fact):
    real = getattr(PackedLayout, fact)

    def shifted(self, rows):
        off = int(dist.is_initialized() and dist.get_rank() == 1)
        return real(self, (rows + off).clamp(max=self.padded_length - 1))

    monkeypatch.setattr(PackedLayout, fact, shifted)
    code, findings = parity()
    assert code == 1
    topk, logits = findings[2, "top-k"], findings[2, "logits"]
    assert not topk["passed"] and "self_attn.indexer" in topk["where"]
    assert not logits["passed"] and int(logits["where"].rpartition(" ")[2]) >= 80


def test_a_dropped_reduce_scatter_is_found(folder, monkeypatch):
    def own_part(full, group, *what):
        rows = full.shape[0] // dist.get_world_size()
        return PendingTensor(full[dist.get_rank() * rows :][:rows])

    monkeypatch.setattr(context, "start_reduce_scatter_rows", own_part)
    code, findings = parity()
    assert code == 1
    failed = {key for key, finding in findings.items() if not finding["passed"]}
    assert failed == {(2, "gradients")}
    assert "kv_a_proj_with_mqa" in findings[2, "gradients"]["where"]


def test_noise_between_two_runs_is_found(folder, monkeypatch):
    forward = Session.forward

    def noisy(self, microbatch):
        self.calls = self.__dict__.get("calls", 0) + 1
        return forward(self, microbatch) * (1 + 1e-6 * self.calls)

    monkeypatch.setattr(Session, "forward", noisy)
    code, findings = parity()
    assert code == 1
    assert findings[1, "bits"]["value"] > 2 and findings[1, "bits"]["where"] == "step 1, loss"


class SumsByRows(TorchDispatchMode):
    """A library whose products of many rows sum in another order than those of few."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default and args[0].shape[0] > 100:
            return self.summed(*args).to(args[0].dtype)
        if func is torch.ops.aten.addmm.out and args[1].shape[0] > 100:
            return kwargs["out"].copy_(args[0].float() + self.summed(*args[1:]))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def summed(first, second):
        half = first.shape[1] // 2
        left, right = first.float().tensor_split([half], dim=1)
        above, below = second.float().tensor_split([half], dim=0)
        return left @ above + right @ below


def test_equal_rows_tell_rounding_from_a_mistake(folder, monkeypatch):
    forward_backward = Session.forward_backward

    def rounded(self, *given):
        modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, RowBlocks)]
        with SumsByRows(), RowBlocks(modes[0].rows) if modes else nullcontext():
            return forward_backward(self, *given)

    monkeypatch.setattr(Session, "forward_backward", rounded)
    words = ["--model.dtype", "bfloat16", "--partition", "contiguous,zigzag"]
    code, plain = parity(*words)
    assert code == 1 and plain[2, "gradients"]["value"] > 3e-2
    code, even = parity(*words, "--equal-rows")
    assert code == 0 and even[2, "logits"]["value"] == even[2, "top-k"]["value"] == 0.0
    assert even[2, "loss"]["value"] < 1e-7


def test_row_blocks_change_no_value():
    generator = torch.Generator().manual_seed(0)
    rows, heads = (
        torch.randn(24, 5, generator=generator),
        torch.randn(3, 24, 5, generator=generator),
    )
    weight = torch.randn(7, 5, generator=generator).requires_grad_()
    for x in (rows, heads, rows[:23]):
        wanted = x @ weight.T
        [gradient] = torch.autograd.grad(wanted.square().sum(), weight)
        with RowBlocks(8):
            got = x @ weight.T
            [same] = torch.autograd.grad(got.square().sum(), weight)
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(same, gradient)


def test_row_blocks_cut_products_that_are_added():
    """Those of adapters: no product of more than 8 rows is left."""
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.addmm.out:
                seen.append(args[1].shape[0])
            return func(*args, **(kwargs or {}))

    rows, out, weight = torch.randn(24, 3), torch.randn(24, 7), torch.randn(3, 7)
    wanted = out + rows @ weight
    with Seen(), RowBlocks(8):
        assert torch.addmm(out, rows, weight, out=out) is out
    torch.testing.assert_close(out, wanted)
    assert seen == [8, 8, 8]


def test_common_rows_divide_every_run_of_rows():
    splits = [Split(), Split(cp=2, partition="zigzag"), Split(cp=3)]
    assert common_rows(splits[:1], 96) == 96
    assert common_rows(splits[:2], 96) == 24
    assert common_rows(splits, 96) == 8


# --------------------------------------------------------------------------------- the parts


def seen(loss: float = 2.0, ids: list[int] = (0, 2, 5), **changes) -> RunSeen:
    row = torch.tensor([[*ids, -1]], dtype=torch.int32)
    pack = PackSeen(
        rows=torch.tensor([3]),
        sets={"layer": set_hashes(row)},
        sampled=torch.tensor([3]),
        ids={"layer": row},
        logits=torch.ones(1, 4),
    )
    gradients = {"a": torch.ones(3), "b": torch.zeros(2)}
    step = StepSeen(loss=loss, gradients=gradients, packs={0: pack})
    for name, value in changes.items():
        setattr(step, name, value)
    return RunSeen(steps=[step], unrepeated=[])


def findings(got: RunSeen, wanted: RunSeen) -> dict[str, Finding]:
    found = compare(Split(cp=2), got, wanted, TOLERANCES["float32"])
    return {finding.quantity: finding for finding in found}


def test_every_quantity_is_compared():
    assert all(f.passed and not f.where for f in findings(seen(), seen()).values())
    assert findings(seen(2.2), seen())["loss"].value == pytest.approx(0.1)
    assert not findings(seen(float("nan")), seen())["loss"].passed
    holes = {"a": torch.full((3,), torch.nan), "b": torch.ones(2)}
    found = findings(seen(gradients=holes), seen())["gradients"]
    assert not found.passed and found.where == "step 1, a"
    found = findings(seen(ids=[0, 2, 6]), seen())["top-k"]
    assert found.value == pytest.approx(1 / 3)
    assert found.where == "step 1, pack 0, layer, 1 of 1 rows from 3 on"


def test_a_loss_that_is_no_number_is_valid_json(folder):
    report = ParityReport(
        config=load_run_config(folder / "run.toml"),
        options=ParityOptions(),
        packs_per_step=1,
        losses={Split(): [2.0, float("nan")]},
        seconds={Split(): 1.0},
        findings=[],
    )
    written = json.loads(json.dumps(as_json(report), allow_nan=False))
    assert written["splits"][0]["losses"] == [2.0, "nan"]


def test_sizes_that_are_no_numbers_are_told_in_plain_words(capsys):
    with pytest.raises(SystemExit):
        main(["parity", "run.toml", "--cp", "two"])
    assert "argument --cp: 'two': it must be whole numbers with commas" in capsys.readouterr().err


def test_the_first_row_that_differs_is_told_beside_the_worst():
    got, wanted = seen(), seen()
    for run, ids in ((got, [[0, 2, 6], [1, 3, 6]]), (wanted, [[0, 2, 5], [0, 2, 5]])):
        run.steps = [seen(ids=of_step).steps[0] for of_step in ids]
    got.steps[0].packs[0].margins = {"layer": [Margin(3, 2e-6, 1e-6)]}
    rows = "pack 0, layer, 1 of 1 rows from 3 on"
    margin = "in row 3 the last key chosen and the next score 2.0e-06 apart, 2 times their rounding"
    where = findings(got, wanted)["top-k"].where
    assert where == f"step 2, {rows}; first in step 1, {rows}; {margin}"


def test_the_margin_is_between_the_last_key_and_the_next():
    """Scores are 8 by two heads of which one is not above 0, 6, and 5.999 as 12 - 6.001."""
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    keys = torch.tensor([[6.0, 0.0], [1.0, 3.0], [8.0, -9.0], [12.0, 6.001]])
    weights = torch.tensor([1.0, -1.0])
    chosen = torch.tensor([0, 2])
    found = margin_of_row(query, keys, weights, chosen, 7)
    assert found.row == 7 and found.gap == pytest.approx(0.001, rel=1e-3)
    eps = torch.finfo(torch.float32).eps
    assert found.rounding == pytest.approx(18.001 * eps)
    assert str(found).startswith(
        "in row 7 the last key chosen and the next score 1.0e-03 apart, 5e+02 "
    )
    wrong = margin_of_row(query, keys, weights, torch.tensor([1, 2]), 7)
    assert wrong.gap == -8, "not what the scores say"
    assert margin_of_row(query, keys, weights, torch.arange(4), 7) is None, "it chose every key"
    alike = Margin(3, 0.0, 0.0)
    assert str(alike).endswith("0.0e+00 apart, 0 times their rounding")


def test_a_set_outside_the_sample_counts():
    got = seen()
    got.steps[0].packs[0].sets = {"layer": torch.tensor([1])}
    found = findings(got, seen())["top-k"]
    assert found.value == 1 / 4 and not found.passed


def test_the_hash_is_of_the_set():
    ids = torch.tensor([[0, 1, 2], [2, 0, 1], [0, 1, -1], [-1, 0, 1], [-1, -1, -1], [0, 1, 3]])
    hashes = set_hashes(ids.int()).tolist()
    assert hashes[0] == hashes[1] and hashes[2] == hashes[3] and len(set(hashes)) == 4
    many = torch.arange(20_000, dtype=torch.int32).view(-1, 2)
    assert len(set(set_hashes(many).tolist())) == 10_000


def test_every_mix_that_fits_is_run_once():
    assert every_split(dp=[1], cp=[2, 1], ep=[1, 2], partition=["contiguous", "zigzag"]) == [
        Split(cp=2),
        Split(cp=2, ep=2),
        Split(cp=1),
        Split(cp=2, partition="zigzag"),
        Split(cp=2, ep=2, partition="zigzag"),
    ]


def fails_on_rank_1(device: torch.device, how: str) -> None:
    """Rank 0 waits for a rank that is gone."""
    if dist.get_rank() == 1:
        if how == "bug":
            raise ZeroDivisionError("a bug of ours")
        if how == "data":
            raise DataError("line 3")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("data", LaunchError, "^rank 1: line 3$"),
        ("bug", RuntimeError, "(?s)^rank 1 of 2 failed:\nTraceback.*a bug of ours"),
        ("kill", LaunchError, "^rank 1: ended with code -9"),
    ],
)
def test_the_rank_that_failed_is_named(how, error, words):
    with pytest.raises(error, match=words):
        run_group(2, fails_on_rank_1, how, timeout_seconds=60.0)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--cp", "2"], "nothing to compare"),
        (["--cp", "1,2", "--ep", "1,3"], "--ep 3 fits none of the other sizes: ep must divide"),
        (["--cp", "1", "--dp", "1,2", "--partition", "contiguous,zigzag"], "--partition zigzag"),
        (["--json", "absent/out.json"], "--json: cannot write absent/out.json: No such file"),
        (["--cp", "0,2"], "sizes must be at least 1"),
        (["--cp", "1,3"], "data.pack_length is 160: it must be a multiple of 3"),
        (["--partition", "contiguous,zigzak"], "parallel.partition is 'zigzak'"),
        (["--steps", "0"], "--steps is 0"),
        (["--tolerance", "topk=-1"], "NAME=VALUE"),
        (["--tolerance", "loos=1"], "a name of loss, logits, gradients, topk"),
        (["--model.path", "absent"], "absent"),
        (["--lora.targets", '["absent"]'], "error: lora.targets: 'absent' matches no module"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_compared_is_one_line(folder, capsys, words, error):
    assert main(["parity", "run.toml", *words]) == 2
    err = capsys.readouterr().err
    assert error in err and err.count("\n") == 1
