"""Figures of kind "bars": a bar for each arm's test value, with its interval and the paper's
value."""

from __future__ import annotations

from typing import Any

from entp.report.panels import lines, panels, values_label
from entp.results.schema import Figure, Record
from entp.results.summary import estimate


def draw_bars(figure: Any, record: Record, spec: Figure) -> None:
    """A panel per metric."""
    shown = panels(record, spec)
    axes = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for axis, panel in zip(axes, shown, strict=True):
        metric = panel.metric.name
        named: list[str] = []
        for line in lines(record, spec, panel.arms):
            for arm in line.arms:
                found = estimate(record, arm, metric, spec.source)
                if found is None:
                    continue
                at = len(named)
                named.append(line.label)
                axis.barh(at, found.mean, color=line.style["color"])
                if found.interval is not None:
                    axis.plot(found.interval, [at, at], color="k", linewidth=1)
                if metric in arm.paper:
                    axis.plot(arm.paper[metric].value, at, "k|", markersize=14)
        axis.set_yticks(range(len(named)), named, fontsize=7)
        label = values_label(record, spec, panel.metric)
        if any(metric in arm.paper for arm in panel.arms.values()):
            label += " (|: the paper's)"
        axis.set(xlabel=label, title=panel.title)
    axes[0].invert_yaxis()
