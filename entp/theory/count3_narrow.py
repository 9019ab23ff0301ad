"""Count3 by decoders of fixed width, as weights set by hand: n_max + 3 blocks, width 18.

    model = narrow_decoder(n_max=64)              # 67 blocks, width 18; x_i < n in a prefix of n
    model = narrow_decoder(n_max=64, values=16)   # 7 blocks, width 123

One value v a block (or several), for n_max of them; three stages in a pipeline. Row 0 is a sink,
as in compiled.py: it scores S more than a match, so that softmax counts.

    block v + 1   MLP: IS = [x = v], zero in row 0; A = -(v + x) mod n, the partner of v and x
    block v + 2   attention: H = number of IS so far; AA = A^2, looked up among the positions
                  MLP: U = 2 (H + [x_0 = v]) - [x = v], zero in row 0; A and AA move to B and BB
    block v + 3   attention: W += sum of U over rows j > 0 with x_j = B, over n

A match scores K (2 B x_j - x_j^2) = K B^2, which the sink beats by S + ln n: ln n makes the sum a
mean. So the later row j of each pair adds 2, and a row paired with itself 1. Block 1 adds 1 / n if
x_0 is paired with itself; the last block takes count mod n from W = count / n, as in compiled.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from entp.errors import InputError
from entp.model import Transformer
from entp.theory.compiled import floor_of_mean, margin, remainder
from entp.theory.weights import SHARP, Form, Head, Layer, Unit, build, clear, where_positive

HEAD = 3
"""Size of a head: the products of a score, and the values whose rows one head counts."""
LENGTH: Form = {"J": 1.0, "1": 1.0}
BUMP = ((1.0, 1.0), (0.0, -2.0), (-1.0, 1.0))
"""Units ReLU(e + shift), weighed, are [e = 0] for integers e."""


def narrow_decoder(n_max: int = 64, values: int = 1) -> Transformer:
    """A float64 Transformer that computes Count3 in mode decoder, for n <= n_max and x_i < n.

    It has n_max / values blocks, rounded up, and 3 more. The width is 7 `values` + 9 rounded up to
    a multiple of 3, whatever n_max.
    """
    if n_max < 1 or not 1 <= values <= n_max:
        raise InputError(
            f"n_max is {n_max} and values {values}: n_max must be at least 1, values from 1 to "
            "n_max."
        )
    registers = _registers(values)
    number = torch.arange(n_max)
    length = number.double() + 1
    return build(
        registers,
        _program(n_max, values),
        heads=-(-len(set(registers.values())) // HEAD),
        tokens={"X": number, "X2": number**2},
        positions={
            "J": number,
            "J2": number**2,
            "FIRST": number == 0,
            "LN": length.log(),
            "NINV": 1 / length,
        },
    )


def _registers(values: int) -> dict[str, int]:
    """X, X2: the token and its square, later zero in row 0; X0: row 0's. J, J2, FIRST, LN, NINV:
    position, its square, [j = 0], ln n, 1 / n. The rest: see above, one each for the values of a
    block."""
    names = ["X", "X2", "J", "J2", "FIRST", "LN", "NINV", "X0", "W"]
    names += [
        f"{name}{q}" for q in range(values) for name in ("IS", "H", "A", "AA", "B", "BB", "U")
    ]
    registers = {name: number for number, name in enumerate(names)}
    return registers | {"MEAN": registers["W"], "T": registers["H0"]}


def _program(n_max: int, values: int) -> list[Layer]:
    """The blocks; in the two before the last, values that no token has are counted in vain."""
    groups = -(-n_max // values)
    blocks = [_block(n_max, values, group * values) for group in range(1, groups + 2)]
    return [_begin(n_max, values), *blocks, Layer([floor_of_mean(n_max)], remainder(n_max))]


def _begin(n_max: int, values: int) -> Layer:
    """Block 1: x_0 in every row, the first values, and x_0 paired with itself."""
    first = Head([({"1": -SHARP}, {"J": 1.0})], {"X0": {"X": 1.0}})
    units = [*_first_with_itself(n_max)]
    for q in range(values):
        units += [*_is(n_max, q, q), *_partner(n_max, q, q, 1.0)]
        units.append(Unit({"X": 1.0, "1": float(q)}, {f"A{q}": -1.0}))
    for name in ("X", "X2"):
        units.append(Unit({name: 1.0, "FIRST": _shut(n_max), "1": -_shut(n_max)}, {name: -1.0}))
    return Layer([first], units)


def _block(n_max: int, values: int, v: int) -> Layer:
    """Begins values v, v + 1, ..., goes on with those of the block before, ends those before it."""
    slots = range(values)
    heads = [_count(n_max, slots[q : q + HEAD]) for q in range(0, values, HEAD)]
    heads += [_square(q) for q in slots] + [_pair(n_max, q) for q in slots]
    units: list[Unit] = []
    for q in slots:
        units += [*_later(n_max, q, v + q - values), *_is(n_max, q, v + q)]
        units += [*_partner(n_max, q, v + q, 1.0), *_partner(n_max, q, v + q - values, -1.0)]
        units.append(Unit({"1": 1.0}, {f"A{q}": -float(values)}))
    return Layer(heads, units)


def _shut(n_max: int) -> float:
    """More than any form that is shut by it can be."""
    return 8.0 * n_max**2


def _first_with_itself(n_max: int) -> Iterable[Unit]:
    """W = 1 / n if 2 x_0 + x_n is 0, n or 2 n."""
    for k in range(3):
        for shift, weight in ((1.0, 1.0), (0.0, -1.0)):
            e: Form = {"X0": 2.0, "X": 1.0, "J": -float(k), "1": shift - k}
            yield from where_positive(e, {"NINV": 1.0}, {"W": weight}, 1.0)


def _is(n_max: int, q: int, v: int) -> Iterable[Unit]:
    """IS = [x = v], not in row 0."""
    for shift, weight in BUMP:
        yield Unit({"X": 1.0, "1": shift - v, "FIRST": -_shut(n_max)}, {f"IS{q}": weight})


def _partner(n_max: int, q: int, v: int, sign: float) -> Iterable[Unit]:
    """What -(v + x) mod n is more than -(v + x), for x < n and v < n, added to A."""
    for k in range(2):
        over: Form = {"X": 1.0, "J": -float(k), "1": float(v - k)}
        yield from where_positive(over, LENGTH, {f"A{q}": sign}, n_max)


def _later(n_max: int, q: int, v: int) -> Iterable[Unit]:
    """U of value v; the partner and its square move on; IS, H and AA are cleared."""
    is_, h, a, aa, b, bb, u = (f"{name}{q}" for name in ("IS", "H", "A", "AA", "B", "BB", "U"))
    yield Unit({h: 1.0}, {h: -1.0, u: 2.0})
    yield Unit({is_: 1.0}, {is_: -1.0, u: -1.0})
    for shift, weight in BUMP:
        yield Unit({"X0": 1.0, "1": shift - v, "FIRST": -_shut(n_max)}, {u: 2 * weight})
    yield Unit({a: 1.0}, {b: 1.0})
    yield Unit({aa: 1.0}, {aa: -1.0, bb: 1.0})
    yield from clear(b, bb, u)


def _count(n_max: int, slots: range) -> Head:
    """H: the rows up to this one that are of a value, for several values."""
    sink = margin(n_max)
    value = {f"H{q}": {f"IS{q}": math.exp(sink)} for q in slots}
    return Head([({"1": sink}, {"FIRST": 1.0})], value)


def _square(q: int) -> Head:
    """AA = A^2: a partner is below n, so its row has been read."""
    near: list[tuple[Form, Form]] = [
        ({f"A{q}": 2 * SHARP}, {"J": 1.0}),
        ({"1": -SHARP}, {"J2": 1.0}),
    ]
    return Head(near, {f"AA{q}": {"J2": 1.0}})


def _pair(n_max: int, q: int) -> Head:
    """W: what the rows of a partner have counted, over n."""
    k = margin(n_max)
    sink: Form = {f"BB{q}": k, "LN": 1.0, "1": k}
    scores: list[tuple[Form, Form]] = [
        ({f"B{q}": 2 * k}, {"X": 1.0}),
        ({"1": -k}, {"X2": 1.0}),
        (sink, {"FIRST": 1.0}),
    ]
    return Head(scores, {"W": {f"U{q}": math.exp(k)}})
