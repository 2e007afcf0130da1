"""Cross-entropy of a frozen output projection in plain PyTorch, a chunk of rows at a time."""

import torch
from torch import Tensor

WIDENED_ELEMENTS = 1 << 24  # of the weight, at once, where it is not wide already


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore: int, chunk_rows: int, keep_grad: bool
) -> tuple[Tensor, Tensor]:
    """nll [rows] in fp32 or wider; d nll / d hidden like hidden, or [0, hidden] unless kept."""
    rows, width = hidden.shape
    wide = torch.promote_types(hidden.dtype, torch.float32)
    nll = torch.zeros(rows, dtype=wide, device=hidden.device)
    grad_rows = rows if keep_grad else 0
    grad = torch.zeros((grad_rows, width), dtype=hidden.dtype, device=hidden.device)
    narrow = _on_matrix_units(hidden, weight)
    trained = (labels != ignore).nonzero()[:, 0]
    logits = nll.new_empty((min(chunk_rows, len(trained)), weight.shape[0]))
    for part in trained.split(chunk_rows):
        target = labels[part, None]
        chunk = _project(hidden[part], weight, logits[: len(part)], narrow)
        peak = chunk.amax(1, keepdim=True)
        target_logit = chunk.gather(1, target)
        total = chunk.sub_(peak).exp_().sum(1, keepdim=True)
        nll[part] = (total.log() + peak - target_logit)[:, 0]
        if keep_grad:
            probs = chunk.div_(total)
            probs.scatter_add_(1, target, total.new_full(target.shape, -1.0))
            grad[part] = _project_back(probs, weight, narrow).to(grad.dtype)
    return nll, grad


def _project(hidden: Tensor, weight: Tensor, logits: Tensor, narrow: bool) -> Tensor:
    """logits = hidden @ weight.T with wide products and sums."""
    if narrow:
        return torch.mm(hidden, weight.T, logits.dtype, out=logits)
    hidden = hidden.to(logits.dtype)
    for part in _slices(weight):
        torch.mm(hidden, weight[part].to(hidden.dtype).T, out=logits[:, part])
    return logits


def _project_back(probs: Tensor, weight: Tensor, narrow: bool) -> Tensor:
    """probs @ weight with wide sums, and wide products unless narrow."""
    if narrow:
        return torch.mm(probs.to(weight.dtype), weight, probs.dtype)
    out = probs.new_zeros((probs.shape[0], weight.shape[1]))
    for part in _slices(weight):
        out.addmm_(probs[:, part], weight[part].to(probs.dtype))
    return out


def _on_matrix_units(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the device multiplies these narrow numbers as they are and adds up in float32. Logits
    lose nothing by it; probabilities are rounded once, where plain PyTorch rounds them and the
    logits. A CPU has no such product, so there the weight is widened.
    """
    narrow = (torch.bfloat16, torch.float16)
    return weight.is_cuda and weight.dtype == hidden.dtype and weight.dtype in narrow


def _slices(weight: Tensor) -> list[slice]:
    """Vocabulary slices to widen one after the other; a single one when the weight is wide."""
    vocab, width = weight.shape
    wide = weight.dtype in (torch.float32, torch.float64)
    step = vocab if wide else max(1, WIDENED_ELEMENTS // width)
    return [slice(first, first + step) for first in range(0, vocab, step)]
