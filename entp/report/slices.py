"""Figures of kind "slices": test metrics against a factor of the arms, or against a slice of the
metric, with the baselines of the same test sequences."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product
from typing import Any, TypeVar

from entp.report.panels import (
    Line,
    Panel,
    lines,
    one_legend,
    panels,
    set_values_axis,
    values_label,
    words,
)
from entp.report.style import BASELINE, BASELINE_DASHES, DASHES, GREY, MARKERS
from entp.results.schema import ArmRecord, Estimate, Factor, Figure, Record
from entp.results.summary import Baselines, authors_values, baselines_of, estimate, sliced


def draw_slices(figure: Any, record: Record, spec: Figure) -> None:
    """A panel per metric, a line per value of the line factors, with intervals; the authors' values
    in grey, the paper's dotted, baselines black and dashed."""
    rows, columns = slices_shape(record, spec)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    shown = list(product(_by_source(spec), panels(record, spec)))
    for axis, (own, panel) in zip(axes, shown, strict=False):
        draw_panel(axis, record, own, panel)
        _draw_baselines(axis, record, own, panel)
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    one_legend(figure, axes)


def slices_shape(record: Record, spec: Figure) -> tuple[int, int]:
    """Rows and columns of the panels of slices: in one row, or several of some sources each."""
    count = len(panels(record, spec))
    if not spec.sources:
        return 1, count
    count *= len(spec.sources)
    return -(-count // ACROSS), min(count, ACROSS)


def _by_source(spec: Figure) -> list[Figure]:
    """The figure of each source by itself."""
    return [replace(spec, source=source, sources=()) for source in spec.sources] or [spec]


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
        values += _draw_paper(axis, record, spec, panel, line)
    values += _draw_authors(axis, record, spec, panel)
    axis.set(xlabel=words(spec.x), title=panel.title)
    numbers = sorted(x for x in ticks if not isinstance(x, str))
    if len(numbers) == len(ticks) > 0:
        if is_factor(record, spec):
            _set_ticks(axis, numbers)
        elif len(numbers) <= FEW:
            axis.set_xticks(numbers, [f"{x:g}" for x in numbers])
    set_values_axis(axis, panel.metric, values, "test")
    axis.set_ylabel(values_label(record, spec, panel.metric))


Value = TypeVar("Value")
ACROSS = 4
"""Panels of several sources in a row, at most."""
FEW = 16
"""Points of a line that get markers."""
LARGE = 100
"""Whole numbers from here on may stand on a log scale."""


def _set_ticks(axis: Any, ticks: list[Any]) -> None:
    """The values that there are; on a log scale, where they span more than sevenfold."""
    if 0 < ticks[0] < ticks[-1] / 7 and (isinstance(ticks[0], float) or ticks[0] >= LARGE):
        axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)


def line_points(record: Record, spec: Figure, panel: Panel, line: Line) -> dict[Factor, Estimate]:
    """The test values of a line by x, in order."""
    found: dict[Factor, Estimate] = {}
    for arm in line.arms:
        if is_factor(record, spec):
            one = estimate(record, arm, panel.metric.name, spec.source)
            if one is not None and spec.x in arm.factors:
                found[arm.factors[spec.x]] = one
        else:
            bins = sliced(record, arm, panel.metric.name, spec.x, spec.source)
            found |= {_number(key): one for key, one in bins.items()}
    return _in_order(found)


def _in_order(found: dict[Factor, Value]) -> dict[Factor, Value]:
    """Numbers by size, then texts."""
    return dict(sorted(found.items(), key=lambda item: (isinstance(item[0], str), item[0])))


def _draw_paper(axis: Any, record: Record, spec: Figure, panel: Panel, line: Line) -> list[float]:
    """The paper's values of a line against a factor, dotted; returns them."""
    metric = panel.metric.name
    if not is_factor(record, spec):
        return []
    told = [arm for arm in line.arms if metric in arm.paper and spec.x in arm.factors]
    found = _in_order({arm.factors[spec.x]: arm.paper[metric].value for arm in told})
    if found:
        style = {"linestyle": ":", "marker": "x", "markersize": 4, "color": line.style["color"]}
        axis.plot(list(found), list(found.values()), linewidth=1, **style)
    return list(found.values())


def _draw_authors(axis: Any, record: Record, spec: Figure, panel: Panel) -> list[float]:
    """The authors' values against a slice, in grey; returns them."""
    drawn: list[float] = []
    if is_factor(record, spec):
        return drawn
    dashes = cycle(DASHES)
    for line in lines(record, spec, panel.arms):
        for arm in line.arms:
            told = authors_values(arm, panel.metric.name, spec.x, spec.source)
            found = _in_order({_number(key): value for key, value in told.items()})
            if found:
                style = {"color": GREY, "marker": ".", "linewidth": 1.6, "zorder": 0}
                style |= {"linestyle": next(dashes), "label": f"authors: {line.label}"}
                axis.plot(list(found), list(found.values()), **style)
                drawn += found.values()
    return drawn


def _draw_baselines(axis: Any, record: Record, spec: Figure, panel: Panel) -> None:
    """The baselines against a slice, black and dashed, each with a marker of its own. The axis
    stays that of the models: least squares may be exact."""
    limits = axis.get_ylim()
    styles = _baseline_styles(record, spec)
    for name, found in baseline_points(record, spec, panel).items():
        every = max(1, len(found) // MARKED)
        axis.plot(list(found), list(found.values()), label=name, markevery=every, **styles[name])
    if axis.get_yscale() == "log":
        low, high = limits
        axis.set_ylim(low, high * HEADROOM)


MARKED = 8
"""Points of a baseline that get a marker, about."""
HEADROOM = 2.0
"""Of a log axis, above the models' worst value."""


def baseline_points(record: Record, spec: Figure, panel: Panel) -> dict[str, dict[Factor, float]]:
    """The values of each baseline of a panel's arms by bin, in order; none against a factor."""
    if is_factor(record, spec):
        return {}
    chosen = [arm for line in lines(record, spec, panel.arms) for arm in line.arms]
    found = {}
    for name, totals in _baselines(record, spec, chosen).items():
        bins = totals.sliced(panel.metric.name, spec.x)
        if bins:
            found[name] = _in_order({_number(key): value for key, value in bins.items()})
    return found


def _baselines(record: Record, spec: Figure, arms: list[ArmRecord]) -> Baselines:
    found = baselines_of(record, arms, spec.source)
    wanted = spec.baselines or tuple(found)
    return {name: one for name, one in found.items() if name in wanted}


def _baseline_styles(record: Record, spec: Figure) -> dict[str, dict[str, Any]]:
    """A style for each baseline, the same in all panels."""
    names = list(_baselines(record, spec, list(record.arms.values())))
    return {
        name: {
            "color": BASELINE,
            "linestyle": BASELINE_DASHES[at // len(MARKERS) % len(BASELINE_DASHES)],
            "marker": MARKERS[at % len(MARKERS)],
            "markersize": 3,
            "linewidth": 0.8,
            "zorder": 1,
        }
        for at, name in enumerate(names)
    }


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
