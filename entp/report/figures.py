"""The figures that a record asks for, in one image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from entp.report.bars import draw_bars
from entp.report.curves import draw_curves
from entp.report.grid import draw_grid, grid_shape
from entp.report.panels import panels, plain
from entp.report.slices import draw_slices, slices_shape
from entp.report.style import new_figure, save_figure
from entp.results.schema import Figure, Record

KINDS: dict[str, Callable[[Any, Record, Figure], None]] = {
    "curves": draw_curves,
    "slices": draw_slices,
    "grid": draw_grid,
    "bars": draw_bars,
}
"""A figure that no kind can draw is a new kind here, not a callback."""


def draw_record(record: Record, path: Path) -> bool:
    """Draw all figures of a record one above the other; False without matplotlib, or before
    anything is run."""
    figure = record_figure(record)
    if figure is None:
        return False
    save_figure(figure, path)
    return True


def record_figure(record: Record) -> Any:
    """All figures of a record as one of matplotlib's; None where there is nothing to draw, or
    nothing to draw with."""
    if not record.figures or not any(arm.runs for arm in record.arms.values()):
        return None
    shapes = [_shape(record, spec) for spec in record.figures]
    heights, widest = [rows for rows, _ in shapes], max(columns for _, columns in shapes)
    figure = new_figure(1 + 4.3 * max(2, widest), 4.4 * sum(heights))
    if figure is None:
        return None
    rows = figure.subfigures(len(shapes), 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, spec in zip(rows, record.figures, strict=True):
        KINDS[spec.kind](row, record, spec)
    dotted = any(arm.paper and arm.runs for arm in record.arms.values())
    note = " (dotted: the paper's value)" if dotted else ""
    figure.suptitle(plain(record.title) + note, fontsize=10)
    return figure


def _shape(record: Record, spec: Figure) -> tuple[int, int]:
    """Rows and columns of the panels of a figure."""
    if spec.kind == "slices":
        return slices_shape(record, spec)
    return grid_shape(record, spec) if spec.kind == "grid" else (1, len(panels(record, spec)))
