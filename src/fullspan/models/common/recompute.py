"""Activation recompute for a layer that hands a selection on: the layer's input and its selection
are all that is kept, the input in host memory where it is asked for (host_inputs.py).

The first pass runs without autograd; the backward pass runs the layer again, with autograd, on the
kept input and with the kept selection, so the indexer runs once and the keys are the same. What is
kept belongs to the autograd node of that one call, so any number of microbatches may be in flight.
`torch.utils.checkpoint` is not used because it would run the indexer again, or need a place outside
the call to hold the selection.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fullspan.models.common.host_inputs import HostInputs
from fullspan.ops.selection import Selection
from fullspan.shapes import Float, Tensor

# (hidden, kept selection or None) -> (hidden, selection)
LayerCall = Callable[[Tensor, Selection | None], tuple[Tensor, Selection]]


class _RecomputedLayer(torch.autograd.Function):
    """forward: one pass without autograd. backward: a second pass with it, then its gradients."""

    @staticmethod
    def forward(
        ctx, call: LayerCall, inputs: HostInputs | None, hidden: Tensor, *parameters: Tensor
    ):
        wanted = any(ctx.needs_input_grad)
        ctx.call = call
        ctx.input = None if inputs is None else inputs.keep(hidden, wanted=wanted)
        out, selection = call(hidden, None)
        if ctx.input is not None:
            ctx.input.leave()
        here = hidden if ctx.input is None else None
        ctx.save_for_backward(here, selection.ids, selection.counts, *parameters)
        ctx.plans = selection.plans
        return out, selection  # no tensor, so autograd hands it on as it is

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor | None):
        hidden, ids, counts, *parameters = ctx.saved_tensors
        if ctx.input is not None:
            hidden = ctx.input.take()
        hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[2])
        with torch.enable_grad():
            out, _ = ctx.call(hidden, Selection(ids, counts, ctx.plans))
        wanted = [hidden, *parameters] if hidden.requires_grad else parameters
        gradients = list(torch.autograd.grad(out, wanted, grad_outputs[0], materialize_grads=True))
        return None, None, gradients.pop(0) if hidden.requires_grad else None, *gradients


def run_recomputed(
    call: LayerCall,
    hidden: Float[Tensor, "rows hidden"],
    parameters: Sequence[nn.Parameter],
    inputs: HostInputs | None = None,
) -> tuple[Float[Tensor, "rows hidden"], Selection]:
    """Run a layer now and again in the backward pass.

    Args:
        call: the layer; its second argument is a kept selection that it must use instead of making
            one.
        parameters: every parameter of the layer that needs a gradient.
        inputs: where the layer's input waits, the same for all layers of a forward pass; None: on
            the device.
    """
    return _RecomputedLayer.apply(call, inputs, hidden, *parameters)
