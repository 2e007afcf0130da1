"""FP8 checkpoints: kept as they are, decided by their scales, and refused by name where they are
not sound.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from fullspan.checkpoint.load import load_model, read_mapping
from fullspan.checkpoint.safetensors_io import CheckpointFolder
from fullspan.checkpoint.tiny import FP8_BLOCK, init_tiny
from fullspan.cli.main import main
from fullspan.errors import CheckpointError
from fullspan.models.dsa.config import DsaConfig
from fullspan.ops.fp8.op import scale_shape
from fullspan.ops.options import OpOptions
from tests.support.fp8 import write_twins
from tests.support.tiny import FAMILIES
from tests.unit.checkpoint.conftest import all_tensors, edit, written_back

E4M3 = torch.float8_e4m3fn
Q_B = "model.layers.1.self_attn.q_b_proj.weight"
UP = "model.layers.3.mlp.experts.6.up_proj.weight"
GATE_UP = "model.layers.3.mlp.experts.gate_up_proj.weight"


def load(folder: Path, **options):
    arguments = {"dtype": torch.bfloat16, "device": "cpu", "options": OpOptions()}
    return load_model(folder, recompute=False, **{**arguments, **options})


@pytest.fixture(scope="module")
def twins(tmp_path_factory) -> tuple[Path, Path]:
    return write_twins(tmp_path_factory.mktemp("twins"))


@pytest.fixture
def folder(twins, tmp_path) -> Path:
    """A copy of the FP8 checkpoint."""
    return Path(shutil.copytree(twins[0], tmp_path / "model"))


def refused(folder: Path, *told: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in told:
        assert part in message, message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_weights_and_scales_are_those_of_the_files(twins, dtype):
    files = all_tensors(twins[0])
    state = load(twins[0], dtype=dtype).state_dict()
    for name, tensor in state.items():
        if ".mlp.experts." in name:
            prefix, _, kind = name.replace("experts.", "experts.{}.").partition("{}.")
            parts = ("gate_proj", "up_proj") if "gate_up" in kind else ("down_proj",)
            suffix = kind.partition(".")[2]
            experts = [[files[f"{prefix}{e}.{part}.{suffix}"] for part in parts] for e in range(8)]
            wanted = torch.stack([torch.cat(e) for e in experts]).float()
        else:
            wanted = files[name].float()
        assert torch.equal(tensor.float(), wanted), name
    kept = {name for name, tensor in state.items() if tensor.dtype == E4M3}
    assert kept == {name.removesuffix("_scale_inv") for name in state if "_scale" in name}
    assert {n.rsplit(".", 2)[1] for n in kept} == {
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "wk"),
        *("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tiny_checkpoint_has_the_vendors_layout(tmp_path, family):
    init_tiny(tmp_path, family=family, fp8=True, mtp=True)
    files = all_tensors(tmp_path)
    scheme = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert scheme | {"modules_to_not_convert": 0} == {
        "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": 0,
        "quant_method": "fp8", "weight_block_size": [24, 40],
    }  # fmt: skip
    kinds = {".".join(p for p in name.split(".") if not p.isdigit()) for name in files}
    assert "model.layers.mlp.experts.gate_proj.weight_scale_inv" in kinds
    grids, ragged = set(), {0: 0, 1: 0}
    for name, tensor in files.items():
        if name.endswith("_scale_inv"):
            weight = files[name.removesuffix("_scale_inv")]
            assert weight.dtype == E4M3 and tensor.dtype == torch.float32
            assert tensor.shape == scale_shape(weight.shape, FP8_BLOCK)
            grids.add(tuple(tensor.shape))
            for side in (0, 1):
                ragged[side] += weight.shape[side] % FP8_BLOCK[side] != 0
        elif tensor.dtype != E4M3:
            float32 = name.endswith("e_score_correction_bias")
            assert tensor.dtype == (torch.float32 if float32 else torch.bfloat16), name
        else:
            assert name + "_scale_inv" in files, name
    assert any(rows > 2 and cols > 2 for rows, cols in grids)
    assert min(ragged.values()) > 20


def test_equal_seeds_give_equal_fp8_files(twins, tmp_path):
    assert main(["init-tiny", str(tmp_path / "a"), "--fp8"]) == 0
    init_tiny(tmp_path / "b", fp8=True)
    init_tiny(tmp_path / "c", fp8=True, seed=1)
    files = [
        {f.name: f.read_bytes() for f in (tmp_path / name).glob("*.safetensors")} for name in "abc"
    ]
    assert files[0] == files[1] != files[2]


def test_scales_decide_and_not_the_list_of_the_config(folder):
    fields = json.loads((folder / "config.json").read_text())
    names = ["self_attn.q_b_proj", "indexers_proj", Q_B]
    fields["quantization_config"]["modules_to_not_convert"] = names
    (folder / "config.json").write_text(json.dumps(fields))
    assert load(folder).state_dict()[Q_B].dtype == E4M3


def test_another_name_of_the_scales(folder, twins):
    def rename(tensors):
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name.removesuffix("_inv")] = tensors.pop(name)

    edit(folder, rename)
    got, wanted = load(folder).state_dict(), load(twins[0]).state_dict()
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name].float(), wanted[name].float()) for name in wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_narrow_scales_become_float32(folder, dtype):
    """Both hold a power of two exactly."""
    name = f"{Q_B}_scale_inv"
    wanted = 2.0 ** torch.arange(-4, 4).view(4, 2)
    edit(folder, lambda tensors: tensors.update({name: wanted.to(dtype)}))
    scale = load(folder).state_dict()[name]
    assert scale.dtype == torch.float32 and torch.equal(scale, wanted)


def test_a_mixed_checkpoint(folder, twins):
    """One projection and one layer's experts in bfloat16, the rest FP8."""
    plain = all_tensors(twins[1])
    layer = "model.layers.3.mlp.experts."

    def mix(tensors):
        for name in list(tensors):
            if name.removesuffix("_scale_inv") == Q_B or name.startswith(layer):
                tensors.pop(name)
        chosen = {n: t for n, t in plain.items() if n == Q_B or n.startswith(layer)}
        tensors.update(chosen)

    edit(folder, mix)
    state = load(folder).state_dict()
    assert state[Q_B].dtype == state[GATE_UP].dtype == torch.bfloat16
    assert f"{Q_B}_scale_inv" not in state
    assert torch.equal(state[Q_B], plain[Q_B])
    assert state[GATE_UP.replace("3", "4", 1)].dtype == E4M3


def test_the_mapping_takes_scales_back_to_the_files(twins):
    """Declared and invertible: every tensor of the folder comes back to the bit, MTP layer too."""
    folder = CheckpointFolder.open(twins[0])
    mapping, _ = read_mapping(folder, DsaConfig.load(twins[0]), OpOptions())
    back = dict(written_back(load(twins[0]).state_dict(), mapping, folder))
    files = all_tensors(twins[0])
    assert back.keys() == files.keys()
    for name, tensor in files.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].float(), tensor.float()), name


def test_the_mtp_layer_is_passed_over_whatever_its_dtype(folder):
    edit(folder, lambda t: t.pop("model.layers.6.self_attn.o_proj.weight_scale_inv"))
    assert len(load(folder).model.layers) == 6


def test_progress_counts_the_bytes_of_fp8(twins):
    calls = []
    load(twins[0], progress=lambda done, total: calls.append((done, total)))
    folder = CheckpointFolder.open(twins[0])
    total = sum(i.nbytes for n, i in folder.tensors.items() if ".layers.6." not in n)
    assert calls[-1] == (total, total)


FAULTS = {
    "no scale": (
        lambda t: t.pop(f"{Q_B}_scale_inv"),
        (Q_B, "float8_e4m3fn without a scale", f"{Q_B}_scale_inv or {Q_B}_scale"),
    ),
    "an expert without a scale": (
        lambda t: t.pop(f"{UP}_scale_inv"),
        (UP, "float8_e4m3fn without a scale"),
    ),
    "a scale without its tensor": (
        lambda t: t.pop(Q_B),
        (f"{Q_B}_scale_inv", "is a scale without its tensor"),
    ),
    "a lost last row": (
        lambda t: t.update({f"{UP}_scale_inv": t[f"{UP}_scale_inv"][:2].clone()}),
        (f"{UP}_scale_inv", "shape [2, 4]", "24 x 40", "[3, 4]"),
    ),
    "a scale of a plain tensor": (
        lambda t: t.update({Q_B: t[Q_B].to(torch.bfloat16)}),
        (Q_B, "has the scale", "bfloat16"),
    ),
    "another FP8": (
        lambda t: t.update({Q_B: t[Q_B].to(torch.bfloat16).to(torch.float8_e5m2)}),
        (Q_B, "float8_e5m2"),
    ),
    "integers as a scale": (
        lambda t: t.update({f"{Q_B}_scale_inv": t[f"{Q_B}_scale_inv"].to(torch.int32)}),
        (f"{Q_B}_scale_inv", "int32", "float32"),
    ),
    "two scales": (
        lambda t: t.update({f"{Q_B}_scale": t[f"{Q_B}_scale_inv"] + 0}),
        (Q_B, "two scales"),
    ),
    "one plain expert": (
        lambda t: t.update({UP: t[UP].to(torch.bfloat16), f"{UP}_scale_inv": None}),
        (UP, "no scale", GATE_UP, "must all be FP8"),
    ),
    "the head": (
        lambda t: t.update(
            {
                "lm_head.weight": t["lm_head.weight"].to(E4M3),
                "lm_head.weight_scale_inv": torch.ones(14, 4),
            }
        ),
        ("lm_head.weight", "only projections"),
    ),
    "an unknown tensor with a scale": (
        lambda t: t.update({"m.weight": t[Q_B].clone(), "m.weight_scale_inv": torch.ones(4, 2)}),
        ("2 unexpected tensors", "m.weight"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unsound_checkpoint_is_refused_by_name(folder, fault):
    change, told = FAULTS[fault]

    def apply(tensors):
        change(tensors)
        for name in [name for name, tensor in tensors.items() if tensor is None]:
            del tensors[name]

    edit(folder, apply)
    refused(folder, *told)


@pytest.mark.parametrize(
    ("scheme", "told"),
    [
        ({"quant_method": "gptq", "bits": 4}, ("quant_method", "'gptq'", "'fp8'")),
        ({"quant_method": "compressed-tensors"}, ("quant_method", "'compressed-tensors'")),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ("fmt", "'e5m2'", "'e4m3'")),
        ({"quant_method": "fp8", "activation_scheme": "static"}, ("activation_scheme", "'static'")),
        ({"quant_method": "fp8", "scale_fmt": "e5m3"}, ("scale_fmt", "'e5m3'")),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ("weight_block_size", "[128]")),
        ({"quant_method": "fp8", "weight_block_size": [0, 8]}, ("weight_block_size", "[0, 8]")),
        ("fp8", ("quantization_config", "'fp8'")),
    ],
)
def test_other_schemes_are_refused_by_name(folder, scheme, told):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": scheme}))
    refused(folder, *told)


def test_another_block_size_does_not_fit_the_scales(folder):
    """Without a block size it is 128 x 128, and the scales of 24 x 40 are of another shape."""
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"].pop("weight_block_size")
    (folder / "config.json").write_text(json.dumps(fields))
    refused(folder, "128 x 128", "weight_block_size")
