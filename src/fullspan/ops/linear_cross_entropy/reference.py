"""Cross-entropy of a frozen output projection in plain PyTorch, a chunk of rows at a time."""

import torch
from torch import Tensor

WEIGHT_BLOCK_ELEMENTS = 1 << 24


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore: int, chunk_rows: int, keep_grad: bool
) -> tuple[Tensor, Tensor]:
    """nll [rows] in fp32 or wider, and d nll / d hidden [rows, hidden] in hidden's dtype ([0, hidden] unless kept)."""
    rows, width = hidden.shape
    wide = torch.promote_types(hidden.dtype, torch.float32)
    nll = torch.zeros(rows, dtype=wide, device=hidden.device)
    grad = torch.zeros((rows if keep_grad else 0, width), dtype=hidden.dtype, device=hidden.device)
    for part in (labels != ignore).nonzero()[:, 0].split(chunk_rows):
        logits = _project(hidden[part].to(wide), weight)
        target = labels[part, None]
        lse = logits.logsumexp(1, keepdim=True)
        nll[part] = (lse - logits.gather(1, target)).squeeze(1)
        if keep_grad:
            probs = logits.sub_(lse).exp_()
            probs.scatter_add_(1, target, torch.full_like(lse, -1.0))
            grad[part] = _project_back(probs, weight).to(hidden.dtype)
    return nll, grad


def _blocks(weight: Tensor) -> list[slice]:
    """Vocabulary slices whose weights are widened one after the other; a single one when they are wide already."""
    vocab, width = weight.shape
    wide = weight.dtype in (torch.float32, torch.float64)
    step = vocab if wide else max(1, WEIGHT_BLOCK_ELEMENTS // width)
    return [slice(first, min(first + step, vocab)) for first in range(0, vocab, step)]


def _project(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T with wide products and sums."""
    logits = hidden.new_empty((hidden.shape[0], weight.shape[0]))
    for part in _blocks(weight):
        torch.mm(hidden, weight[part].to(hidden.dtype).T, out=logits[:, part])
    return logits


def _project_back(probs: Tensor, weight: Tensor) -> Tensor:
    """probs @ weight with wide products and sums."""
    out = probs.new_zeros((probs.shape[0], weight.shape[1]))
    for part in _blocks(weight):
        out.addmm_(probs[:, part], weight[part].to(probs.dtype))
    return out
