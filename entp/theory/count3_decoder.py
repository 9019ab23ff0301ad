"""Count3 by a decoder, as weights set by hand: four blocks, width 6 n_max, right after every row.

    model = decoder(n_max=64)            # width 384, 6 heads; values below 64, also x >= n
    model(tokens, mode="decoder")        # (batch, time, 64): the largest is Count3 of what was read

P(t), the number of pairs with x_i + x_j = t, needs neither n nor x_n, and the later of i and j can
count it: P(t) = sum over i of 2 #{j < i: x_j = t - x_i} + [t = 2 x_i]. Only the last row needs n:
Count3 = the sum of P(t) over t = -x_n mod n. Registers: X_v the token, one-hot, and the logits; E_j
the position, one-hot, so that every function of n is a linear form; T_t, P_t; B; Q.

    block 1   attention: T_v = (number of j < i with x_j = v, and 1/2 for x_i = v) / (i + 1/2)
              MLP: T moves up by s floor(x / s), s about the root of n_max; B = -x mod n
    block 2   MLP: T moves up by x mod s; P_t = 0 if t = B mod n, else -1
    block 3   attention: rows weigh (2 i + 1) / n^2; P_t += mean of T_t = P(t) / n^2
              MLP: Q = sum of ReLU(P_t) = count / n^2; T = 0
    block 4   attention: k = floor(n Q) among the positions, one-hot in T
              MLP: f = Q - k / n, 0 where that is 1 / n; logits C (2 v f - v^2 / n^2), that is
              C (2 v r - v^2) / n^2 with r = count mod n

There is no product of two registers anywhere: counts of partners are moved to where they belong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from entp.errors import InputError
from entp.model import Transformer
from entp.tasks.counting import count3_next
from entp.theory.weights import SHARP, Form, Head, Layer, Unit, build, clear, where_positive

BLOCKS, HEADS = 4, 6
BATCH = 64
"""Sequences that are tried at a time."""


def decoder(n_max: int = 64) -> Transformer:
    """A float64 Transformer that computes Count3 after every row in mode decoder, for n <= n_max.

    Tokens are any numbers from 0 to n_max - 1. Blocks do not depend on n_max, the width is 6 n_max
    (more above 100, for the MLPs).
    """
    if n_max < 1:
        raise InputError(f"n_max is {n_max}: it must be at least 1.")
    top = n_max + max(_highs(n_max), default=0)
    layers = [
        Layer([_seen(n_max)], [*_shift(n_max, _highs(n_max), n_max), *_wanted(n_max)]),
        Layer([], [*_shift(n_max, _lows(n_max), top), *_choice(n_max)]),
        Layer(_pairs(n_max), _total(n_max)),
        Layer([_floor(n_max)], [*_logits(n_max)]),
    ]
    one = torch.eye(n_max)
    return build(
        _registers(n_max),
        layers,
        heads=HEADS,
        tokens={f"X{v}": one[v] for v in range(n_max)},
        positions={f"E{j}": one[j] for j in range(n_max)},
    )


@torch.no_grad()
def wrong_and_margin(model: Transformer, x: np.ndarray) -> tuple[int, float]:
    """How many answers after each row of x (batch, n) are wrong, and the least lead of the right.

    The lead is the right answer's logit less the largest of the others.
    """
    if len(x) > BATCH:
        found = [wrong_and_margin(model, x[i : i + BATCH]) for i in range(0, len(x), BATCH)]
        return sum(wrong for wrong, _ in found), min(lead for _, lead in found)
    want = np.stack([count3_next(x[:, : i + 1]) for i in range(x.shape[1])], 1)
    logits = model(torch.from_numpy(x), mode="decoder")
    said = torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1)
    wrong = int((said.numpy() != want).sum())
    right = torch.from_numpy(want)[..., None]
    others = logits.scatter(-1, right, -math.inf)
    lead = logits.gather(-1, right)[..., 0] - others.amax(-1)
    return wrong, float(lead.min())


def _registers(n_max: int) -> dict[str, int]:
    names = [f"{name}{v}" for name in "XE" for v in range(n_max)]
    names += [f"{name}{t}" for name in "TP" for t in range(2 * n_max - 1)]
    return {name: number for number, name in enumerate([*names, "B", "Q"])}


def _of_n(values: Iterable[float]) -> Form:
    """The form that has these values in rows of length n = 1, 2, ..., n_max."""
    return {f"E{j}": float(value) for j, value in enumerate(values) if value}


def _lengths(n_max: int) -> range:
    return range(1, n_max + 1)


def _token(n_max: int) -> Form:
    return {f"X{v}": float(v) for v in range(1, n_max)}


def _seen(n_max: int) -> Head:
    """Shares of the tokens so far; a row counts itself half."""
    own: list[tuple[Form, Form]] = [({f"E{j}": -math.log(2)}, {f"E{j}": 1.0}) for j in range(n_max)]
    return Head(own, {f"T{v}": {f"X{v}": 1.0} for v in range(n_max)})


def _step(n_max: int) -> int:
    """Shifts are first by multiples of this, then by less than this."""
    return math.isqrt(n_max - 1) + 1


def _highs(n_max: int) -> dict[int, list[int]]:
    """Tokens by step floor(x / step)."""
    step = _step(n_max)
    return {low: [*range(low, min(low + step, n_max))] for low in range(step, n_max, step)}


def _lows(n_max: int) -> dict[int, list[int]]:
    """Tokens by x mod step."""
    step = _step(n_max)
    return {low: [*range(low, n_max, step)] for low in range(1, min(step, n_max))}


def _shift(n_max: int, groups: Mapping[int, list[int]], top: int) -> Iterable[Unit]:
    """T below `top` moves up by the group that the token is in; what a T holds is at most 1."""
    for amount, tokens in groups.items():
        chosen: Form = {f"X{v}": 1.0 for v in tokens}
        for t in range(min(top, 2 * n_max - 1 - amount)):
            form: Form = {f"T{t}": 1.0, "1": -1.0, **chosen}
            yield Unit(form, {f"T{t + amount}": 1.0, f"T{t}": -1.0})


def _wanted(n_max: int) -> Iterable[Unit]:
    """B = -x mod n: n for each k with x > k n, less x."""
    for k in range(n_max - 1):
        over = _token(n_max) | _of_n(-k * n for n in _lengths(n_max))
        yield from where_positive(over, _of_n(_lengths(n_max)), {"B": 1.0}, n_max)
    yield Unit(_token(n_max), {"B": -1.0})


def _choice(n_max: int) -> Iterable[Unit]:
    """P_t = 0 if t = B mod n, else -1: a bump at (t mod n) - B = 0, less 1."""
    sums = range(2 * n_max - 1)
    for t in sums:
        rest = _of_n(t % n for n in _lengths(n_max))
        for shift, weight in ((1.0, 1.0), (0.0, -2.0), (-1.0, 1.0)):
            yield Unit({**rest, "B": -1.0, "1": shift}, {f"P{t}": weight})
    yield Unit({"1": 1.0}, {f"P{t}": -1.0 for t in sums})


def _pairs(n_max: int) -> list[Head]:
    """P_t += P(t) / n^2: rows weigh 2 i + 1, which undoes the shares' i + 1/2."""
    weight = _of_n(math.log(2 * n - 1) for n in _lengths(n_max))
    return [
        Head([({"1": 1.0}, weight)], {f"P{t}": {f"T{t}": 1.0} for t in sums})
        for sums in (range(n_max), range(n_max, 2 * n_max - 1))
    ]


def _total(n_max: int) -> list[Unit]:
    """Q, and T cleared where block 4 writes."""
    total = [Unit({f"P{t}": 1.0}, {"Q": 1.0}) for t in range(2 * n_max - 1)]
    return total + clear(*(f"T{k}" for k in range(n_max)))


def _floor(n_max: int) -> Head:
    """The position nearest to n Q - 1/2 + 1 / (2 n); at distance 1/2 - 1 / (2 n) at most."""
    sharp = SHARP * n_max**2
    linear = _of_n(sharp * (1 / n**2 - 1 / n) for n in _lengths(n_max)) | {"Q": 2 * sharp}
    square = _of_n(-sharp / n for n in _lengths(n_max))
    position: Form = {f"E{j}": float(j) for j in range(n_max)}
    squared: Form = {f"E{j}": float(j**2) for j in range(n_max)}
    found: dict[str, Form] = {f"T{k}": {f"E{k}": 1.0} for k in range(n_max)}
    return Head([(linear, position), (square, squared)], found)


def _logits(n_max: int) -> Iterable[Unit]:
    """X_v += C (2 v f - v^2 / n^2)."""
    sharp, lengths = SHARP * n_max**2, _lengths(n_max)
    times_f: Form = {f"X{v}": 2 * sharp * v for v in range(1, n_max)}
    less_f = {name: -weight for name, weight in times_f.items()}
    yield Unit({"Q": 1.0}, times_f)
    for k in range(1, n_max):  # k / n where k was found; no prefix of length n <= k finds it
        share = _of_n(k / n if k < n else 0.0 for n in lengths)
        yield Unit({**share, f"T{k}": 1.0, "1": -1.0}, less_f)
    steep = 2.0 * n_max  # from 0 at Q = 1 - 1 / (2 n^2) to 1 / n, reached before Q = 1
    whole = _of_n(steep * (0.5 / n**2 - 1) for n in lengths)
    over = _of_n(steep * (0.5 / n**2 - 1) - 1 / n for n in lengths)
    yield Unit({**whole, "Q": steep}, less_f)
    yield Unit({**over, "Q": steep}, times_f)
    squares = {f"X{v}": -sharp * v**2 for v in range(n_max)}
    yield Unit(_of_n(1 / n**2 for n in lengths), squares)
