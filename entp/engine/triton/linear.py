"""Matrix products on packed rows in half precision; gradients of the weights are summed in fp32.

`linear` is x W^T; `norm_linear` is the same with the gain and shift of the norm before it folded in
(see rows.py). The kernel that reads a product returns the gradient of its bias, and adds the bias
too unless the product has it already.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from entp.engine.triton.cublaslt import product
from entp.engine.triton.rows import fold, fold_backward


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x (N, D) times w (K, D) transposed, in x's type."""
    return _Linear.apply(x, w, None)


def norm_linear(
    x: Tensor, layer: nn.Linear, norm: nn.Module, *, add: bool = False
) -> tuple[Tensor, Tensor]:
    """layer(norm(.)) and its bias, which is added only if `add`.

    x: rows that are normed but for gain and shift.
    """
    bias, (gain, shift) = bias_of(layer), gain_and_shift(norm)
    if gain is None:
        return _Linear.apply(x, layer.weight, bias if add else None), bias
    return _NormLinear.apply(x, layer.weight, bias, gain, shift, add)


def bias_of(layer: nn.Linear) -> Tensor:
    """The layer's bias, or zeros: kernels add one in any case."""
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias


def gain_and_shift(norm: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """A norm's gain and shift, or None; the shift is 0 if it has only a gain."""
    gain, shift = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if gain is not None and shift is None:
        shift = torch.zeros_like(gain)
    return gain, shift


def weight_gradient(grad: Tensor, x: Tensor, like: torch.dtype) -> Tensor:
    """grad^T x, rounded once, to the weights' type."""
    if grad.is_cuda and grad.dtype != like:
        return torch.mm(grad.T, x, out_dtype=like)
    return (grad.T @ x).to(like)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        half = w.to(x.dtype)
        ctx.save_for_backward(x, half)
        ctx.kind = w.dtype
        return product(x, half, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, half = ctx.saved_tensors
        grad = grad.contiguous()
        return product(grad, half, plain=True), weight_gradient(grad, x, ctx.kind), None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, w: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, add: bool
    ) -> tuple[Tensor, Tensor]:
        half, folded = fold(w, bias, gain, shift, x.dtype)
        ctx.save_for_backward(x, half, w, gain, shift)
        return product(x, half, folded.to(x.dtype) if add else None), folded

    @staticmethod
    @once_differentiable
    def backward(
        ctx, grad: Tensor, d_bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None]:
        x, half, w, gain, shift = ctx.saved_tensors
        grad = grad.contiguous()
        dw, d_gain, d_shift = fold_backward(
            weight_gradient(grad, x, w.dtype), d_bias, w, gain, shift
        )
        return product(grad, half, plain=True), dw, d_bias, d_gain, d_shift, None
