"""The tree of sections: shipped files parse, rules between sections hold, paths are absolute."""

from pathlib import Path

import pytest

from fullspan import settings
from fullspan.errors import ConfigError
from fullspan.train.config import RunConfig, load_run_config

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "configs").glob("*.toml"))
MINIMAL = """
[model]
path = "model"
[data]
path = "data/*.jsonl"
pack_length = 256
[train]
steps = 10
output_dir = "out"
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(MINIMAL)
    return tmp_path / "run.toml"


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config = load_run_config(path, overrides)
        config.check_ranks(config.parallel.cp or 1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_there_are_shipped_configurations():
    assert "tiny_cpu.toml" in [path.name for path in SHIPPED]


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_configuration_parses_and_round_trips(shipped, tmp_path):
    config = load_run_config(shipped)
    config.check_ranks(config.parallel.cp or 1)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(settings.dump_toml(config))
    assert load_run_config(resolved) == config
    assert settings.load(RunConfig, resolved) == config


def test_sections_without_a_required_key_may_be_left_out(path):
    config = load_run_config(path)
    assert config.parallel.cp == 0
    assert config.checkpoint.resume is True
    assert config.model.dtype == "bfloat16"


def test_paths_start_from_the_working_directory(path):
    here = Path.cwd()
    config = load_run_config(path)
    assert config.model.path == str(here / "model")
    assert config.data.path == str(here / "data/*.jsonl")
    assert config.data.eval_path is None
    assert config.train.output_dir == str(here / "out")
    words = ["--checkpoint.resume", "old", "--data.eval_path", "held", "--model.path", "/m"]
    config = load_run_config(path, words)
    assert config.checkpoint.resume == str(here / "old")
    assert config.data.eval_path == str(here / "held")
    assert config.model.path == "/m"


def test_a_home_folder_is_expanded(path, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert load_run_config(path, ["--model.path", "~/m"]).model.path == "/somewhere/m"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--parallel.cp", "3"], ["data.pack_length is 256", "such as 258"]),
        (["--parallel.cp", "512"], ["data.pack_length is 256", "such as 512"]),
        (["--train.eval_every", "5"], ["train.eval_every is 5", "data.eval_path"]),
        (["--optim.warmup_steps", "11"], ["optim.warmup_steps is 11", "train.steps, 10"]),
        (["--train.steps", "0"], ["train.steps is 0"]),
        (["--model.dtype", "float16"], ["model.dtype", "'bfloat16', 'float32'", '"float16"']),
        (["--model.path="], ["model.path is empty"]),
        (["--data.pack_lenght", "8"], ["did you mean 'data.pack_length'?"]),
        (["--optim.learning_rate", "8"], ["did you mean 'optim.lr'?"]),
        (["--lora.rank", "8"], ["did you mean 'lora.r'?"]),
        (["--parallel.zigzag", "true"], ["did you mean 'parallel.partition'?"]),
        (["--parallel.nothing", "8"], ["unknown setting 'parallel.nothing' ([parallel] knows"]),
        (["--lr", "8"], ["unknown setting 'lr'", "did you mean 'optim.lr'?"]),
    ],
)
def test_rules_between_and_within_sections(path, words, parts):
    message = error_of(path, *words)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("missing", ["model", "data", "train"])
def test_required_sections(path, missing):
    sections = ["[" + part for part in MINIMAL.split("[")[1:]]
    path.write_text("".join(part for part in sections if not part.startswith(f"[{missing}]")))
    assert f"{missing}." in error_of(path)
    assert "is required" in error_of(path)


def test_the_number_of_ranks_is_checked(path):
    config = load_run_config(path)
    config.check_ranks(4)
    with pytest.raises(ConfigError, match=r"data.pack_length is 256: .* multiple of 3 for"):
        config.check_ranks(3)
    config = load_run_config(path, ["--parallel.cp", "2"])
    config.check_ranks(2)
    with pytest.raises(
        ConfigError, match=r"x parallel.cp 2 makes 2, but the run has 1 rank: .*--nproc"
    ):
        config.check_ranks(1)
    config = load_run_config(path, ["--parallel.dp=2", "--parallel.cp=3", "--parallel.ep=2"])
    with pytest.raises(ConfigError, match=r"dp 2 x parallel.cp 3 makes 6, but the run has 4 ranks"):
        config.check_ranks(4)
