"""Figures of kind "curves": validation metrics against steps, seconds or sequences."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from entp.report.panels import Line, Panel, lines, one_legend, panels, set_values_axis
from entp.report.style import DASHES, GREY
from entp.results.schema import AuthorsCurve, Figure, Point, Record, RunRecord

SCALES = {"steps": 1e3, "seconds": 1.0, "sequences": 1e6}
NAMES = {
    "steps": "optimizer steps (thousands)",
    "seconds": "seconds of training",
    "sequences": "sequences read (millions)",
}


def draw_curves(figure: Any, record: Record, spec: Figure) -> None:
    """A panel per metric: a colour per arm, a line per seed, the authors' curves in grey, the
    paper's values dotted."""
    shown = panels(record, spec)
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, panel in zip(axes, shown, strict=True):
        draw_authors(axis, record, spec, panel.metric.name)
        for line in lines(record, spec, panel.arms):
            draw_line(axis, line, panel.metric.name, spec.x)
        _name_axes(axis, panel, spec)
    one_legend(figure, axes)


def draw_line(axis: Any, line: Line, metric: str, x: str = "") -> None:
    """The curve of every seed of a line's arms."""
    label: str | None = line.label
    style = {key: value for key, value in line.style.items() if key != "marker"}
    for arm in line.arms:
        for run in arm.runs:
            axis.plot(*points(run, metric, x), label=label, linewidth=1.4, **style)
            label = None
        if metric in arm.paper and arm.runs:
            dotted = {"linestyle": ":", "linewidth": 1, "alpha": 0.7, "color": style["color"]}
            axis.axhline(arm.paper[metric].value, **dotted)


def points(run: RunRecord, metric: str, x: str = "") -> tuple[list[float], list[float]]:
    """Where a run was at each evaluation, and what it reached; unknown times are left out."""
    found = [
        (at / SCALES[x or "steps"], point.values[metric])
        for point in run.curve
        if metric in point.values and (at := _at(point, x)) is not None
    ]
    return [at for at, _ in found], [value for _, value in found]


def _at(point: Point, x: str) -> float | None:
    if x == "seconds":
        return point.seconds
    return point.sequences if x == "sequences" else point.step


def draw_authors(axis: Any, record: Record, spec: Figure, metric: str) -> None:
    """The authors' curves, where their steps or sequences can be compared."""
    curves = {k: v for k, v in record.authors_curves.items() if metric in v.values}
    if spec.x == "seconds" or spec.panels:
        return
    for (label, curve), dashes in zip(curves.items(), cycle(DASHES), strict=False):
        draw_authors_curve(axis, curve, metric, spec.x, f"authors: {label}", dashes)


def draw_authors_curve(
    axis: Any, curve: AuthorsCurve, metric: str, x: str, label: str, dashes: Any = "-"
) -> None:
    read = curve.sequences if x == "sequences" else curve.steps
    at = [value / SCALES[x or "steps"] for value in read]
    style = {"color": GREY, "linestyle": dashes, "linewidth": 1.6, "zorder": 0}
    axis.plot(at, curve.values[metric], label=label, **style)


def _name_axes(axis: Any, panel: Panel, spec: Figure) -> None:
    runs = [run for arm in panel.arms.values() for run in arm.runs]
    xlabel = NAMES[spec.x or "steps"]
    if (spec.x or "steps") == "steps":
        xlabel += batch_sizes(runs)
    axis.set(xlabel=xlabel, title=panel.title)
    values = [v for line in axis.get_lines() for v in line.get_ydata()]
    set_values_axis(axis, panel.metric, values, "validation")


def batch_sizes(runs: list[RunRecord]) -> str:
    """A word on steps that read different numbers of sequences, and so do not compare."""
    sizes = set()
    for run in runs:
        config = run.config
        parts = [config, config.get("batch_schedule"), config.get("curriculum")]
        found = [part.get("batch_size") for part in parts if isinstance(part, dict)]
        sizes |= {size for size in found if isinstance(size, int)}
    return f", of {min(sizes)} to {max(sizes)} sequences" if len(sizes) > 1 else ""
