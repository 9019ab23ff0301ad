"""The figure of what was found, from the records in results/.

Who learns Count3, in how many minutes and from how many sequences; from how many sums addition is
learned, and how far it goes; in-context learning; what a step costs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from entp.report.bench import draw_speeds, step_seconds, whole_shapes
from entp.report.curves import draw_authors_curve, draw_line
from entp.report.panels import Line, panels
from entp.report.slices import draw_panel, is_factor
from entp.report.style import DASHES, GREY, UNIT, mode_style, new_figure, save_figure
from entp.results.schema import ArmRecord, Figure, Record
from entp.results.sections import read_sections
from entp.results.verdict import select

Draw = Callable[[Any], None]
METRIC = "exact_match"
AUTHORS = "ENTP medium"
MINUTES = {"training": ["tuned", "curriculum"]}
"""Arms that are about minutes: ENTP, and decoders that get as many."""
READING = {"training": ["tuned", "matched steps", "matched data"]}
"""Arms that are about sequences: those without a curriculum."""


class Sliced(NamedTuple):
    """A panel of test values, of a record's arms."""

    recipe: str
    figure: Figure
    title: str
    x: str


BOTH = {"mode": ["ENTP", "decoder"]}
SLICED = (
    Sliced(
        "addition-samples",
        Figure(
            "slices",
            x="examples",
            y=METRIC,
            lines="mode",
            where={**BOTH, "size": "small", "format": "reversed"},
        ),
        "addition, reversed sums, small",
        "sums trained on; the authors' values dotted",
    ),
    Sliced(
        "addition-positions",
        Figure("slices", x="digits", y=METRIC, lines="mode", where={**BOTH, "positions": "abacus"}),
        "sums longer than 10 digits, Abacus",
        "digits of the longer number",
    ),
    Sliced(
        "icl",
        Figure(
            "slices",
            x="examples",
            y="squared_error",
            lines="mode",
            where={**BOTH, "size": "standard", "function": "linear"},
        ),
        "linear functions in context",
        "examples",
    ),
)


def draw_summary(results: Path, records: list[Record], path: Path) -> bool:
    """Draw what was found; False where nothing was drawn."""
    figure = summary_figure(results, records)
    if figure is None:
        return False
    save_figure(figure, path, dpi=110)
    return True


def summary_figure(results: Path, records: list[Record]) -> Any:
    """One panel for each record that is there and has something to show; None where there is
    nothing to draw, or nothing to draw with."""
    named = {record.recipe: record for record in records}
    count3 = named.get("count3")
    speed = read_sections(results / "engine_speed.json").get("step")
    draws: list[Draw] = []
    if count3 is not None and _lines(count3, MINUTES):
        loop = step_seconds(speed, "entp reference") if speed else None
        draws.append(lambda panel: draw_minutes(panel, count3, loop))
    if count3 is not None and _lines(count3, READING):
        draws.append(lambda panel: draw_reading(panel, count3))
    for one in SLICED:
        if (record := named.get(one.recipe)) is not None and _has_values(record, one.figure):
            draws.append(partial(draw_sliced, record=record, one=one))
    if speed and whole_shapes(speed):
        draws.append(lambda panel: draw_speeds(panel, speed))
    return _all_panels(draws)


def _all_panels(draws: list[Draw]) -> Any:
    """Three panels in a row, four as two by two."""
    columns = 2 if len(draws) == 4 else min(3, len(draws))
    rows = -(-len(draws) // max(columns, 1))
    figure = new_figure(1 + 4.6 * columns, 3.9 * rows) if draws else None
    if figure is None:
        return None
    every = figure.subplots(rows, columns, squeeze=False).flat
    for panel, draw in zip(every, draws, strict=False):
        draw(panel)
    for panel in every[len(draws) :]:
        panel.set_axis_off()
    return figure


def _lines(record: Record, where: Any) -> list[Line]:
    """The arms with these factors that ran: a colour per mode, dashes per training."""
    trainings = where["training"]
    found = []
    for label in select(record.arms, where):
        arm = record.arms[label]
        dashes = DASHES[trainings.index(arm.factors["training"])]
        if arm.runs:
            found.append(Line(label, [arm], mode_style(arm.factors.get("mode"), dashes)))
    return found


def draw_minutes(panel: Any, count3: Record, loop: float | None) -> None:
    """Exact match against minutes; the authors' curve at the time that our reference loop takes on
    the same device."""
    lines = _lines(count3, MINUTES)
    for line in lines:
        draw_line(panel, line, METRIC, "seconds")
    authors = count3.authors_curves.get(AUTHORS)
    if loop is not None and authors is not None:
        seconds = [step * loop for step in authors.steps]
        told = f"ENTP, the authors' curve,\nreference loop: {loop:.2f} s a step"
        style = {"color": GREY, "linewidth": 2, "zorder": 0}
        panel.plot(seconds, authors.values[METRIC], label=told, **style)
    ticks = [6, 60, 600, 6000, 60_000]
    panel.set(xscale="log", ylim=UNIT, title="learning Count3 (64 integers, medium)")
    panel.set_xticks(ticks, [f"{tick / 60:g}" for tick in ticks])
    panel.set_xlim(left=0.1)  # room for the legend: before the first minute nobody has learned
    device = lines[0].arms[0].runs[0].environment.device
    panel.set(xlabel=f"minutes of training on one {device}", ylabel="validation exact match")
    panel.legend(fontsize=6.5, loc="upper left")


def draw_reading(panel: Any, count3: Record) -> None:
    """Exact match against sequences read, as far as the authors' ENTP went."""
    for line in _lines(count3, READING):
        draw_line(panel, line, METRIC, "sequences")
    authors = count3.authors_curves.get(AUTHORS)
    if authors is not None:
        draw_authors_curve(panel, authors, METRIC, "sequences", "ENTP, the authors' curve")
        panel.set_xlim(0, authors.sequences[-1] / 1e6)
    panel.set(ylim=UNIT, title="the same by sequences read, without a curriculum")
    panel.set(xlabel="sequences read (millions)", ylabel="validation exact match")
    panel.legend(fontsize=7, loc="upper left")


def _has_values(record: Record, spec: Figure) -> bool:
    """Whether an arm of a panel was tested."""
    return bool(_tested({label: record.arms[label] for label in select(record.arms, spec.where)}))


def _tested(arms: dict[str, ArmRecord]) -> list[ArmRecord]:
    """Those with a test."""
    return [arm for arm in arms.values() if any(run.test for run in arm.runs)]


def draw_sliced(panel: Any, record: Record, one: Sliced) -> None:
    """Test values with their intervals, a line for each mode; the title tells the seeds."""
    shown = panels(record, one.figure)[0]
    draw_panel(panel, record, one.figure, shown)
    seeds = min(len([run for run in arm.runs if run.test]) for arm in _tested(shown.arms))
    told = f"{seeds} seeds" if seeds > 1 else "one seed"
    panel.set(title=f"{one.title}, {told}", xlabel=one.x)
    if not is_factor(record, one.figure):
        panel.xaxis.get_major_locator().set_params(integer=True)
    panel.legend(fontsize=7)
