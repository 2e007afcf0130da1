"""Choice of a backend, its log line, and what OpOptions refuses."""

import logging

import pytest
import torch

from fullspan.errors import BackendError, ConfigError
from fullspan.ops import backend
from fullspan.ops.backend import resolve
from fullspan.ops.options import BACKEND_NAMES, OpOptions

CPU = torch.device("cpu")


def test_auto_becomes_a_backend_and_the_rest_stays():
    options = OpOptions(workspace_bytes=1 << 21, sparse_attention="reference")
    chosen = resolve(options, CPU, torch.float32)
    assert (chosen.index_topk, chosen.sparse_attention) == ("reference", "reference")
    assert chosen.workspace_bytes == 1 << 21


def test_a_choice_is_logged_once(caplog):
    backend.choose.cache_clear()
    with caplog.at_level(logging.INFO, logger="fullspan"):
        for _ in range(3):
            resolve(OpOptions(sparse_attention="reference"), CPU, torch.bfloat16)
    assert [record.message for record in caplog.records] == [
        "index_topk: reference, the first backend for torch.bfloat16 on cpu "
        "(hopper: needs an NVIDIA GPU, not cpu; triton: needs an NVIDIA GPU, not cpu; "
        "reference: can run)",
        "sparse_attention: reference, named by ops.sparse_attention",
        "fp8: reference, the first backend for torch.bfloat16 on cpu "
        "(triton: needs an NVIDIA GPU, not cpu; reference: can run)",
        "rows: reference, the first backend for torch.bfloat16 on cpu "
        "(triton: needs an NVIDIA GPU, not cpu; reference: can run)",
        "expert_products: bf16, named by ops.expert_products",
    ]


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(
        BackendError,
        match=r"ops.index_topk is 'flash'; .*: auto, hopper, triton, reference, cudnn$",
    ):
        OpOptions(index_topk="flash")


def test_fp8_scores_need_a_backend_that_has_them(monkeypatch):
    """With the answers of a Hopper machine in place of this one's."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(backend.importlib.metadata, "version", lambda _: "3.6.0")
    backend.choose.cache_clear()
    gpu = torch.device("cuda")
    chosen = resolve(OpOptions(index_scores="fp8"), gpu, torch.bfloat16, index_dim=128)
    assert (chosen.index_topk, chosen.sparse_attention) == ("hopper", "hopper")
    with pytest.raises(
        BackendError,
        match=r"^ops.index_topk = 'triton' cannot run for torch.float8_e4m3fn \(ops.index_scores\) "
        r"on cuda \(hopper: can run; triton: computes in [^\n]*\)$",
    ):
        resolve(OpOptions(index_scores="fp8", index_topk="triton"), gpu, torch.bfloat16)
    backend.choose.cache_clear()


def test_index_scores_have_a_name():
    with pytest.raises(ConfigError, match=r"^ops.index_scores is 'fp4'; it can be: bf16, fp8$"):
        OpOptions(index_scores="fp4")


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_a_backend_that_cannot_run_says_why(name):
    with pytest.raises(
        BackendError, match=rf"'{name}' cannot run .*reference: .*not in torch.int8"
    ):
        resolve(OpOptions(index_topk=name), CPU, torch.int8)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (op, n)
        for op, names in BACKEND_NAMES.items()
        for n in names
        if n not in ("reference", "bf16")
    ],
)
def test_a_gpu_backend_that_is_named_on_a_cpu_raises(op, name):
    with pytest.raises(BackendError, match=rf"{op} = '{name}' cannot run .*needs an NVIDIA GPU"):
        resolve(OpOptions(**{op: name}), CPU, torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "reason"),
    [
        ((9, 0), torch.bfloat16, {"qk": 576, "value_dim": 512, "topk": 2048}, None),
        ((9, 0), torch.bfloat16, {}, None),
        ((9, 0), torch.bfloat16, {"qk": 40, "value_dim": 32}, "needs qk 576 or 512, not 40"),
        ((9, 0), torch.float16, {}, "computes in bfloat16, not in torch.float16"),
        ((9, 0), torch.bfloat16, {"topk": 5000}, "holds 4096 keys a row at most, not 5000"),
        ((10, 0), torch.bfloat16, {}, "needs a Hopper GPU"),
        ((7, 5), torch.bfloat16, {}, "needs compute capability 8.0"),
    ],
)
def test_what_the_hopper_kernels_are_made_for(monkeypatch, device, dtype, widths, reason):
    """With the answers of a GPU machine in place of this one's."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: device)
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(backend.importlib.metadata, "version", lambda _: "3.6.0")
    check = backend.BACKENDS["sparse_attention"]["hopper"]
    said = check(torch.device("cuda"), dtype, widths)
    assert said is None if reason is None else reason in said
    monkeypatch.setattr(backend.importlib.metadata, "version", lambda _: "3.7.1")
    assert check(torch.device("cuda"), dtype, widths) is not None


def test_the_names_are_those_of_the_registry():
    assert {op: tuple(names) for op, names in backend.BACKENDS.items()} == BACKEND_NAMES


def test_fp8_needs_hardware_that_converts_e4m3(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda _: object())
    for device, reason in (
        ((8, 9), None),
        ((9, 0), None),
        ((8, 6), "needs compute capability 8.9"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, is_=device: is_)
        said = backend.BACKENDS["fp8"]["triton"](torch.device("cuda"), torch.bfloat16, {})
        assert said is None if reason is None else reason in said


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("workspace_bytes", (1 << 20) - 1),
        ("attention_bytes", 1),
        ("expert_bytes", 0),
        ("loss_chunk_rows", 0),
    ],
)
def test_settings_that_are_too_small(setting, value):
    with pytest.raises(ConfigError, match=rf"ops.{setting} is {value}; it must be at least"):
        OpOptions(**{setting: value})
