"""Matrix products on packed rows: inputs and outputs in half precision, gradients of the weights added up in fp32.

`linear` is x W^T; `norm_linear` is the same with the gain and shift of the norm before it folded in (see rows.py). Biases are
returned, not added: the kernel that reads the product adds them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from entp.engine.triton.rows import fold, fold_backward


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x (N, D) times w (K, D) transposed, in x's type."""
    return _Linear.apply(x, w)


def norm_linear(x: Tensor, layer: nn.Linear, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """layer(norm(.)) without its bias, for rows x that are normed but for gain and shift; and the bias to be added."""
    if not isinstance(norm, nn.LayerNorm):
        return linear(x, layer.weight), layer.bias
    return _NormLinear.apply(x, layer.weight, layer.bias, norm.weight, norm.bias)


def weight_gradient(grad: Tensor, x: Tensor, like: torch.dtype) -> Tensor:
    """grad^T x, rounded once, to the weights' type."""
    if grad.is_cuda and grad.dtype != like:
        return torch.mm(grad.T, x, out_dtype=like)
    return (grad.T @ x).to(like)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        half = w.to(x.dtype)
        ctx.save_for_backward(x, half)
        ctx.kind = w.dtype
        return x @ half.T

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, half = ctx.saved_tensors
        grad = grad.contiguous()
        return grad @ half, weight_gradient(grad, x, ctx.kind)


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, bias: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        half, folded = fold(w, bias, gain, shift, x.dtype)
        ctx.save_for_backward(x, half, w, gain, shift)
        return x @ half.T, folded

    @staticmethod
    def backward(ctx, grad: Tensor, d_bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, half, w, gain, shift = ctx.saved_tensors
        grad = grad.contiguous()
        dw, d_gain, d_shift = fold_backward(weight_gradient(grad, x, w.dtype), d_bias, w, gain, shift)
        return grad @ half, dw, d_bias, d_gain, d_shift
