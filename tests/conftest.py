"""Shared by every test: annotations of shapes are checked, one CPU thread per process,
uninitialised memory is NaN.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS warns on a GPU

from jaxtyping import install_import_hook

import tests.support.typecheck  # noqa: F401  the hook finds it by its name

install_import_hook("fullspan", "tests.support.typecheck.checked")

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which torch may do


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """torch.empty gives NaN, so that a value that is read before it is written cannot go unseen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory) -> dict[str, Path]:
    """One tiny checkpoint of each family, written once for the whole session. Never write into
    them.
    """
    from fullspan.checkpoint.tiny import init_tiny
    from tests.support.tiny import FAMILIES

    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        init_tiny(folder, family=family, seed=0)
    return folders
