"""The pictures of recipes: curves against steps, and Count3 by depth and length."""

from __future__ import annotations

import re
import sys
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entp.config.json import run_from_json
from entp.report.style import save_figure

if TYPE_CHECKING:
    from entp.experiments.recipe import Recipe


def new_figure(width: float, height: float) -> Any:
    """A figure, or None with a word on standard error where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install 'entp[plot]' to draw one.", file=sys.stderr)
        return None
    return Figure(figsize=(width, height), layout="constrained")


COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "k", "C8", "C9", "navy", "gold")
"""Of arms: C7 is grey, which is the authors'."""
DASHES = ("-", "--", "-.", (0, (4, 1, 1, 1, 1, 1)))
"""Tell the authors' curves apart, all of them grey; dotted is the paper's value."""


def draw_curves(recipe: Recipe, results: dict[str, Any], path: Path) -> None:
    """Every metric of the recipe by steps: a colour per arm, a line per seed, the authors' curves
    in grey, one legend."""
    metrics = ("loss", *(m for m in reversed(recipe.metrics) if m != "loss"))
    figure = new_figure(1 + 4.3 * len(metrics), 4.8)
    if figure is None:
        return
    panels, sizes = figure.subplots(1, len(metrics), squeeze=False)[0], _sizes(results)
    for panel, metric in zip(panels, metrics, strict=True):
        for (label, curves), dashes in zip(recipe.curves.items(), cycle(DASHES), strict=False):
            steps, values = zip(
                *((step / 1000, value) for step, value in curves[metric]), strict=True
            )
            panel.plot(
                steps,
                values,
                color="0.6",
                linestyle=dashes,
                linewidth=1.6,
                zorder=0,
                label=f"authors: {label}",
            )
        for number, (label, arm) in enumerate(
            (k, v) for k, v in results["arms"].items() if k in recipe.runs
        ):
            _draw_arm(panel, arm, metric, COLOURS[number % len(COLOURS)], label)
        panel.set(
            xlabel=f"optimizer steps (thousands){sizes}",
            ylabel=f"validation {metric.replace('_', ' ')}",
        )
        panel.set(**{"yscale": "log"} if metric == "loss" else {"ylim": (-0.03, 1.03)})
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7)
    dotted = any(
        m in arm.get("paper", {})
        for arm in results["arms"].values()
        if arm.get("runs")
        for m in metrics
    )
    figure.suptitle(
        results["title"] + (" (dotted: the paper's value)" if dotted else ""), fontsize=10
    )
    save_figure(figure, path)


def _sizes(results: dict[str, Any]) -> str:
    """A word on steps that read different numbers of sequences, and so do not compare."""
    runs = [
        run_from_json(run["settings"], "a recorded run")
        for arm in results["arms"].values()
        for run in arm.get("runs", [])
    ]
    sizes = {run.batch_at(step) for run in runs for step in (0, run.steps)}
    return f", of {min(sizes)} to {max(sizes)} sequences" if len(sizes) > 1 else ""


def _draw_arm(panel: Any, arm: dict[str, Any], metric: str, colour: str, label: str) -> None:
    for number, run in enumerate(arm.get("runs", [])):
        steps, values = [r["step"] / 1000 for r in run["curve"]], [r[metric] for r in run["curve"]]
        panel.plot(steps, values, color=colour, linewidth=1.4, label=label if number == 0 else None)
    known = arm.get("paper", {}).get(metric)
    if known and arm.get("runs"):
        panel.axhline(known["value"], color=colour, linestyle=":", linewidth=1, alpha=0.7)


def draw_depth(results: dict[str, Any], path: Path) -> None:
    """Count3 by depth: accuracy on fresh sequences against length; for each length, accuracy inside
    it, and learning.

    Labels are "decoder, 3 layers, 32 integers".
    """
    points = [(where, arm["runs"][0]) for where, arm in _points(results)]
    lengths = sorted({length for (_, _, length), _ in points})
    figure = new_figure(15, 10) if lengths else None
    if figure is None:
        return
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.6))
    for panel, metric in zip(
        above.subplots(1, 2), ("token_accuracy", "sequence_accuracy"), strict=True
    ):
        for label, where, values, style in depth_lines(results, metric):
            panel.plot(where, values, label=label, **style)
        name = metric.replace("_", " ")
        panel.set(
            xlabel="integers in a sequence",
            ylabel=f"{name} on fresh sequences",
            ylim=(-0.03, 1.03),
            xticks=lengths,
        )
    panel.legend(fontsize=8)
    inside, learning = below.subplots(2, len(lengths), sharey="row", squeeze=False)
    for (mode, layers, length), run in points:
        number, style = lengths.index(length), {**_style(mode, layers), "marker": None}
        right = run.get("final", {}).get("by_length", {})
        inside[number].plot([int(n) for n in right], list(right.values()), **style)
        learning[number].plot(
            [r["step"] / 1000 for r in run["curve"]], [r["loss"] for r in run["curve"]], **style
        )
    for length, first, second in zip(lengths, inside, learning, strict=True):
        first.set(title=f"{length} integers", xlabel="integers read", ylim=(-0.03, 1.03))
        first.locator_params("x", integer=True)
        second.set(xlabel="optimizer steps (thousands)", ylim=(0, None))
    inside[0].set_ylabel("share of right answers")
    learning[0].set_ylabel("validation loss")
    figure.suptitle(results["title"], fontsize=10)
    save_figure(figure, path)


def depth_lines(
    results: dict[str, Any], metric: str
) -> list[tuple[str, list[int], list[float], dict[str, Any]]]:
    """For each mode and depth: its name, the lengths, the metric on fresh sequences of each, and
    how to draw it."""
    points = [(where, arm["fresh"]) for where, arm in _points(results)]
    lines = []
    for mode, layers in sorted({(mode, layers) for (mode, layers, _), _ in points}):
        mine = sorted(
            (length, fresh[metric]) for (m, k, length), fresh in points if (m, k) == (mode, layers)
        )
        lengths, values = [n for n, _ in mine], [value for _, value in mine]
        lines.append(
            (
                f"{mode}, {layers} layer{'s' if layers > 1 else ''}",
                lengths,
                values,
                _style(mode, layers),
            )
        )
    return lines


def _points(results: dict[str, Any]) -> list[tuple[tuple[str, int, int], dict[str, Any]]]:
    """Arms that were tested, by mode, layers and length of labels such as "decoder, 3 layers, 32
    integers"; no others."""
    tested = {label: arm for label, arm in results["arms"].items() if arm.get("fresh")}
    parts = (
        (re.fullmatch(r"(\w+), (\d+) layers, (\d+) integers", label), arm)
        for label, arm in tested.items()
    )
    return [((found[1], int(found[2]), int(found[3])), arm) for found, arm in parts if found]


def _style(mode: str, layers: int) -> dict[str, Any]:
    """Blues for ENTP, oranges for decoders, darker for deeper, and a marker for each depth."""
    from matplotlib import colormaps

    deep, marker = {
        1: (0.35, "v"),
        2: (0.5, "s"),
        3: (0.65, "o"),
        6: (0.8, "^"),
        12: (1.0, "D"),
    }.get(layers, (0.6, "x"))
    return {"color": colormaps["Blues" if mode == "ENTP" else "Oranges"](deep), "marker": marker}
