"""Cells of tables: numbers, intervals and factors as texts, and tables as Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import NamedTuple

from entp.results.schema import (
    Estimate,
    Factor,
    MetricSpec,
    Record,
)

NONE = "-"


class TableText(NamedTuple):
    head: list[str]
    rows: list[list[str]]


def title(metric: MetricSpec) -> str:
    return metric.name.replace("_", " ")


def span(values: list[int]) -> str:
    """The least and the most, if they differ."""
    if not values:
        return NONE
    return " to ".join(f"{value:,}" for value in sorted({min(values), max(values)}))


def mean_text(found: Estimate | None, metric: MetricSpec) -> str:
    return NONE if found is None else number(found.mean, metric)


def interval_text(found: Estimate | None, metric: MetricSpec) -> str:
    """An interval and what it is over."""
    if found is None or found.interval is None:
        return NONE if found is None else found.basis
    low, high = (number(end, metric) for end in found.interval)
    return f"{low} to {high}, {found.basis}"


def number(value: float, metric: MetricSpec) -> str:
    """A value of a metric; 0 and 1 without decimals where they are exact."""
    if value in (0, 1):
        return f"{value:.0f}"
    if metric.better == "higher" and abs(value) <= 1:
        return f"{value:.4f}"
    return f"{value:#.4g}"


def with_interval(found: Estimate | None, metric: MetricSpec) -> str:
    """ "0.851 (0.835 to 0.866)"."""
    if found is None:
        return NONE
    text = number(found.mean, metric)
    if found.interval is not None:
        low, high = (number(end, metric) for end in found.interval)
        text += f" ({low} to {high})"
    return text


def cell_names(record: Record) -> Sequence[str]:
    named = record.table.cells if record.table is not None else ()
    return named or (record.metrics[0].name,)


def in_words(names: Sequence[str], values: tuple[Factor, ...]) -> str:
    found = []
    for name, value in zip(names, values, strict=True):
        text = f"{value:g}" if isinstance(value, float) else str(value)
        found.append(text if isinstance(value, str) else f"{name.replace('_', ' ')} {text}")
    return ", ".join(found)


def in_order(key: str) -> tuple[bool, float, str]:
    """Numbers by size, then texts."""
    try:
        return False, float(key), ""
    except ValueError:
        return True, 0.0, key


def markdown_table(table: TableText) -> list[str]:
    """Lines of Markdown, every text escaped."""
    lines = [_line(table.head), _line(["---"] * len(table.head))]
    return lines + [_line(row) for row in table.rows]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell if cell == '---' else escape(cell) for cell in cells)} |"


def escape(text: str) -> str:
    """A text that Markdown and HTML show as it is, on one line."""
    flat = " ".join(text.split())
    marked = re.sub(r"([\\`*_\[\]|#~!$])", r"\\\1", flat)
    return html.escape(marked, quote=False)
