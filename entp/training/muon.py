"""Muon for the matrices inside the blocks, optionally with a preconditioner on their long side."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from entp.engine.triton.cublaslt import batched_product

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic iteration, as in torch.optim.Muon."""
REMEMBERED = 0.99
"""How much of the products of gradients' rows is kept at each step, where they are preconditioned.
"""
DAMPING = 3e-3
"""What is added to these products' eigenvalues, of their mean: noise is not blown up."""
SMALLEST = 1e-5
"""The smallest eigenvalue that is preconditioned in full, of the products' norm."""
QUICK_FROM = 1e-2
"""Where no eigenvalue is smaller than that, three digits are enough to go on with."""


class Muon(torch.optim.Muon):
    """torch's Muon with its matrices of one shape, lying or standing, orthogonalised in one batched
    call, in fp32 on a CPU.

    torch's own step works in bfloat16 everywhere; a CPU without bfloat16 instructions takes tens of
    seconds for that. A group's "parts" says for each parameter how many matrices are stacked in it,
    each of which is orthogonalised for itself; "precondition", which of them are preconditioned on
    their long
    side: `precondition` is to be called now and then.
    """

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[no-untyped-def]
        """One update of every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            everyone = len(group["params"])
            parts, precondition = (
                group.get("parts") or [1] * everyone,
                group.get("precondition") or [False] * everyone,
            )
            moving = [
                m
                for m in zip(group["params"], parts, precondition, strict=True)
                if m[0].grad is not None
            ]
            same_shape: dict[tuple[int, int, bool], list[Move]] = defaultdict(list)
            for (p, n, white), way in zip(
                moving, self._directions([p for p, _, _ in moving], group), strict=True
            ):
                preconditioner = self._gather(p) if white else None
                for matrix, part in zip(p.chunk(n), way.chunk(n), strict=True):
                    short, long = sorted(matrix.shape)
                    same_shape[short, long, white].append(
                        Move(matrix, part, preconditioner, matrix.shape[0] < long)
                    )
            for moves in same_shape.values():
                _move(moves, group)
        return loss

    def _directions(self, matrices: list[nn.Parameter], group: dict) -> list[Tensor]:
        """The gradients' running means, with Nesterov's momentum one gradient ahead."""
        if not matrices:
            return []
        for p in matrices:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        gradients = [p.grad for p in matrices if p.grad is not None]
        averages = [self.state[p]["momentum_buffer"] for p in matrices]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        return (
            list(torch._foreach_lerp(gradients, averages, group["momentum"]))
            if group["nesterov"]
            else averages
        )

    def _gather(self, p: Tensor) -> Tensor:
        """Add this gradient to the products of its rows (its long side), and give their
        preconditioner as it is now."""
        assert p.grad is not None
        state, gradient = self.state[p], p.grad if p.shape[0] > p.shape[1] else p.grad.mT
        if "products" not in state:
            state["products"] = gradient.new_zeros(2 * gradient.shape[:1])
            rounded = torch.bfloat16 if p.is_cuda else p.dtype  # what `_move` reads
            state["preconditioner"] = torch.eye(len(gradient), dtype=rounded, device=p.device)
        state["products"].lerp_(row_products(gradient), 1 - REMEMBERED)
        return state["preconditioner"]

    @torch.no_grad()
    def precondition(self) -> None:
        """Make the preconditioners anew from the products seen; in place, as a captured step reads
        them."""
        same_shape: dict[torch.Size, list[dict[str, Tensor]]] = defaultdict(list)
        for state in self.state.values():
            if "products" in state:
                same_shape[state["products"].shape].append(state)
        for states in same_shape.values():
            roots = inverse_fourth_root(torch.stack([state["products"] for state in states]))
            for state, root in zip(states, roots, strict=True):
                state["preconditioner"].copy_(root)


class Move(NamedTuple):
    """A matrix, the direction it is moved against, what preconditions its long side, if anything
    does; lying is wider than tall."""

    matrix: Tensor
    direction: Tensor
    preconditioner: Tensor | None
    lying: bool


def _move(moves: list[Move], group: dict) -> None:
    """Move matrices of one shape, lying or standing, each against its direction made orthogonal.

    Preconditioned, it is made orthogonal in coordinates in which the gradients' rows have more
    equal sizes, and taken back.
    """
    moves = sorted(moves, key=lambda move: move.lying)
    rate = (
        group["lr"] * 0.2 * math.sqrt(max(moves[0].matrix.shape))
    )  # "match_rms_adamw": AdamW's rates carry over
    ways = torch.stack([move.direction.mT if move.lying else move.direction for move in moves])
    preconditioners = [move.preconditioner for move in moves if move.preconditioner is not None]
    if not preconditioners:
        updates = orthogonalise(ways, group["ns_steps"], group["eps"])
    else:
        white = torch.stack(preconditioners).to(torch.bfloat16 if ways.is_cuda else ways.dtype)
        turned = batched_product(white, ways.to(white.dtype))
        straight = orthogonalise(turned, group["ns_steps"], group["eps"]).to(white.dtype)
        updates = batched_product(white, straight)
        size, now = (x.float().norm(dim=(1, 2), keepdim=True) for x in (straight, updates))
        updates = updates * (size / now.clamp(min=group["eps"]))
    updates = updates.to(ways.dtype) * rate
    matrices, lying = [move.matrix for move in moves], sum(move.lying for move in moves)
    if group["weight_decay"]:
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
    standing = len(moves) - lying
    steps = [*updates[:standing].unbind(), *updates[standing:].mT.contiguous().unbind()]
    torch._foreach_sub_(
        matrices, steps
    )  # one launch, because each step lies in memory as its matrix does


def orthogonalise(g: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """The nearest semi-orthogonal matrices to g (n, rows, columns), roughly, by Newton-Schulz
    iteration."""
    a, b, c = NEWTON_SCHULZ
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = g.shape[1] > g.shape[2]
    if tall:
        x = x.mT
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)).contiguous()
    for _ in range(steps):
        gram = batched_product(x, x.mT)
        x = batched_product(batched_product(gram, gram, gram, alpha=c, beta=b), x, x, beta=a)
    return x.mT if tall else x


def row_products(g: Tensor) -> Tensor:
    """g g' (rows, rows); on CUDA of g in bfloat16, summed in fp32, so that it has no eigenvalue
    below 0 by more than that."""
    if g.is_cuda and g.dtype == torch.float32:
        g = g.bfloat16()
        return torch.mm(g, g.mT, out_dtype=torch.float32)
    return g @ g.mT


def inverse_fourth_root(a: Tensor) -> Tensor:
    """(A + d I)^(-1/4) of symmetric A (n, k, k) without negative eigenvalues, scaled to mean
    diagonal 1.

    d is DAMPING times A's mean eigenvalue. Newton's iteration, with longer steps at first:
    m = x^4 a has eigenvalues between `low` and 1, and goes to 1 with x := x t,
    t = scale (1 - slope m). An eigenvalue below SMALLEST of A's norm counts as larger than it is.
    """
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    a = a + DAMPING * a.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * eye
    x, m = (
        eye.expand_as(a),
        a / a.norm(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(a.dtype).tiny),
    )
    for low, scale, slope in newton_steps():
        with _products("high" if a.is_cuda and low > QUICK_FROM else "highest"):
            t = scale * (eye - slope * m)
            x = x @ t
            t = t @ t
            m = t @ (t @ m)
    return x / x.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]


def newton_steps(low: float = SMALLEST) -> list[tuple[float, float, float]]:
    """(low, scale, slope) of the steps that bring every m from `low` to 1 up to at least .99, as
    fast as can be.

    m (1 - slope m)^4 is as large at m = low as at m = 1, and larger between; scale makes 1 the
    largest again.
    """
    steps = []
    while low < 0.99:
        slope = (1 - low**0.25) / (1 - low**1.25)
        top = 0.8**4 / (5 * slope)  # at m = 1 / (5 slope)
        steps.append((low, top**-0.25, slope))
        low = (1 - slope) ** 4 / top
    return steps


@contextmanager
def _products(precision: str) -> Iterator[None]:
    """Matrix products of fp32 in full ("highest"), or on CUDA with 10 bits of mantissa, several
    times as fast ("high").

    Whatever the program has chosen for its own.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
