"""What one layer cannot do: Count3 as a question of two players, and the steps of that proof.

    x = sequence([1, 0, 1], [1, 1, 0])          # [1, 0, 3, 6, 5, 0, 0] for n = 7
    common_ones(count3, x)                      # 1: both have a 1 in one place
    least_message(4097)                         # 2036: bits that one player's half takes
    excluded_from(heads=6, size=64, bits=32)    # 24991: from this n on, one such layer is too small

Alice's bits alpha and Bob's bits beta are written into a sequence so that its Count3 tells how many
ones they have in common. What a layer's last row hears from Alice's tokens, `size` + 1 numbers of
each head, determines alpha together with |alpha|: it has m bits less log m (docs/theory.md, "Lower
bounds").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from entp.errors import InputError
from entp.model import Block, Transformer
from entp.theory.weights import Head, Layer, build

Bits = Sequence[int] | np.ndarray


def sequence(alpha: Bits, beta: Bits, n: int | None = None) -> np.ndarray:
    """The Count3 sequence (n,) of two players with m bits each; n is 2m + 1 or more.

    Token k of Alice is k if alpha_k = 1, else 0; token k of Bob is n - k if beta_k = 1, else 0.
    All others are 0, the last one too.
    """
    one, other = _bits("alpha", alpha), _bits("beta", beta)
    m = len(one)
    n = 2 * m + 1 if n is None else n
    if len(other) != m:
        raise InputError(f"alpha has {m} bits and beta {len(other)}: both need as many.")
    if n < 2 * m + 1:
        raise InputError(f"n is {n}: for {m} bits each it must be at least {2 * m + 1}.")
    k = np.arange(1, m + 1)
    return np.concatenate([one * k, other * (n - k), np.zeros(n - 2 * m, dtype=np.int64)])


def common_ones(count3: int, x: np.ndarray) -> int:
    """|alpha AND beta|, from Count3 of their sequence and its number of zeros.

    k and n - k' sum to 0 modulo n only for k = k'; two numbers of one player never do. So the pairs
    are 2 |alpha AND beta| + zeros², and 2 |alpha AND beta| <= 2m < n.
    """
    n, zeros = len(x), int(np.count_nonzero(x == 0))
    twice = (count3 - zeros**2) % n
    if twice % 2 or twice > 2 * players(n):
        raise InputError(f"{count3} is not Count3 of such a sequence of {n} with {zeros} zeros.")
    return twice // 2


def players(n: int) -> int:
    """The most bits m that each player can have in a sequence of n."""
    if n < 1:
        raise InputError(f"n is {n}: a sequence has at least 1 integer.")
    return (n - 1) // 2


def least_message(n: int) -> int:
    """Bits that what one row hears from Alice must have: m, less those that tell |alpha|."""
    m = players(n)
    return m - m.bit_length()


def excluded_from(heads: int, size: int, bits: int) -> int:
    """The least n from which on no single layer of these heads computes Count3.

    heads, size: H heads of size d. bits: p, those of each of the H (d + 1) numbers.
    """
    for name, got in (("heads", heads), ("size", size), ("bits", bits)):
        if got < 1:
            raise InputError(f"{name} is {got}: it must be at least 1.")
    heard = heads * (size + 1) * bits
    m = heard + 1
    while m - m.bit_length() <= heard:
        m += 1
    return 2 * m + 1


@torch.no_grad()
def heard(model: Transformer, x: Tensor, rows: range) -> Tensor:
    """What the last row of a one-layer model hears from these rows: (H, d + 1).

    Of each head the sum of e^score, then that of e^score times the value. It depends on the tokens
    of these rows and on the last one.
    """
    block = _only_block(model)
    ids = torch.arange(len(x))
    q, k, v = (part[0] for part in block.project(model.embed(x[None]), ids[None]))
    scores = block.scale * torch.einsum("hd,khd->kh", q[-1], k[rows])
    parts = torch.cat([torch.ones_like(v[rows, :, :1]), v[rows]], -1)
    return (scores.exp()[..., None] * parts).sum(0)


@torch.no_grad()
def said(model: Transformer, x: Tensor, total: Tensor) -> Tensor:
    """The last row's output, from its own token and position and the sum of all it has heard."""
    attended = (total[:, 1:] / total[:, :1]).flatten()
    last = model.embed(x[None])[0, -1]
    return model.readout(_only_block(model).finish(last, attended))


def histogram_layer(n: int) -> Transformer:
    """A layer of width n whose last row hears how often each value below n has come.

    So n numbers are enough, and an MLP may be any function: the bound is tight up to the bits of a
    number.
    """
    names = [f"X{value}" for value in range(n)]
    tokens = dict(zip(names, torch.eye(n), strict=True))
    positions = {names[0]: torch.zeros(n)}
    mean = Head([], {name: {name: 1.0} for name in names})
    registers = {name: at for at, name in enumerate(names)}
    return build(registers, [Layer([mean])], heads=1, tokens=tokens, positions=positions)


def _only_block(model: Transformer) -> Block:
    """The block of a model whose last row hears sums over tokens, and nothing else."""
    config = model.config
    told = {"layers": config.layers, "loops": config.loops, "causal_layers": config.causal_layers}
    if told != {"layers": 1, "loops": 1, "causal_layers": 0}:
        raise InputError(f"this model has {told}: the bound is about one layer that runs once.")
    if config.position_embedding == "relative" or config.kv_heads not in (None, config.heads):
        raise InputError(
            "sums of a model with relative positions or shared keys are not written here: give one "
            "with other positions, and with kv_heads as heads."
        )
    return cast(Block, model.blocks[0])


def _bits(name: str, bits: Bits) -> np.ndarray:
    found = np.asarray(bits, dtype=np.int64).reshape(-1)
    if not np.isin(found, (0, 1)).all():
        raise InputError(f"{name} has other numbers than 0 and 1: give bits.")
    return found
