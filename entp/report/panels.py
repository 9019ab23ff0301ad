"""What figures of all kinds share: which arms a panel has, how its axes and lines are named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from entp.report.style import UNIT, arm_colours, line_styles
from entp.results.schema import ArmRecord, Factor, Figure, MetricSpec, Record
from entp.results.summary import source_label
from entp.results.verdict import select

Key = tuple[Factor, ...]


class Line(NamedTuple):
    """Arms that one line is drawn of."""

    label: str
    arms: list[ArmRecord]
    style: dict[str, Any]


class Panel(NamedTuple):
    """What one panel shows."""

    metric: MetricSpec
    title: str
    arms: dict[str, ArmRecord]


def panels(record: Record, spec: Figure) -> list[Panel]:
    """The panels of a figure, from left to right."""
    names = spec.y or tuple(metric.name for metric in record.metrics)
    chosen = {label: record.arms[label] for label in select(record.arms, spec.where)}
    values: list[Factor | None] = [None]
    if spec.panels:
        found = {arm.factors[spec.panels] for arm in chosen.values() if spec.panels in arm.factors}
        values = sorted(found, key=lambda value: (isinstance(value, str), value))
    found_panels = []
    for name in names:
        for value in values:
            arms = {
                label: arm
                for label, arm in chosen.items()
                if value is None or arm.factors.get(spec.panels) == value
            }
            title = "" if value is None else factor_text(spec.panels, value)
            found_panels.append(Panel(record.metric(name), title, arms))
    return found_panels


def lines(record: Record, spec: Figure, arms: dict[str, ArmRecord]) -> list[Line]:
    """The lines of a panel; their styles are the same in all panels of the record."""
    if not spec.lines:
        colours = arm_colours(list(record.arms))
        return [Line(plain(label), [arm], colours[label]) for label, arm in arms.items()]
    styles = line_styles(list(_keys(spec.lines, record.arms)))
    found = _keys(spec.lines, arms)
    return [Line(_label(spec.lines, key), own, styles[key]) for key, own in found.items()]


def _keys(names: Sequence[str], arms: dict[str, ArmRecord]) -> dict[Key, list[ArmRecord]]:
    """The arms by their values of these factors; arms without them are left out."""
    found: dict[Key, list[ArmRecord]] = {}
    for arm in arms.values():
        if all(name in arm.factors for name in names):
            found.setdefault(tuple(arm.factors[name] for name in names), []).append(arm)
    return found


def _label(names: Sequence[str], key: Key) -> str:
    return ", ".join(factor_text(name, value) for name, value in zip(names, key, strict=True))


def factor_text(name: str, value: Factor) -> str:
    """A factor in words: "ENTP", "layers 3"."""
    if isinstance(value, str):
        return plain(value)
    number = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{words(name)} {number}"


def values_label(record: Record, spec: Figure, metric: MetricSpec) -> str:
    """What a figure shows: "test exact match", and below it of what, if not of the best
    checkpoint."""
    text = f"test {words(metric.name)}"
    if spec.source == "test":
        return text
    return f"{text}\n({source_label(record, spec.source)})".replace(", ", ",\n")


def words(name: str) -> str:
    """A name for people: "exact match"."""
    return plain(name.replace("_", " "))


def plain(text: str) -> str:
    """Text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")


def set_values_axis(panel: Any, metric: MetricSpec, values: Sequence[float], what: str) -> None:
    """The axis of a metric: fractions from 0 to 1, what is better lower on a log scale."""
    panel.set_ylabel(f"{what} {words(metric.name)}")
    if metric.better == "lower":
        if values and min(values) > 0:
            panel.set_yscale("log")
    elif all(0 <= value <= 1 for value in values):
        panel.set_ylim(*UNIT)


def one_legend(figure: Any, axes: Sequence[Any], columns: int = 4) -> None:
    """One legend below all panels, with every label once."""
    found: dict[str, Any] = {}
    for panel in axes:
        handles, labels = panel.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            found.setdefault(label, handle)
    if found:
        where = {"loc": "outside lower center", "ncols": columns, "fontsize": 7}
        figure.legend(list(found.values()), list(found), **where)
