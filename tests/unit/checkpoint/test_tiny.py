"""The tiny checkpoint: transformers loads it without a name left over, equal seeds give equal
files, no part of the model is degenerate."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullspan.checkpoint.tiny import init_tiny
from fullspan.cli.main import main
from fullspan.errors import CheckpointError
from tests.support.tiny import FAMILIES
from tests.unit.checkpoint.conftest import all_tensors, shards

TOKENS = torch.arange(300).view(1, -1) * 7 % 256


def from_pretrained(folder: Path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own deprecations
        return AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.fixture(scope="module")
def stock(tiny_checkpoints):
    """transformers' model of each family and what it says about loading it."""
    return {
        family: from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        for family, folder in tiny_checkpoints.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_it_without_a_name_left_over(stock, family):
    model, info = stock[family]
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ in json.dumps(model.config.architectures)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_fits_the_config(tiny_checkpoints, family):
    folder = tiny_checkpoints[family]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    assert len(tokenizer) <= fields["vocab_size"]
    assert tokenizer.pad_token_id == fields["pad_token_id"] == fields["eos_token_id"][0]
    assert tokenizer.convert_ids_to_tokens(fields["eos_token_id"]) == [
        "<|endoftext|>", "<|user|>", "<|observation|>"
    ]  # fmt: skip
    turn = [{"role": "user", "content": "hi"}]
    assert "<|user|>" in tokenizer.apply_chat_template(turn, tokenize=False)


def test_layers_are_of_every_kind(stock):
    config = stock["glm_moe_dsa"][0].config
    rule = ["shared" if max(i - 2 + 1, 0) % 3 else "full" for i in range(6)]
    assert config.indexer_types == rule and set(rule) == {"full", "shared"}
    assert set(config.mlp_layer_types) == {"dense", "sparse"}
    assert config.index_topk < TOKENS.shape[1]
    other = stock["deepseek_v32"][0].config
    assert other.rope_parameters["rope_type"] == "yarn" and other.topk_group < other.n_group


@pytest.mark.parametrize("family", FAMILIES)
def test_every_sublayer_matters(stock, family):
    """No attention or MLP adds less than a tenth of the residual stream's size, none swamps it."""
    model = stock[family][0]
    added: dict[str, float] = {}
    streams: dict[str, float] = {}

    def watch(name):
        def hook(_, __, out):
            out = out[0] if isinstance(out, tuple) else out
            added[name] = out.square().mean().sqrt().item()

        return hook

    def before(name):
        def hook(_, args):
            streams[name] = args[0].square().mean().sqrt().item()

        return hook

    handles = []
    for number, layer in enumerate(model.model.layers):
        for part, norm in (("self_attn", "input_layernorm"), ("mlp", "post_attention_layernorm")):
            name = f"{number}.{part}"
            handles.append(getattr(layer, part).register_forward_hook(watch(name)))
            handles.append(getattr(layer, norm).register_forward_pre_hook(before(name)))
    try:
        with torch.no_grad():
            logits = model(TOKENS).logits
    finally:
        for handle in handles:
            handle.remove()
    assert len(added) == 2 * len(model.model.layers)
    for name, size in added.items():
        assert 0.1 < size / streams[name] < 2, (name, size / streams[name])
    assert 0.5 < logits.std() < 3


@pytest.mark.parametrize("family", FAMILIES)
def test_indexer_scores_do_not_tie_and_pick_more_than_the_recent(stock, family):
    model = stock[family][0]
    indexer = model.model.layers[0].self_attn.indexer
    scores: list[torch.Tensor] = []
    picked: list[torch.Tensor] = []
    handle = indexer.register_forward_hook(lambda _, __, out: picked.append(out))
    original = torch.Tensor.topk
    try:
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch.Tensor, "topk", lambda t, *a, **k: scores.append(t) or original(t, *a, **k)
            )
            model(TOKENS)
    finally:
        handle.remove()
    row = 250
    last = next(t for t in scores if t.shape[-1] == TOKENS.shape[1])[0, row, : row + 1]
    assert last.unique().numel() == row + 1
    assert last.std() > 0.1
    chosen = picked[0][0, row].long()
    assert chosen.max() <= row and (chosen < row - 64).sum() > 16


def test_norms_and_biases_are_not_trivial(tiny_checkpoints):
    tensors = all_tensors(tiny_checkpoints["glm_moe_dsa"])
    key_norm = "model.layers.0.self_attn.indexer.k_norm"
    assert abs(tensors[f"{key_norm}.weight"].mean() - 1) > 0.05
    assert tensors[f"{key_norm}.bias"].abs().mean() > 0.1
    bias = tensors["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert 0 < bias.abs().max() < 0.5 and bias.dtype == torch.float32
    for name, tensor in tensors.items():
        assert tensor.isfinite().all() and tensor.std() > 0.01, name


def test_router_uses_every_expert_and_the_bias_changes_its_choice(stock):
    model = stock["glm_moe_dsa"][0]
    gate = model.model.layers[2].mlp.gate
    chosen: list[torch.Tensor] = []
    handle = gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    bias = gate.e_score_correction_bias.clone()
    try:
        with torch.no_grad():
            model(TOKENS)
            gate.e_score_correction_bias.zero_()
            model(TOKENS)
    finally:
        handle.remove()
        gate.e_score_correction_bias.copy_(bias)
    assert torch.bincount(chosen[0].flatten(), minlength=8).min() > 0
    assert not torch.equal(chosen[0].sort(-1).values, chosen[1].sort(-1).values)


def test_yarn_is_felt(stock, tiny_checkpoints, tmp_path):
    """The same weights without yarn give other logits."""
    model = stock["deepseek_v32"][0]
    fields = json.loads((tiny_checkpoints["deepseek_v32"] / "config.json").read_text())
    del fields["rope_scaling"]
    init_tiny(tmp_path, family="deepseek_v32")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    plain = from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        apart = (plain(TOKENS).logits - model(TOKENS).logits)[0, 200:]
    assert apart.abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_seeds_give_equal_files(tiny_checkpoints, tmp_path, family):
    init_tiny(tmp_path / "same", family=family, seed=0)
    init_tiny(tmp_path / "other", family=family, seed=1)
    first = {f.name: f.read_bytes() for f in tiny_checkpoints[family].iterdir()}
    assert len([name for name in first if name.endswith(".safetensors")]) >= 2
    assert {f.name: f.read_bytes() for f in (tmp_path / "same").iterdir()} == first
    other = all_tensors(tmp_path / "other")
    assert not any(torch.equal(t, other[n]) for n, t in all_tensors(tmp_path / "same").items())


def test_bfloat16_is_the_same_weights_rounded(tiny_checkpoints, tmp_path):
    init_tiny(tmp_path, dtype="bfloat16")
    wide = all_tensors(tiny_checkpoints["glm_moe_dsa"])
    for name, tensor in all_tensors(tmp_path).items():
        kept = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16)
        assert torch.equal(tensor, wide[name].to(tensor.dtype))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis\.txt.*--force"):
        init_tiny(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
    init_tiny(tmp_path, force=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work" and shards(tmp_path)


def test_a_tiny_checkpoint_may_be_replaced(tmp_path):
    init_tiny(tmp_path, seed=1)
    init_tiny(tmp_path, seed=0)
    replaced = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    init_tiny(tmp_path / "below", seed=0)
    assert replaced == {file.name: file.read_bytes() for file in (tmp_path / "below").iterdir()}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"family": "glm"}, "family is 'glm'.*glm_moe_dsa, deepseek_v32"),
        ({"dtype": "float16"}, "dtype is 'float16'.*float32, bfloat16"),
    ],
)
def test_unknown_names_list_the_known(tmp_path, options, told):
    with pytest.raises(CheckpointError, match=told):
        init_tiny(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write a checkpoint"):
        init_tiny(tmp_path / "file" / "below")


def test_the_command_says_what_it_wrote(tmp_path, capsys, tiny_checkpoints):
    folder = tmp_path / "model"
    assert main(["init-tiny", str(folder), "--family", "deepseek_v32"]) == 0
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and str(folder) in told and "deepseek_v32" in told
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    same = tiny_checkpoints["deepseek_v32"]
    assert files == {file.name: file.read_bytes() for file in same.iterdir()}


@pytest.mark.parametrize(
    ("words", "told"),
    [([], "notes.md"), (["--force", "--family", "llama"], "llama"), (["--dtype", "int8"], "int8")],
)
def test_the_command_refuses_in_one_line(tmp_path, capsys, words, told):
    (tmp_path / "notes.md").write_text("mine")
    assert main(["init-tiny", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and told in error and "Traceback" not in error
    assert [file.name for file in tmp_path.iterdir()] == ["notes.md"]


def test_the_command_takes_seed_dtype_and_force(tmp_path):
    (tmp_path / "notes.md").write_text("mine")
    options = ["--seed", "3", "--dtype", "bfloat16", "--force"]
    assert main(["init-tiny", str(tmp_path), *options]) == 0
    init_tiny(tmp_path / "same", seed=3, dtype="bfloat16")
    got, wanted = all_tensors(tmp_path), all_tensors(tmp_path / "same")
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
