"""Negative log likelihood under a frozen output projection, without the [rows, vocab] logits.

As the projection is frozen, only the hidden rows have a gradient. It is computed beside the loss,
while the logits of a chunk exist, and backward only scales its rows. Reduction over rows and ranks
is the caller's.
"""

import torch

from fullspan.errors import ConfigError
from fullspan.ops.linear_cross_entropy import reference
from fullspan.ops.options import OpOptions
from fullspan.shapes import Float, Int64, Tensor

IGNORE = -100


def linear_cross_entropy(
    hidden: Float[Tensor, "rows hidden"],
    weight: Float[Tensor, "vocab hidden"],
    labels: Int64[Tensor, "rows"],
    *,
    options: OpOptions,
) -> Float[Tensor, "rows"]:
    """logsumexp(hidden @ weight.T) less the label's logit, fp32 or wider; 0 where IGNORE.

    Ignored rows are not computed: without a trained row, loss and gradient are zeros. At most
    options.loss_chunk_rows rows of logits exist at once. Raises ConfigError when weight requires
    a gradient.
    """
    if weight.requires_grad:
        raise ConfigError(
            "the output projection requires a gradient and linear_cross_entropy computes none: "
            "take lm_head out of lora.targets or freeze it"
        )
    keep_grad = torch.is_grad_enabled() and hidden.requires_grad
    return _linear_cross_entropy(hidden, weight, labels, options.loss_chunk_rows, keep_grad)[0]


@torch.library.custom_op(
    "fullspan::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor labels, int chunk_rows, bool keep_grad) "
    "-> (Tensor, Tensor)",
)
def _linear_cross_entropy(hidden, weight, labels, chunk_rows, keep_grad):
    return reference.linear_cross_entropy(hidden, weight, labels, IGNORE, chunk_rows, keep_grad)


@_linear_cross_entropy.register_fake
def _(hidden, weight, labels, chunk_rows, keep_grad):
    rows, width = hidden.shape
    nll = hidden.new_empty(rows, dtype=torch.promote_types(hidden.dtype, torch.float32))
    return nll, hidden.new_empty((rows if keep_grad else 0, width))


def _setup_context(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx, grad_nll, _):
    (unit,) = ctx.saved_tensors
    return (grad_nll[:, None] * unit).to(unit.dtype), None, None, None, None


_linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)
