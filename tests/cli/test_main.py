"""The command line itself: it answers at once, and what a user gets wrong is one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from fullspan import __version__
from fullspan.cli.main import main

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "matplotlib", "numpy", "tokenizers", "safetensors")
PROBE = """
import sys
from fullspan.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as leaving:
    assert leaving.code == 0, leaving.code
print("heavy:", [name for name in {heavy} if name in sys.modules])
"""


def exit_code(*words: str) -> int:
    """Of the command line, whether it returns or lets argparse leave."""
    try:
        return main(words)
    except SystemExit as leaving:
        assert isinstance(leaving.code, int)
        return leaving.code


@pytest.fixture
def run_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npath = "model"\n[data]\npath = "data"\npack_length = 64\n'
        '[train]\nsteps = 1\noutput_dir = "out"\n'
    )
    return path


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["train", "--help"], ["data", "--help"], ["init-tiny", "--help"]],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(words):
    probe = PROBE.format(heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", probe, *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("heavy: []\n")
    assert done.stderr == ""


def test_version(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"fullspan {__version__}\n"


def test_help_names_every_command(capsys):
    assert exit_code("--help") == 0
    out = capsys.readouterr().out
    for name in ("init-tiny", "data", "train", "export"):
        assert f"\n    {name}" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "CONFIG"),
        (["train", "a.toml", "--nproc", "2"], "unrecognized arguments: --nproc 2"),
        (["train", "a.toml", "--nproc-per-node", "two"], "invalid int value: 'two'"),
        (["init-tiny", "x", "--optim.lr", "1"], "unrecognized arguments: --optim.lr 1"),
    ],
)
def test_words_that_no_command_takes(words, message, capsys):
    assert exit_code(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optim.lrr", "1"], "command line: unknown setting 'optim.lrr'; did you mean"),
        (["--optim.lr", "fast"], "command line: optim.lr must be a finite number"),
        (["--optim.lr"], "command line: --optim.lr needs a value"),
        (["--parallel.cp", "2"], "parallel."),
        (["--nproc-per-node", "3"], "data.pack_length is 64"),
        (["--nproc-per-node", "0"], "--nproc-per-node is 0"),
        (["--master-port", "1"], "--master-port needs ranks that meet"),
    ],
)
def test_a_users_error_is_one_line_on_stderr(run_file, words, message, capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert exit_code("train", str(run_file), *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"fullspan: error: {message}")
    assert err.count("\n") == 1


def test_overrides_may_stand_before_the_file(run_file, capsys):
    assert exit_code("train", "--optim.lr", "fast", str(run_file)) == 2
    assert "optim.lr must be a finite number" in capsys.readouterr().err


def test_a_file_that_is_absent(tmp_path, capsys):
    assert exit_code("train", str(tmp_path / "absent.toml")) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_size_rules_hold_and_are_enforced(tmp_path):
    script = ROOT / "scripts" / "check_size.py"
    body = "".join(f"    x{number} = {number}\n" for number in range(90))
    (tmp_path / "long.py").write_text(f'"""Doc."""\n\n\ndef long():\n{body}')
    (tmp_path / "short.py").write_text('"""Doc."""\n\n\ndef short():\n    pass\n')
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'long.py'}:4 long: 91 lines, at most 80\n"
