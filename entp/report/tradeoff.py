"""The figure of time against space for Count3: steps and counters of each algorithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from entp.report.style import HEAT, LIMIT, save_figure

MARKS = {
    "quadratic": ("s", "quadratic (alg:tc1)"),
    "linear": ("D", "linear (alg:tc2)"),
    "blocked": ("o", "s = root of n"),
}
Rows = list[dict[str, Any]]


def draw_tradeoff(
    result: dict[str, Any], path: Path, read_only: Sequence[str], other: Sequence[str]
) -> None:
    """Steps against counters with the conjecture's two lines, and their product over n^2;
    ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(13, 5.5), layout="constrained")
    curves, products = figure.subplots(1, 2, width_ratios=(1.3, 1))
    _draw_curves(curves, result)
    _draw_products(products, result, read_only, other)
    save_figure(figure, path)


def select(rows: Rows, name: str) -> Rows:
    """One row of an algorithm for each length: of `blocked`, the one whose s is the root of n."""
    return [
        row
        for row in rows
        if row["algorithm"] == name and row["s"] in (None, round(math.sqrt(row["n"])))
    ]


def _draw_curves(axis: Any, result: dict[str, Any]) -> None:
    """The read-only algorithms: one curve of `blocked` per length, the printed algorithms and s =
    sqrt n marked."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    lengths, n = result["lengths"], max(result["lengths"])
    shades = colormaps[HEAT](np.linspace(0.9, 0.1, len(lengths)))
    curves = []
    for length, colour in zip(lengths, shades, strict=True):
        rows = [row for row in result["rows"] if row["n"] == length]
        blocked = [row for row in rows if row["algorithm"] == "blocked"]
        space, steps = [row["space"] for row in blocked], [row["time"] for row in blocked]
        curves += axis.loglog(space, steps, ".-", color=colour, label=f"n = {length}")
        for name, (marker, _) in MARKS.items():
            (row,) = select(rows, name)
            axis.plot(max(1, row["space"]), row["time"], marker, color=colour)
    _draw_limits(axis, n)
    handles = [
        Line2D([], [], marker=marker, linestyle="", color="0.3", label=text)
        for marker, text in MARKS.values()
    ]
    where = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    axis.legend(handles=[*handles, *curves], fontsize=7, **where)


def _draw_limits(axis: Any, n: int) -> None:
    """The conjecture's two branches."""
    style = {"color": LIMIT, "linestyle": "--", "linewidth": 1}
    axis.axhline(n**2, **style)
    axis.axvline(n, **style)
    text = {"color": LIMIT, "fontsize": 8}
    above = {"ha": "center", "va": "bottom", **text}
    axis.text(n**0.5, n**2 * 1.1, f"(i) time n^2 = {n**2:,}", **above)
    beside = {"ha": "right", "va": "center", "rotation": 90, **text}
    axis.text(n * 0.97, n**1.5, f"(ii) space n = {n}", **beside)
    axis.set(
        xlabel="space: counters alive at once (number, log; 0 drawn at 1)",
        ylabel="time: steps after x_n (number, log)",
    )
    title = f"read-only input, blocks of s residues; dashed: the branches of con:ts2 for n = {n}"
    axis.set_title(title, fontsize=9)


def _draw_products(
    axis: Any, result: dict[str, Any], read_only: Sequence[str], other: Sequence[str]
) -> None:
    """Time times space over n^2 against n: flat for the read-only algorithms, falling for the
    others."""
    for name, marker in zip((*read_only, *other), "sDov^*P", strict=True):
        found = select(result["rows"], name)
        label = f"{name}, s = root of n" if name == "blocked" else name
        style = "-" if name in read_only else "--"
        lengths, products = [r["n"] for r in found], [r["time_space"] for r in found]
        axis.loglog(lengths, products, marker + style, label=label, markersize=5)
    axis.set_xticks(result["lengths"], [str(n) for n in result["lengths"]], fontsize=7)
    axis.set_xticks([], minor=True)
    axis.set(xlabel="n (tokens, log)", ylabel="time x space / n^2 (log; space 0 taken as 1)")
    title = (
        "dashed: x is overwritten (in place), or\ncells kept from shorter lengths are not counted "
        "(tables)"
    )
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=7, loc="lower left")
