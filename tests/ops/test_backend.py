"""Choice of a backend, its log line, and what OpOptions refuses."""

import logging

import pytest
import torch

from fullspan.errors import BackendError, ConfigError
from fullspan.ops import backend
from fullspan.ops.backend import OpOptions, resolve

CPU = torch.device("cpu")


def test_auto_becomes_a_backend_and_the_rest_stays():
    options = OpOptions(workspace_bytes=1 << 21, sparse_attention="reference")
    chosen = resolve(options, CPU, torch.float32)
    assert (chosen.index_topk, chosen.sparse_attention) == ("reference", "reference")
    assert chosen.workspace_bytes == 1 << 21


def test_a_choice_is_logged_once(caplog):
    backend._choose.cache_clear()
    with caplog.at_level(logging.INFO, logger="fullspan"):
        for _ in range(3):
            resolve(OpOptions(sparse_attention="reference"), CPU, torch.bfloat16)
    assert [record.message for record in caplog.records] == [
        "index_topk: reference, the first backend for torch.bfloat16 on cpu",
        "sparse_attention: reference, named by ops.sparse_attention",
    ]


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(BackendError, match=r"ops.index_topk is 'flash'; .*: auto, reference$"):
        OpOptions(index_topk="flash")


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_a_backend_that_cannot_run_says_why(name):
    with pytest.raises(
        BackendError, match=rf"'{name}' cannot run .*reference: .*not in torch.int8"
    ):
        resolve(OpOptions(index_topk=name), CPU, torch.int8)


@pytest.mark.parametrize(
    ("setting", "value"), [("workspace_bytes", (1 << 20) - 1), ("loss_chunk_rows", 0)]
)
def test_settings_that_are_too_small(setting, value):
    with pytest.raises(ConfigError, match=rf"ops.{setting} is {value}; it must be at least"):
        OpOptions(**{setting: value})
