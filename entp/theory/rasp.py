"""RASP, the small language of sequence operations of the paper's programs, in exact arithmetic.

A program is an ordinary function of an evaluation and a sequence:

    def how_many_so_far(r: Rasp, x: np.ndarray) -> np.ndarray:
        return r.sel_width(r.select(k=x, q=x, pred=equals))

    how_many_so_far(Rasp("causal"), np.array([7, 7, 5, 7]))   # 1 2 1 3
    how_many_so_far(Rasp("encoder"), np.array([7, 7, 5, 7]))  # 3 3 1 3

Sequences are one-dimensional arrays of Python integers or fractions, so that nothing overflows and
nothing is rounded; plus, minus, times, comparison and remainder of two sequences are numpy's,
position by position.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from entp.errors import InputError, one_of

Predicate = Callable[[Any, Any], Any]
"""Of one key and one query: is the key selected?"""

MASKS = ("encoder", "causal")


def equals(key: Any, query: Any) -> bool:
    """The key is the query."""
    return bool(key == query)


def true(key: Any, query: Any) -> bool:
    """Every key is selected."""
    return True


def exact(values: Any) -> np.ndarray:
    """Whole numbers or fractions as a sequence of Python's own; whole fractions become integers."""
    given = np.asarray(values, dtype=object)
    if given.ndim != 1:
        raise InputError(f"a RASP sequence has one dimension: got {given.ndim}.")
    return _sequence([_number(v) for v in given.tolist()])


def _number(v: Any) -> int | Fraction:
    if isinstance(v, Fraction):
        return v.numerator if v.denominator == 1 else v
    if isinstance(v, int | np.integer | np.bool_):
        return int(v)
    raise InputError(f"a RASP sequence holds whole numbers or fractions: got {v!r}.")


def _sequence(values: list[Any]) -> np.ndarray:
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def _mean(values: list[Any]) -> Fraction:
    return Fraction(sum(values)) / len(values)


REDUCTIONS: dict[str, Callable[[list[Any]], Any]] = {"mean": _mean, "max": max, "min": min}


class Rasp:
    """One evaluation of RASP programs under one mask; it keeps the values that programs name.

    The mask belongs to the evaluation and holds for every select in it, as in a Transformer: no
    operation can step out of it. "encoder": every position sees all positions; "causal": a position
    sees itself and those before it.
    """

    def __init__(self, mask: str) -> None:
        if mask not in MASKS:
            raise one_of("mask", mask, MASKS)
        self.mask = mask
        self.named: dict[str, np.ndarray] = {}

    def note(self, name: str, value: np.ndarray) -> np.ndarray:
        """Keep a value in `named` and give it back."""
        self.named[name] = exact(value)
        return value

    def full(self, x: np.ndarray, c: int) -> np.ndarray:
        """c at every position of x."""
        return exact([c] * len(x))

    def indices(self, x: np.ndarray) -> np.ndarray:
        """0, 1, 2, ... for the positions of x."""
        return exact(range(len(x)))

    def tok_map(self, x: np.ndarray, f: Callable[[Any], Any]) -> np.ndarray:
        """f of each value."""
        return exact([f(a) for a in exact(x)])

    def seq_map(self, x: np.ndarray, y: np.ndarray, f: Callable[[Any, Any], Any]) -> np.ndarray:
        """f of each pair of values at the same position."""
        return exact([f(a, b) for a, b in zip(exact(x), exact(y), strict=True)])

    def select(self, k: np.ndarray, q: np.ndarray, pred: Predicate) -> np.ndarray:
        """Which keys each position selects inside the mask: a boolean matrix [query, key]."""
        keys, queries = exact(k), exact(q)
        if len(keys) != len(queries):
            raise InputError(
                f"keys and queries are of one sequence: got {len(keys)} and {len(queries)} of them."
            )
        selected = np.frompyfunc(pred, 2, 1)(keys[None, :], queries[:, None]).astype(bool)
        return np.tril(selected) if self.mask == "causal" else selected

    def sel_width(self, selector: np.ndarray) -> np.ndarray:
        """How many keys each position selects."""
        return exact(selector.sum(axis=1))

    def aggr(
        self, selector: np.ndarray, v: np.ndarray, reduction: str = "mean", default: int = 0
    ) -> np.ndarray:
        """The mean, max or min of the values each position selects; the default for none."""
        if reduction not in REDUCTIONS:
            raise one_of("reduction", reduction, REDUCTIONS)
        values, reduce = exact(v), REDUCTIONS[reduction]
        return exact([reduce(values[row].tolist()) if row.any() else default for row in selector])

    def kqv(
        self,
        k: np.ndarray,
        q: np.ndarray,
        v: np.ndarray,
        pred: Predicate,
        reduction: str = "mean",
        default: int = 0,
    ) -> np.ndarray:
        """Select, then aggregate: one attention head."""
        return self.aggr(self.select(k, q, pred), v, reduction, default)
