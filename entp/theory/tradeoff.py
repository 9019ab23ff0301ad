"""Time against space for Count3: what the algorithms of count3_algorithms.py took, as a table and a
picture.

Conjecture con:ts2 says that an algorithm for Count3 takes order n^2 steps once it has x_n, or order
n values that belong to this n alone. The counted steps and counters of `blocked` show points below
both lines, further below the larger n is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from entp.errors import InputError
from entp.report.tradeoff import draw_tradeoff, select
from entp.results.environment import environment
from entp.tasks.counting import count3_next
from entp.terminal import format_table
from entp.theory import count3_algorithms as algorithms
from entp.theory.count3_algorithms import Counted

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
READ_ONLY = ("quadratic", "linear", "blocked")
"""Algorithms that only read x and keep nothing from shorter lengths."""
OTHER = ("in place", "running table", "append-only table", "one cell a token")
"""Algorithms that overwrite x, or keep something from shorter lengths."""


def measure(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> dict[str, Any]:
    """Run every algorithm on one random sequence of each length, values below n, and fit powers of
    n to what they took.

    `time_space` is time times space over n^2, a space of 0 taken as 1. `correct` is equality with
    `entp.tasks.counting`.
    """
    lengths = sorted(set(lengths))
    if len(lengths) < 2 or lengths[0] < 2:
        raise InputError(
            f"lengths are {lengths}: give at least two different ones, each at least 2."
        )
    rows = [row for n in lengths for row in _rows(n, seed)]
    return {
        "environment": environment(torch.device("cpu"), 1),
        "lengths": lengths,
        "seed": seed,
        "rows": rows,
        "fits": [_fit(rows, name) for name in (*READ_ONLY, *OTHER)],
    }


def block_sizes(n: int) -> list[int]:
    """The powers of two up to n, and the root of n rounded."""
    return sorted({2**k for k in range(n.bit_length())} | {root(n)})


def root(n: int) -> int:
    """The root of n rounded to a whole number."""
    return round(math.sqrt(n))


def _rows(n: int, seed: int) -> Iterator[dict[str, Any]]:
    x = np.random.default_rng((seed, n)).integers(0, n, n)
    expected = int(count3_next(x[None])[0])
    for name, s, counted in _runs(x):
        yield {
            "n": n,
            "algorithm": name,
            "s": s,
            "time": counted.time,
            "space": counted.space,
            "shared": counted.shared,
            "time_space": counted.time * max(1, counted.space) / n**2,
            "value": counted.value,
            "correct": counted.value == expected,
        }


def _runs(x: np.ndarray) -> Iterator[tuple[str, int | None, Counted]]:
    """Name, block size and outcome of each algorithm on x."""
    yield "quadratic", None, algorithms.quadratic(x)
    yield "linear", None, algorithms.linear(x)
    for s in block_sizes(len(x)):
        yield "blocked", s, algorithms.blocked(x, s)
    yield "in place", None, algorithms.in_place(x)
    for name, make in (
        ("running table", algorithms.RunningTable),
        ("append-only table", algorithms.AppendOnlyTable),
        ("one cell a token", algorithms.CellPerToken),
    ):
        table = make(len(x))
        table.extend(x)
        yield name, None, table.count3()


def _fit(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The p of c n^p for time and for space, by least squares of logarithms; None for a space that
    is 0."""
    found = select(rows, name)

    def power(what: str) -> float | None:
        values = [row[what] for row in found]
        if min(values) == 0:
            return None
        return float(np.polyfit(np.log([row["n"] for row in found]), np.log(values), 1)[0])

    return {"algorithm": name, "time": power("time"), "space": power("space")}


def report(result: dict[str, Any]) -> str:
    """The tables for a person: the largest length, s = sqrt n over all lengths, and what the model
    leaves out."""
    rows, n = result["rows"], max(result["lengths"])
    fits = {fit["algorithm"]: fit for fit in result["fits"]}
    head = ["s", "time", "space", "time/n^2", "space/n", "time*space/n^2"]
    largest = [
        [row["algorithm"], *_cells(row)]
        for row in rows
        if row["n"] == n and row["algorithm"] in READ_ONLY
    ]
    rooted = [[str(row["n"]), *_cells(row)] for row in select(rows, "blocked")]
    others = [
        [
            name,
            *(str(select(rows, name)[-1][what]) for what in ("time", "space", "shared")),
            *(_power(fits[name][what]) for what in ("time", "space")),
            f"{select(rows, name)[0]['time_space']:.5f}",
            f"{select(rows, name)[-1]['time_space']:.5f}",
        ]
        for name in OTHER
    ]
    right = sum(row["correct"] for row in rows)
    blocks = f"time ~ {_power(fits['blocked']['time'])}, space ~ {_power(fits['blocked']['space'])}"
    place = result["environment"]
    where = f"seed {result['seed']}; {place['device']}, commit {place['commit']}"
    products = [f"time*space/n^2 at n = {length}" for length in (min(result["lengths"]), n)]
    return "\n".join(
        [
            f"Count3, read-only input, n = {n}: steps after x_n, and counters alive at once",
            format_table(["algorithm", *head], largest),
            "\nblocked with s = the root of n: neither time n^2 nor space n",
            format_table(["n", *head], rooted),
            f"fitted: {blocks}",
            f"\nother rules, n = {n}: `in place` overwrites x, the tables keep cells from shorter "
            "lengths",
            format_table(
                ["algorithm", "time", "space", "kept", "time ~", "space ~", *products], others
            ),
            f"\n{right} of {len(rows)} answers equal Count3; {where}",
        ]
    )


def _cells(row: dict[str, Any]) -> list[str]:
    n = row["n"]
    return [
        "" if row["s"] is None else str(row["s"]),
        str(row["time"]),
        str(row["space"]),
        f"{row['time'] / n**2:.4f}",
        f"{row['space'] / n:.4f}",
        f"{row['time_space']:.3f}",
    ]


def _power(exponent: float | None) -> str:
    return "0" if exponent is None else f"n^{exponent:.2f}"


def draw(result: dict[str, Any], path: Path) -> None:
    """The figure; ImportError without matplotlib."""
    draw_tradeoff(result, path, READ_ONLY, OTHER)
