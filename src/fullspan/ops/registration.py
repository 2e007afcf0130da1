"""Operators of PyTorch with little work for the host, for what has no autograd of its own.

`torch.library.custom_op` with `register_autograd` takes the host 100 us a call and 220 us with its
backward on one CPU, where an operator that is registered here and called by an autograd function
takes 40 and 90. One without `register_autograd` takes 20 to 110 us, most where a tensor is written,
where one that is registered here takes 5 to 12. Kernels that take a tenth of a millisecond wait for
that where the host has just waited for the GPU.
"""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("fullspan", "FRAGMENT")

Implementation = Callable[..., Any]


def operator(schema: str, fake: Implementation) -> Callable[[Implementation], Implementation]:
    """Make a function the operator fullspan::<name>, on every device and without autograd.

    A backward pass through it warns and gives no gradient. Tensors that the schema says are written
    count as changed in place, whatever wrote them: autograd then refuses to use what it had kept of
    them.

    Args:
        schema: name, arguments and results.
        fake: what it returns for tensors without values.
    """
    name = schema.partition("(")[0]

    def register(function: Implementation) -> Implementation:
        _LIBRARY.define(schema)
        made = getattr(torch.ops.fullspan, name).default
        arguments = made._schema.arguments
        written = [place for place, argument in enumerate(arguments) if argument.is_write]

        def run(*given: Any) -> Any:
            results = function(*given)
            torch.autograd.graph.increment_version([given[place] for place in written])
            return results

        _LIBRARY.impl(name, run if written else function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fullspan::{name}", fake, lib=_LIBRARY)
        return made

    return register
