"""Figures of kind "slices": test metrics against a factor of the arms, or against a slice of the
metric."""

from __future__ import annotations

from typing import Any

from entp.report.panels import Line, Panel, lines, one_legend, panels, set_values_axis, words
from entp.results.schema import Estimate, Factor, Figure, Record
from entp.results.summary import estimate, sliced


def draw_slices(figure: Any, record: Record, spec: Figure) -> None:
    """A panel per metric, a line per value of the line factors, with intervals."""
    shown = panels(record, spec)
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, panel in zip(axes, shown, strict=True):
        draw_panel(axis, record, spec, panel)
    one_legend(figure, axes)


def draw_panel(axis: Any, record: Record, spec: Figure, panel: Panel) -> None:
    values: list[float] = []
    ticks: list[Factor] = []
    for line in lines(record, spec, panel.arms):
        found = line_points(record, spec, panel, line)
        if not found:
            continue
        at, means = list(found), [one.mean for one in found.values()]
        values, ticks = values + means, ticks + [x for x in at if x not in ticks]
        style = {"marker": "."} | line.style
        if len(found) > FEW:
            style["marker"] = None
        axis.plot(at, means, label=line.label, **style)
        _draw_intervals(axis, found, style)
    axis.set(xlabel=words(spec.x), title=panel.title)
    if is_factor(record, spec) and ticks and not isinstance(ticks[0], str):
        _set_ticks(axis, sorted(ticks))
    set_values_axis(axis, panel.metric, values, "test")


FEW = 16
"""Points of a line that get markers."""


def _set_ticks(axis: Any, ticks: list[Any]) -> None:
    """The values that there are; on a log scale, where they span more than tenfold."""
    if 0 < ticks[0] < ticks[-1] / 7 and isinstance(ticks[0], float):
        axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)


def line_points(record: Record, spec: Figure, panel: Panel, line: Line) -> dict[Factor, Estimate]:
    """The test values of a line by x, in order."""
    found: dict[Factor, Estimate] = {}
    for arm in line.arms:
        if is_factor(record, spec):
            one = estimate(record, arm, panel.metric.name)
            if one is not None and spec.x in arm.factors:
                found[arm.factors[spec.x]] = one
        else:
            bins = sliced(record, arm, panel.metric.name, spec.x)
            found |= {_number(key): one for key, one in bins.items()}
    return dict(sorted(found.items(), key=lambda item: (isinstance(item[0], str), item[0])))


def is_factor(record: Record, spec: Figure) -> bool:
    """Whether x is a factor of the arms; it is a slice where each panel has one value of it."""
    return spec.x != spec.panels and any(spec.x in arm.factors for arm in record.arms.values())


def _number(key: str) -> Factor:
    try:
        return float(key)
    except ValueError:
        return key


def _draw_intervals(axis: Any, found: dict[Factor, Estimate], style: dict[str, Any]) -> None:
    ends = {x: one.interval for x, one in found.items() if one.interval is not None}
    if ends and len(ends) == len(found):
        low, high = zip(*ends.values(), strict=True)
        axis.fill_between(list(ends), low, high, color=style["color"], alpha=0.15, linewidth=0)
