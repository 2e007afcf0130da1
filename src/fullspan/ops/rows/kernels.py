"""Gathered sums, gated products and norms in Triton: one program a row.

Sums run in float32 in one fixed order; nothing is added by an atomic. Kernels carry `no_type_check`
so that import hooks which wrap annotated functions leave them to Triton.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def gather_rows_kernel(
    X, INDEX, OUT, x_row, WIDTH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """OUT[i] = sum over j of X[INDEX[i, j]]."""
    row = tl.program_id(0).to(tl.int64)
    for first in tl.static_range(0, WIDTH, BLOCK):
        col = first + tl.arange(0, BLOCK)
        mask = col < WIDTH
        at = tl.load(INDEX + row * COUNT)
        total = tl.load(X + at * x_row + col, mask=mask, other=0.0).to(tl.float32)
        for j in tl.static_range(1, COUNT):
            at = tl.load(INDEX + row * COUNT + j)
            total += tl.load(X + at * x_row + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(OUT + row * WIDTH + col, total.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def swiglu_kernel(
    GATE, UP, WEIGHTS, OUT, gate_row, up_row, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT = silu(GATE) * UP * WEIGHTS[row]."""
    row = tl.program_id(0).to(tl.int64)
    for first in tl.static_range(0, WIDTH, BLOCK):
        col = first + tl.arange(0, BLOCK)
        mask = col < WIDTH
        gate = tl.load(GATE + row * gate_row + col, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(UP + row * up_row + col, mask=mask, other=0.0).to(tl.float32)
        wide = tl.sigmoid(gate) * gate * up
        if WEIGHTED:
            wide *= tl.load(WEIGHTS + row)
        tl.store(OUT + row * WIDTH + col, wide.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def swiglu_backward_kernel(
    GRAD, GATE, UP, WEIGHTS, DGATE, DUP, DWEIGHTS, grad_row, gate_row, up_row, dgate_row, dup_row,
    WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of all that swiglu_kernel reads."""
    row = tl.program_id(0).to(tl.int64)
    dweight = tl.zeros([BLOCK], tl.float32)
    for first in tl.static_range(0, WIDTH, BLOCK):
        col = first + tl.arange(0, BLOCK)
        mask = col < WIDTH
        gate = tl.load(GATE + row * gate_row + col, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(UP + row * up_row + col, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + row * grad_row + col, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if WEIGHTED:
            dweight += grad * silu * up
            grad *= tl.load(WEIGHTS + row)
        dgate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(DUP + row * dup_row + col, (grad * silu).to(DUP.dtype.element_ty), mask=mask)
        tl.store(DGATE + row * dgate_row + col, dgate.to(DGATE.dtype.element_ty), mask=mask)
    if WEIGHTED:
        tl.store(DWEIGHTS + row, tl.sum(dweight, 0))


@triton.jit
@no_type_check
def rms_norm_kernel(
    X, WEIGHT, OUT, RSTD, x_row, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """OUT = WEIGHT * round(X * RSTD), RSTD = 1 / rms. A row is in registers."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < WIDTH
    x = tl.load(X + row * x_row + col, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(WEIGHT + col, mask=mask, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    normed = (x * rstd).to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + row * WIDTH + col, (weight * normed).to(OUT.dtype.element_ty), mask=mask)
    tl.store(RSTD + row, rstd)


@triton.jit
@no_type_check
def rms_norm_backward_kernel(
    GRAD, X, WEIGHT, RSTD, DX, grad_row, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradient of X."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < WIDTH
    rstd = tl.load(RSTD + row)
    normed = tl.load(X + row * x_row + col, mask=mask, other=0.0).to(tl.float32) * rstd
    grad = tl.load(GRAD + row * grad_row + col, mask=mask, other=0.0).to(tl.float32)
    grad *= tl.load(WEIGHT + col, mask=mask, other=0.0).to(tl.float32)
    dx = (grad - normed * (tl.sum(grad * normed, 0) / WIDTH)) * rstd
    tl.store(DX + row * WIDTH + col, dx.to(DX.dtype.element_ty), mask=mask)
