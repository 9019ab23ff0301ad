"""Figures of kind "curves": validation metrics against steps, seconds, sequences or FLOPs."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from entp.report.panels import Line, Panel, lines, one_legend, panels, set_values_axis
from entp.report.style import DASHES, GREY
from entp.results.schema import AuthorsCurve, Figure, MetricSpec, Record, RunRecord
from entp.results.summary import at_axis

SCALES = {"steps": 1e3, "seconds": 1.0, "sequences": 1e6, "flops": 1e15}
NAMES = {
    "steps": "optimizer steps (thousands)",
    "seconds": "seconds of training",
    "sequences": "sequences read (millions)",
    "flops": "FLOPs of training (10^15, by formula)",
}


def draw_curves(figure: Any, record: Record, spec: Figure) -> None:
    """A panel per metric: a colour per arm, a line per seed, the authors' curves in grey, the
    paper's values dotted. A metric that validation does not measure is that of the evaluations on
    the test during training, where there are some."""
    shown = panels(record, spec)
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, panel in zip(axes, shown, strict=True):
        draw_authors(axis, record, spec, panel.metric.name)
        on_test = _is_on_test(panel)
        for line in lines(record, spec, panel.arms):
            draw_line(axis, line, panel.metric.name, spec.x, panel.metric if on_test else None)
        _name_axes(axis, panel, spec, "test" if on_test else "validation")
    one_legend(figure, axes)


def _is_on_test(panel: Panel) -> bool:
    """Whether a metric was measured by evaluations on the test, and not by validation."""
    runs, name = [run for arm in panel.arms.values() for run in arm.runs], panel.metric.name
    if any(name in point.values for run in runs for point in run.curve):
        return False
    return any(name in point.totals.all for run in runs for point in run.splits.get("test", []))


def draw_line(
    axis: Any, line: Line, metric: str, x: str = "", on_test: MetricSpec | None = None
) -> None:
    """The curve of every seed of a line's arms; with `on_test`, of the evaluations on the test."""
    label: str | None = line.label
    style = {key: value for key, value in line.style.items() if key != "marker"}
    for arm in line.arms:
        for run in arm.runs:
            shown = points(run, metric, x) if on_test is None else points_on_test(run, on_test, x)
            axis.plot(*shown, label=label, linewidth=1.4, **style)
            label = None
        if metric in arm.paper and arm.runs:
            dotted = {"linestyle": ":", "linewidth": 1, "alpha": 0.7, "color": style["color"]}
            axis.axhline(arm.paper[metric].value, **dotted)


def points(run: RunRecord, metric: str, x: str = "") -> tuple[list[float], list[float]]:
    """Where a run was at each evaluation, and what it reached; unknown times and FLOPs are left
    out."""
    found = [
        (at / SCALES[x or "steps"], point.values[metric])
        for point in run.curve
        if metric in point.values and (at := at_axis(point, x)) is not None
    ]
    return [at for at, _ in found], [value for _, value in found]


def points_on_test(
    run: RunRecord, metric: MetricSpec, x: str = ""
) -> tuple[list[float], list[float]]:
    """The same of the evaluations on the test during training."""
    known = {point.step: point for point in run.curve}
    found = []
    for split in run.splits.get("test", []):
        totals, point = split.totals.totals([metric]), known.get(split.step)
        at = at_axis(point, x) if point is not None else None
        if at is not None and metric.name in totals.all and totals.all[metric.name].w:
            found.append((at / SCALES[x or "steps"], totals.value(metric.name)))
    return [at for at, _ in found], [value for _, value in found]


def draw_authors(axis: Any, record: Record, spec: Figure, metric: str) -> None:
    """The authors' curves, where their steps or sequences can be compared."""
    curves = {k: v for k, v in record.authors_curves.items() if metric in v.values}
    if spec.x in ("seconds", "flops") or spec.panels:
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


def _name_axes(axis: Any, panel: Panel, spec: Figure, what: str) -> None:
    runs = [run for arm in panel.arms.values() for run in arm.runs]
    xlabel = NAMES[spec.x or "steps"]
    if (spec.x or "steps") == "steps":
        xlabel += batch_sizes(runs)
    axis.set(xlabel=xlabel, title=panel.title)
    values = [v for line in axis.get_lines() for v in line.get_ydata()]
    set_values_axis(axis, panel.metric, values, what)


def batch_sizes(runs: list[RunRecord]) -> str:
    """A word on steps that read different numbers of sequences, and so do not compare."""
    sizes = set()
    for run in runs:
        config = run.config
        parts = [config, config.get("batch_schedule"), config.get("curriculum")]
        found = [part.get("batch_size") for part in parts if isinstance(part, dict)]
        sizes |= {size for size in found if isinstance(size, int)}
    return f", of {min(sizes)} to {max(sizes)} sequences" if len(sizes) > 1 else ""
