"""AdamW as the paper uses it, Muon for the matrices inside the blocks, and the warm-up and decay of both."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from entp.config import OptimConfig
from entp.engine.cublaslt import batched_product

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic iteration, as in torch.optim.Muon."""
REMEMBERED = 0.99
"""How much of the products of gradients' rows is kept at each step, where they are whitened."""
DAMPING = 3e-3
"""What is added to these products' eigenvalues, of their mean: noise is not blown up."""
SMALLEST = 1e-5
"""The smallest eigenvalue that is whitened in full, of the products' norm."""
QUICK_FROM = 1e-2
"""Where no eigenvalue is smaller than that, three digits are enough to go on with."""


def learning_rate(config: OptimConfig, step: int, spent: float = 0.0, first: int = 0) -> float:
    """The rate of step 0, 1, ...: linear warm-up, cosine or line to min_lr at decay_steps, then min_lr.

    spent: the fraction of train.max_seconds that is over, which the decay follows if config.decay is "seconds".
    first: steps that came before this schedule, the warm-up among them.
    """
    step, warmup = step - first, 0 if first else config.warmup
    if step < warmup:
        return config.max_lr * (step + 1) / warmup
    steps = (step - warmup) / (config.decay_steps - warmup)
    done = min(1.0, spent if config.decay == "seconds" else steps)
    left = 1 - done if config.shape == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.min_lr + (config.max_lr - config.min_lr) * left


class Muon(torch.optim.Muon):
    """torch's Muon with its matrices of one shape, lying or standing, orthogonalised in one batched call, in fp32 on a CPU.

    torch's own step works in bfloat16 everywhere; a CPU without bfloat16 instructions takes tens of seconds for that. A group's
    "parts" says for each parameter how many matrices are stacked in it, each of which is orthogonalised for itself; "whiten",
    which of them are whitened on their long side: `whiten` is to be called now and then.
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
            parts, whiten = group.get("parts") or [1] * everyone, group.get("whiten") or [False] * everyone
            moving = [m for m in zip(group["params"], parts, whiten, strict=True) if m[0].grad is not None]
            same_shape: dict[tuple[int, int, bool], list[Move]] = defaultdict(list)
            for (p, n, white), way in zip(moving, self._directions([p for p, _, _ in moving], group), strict=True):
                whitener = self._gather(p) if white else None
                for matrix, part in zip(p.chunk(n), way.chunk(n), strict=True):
                    short, long = sorted(matrix.shape)
                    same_shape[short, long, white].append(Move(matrix, part, whitener, matrix.shape[0] < long))
            for moves in same_shape.values():
                _move(moves, group)
        return loss

    def _directions(self, matrices: list[nn.Parameter], group: dict) -> list[Tensor]:
        """The gradients' running means, one gradient ahead of themselves with Nesterov's momentum."""
        if not matrices:
            return []
        for p in matrices:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        gradients = [p.grad for p in matrices if p.grad is not None]
        averages = [self.state[p]["momentum_buffer"] for p in matrices]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        return list(torch._foreach_lerp(gradients, averages, group["momentum"])) if group["nesterov"] else averages

    def _gather(self, p: Tensor) -> Tensor:
        """Add this gradient to the products of its rows (its long side), and give their whitener as it is now."""
        assert p.grad is not None
        state, gradient = self.state[p], p.grad if p.shape[0] > p.shape[1] else p.grad.mT
        if "products" not in state:
            state["products"] = gradient.new_zeros(2 * gradient.shape[:1])
            rounded = torch.bfloat16 if p.is_cuda else p.dtype  # what `_move` reads
            state["whitener"] = torch.eye(len(gradient), dtype=rounded, device=p.device)
        state["products"].lerp_(row_products(gradient), 1 - REMEMBERED)
        return state["whitener"]

    @torch.no_grad()
    def whiten(self) -> None:
        """Make the whiteners anew from the products seen; in place, as a recorded step reads them."""
        same_shape: dict[torch.Size, list[dict[str, Tensor]]] = defaultdict(list)
        for state in self.state.values():
            if "products" in state:
                same_shape[state["products"].shape].append(state)
        for states in same_shape.values():
            roots = inverse_fourth_root(torch.stack([state["products"] for state in states]))
            for state, root in zip(states, roots, strict=True):
                state["whitener"].copy_(root)


class Move(NamedTuple):
    """A matrix, the direction it is moved against, what whitens its long side, if anything does; lying is wider than tall."""

    matrix: Tensor
    direction: Tensor
    whitener: Tensor | None
    lying: bool


def _move(moves: list[Move], group: dict) -> None:
    """Move matrices of one shape, lying or standing, each against its direction made orthogonal.

    Whitened, it is made orthogonal in coordinates in which the gradients' rows have more equal sizes, and taken back.
    """
    moves = sorted(moves, key=lambda move: move.lying)
    rate = group["lr"] * 0.2 * math.sqrt(max(moves[0].matrix.shape))  # "match_rms_adamw": AdamW's rates carry over
    ways = torch.stack([move.direction.mT if move.lying else move.direction for move in moves])
    whiteners = [move.whitener for move in moves if move.whitener is not None]
    if not whiteners:
        updates = orthogonalise(ways, group["ns_steps"], group["eps"])
    else:
        white = torch.stack(whiteners).to(torch.bfloat16 if ways.is_cuda else ways.dtype)
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
    torch._foreach_sub_(matrices, steps)  # one launch, because each step lies in memory as its matrix does


def orthogonalise(g: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """The nearest semi-orthogonal matrices to g (n, rows, columns), roughly, by Newton-Schulz iteration."""
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
    """g g' (rows, rows); on CUDA of g in bfloat16, summed in fp32, so that it has no eigenvalue below 0 by more than that."""
    if g.is_cuda and g.dtype == torch.float32:
        g = g.bfloat16()
        return torch.mm(g, g.mT, out_dtype=torch.float32)
    return g @ g.mT


def inverse_fourth_root(a: Tensor) -> Tensor:
    """(A + d I)^(-1/4) of symmetric A (n, k, k) without negative eigenvalues, scaled to mean diagonal 1.

    d is DAMPING times A's mean eigenvalue. Newton's iteration, with longer steps at first: m = x^4 a has eigenvalues between
    `low` and 1, and goes to 1 with x := x t, t = scale (1 - slope m). An eigenvalue below SMALLEST of A's norm
    counts as larger than it is.
    """
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    a = a + DAMPING * a.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * eye
    x, m = eye.expand_as(a), a / a.norm(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(a.dtype).tiny)
    for low, scale, slope in newton_steps():
        with _products("high" if a.is_cuda and low > QUICK_FROM else "highest"):
            t = scale * (eye - slope * m)
            x = x @ t
            t = t @ t
            m = t @ (t @ m)
    return x / x.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]


def newton_steps(low: float = SMALLEST) -> list[tuple[float, float, float]]:
    """(low, scale, slope) of the steps that bring every m from `low` to 1 up to at least .99, as fast as can be.

    m (1 - slope m)^4 is as large at m = low as at m = 1, and larger between; scale makes 1 the largest again.
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
    """Matrix products of fp32 in full ("highest"), or on CUDA with 10 bits of mantissa, several times as fast ("high").

    Whatever the program has chosen for its own.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_optimizers(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """AdamW over everything, or Muon over the blocks' matrices and AdamW over the rest; vectors are not decayed."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    muon = {n: p for n, p in named if config.name == "muon" and n.startswith("blocks.") and p.ndim == 2}
    taken = {id(p) for p in muon.values()}
    rest = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    cuda = named[0][1].is_cuda

    def rate() -> Tensor | float:  # on CUDA a recorded step reads it
        return torch.tensor(config.max_lr, device=named[0][1].device) if cuda else config.max_lr

    betas = (config.beta1, config.beta2)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=rate(), betas=betas, fused=cuda, capturable=cuda)]
    if muon:
        optimizers.append(Muon(list(muon.values()), lr=config.max_lr, weight_decay=config.weight_decay))
        optimizers[1].param_groups[0]["parts"] = [_stacked(n, p) for n, p in muon.items()]
        optimizers[1].param_groups[0]["whiten"] = [config.whiten > 0 and n.endswith(("fc.weight", "out.weight")) for n in muon]
        optimizers[1].param_groups[0]["lr"] = rate()
    return optimizers


def _stacked(name: str, p: Tensor) -> int:
    """How many square matrices stand in a parameter: q, k and v, unless keys and values have fewer heads."""
    return 3 if name.endswith("qkv.weight") and p.shape[0] == 3 * p.shape[1] else 1


def set_learning_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """The same rate for every group of every optimizer."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # on CUDA, where a recorded step reads it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def renew_whiteners(optimizers: list[torch.optim.Optimizer], config: OptimConfig, step: int) -> None:
    """Every config.whiten steps, before the step: what whitens Muon's directions, from the gradients so far."""
    if config.whiten and step % config.whiten == 0:
        for optimizer in optimizers:
            if isinstance(optimizer, Muon):
                optimizer.whiten()


def save_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state for a file: on whatever device it continues, it is the same."""
    saved = optimizer.state_dict()
    groups = [{**g, "lr": float(g["lr"])} for g in saved["param_groups"]]
    return {"state": saved["state"], "param_groups": groups}


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load the state that save_optimizer gave; settings stay the run's own, and what belongs to the device as it is."""
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    groups = [{**kept, "params": group["params"]} for group, kept in zip(saved["param_groups"], own, strict=True)]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    for group, kept in zip(optimizer.param_groups, own, strict=True):
        group.update(kept)
