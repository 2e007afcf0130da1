"""TOML and overrides to dataclasses: an error names file, key, what was got, what is allowed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from fullspan import settings
from fullspan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 2


@dataclass(frozen=True, kw_only=True)
class Optim:
    lr: float = 1e-4
    steps: int
    schedule: Literal["cosine", "linear"] = "cosine"
    fused: bool = False
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True, kw_only=True)
class Data:
    path: Path = Path("data")
    name: str = "x"
    extra: str | None = None
    resume: bool | str = True
    targets: tuple[str, ...] = ("a",)
    sizes: list[int] = field(default_factory=lambda: [1, 2])


@dataclass(frozen=True, kw_only=True)
class Run:
    optim: Optim
    data: Data = field(default_factory=Data)


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode())
        return path

    return write


def load(path: Path, *overrides: str) -> Run:
    return settings.load(Run, path, overrides)


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_file_and_defaults(write):
    run = load(write("[optim]\nsteps = 3\nlr = 1\n[optim.inner]\ndepth = 5\n"))
    assert run == Run(optim=Optim(steps=3, lr=1.0, inner=Inner(depth=5)))
    assert type(run.optim.lr) is float


def test_byte_order_mark_and_crlf(write):
    assert load(write("\ufeff[optim]\r\nsteps = 3\r\n")).optim.steps == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--optim.lr", "1e-3"], Optim(steps=3, lr=1e-3)),
        (["--optim.lr=1e-3"], Optim(steps=3, lr=1e-3)),
        (["--optim.lr", "2"], Optim(steps=3, lr=2.0)),
        (["--optim.lr", "-2.5"], Optim(steps=3, lr=-2.5)),
        (["--optim.steps", "1_000"], Optim(steps=1000)),
        (["--optim.fused", "true"], Optim(steps=3, fused=True)),
        (["--optim.schedule", "linear"], Optim(steps=3, schedule="linear")),
        (["--optim.inner.depth", "7"], Optim(steps=3, inner=Inner(depth=7))),
        (["--optim.steps", "4", "--optim.steps", "5"], Optim(steps=5)),
    ],
)
def test_overrides_win_over_the_file(write, words, expected):
    assert load(write("[optim]\nsteps = 3\n"), *words).optim == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--data.name", "plain words"], Data(name="plain words")),
        (["--data.name", "123"], Data(name="123")),
        (["--data.name", "true"], Data(name="true")),
        (["--data.name=a=b"], Data(name="a=b")),
        (["--data.name", '"quoted"'], Data(name="quoted")),
        (["--data.name", "x\ny = 2"], Data(name="x\ny = 2")),
        (["--data.name="], Data(name="")),
        (["--data.path", "some/where"], Data(path=Path("some/where"))),
        (["--data.extra", "e"], Data(extra="e")),
        (["--data.resume", "false"], Data(resume=False)),
        (["--data.resume", "runs/1"], Data(resume="runs/1")),
        (["--data.resume", '"false"'], Data(resume="false")),
        (["--data.targets", '["q_b_proj", "o_proj"]'], Data(targets=("q_b_proj", "o_proj"))),
        (["--data.sizes", "[4, 5]"], Data(sizes=[4, 5])),
    ],
)
def test_the_field_decides_how_an_override_is_read(write, words, expected):
    assert load(write("[optim]\nsteps = 3\n"), *words).data == expected


def test_none_unsets_what_the_file_sets(write):
    path = write('[optim]\nsteps = 3\n[data]\nextra = "e"\n')
    assert load(path).data.extra == "e"
    assert load(path, "--data.extra", "none").data.extra is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[optim]\nsteps = 3\nlearning_rat = 1\n", ["unknown setting 'optim.learning_rat'", "lr"]),
        ("[optim]\nsteps = 3\nstep = 1\n", ["did you mean 'optim.steps'?"]),
        ("[optim]\nsteps = 3\ntargets = []\n", ["did you mean 'data.targets'?"]),
        ("[optim]\nsteps = 3\nsizes = []\n", ["did you mean 'data.sizes'?"]),
        ("[optim]\nsteps = 3\n[dat]\n", ["unknown section 'dat'", "did you mean 'data'?"]),
        ("steps = 3\n", ["unknown setting 'steps'", "did you mean 'optim.steps'?"]),
        ("[data]\n", ["optim.steps is required", "[optim]", "--optim.steps"]),
        ("optim = 3\n", ["optim is a section", "got 3"]),
        ("[optim]\nsteps = 3\ninner = 1\n", ["optim.inner is a section", "optim.inner.depth"]),
        ("[optim]\nsteps = 3.5\n", ["optim.steps must be a whole number, got 3.5"]),
        ("[optim]\nsteps = true\n", ["optim.steps must be a whole number, got true"]),
        ('[optim]\nsteps = "3"\n', ['optim.steps must be a whole number, got "3"']),
        ("[optim]\nsteps = 3\nlr = nan\n", ["optim.lr must be a finite number, got nan"]),
        ("[optim]\nsteps = 3\nlr = true\n", ["optim.lr must be a finite number, got true"]),
        ("[optim]\nsteps = 3\nfused = 1\n", ["optim.fused must be true or false, got 1"]),
        ("[optim]\nsteps = 3\nlr = [1]\n", ["optim.lr must be a finite number, got [1]"]),
        ("[optim]\nsteps = 3\n[optim.lr]\n", ["optim.lr must be a finite number, got a section"]),
        ("[optim]\nsteps = 3\nlr = 2020-01-01\n", ["optim.lr must be", "got 2020-01-01"]),
        (
            '[optim]\nsteps = 3\nschedule = "cosin"\n',
            ["optim.schedule must be one of 'cosine', 'linear'", "did you mean 'cosine'?"],
        ),
        ("[optim]\nsteps = 3\n[data]\nextra = 1\n", ["data.extra must be a string or none, got 1"]),
        ("[optim]\nsteps = 3\n[data]\nresume = 1\n", ["must be true or false or a string, got 1"]),
        ("[optim]\nsteps = 3\n[data]\ntargets = [1]\n", ["data.targets must be a list", "[1]"]),
        ('[optim]\nsteps = 3\n[data]\ntargets = "q"\n', ["data.targets must be a list"]),
        ("[optim\n", ["not valid TOML", "line 1"]),
        ("[optim]\nsteps = 3\nsteps = 4\n", ["not valid TOML"]),
    ],
)
def test_errors_of_the_file(write, text, parts):
    path = write(text)
    message = error_of(path)
    assert message.startswith(f"{path}: ")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--optim.lrr", "1"], ["unknown setting 'optim.lrr'", "did you mean 'optim.lr'?"]),
        (["--nowhere.x", "1"], ["unknown section 'nowhere'", "optim, data"]),
        (["--optim.steps", "many"], ['optim.steps must be a whole number, got "many"']),
        (["--optim.steps", "3\ny = 4"], ['optim.steps must be a whole number, got "3\\ny = 4"']),
        (["--optim.steps", "1e3"], ["optim.steps must be a whole number, got 1000.0"]),
        (["--optim.fused", "yes"], ['optim.fused must be true or false, got "yes"']),
        (["--optim.schedule", "3"], ["one of 'cosine', 'linear'"]),
        (["--data.targets", "q_b_proj"], ["data.targets must be a list", '"q_b_proj"']),
        (["--optim", "x"], ["optim is a section", "got 'x'"]),
        (["--optim.steps"], ["--optim.steps needs a value"]),
        (["--optim.steps", "--optim.lr", "1"], ["--optim.steps needs a value"]),
        (["--optim.steps.x", "1"], ["steps is a value, not a section"]),
        (["stray"], ["unexpected 'stray'"]),
    ],
)
def test_errors_of_the_command_line(write, words, parts):
    message = error_of(write("[optim]\nsteps = 3\n"), *words)
    assert message.startswith("command line: ")
    for part in parts:
        assert part in message


def test_a_file_that_cannot_be_read(tmp_path):
    assert "cannot read" in error_of(tmp_path / "absent.toml")
    assert "cannot read" in error_of(tmp_path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"[optim]\nsteps = 3 # \xe9\n")
    assert "not UTF-8" in error_of(latin)


def test_split_overrides():
    words = ["train", "a.toml", "--optim.lr", "1", "--nproc-per-node", "2", "--data.name=x.y"]
    words += ["--out=./a.b", "--data.path", "c.d", "--optim.fused"]
    assert settings.split_overrides(words) == (
        ["train", "a.toml", "--nproc-per-node", "2", "--out=./a.b"],
        ["--optim.lr", "1", "--data.name=x.y", "--data.path", "c.d", "--optim.fused"],
    )


def test_the_resolved_configuration_loads_back_equal(write):
    awkward = 'quote " back \\ tab \t line \n del \x7f nul \x00 snow ☃ far 𝄞'
    run = Run(
        optim=Optim(lr=1e-05, steps=1 << 40, fused=True, schedule="linear", inner=Inner(depth=-1)),
        data=Data(path=Path("ä b"), name=awkward, resume="r", targets=(), sizes=[3]),
    )
    text = settings.dump_toml(run)
    assert load(write(text)) == run
    assert "extra" not in text
    assert text.startswith("[optim]\n")
