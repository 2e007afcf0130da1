"""Operators registered by ops/registration.py."""

import pytest
import torch

from fullspan.ops.registration import operator


@operator("written_outside_torch(Tensor x, Tensor(a!) out) -> Tensor", fake=lambda x, out: x + 0)
def _written_outside_torch(x, out):
    """As kernels write: PyTorch does not see it."""
    out.detach().numpy()[...] = 7
    return x * 2


def test_a_kernel_that_writes_counts_as_a_change_in_place():
    """Autograd says so, where it would use the changed values for a gradient."""
    kept = torch.ones(3)
    x = torch.ones(3, requires_grad=True)
    product = (x * kept).sum()
    _written_outside_torch(torch.ones(3), kept)
    assert kept.tolist() == [7, 7, 7]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_what_only_reads_changes_no_count():
    x, out = torch.ones(3), torch.ones(3)
    result = _written_outside_torch(x, out)
    assert (x._version, out._version, result.tolist()) == (0, 1, [2, 2, 2])
    torch.library.opcheck(_written_outside_torch, (x, out))
