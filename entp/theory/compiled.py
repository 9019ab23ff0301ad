"""Count3 as weights set by hand: a Transformer of four blocks that computes it without error.

    model = count3(n_max=64)             # x_i < n, every n up to 64
    # x_i < 4 n: the paper's experiments, values up to 63 from n = 16 on
    model = count3(n_max=64, ratio=4)
    model(tokens, mode="entp")           # or save it, load it, generate with it
    numbers(count3(64, number=True), x)  # the count itself, from a register of a fifth block

A lemma of the paper (lem:enc-bound) says that a fixed encoder exists; these are its weights. With
l = x_n, s_i = x_i + l and kappa_i = ceil(s_i / n), the partner that row i looks for is
a_i = kappa_i n - s_i, one of 0..n-1.

    block 1   attention: every row fetches l, l^2, n, n^2 from the last row and x_0 from the first
              MLP: a_i, kappa_i^2, kappa_i s_i; x_j mod n and what its square is made of, all
              zero in row 0
    block 2   attention: w_i = number of j > 0 with x_j = a_i mod n. Row 0 is a sink (below)
              MLP: + 1 if x_0 = a_i mod n
    block 3   attention: the mean over all rows, W = count / n, and 1 / n
    block 4   attention: t = floor(W), by looking up the position nearest to W - 1/2 + 1/(2n)
              MLP: f = W - t, 0 where that is 1. The output's logits are
              2 v f - v^2 / n = (2 v r - v^2) / n, r = count mod n
    block 5   with `number`: the position r, looked up with the same scores, is written into R

Three ideas keep it small. **A sink makes softmax count**: if row 0 scores S more than a match and
has value 0, the weights of matches are exp(-S) each, so exp(S) times the attended value is their
number (relative error n exp(-S)): no reciprocals.
**Products in the scores**: a match scores K a_i^2, a product that no MLP of fixed size can form;
the sink has to score
K a_i^2 + S = K (kappa_i^2 n^2 - 2 kappa_i s_i n + x_i^2 + 2 x_i l + l^2) + S, in which each product
is one of something that row i has and something that row 0 has.
**Thresholds in one layer**: y [e > 0] = min(ReLU(M (2e - 1)), y) for integers e.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from entp.errors import InputError
from entp.model import Transformer
from entp.theory.weights import SHARP, Form, Head, Layer, Unit, build, clear, where_positive

BLOCKS, HEADS = 4, 2
LEAST_MARGIN = 30


def count3(n_max: int = 64, ratio: int = 1, number: bool = False) -> Transformer:
    """A float64 Transformer that computes Count3 in mode entp, for n <= n_max and x_i < ratio n.

    Token ids go from 0 to n_max - 1. Layers and width do not depend on n_max; the width grows with
    ratio. number: a fifth block writes the answer into a register of the last row, see `numbers`.
    """
    if n_max < 1 or ratio < 1:
        raise InputError(f"n_max is {n_max} and ratio {ratio}: both must be at least 1.")
    registers = _registers(ratio)
    layers = _program(n_max, ratio) + ([_number()] if number else [])
    row = torch.arange(n_max)
    return build(
        registers,
        layers,
        heads=HEADS,
        tokens={"X": row, "X2": row**2},
        positions={"J": row, "J2": row**2, "FIRST": row == 0},
    )


@torch.no_grad()
def answers(model: Transformer, x: np.ndarray, mode: str = "entp") -> np.ndarray:
    """What a model says after each whole row of x (batch, n); -1 where its numbers are not finite,
    as beyond the range of a short type."""
    logits = model(torch.from_numpy(x), mode=mode, at=[x.shape[1] - 1])[:, 0]
    return torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1).numpy()


@torch.no_grad()
def numbers(model: Transformer, x: np.ndarray) -> np.ndarray:
    """Register R of the last row after each whole row of x (batch, n); count3 needs `number`."""
    return model.encode(torch.from_numpy(x))[:, -1, _registers(1)["R"]].numpy()


def _registers(ratio: int) -> dict[str, int]:
    """Which dimension of the stream holds what; MEAN, NINV, T and R reuse what has been cleared.

    X, X2: the token and its square; in the end what the tied readout needs. J, J2, FIRST: position,
    its square, [j = 0]. L, L2, N, N2, X0: fetched by block 1. A, K2, KS: a, kappa^2, kappa s. GX,
    GX2, QX, Q2: of keys, zero in row 0: x mod n, x^2, q x and q^2 with q = floor(x / n), from which
    (x mod n)^2 = x^2 - 2 q x n + q^2 n^2. SN, SN2: n and n^2 in row 0 only, L becomes such. If x <
    n there is no q, and N and N2 are not needed outside row 0.
    """
    names = ["X", "X2", "J", "J2", "FIRST", "L", "L2", "N", "N2", "X0"]
    names += ["A", "K2", "KS", "GX", "GX2", "W"]
    if ratio > 1:
        names += ["QX", "Q2", "SN", "SN2"]
    registers = {name: number for number, name in enumerate(names)}
    registers |= {"MEAN": registers["A"], "NINV": registers["K2"], "T": registers["KS"]}
    registers["R"] = registers["T"]
    if ratio == 1:
        registers |= {"SN": registers["N"], "SN2": registers["N2"]}
    return registers


def _program(n_max: int, ratio: int) -> list[Layer]:
    """The four blocks."""
    fetched: dict[str, Form] = {
        "L": {"X": 1.0},
        "L2": {"X2": 1.0},
        "N": {"J": 1.0, "1": 1.0},
        "N2": {"J2": 1.0, "J": 2.0, "1": 1.0},
    }
    last = Head([({"1": SHARP}, {"J": 1.0})], fetched)
    first = Head([({"1": -SHARP}, {"J": 1.0})], {"X0": {"X": 1.0}})
    mean = Head([], {"MEAN": {"W": 1.0}, "NINV": {"FIRST": 1.0}})
    return [
        Layer([last, first], [*_partners(n_max, ratio), *_keys(n_max, ratio)]),
        Layer([_count(n_max, ratio)], [*_match_at_first(ratio), *clear("A", "K2", "KS")]),
        Layer([mean]),
        Layer([floor_of_mean(n_max)], remainder(n_max)),
    ]


def _partners(n_max: int, ratio: int) -> Iterable[Unit]:
    """a, kappa^2 and kappa s of every row: thresholds s > t n, for t = 0 .. 2 ratio - 1."""
    s = {"X": 1.0, "L": 1.0}
    for t in range(2 * ratio):
        over = {**s, "N": -float(t)}
        yield from where_positive(over, {"1": 1.0}, {"K2": 2.0 * t + 1}, 2 * n_max)
        yield from where_positive(over, s, {"KS": 1.0}, 2 * n_max)
        yield from where_positive(over, {"N": 1.0}, {"A": 1.0}, 2 * n_max)
    yield from (Unit({name: 1.0}, {"A": -1.0}) for name in s)


def _keys(n_max: int, ratio: int) -> Iterable[Unit]:
    """What rows are searched by: for tokens zero in row 0, for the sink zero elsewhere."""
    shut = 8.0 * n_max**2  # more than any form below can be
    for name, out in (("X", "GX"), ("X2", "GX2")):
        yield Unit({name: 1.0, "FIRST": -shut}, {out: 1.0})
    for t in range(1, ratio):  # x >= t n
        over = {"X": 1.0, "N": -float(t), "1": 1.0}
        yield from where_positive(over, {"1": 1.0}, {"Q2": 2.0 * t - 1}, n_max, shut)
        yield from where_positive(over, {"X": 1.0}, {"QX": 1.0}, n_max, shut)
        yield from where_positive(over, {"N": 1.0}, {"GX": -1.0}, n_max, shut)
    if ratio > 1:
        for name, out in (("N", "SN"), ("N2", "SN2")):
            yield Unit({name: 1.0, "FIRST": shut, "1": -shut}, {out: 1.0})
    for name in ("L",) if ratio > 1 else ("L", "N", "N2"):
        # In place: less itself in every row but the first.
        yield Unit({name: 1.0, "FIRST": -shut}, {name: -1.0})


def margin(n_max: int) -> float:
    """K and S: a mismatch scores at least K less than a match, the sink S more. A whole number.

    A count is wrong by less than 2 n^3 exp(-S) in the worst case, and may be by less than one half.
    """
    return float(max(LEAST_MARGIN, math.ceil(3 * math.log(n_max)) + 6))


def _count(n_max: int, ratio: int) -> Head:
    """The number of rows j > 0 with x_j = a mod n, by products (query's row) x (key's row)."""
    k = margin(n_max)
    tokens: list[tuple[Form, Form]] = [({"A": 2 * k}, {"GX": 1.0}), ({"1": -k}, {"GX2": 1.0})]
    if ratio > 1:
        tokens += [({"N": 2 * k}, {"QX": 1.0}), ({"N2": -k}, {"Q2": 1.0})]
    sink: list[tuple[Form, Form]] = [
        ({"K2": k}, {"SN2": 1.0}),
        ({"KS": -2 * k}, {"SN": 1.0}),
        ({"X": 2 * k}, {"L": 1.0}),
        ({"X2": k, "L2": k, "1": k}, {"FIRST": 1.0}),
    ]
    return Head(tokens + sink, {"W": {"1": math.exp(k), "FIRST": -math.exp(k)}})


def _match_at_first(ratio: int) -> Iterable[Unit]:
    """1 if x_0 = a mod n: a bump at x_0 - t n - a = 0."""
    for t in range(ratio):
        for shift, weight in ((1.0, 1.0), (0.0, -2.0), (-1.0, 1.0)):
            yield Unit({"X0": 1.0, "A": -1.0, "N": -float(t), "1": shift}, {"W": weight})


def floor_of_mean(n_max: int) -> Head:
    """T = floor of MEAN = count / n, n - 1 if that is n: the position nearest to it less 1/2 and
    more 1 / (2n)."""
    sharp = SHARP * n_max
    near = {"MEAN": 2 * sharp, "1": -sharp, "NINV": sharp}
    return Head([(near, {"J": 1.0}), ({"1": -sharp}, {"J2": 1.0})], {"T": {"J": 1.0}})


def remainder(n_max: int) -> list[Unit]:
    """X = 2 C f and X2 = -C / n, with f = W - t, or 0 if that is 1, for the tied readout."""
    sharp, steep = SHARP * n_max, 4.0 * n_max
    whole = {"MEAN": steep, "T": -steep, "NINV": steep / 2, "1": -steep}
    return [
        Unit({"MEAN": 1.0}, {"X": 2 * sharp}),
        Unit({"T": 1.0}, {"X": -2 * sharp}),
        Unit(whole, {"X": -2 * sharp}),
        Unit({**whole, "1": -steep - 1}, {"X": 2 * sharp}),
        Unit({"NINV": 1.0}, {"X2": -sharp}),
        *clear("X", "X2", "T"),
    ]


def _number() -> Layer:
    """R = r, the position that the output's logits are largest for."""
    return Layer([Head([({"X": 1.0}, {"J": 1.0}), ({"X2": 1.0}, {"J2": 1.0})], {"R": {"J": 1.0}})])
