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
from entp.report.style import save_figure
from entp.tasks.counting import count3_next
from entp.terminal import format_table
from entp.theory import count3_algorithms as algorithms
from entp.theory.count3_algorithms import Counted
from entp.training.loggers import environment

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
READ_ONLY = ("quadratic", "linear", "blocked")
"""Algorithms that only read x and keep nothing from shorter lengths."""
OTHER = ("in place", "running table", "append-only table")
"""Algorithms that overwrite x, or keep something from shorter lengths."""


def measure(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> dict[str, Any]:
    """Run every algorithm on one random sequence of each length, values below n, and fit powers of
    n to what they took.

    `time_space` is time times space over n^2, a space of 0 taken as 1. `correct` is equality with `entp.tasks.counting`.
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
    ):
        table = make(len(x))
        table.extend(x)
        yield name, None, table.count3()


def _select(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """One row of an algorithm for each length: of `blocked`, the one whose s is the root of n."""
    return [row for row in rows if row["algorithm"] == name and row["s"] in (None, root(row["n"]))]


def _fit(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The p of c n^p for time and for space, by least squares of logarithms; None for a space that
    is 0."""
    found = _select(rows, name)

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
    rooted = [[str(row["n"]), *_cells(row)] for row in _select(rows, "blocked")]
    others = [
        [
            name,
            *(str(_select(rows, name)[-1][what]) for what in ("time", "space", "shared")),
            *(_power(fits[name][what]) for what in ("time", "space")),
            f"{_select(rows, name)[0]['time_space']:.5f}",
            f"{_select(rows, name)[-1]['time_space']:.5f}",
        ]
        for name in OTHER
    ]
    right = sum(row["correct"] for row in rows)
    blocks = f"time ~ {_power(fits['blocked']['time'])}, space ~ {_power(fits['blocked']['space'])}"
    where = f"seed {result['seed']}; {result['environment']['device']}, commit {result['environment']['commit']}"
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
    """Steps against counters with the conjecture's two lines, and their product over n^2;
    ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(13, 5.5), layout="constrained")
    curves, products = figure.subplots(1, 2, width_ratios=(1.3, 1))
    _draw_curves(curves, result)
    _draw_products(products, result)
    save_figure(figure, path)


def _draw_curves(axis: Any, result: dict[str, Any]) -> None:
    """The read-only algorithms: one curve of `blocked` per length, the printed algorithms and s =
    sqrt n marked."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    lengths, n = result["lengths"], max(result["lengths"])
    marks = {
        "quadratic": ("s", "quadratic (alg:tc1)"),
        "linear": ("D", "linear (alg:tc2)"),
        "blocked": ("o", "s = root of n"),
    }
    for length, colour in zip(
        lengths, colormaps["viridis"](np.linspace(0.9, 0.1, len(lengths))), strict=True
    ):
        rows = [row for row in result["rows"] if row["n"] == length]
        curve = [row for row in rows if row["algorithm"] == "blocked"]
        axis.loglog(
            [row["space"] for row in curve],
            [row["time"] for row in curve],
            ".-",
            color=colour,
            label=f"n = {length}",
        )
        for name, (marker, _) in marks.items():
            (row,) = _select(rows, name)
            axis.plot(max(1, row["space"]), row["time"], marker, color=colour)
    axis.axhline(n**2, color="C3", linestyle="--", linewidth=1)
    axis.axvline(n, color="C3", linestyle="--", linewidth=1)
    axis.text(
        n**0.5,
        n**2 * 1.1,
        f"(i) time n^2 = {n**2:,}",
        color="C3",
        ha="center",
        va="bottom",
        fontsize=8,
    )
    axis.text(
        n * 0.97,
        n**1.5,
        f"(ii) space n = {n}",
        color="C3",
        ha="right",
        va="center",
        rotation=90,
        fontsize=8,
    )
    axis.set(
        xlabel="space: counters alive at once (number, log; 0 drawn at 1)",
        ylabel="time: steps after x_n (number, log)",
    )
    axis.set_title(
        f"read-only input, blocks of s residues; dashed: the branches of con:ts2 for n = {n}",
        fontsize=9,
    )
    handles = [
        Line2D([], [], marker=m, linestyle="", color="0.3", label=text)
        for m, text in marks.values()
    ]
    axis.legend(
        handles=[*handles, *axis.get_lines()[: -2 : 1 + len(marks)]],
        fontsize=7,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )


def _draw_products(axis: Any, result: dict[str, Any]) -> None:
    """Time times space over n^2 against n: flat for the read-only algorithms, falling for the
    others."""
    for name, marker in zip((*READ_ONLY, *OTHER), "sDov^*", strict=True):
        found = _select(result["rows"], name)
        label = f"{name}, s = root of n" if name == "blocked" else name
        style = "-" if name in READ_ONLY else "--"
        axis.loglog(
            [r["n"] for r in found],
            [r["time_space"] for r in found],
            marker + style,
            label=label,
            markersize=5,
        )
    axis.set_xticks(result["lengths"], [str(n) for n in result["lengths"]], fontsize=7)
    axis.set_xticks([], minor=True)
    axis.set(xlabel="n (tokens, log)", ylabel="time x space / n^2 (log; space 0 taken as 1)")
    axis.set_title(
        "dashed: x is overwritten (in place), or\ncells kept from shorter lengths are not counted "
        "(tables)",
        fontsize=9,
    )
    axis.legend(fontsize=7, loc="lower left")
