"""Figures of kind "grid": a heat map of the arms' test values."""

from __future__ import annotations

import math
from typing import Any

from entp.report.panels import lines, panels, words
from entp.report.slices import line_points
from entp.report.style import HEAT
from entp.results.schema import Figure, Record


def draw_grid(figure: Any, record: Record, spec: Figure) -> None:
    """A panel per metric: a row for each line, a column for each value of x, the value in each
    cell."""
    shown = panels(record, spec)
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, panel in zip(axes, shown, strict=True):
        rows = {
            line.label: line_points(record, spec, panel, line)
            for line in lines(record, spec, panel.arms)
        }
        columns = list(dict.fromkeys(x for row in rows.values() for x in row))
        cells = [[row[x].mean if x in row else math.nan for x in columns] for row in rows.values()]
        axis.set(title=f"test {words(panel.metric.name)}", xlabel=words(spec.x))
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
