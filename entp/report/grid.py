"""Figures of kind "grid": a heat map of the arms' test values, or one for each arm of a slice whose
bins are pairs."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from entp.report.panels import Panel, lines, panels, plain, values_label, words
from entp.report.slices import is_factor, line_points
from entp.report.style import HEAT, INK
from entp.results.schema import ArmRecord, Figure, MetricSpec, Record
from entp.results.summary import sliced

ACROSS = 4
"""Heat maps of pairs side by side, at most."""
WRITTEN = 12
"""Columns up to which cells of pairs have their value written in them."""


class PairMap(NamedTuple):
    """The heat map of an arm."""

    title: str
    metric: MetricSpec
    cells: dict[tuple[int, int], float]
    """(row, column) to value."""


def grid_shape(record: Record, spec: Figure) -> tuple[int, int]:
    """Rows and columns of the panels of a grid."""
    if is_factor(record, spec):
        return 1, len(panels(record, spec))
    count = max(1, len(pair_maps(record, spec)))
    return -(-count // ACROSS), min(count, ACROSS)


def draw_grid(figure: Any, record: Record, spec: Figure) -> None:
    """A panel per metric: a row for each line, a column for each value of x, the value in each
    cell. Where x is a slice of pairs, a panel per metric and arm."""
    if is_factor(record, spec):
        _draw_arms(figure, record, spec)
    else:
        _draw_pairs(figure, record, spec)


def _draw_arms(figure: Any, record: Record, spec: Figure) -> None:
    shown = panels(record, spec)
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, panel in zip(axes, shown, strict=True):
        rows = {
            line.label: line_points(record, spec, panel, line)
            for line in lines(record, spec, panel.arms)
        }
        columns = list(dict.fromkeys(x for row in rows.values() for x in row))
        cells = [[row[x].mean if x in row else math.nan for x in columns] for row in rows.values()]
        axis.set(title=values_label(record, spec, panel.metric), xlabel=words(spec.x))
        if not columns:
            continue
        axis.imshow(cells, aspect="auto", cmap=HEAT)
        axis.set_xticks(range(len(columns)), [str(x) for x in columns])
        axis.set_yticks(range(len(rows)), list(rows))
        for y, row in enumerate(cells):
            for x, value in enumerate(row):
                if not math.isnan(value):
                    style = {"ha": "center", "va": "center", "fontsize": 7, "color": "w"}
                    axis.text(x, y, f"{value:.3g}", **style)


def _draw_pairs(figure: Any, record: Record, spec: Figure) -> None:
    """A heat map for each arm that has pairs, all of a metric with the same colours; rows are the
    first of a pair, from below, columns the second."""
    shown, (rows, columns) = pair_maps(record, spec), grid_shape(record, spec)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    for name in dict.fromkeys(one.metric.name for one in shown):
        mine = [(axis, m) for axis, m in zip(axes, shown, strict=False) if m.metric.name == name]
        values = [value for _, one in mine for value in one.cells.values()]
        low, high = mine[0][1].metric.bounds or (min(values), max(values))
        for axis, one in mine:
            image = _draw_pair_map(axis, one, low, high)
            axis.set(title=plain(one.title), xlabel=f"{words(spec.x)}: second", ylabel="first")
        label = values_label(record, spec, mine[0][1].metric)
        figure.colorbar(image, ax=[axis for axis, _ in mine], label=label)


def _draw_pair_map(axis: Any, one: PairMap, low: float, high: float) -> Any:
    firsts, seconds = (sorted({pair[side] for pair in one.cells}) for side in (0, 1))
    cells = [[one.cells.get((a, b), math.nan) for b in seconds] for a in firsts]
    image = axis.imshow(cells, origin="lower", cmap=HEAT, vmin=low, vmax=high, aspect="auto")
    axis.set_xticks(range(len(seconds)), [str(b) for b in seconds], fontsize=6)
    axis.set_yticks(range(len(firsts)), [str(a) for a in firsts], fontsize=6)
    for y, row in enumerate(cells if len(seconds) <= WRITTEN else []):
        for x, value in enumerate(row):
            if not math.isnan(value):
                bright = value > low + 0.6 * (high - low)
                style = {"ha": "center", "va": "center", "fontsize": 6}
                axis.text(x, y, f"{value:.2g}", color=INK if bright else "w", **style)
    return image


def pair_maps(record: Record, spec: Figure) -> list[PairMap]:
    """The heat maps of a slice of pairs; arms without values have none."""
    found = []
    for panel in panels(record, spec):
        for label, arm in panel.arms.items():
            cells = _pairs(record, spec, panel, arm)
            if cells:
                found.append(PairMap(label, panel.metric, cells))
    return found


def _pairs(
    record: Record, spec: Figure, panel: Panel, arm: ArmRecord
) -> dict[tuple[int, int], float]:
    """The values of bins such as 11x3; others are left out."""
    found = {}
    for key, one in sliced(record, arm, panel.metric.name, spec.x, spec.source).items():
        pair = re.fullmatch(r"(\d+)x(\d+)", key)
        if pair is not None:
            found[int(pair[1]), int(pair[2])] = one.mean
    return found
