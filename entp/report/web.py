"""The page of all recorded results as one file of HTML: `entp report --out page.html`. It asks for
nothing outside itself and runs no script; its texts, tables and figures are those of the page of
Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from entp.files import write_file
from entp.report import contents
from entp.report.arms import (
    Settings,
    about_curves,
    curves_table,
    places_table,
    runs_table,
    settings_table,
    shared_settings,
)
from entp.report.cells import TableText
from entp.report.contents import records_for, that_ran, verdict_text
from entp.report.figures import record_figure
from entp.report.summary import summary_figure
from entp.report.svg import DARK, dark_colours, inline_svg, share_styles
from entp.results.schema import ArmRecord, Record
from entp.results.store import complete
from entp.results.summary import status
from entp.terminal import counted

Titled = tuple[str, TableText]
"""A table and what stands above it."""


class Arm(NamedTuple):
    """What the page says about an arm by itself."""

    name: str
    """Its id."""
    label: str
    status: str
    arm: ArmRecord
    tables: list[Titled]
    caveats: list[str]


class Section(NamedTuple):
    """What the page says about a record."""

    name: str
    """Its id."""
    record: Record
    command: str
    verdict: str
    ran: int
    planned: int
    tables: list[Titled]
    told: list[str]
    """Whose rows the authors' are, caveats, and where it ran."""
    not_run: list[str]
    arms: list[Arm]
    shared: Settings
    """Settings of all its runs."""
    figure: str
    """SVG, or nothing."""


def write_web_page(results: Path, out: Path) -> str:
    """Write the page, and return a message for a person."""
    data = web_page(results, records_for(results, out)).encode()
    write_file(out, data)
    return f"page: {out}, {len(data) / 1e6:.2f} MB, nothing else needed"


def web_page(results: Path, records: dict[Path, Record]) -> str:
    """The page of these records by file, with the figure of what was found from the folder."""
    found = {path: complete(record) for path, record in records.items()}
    names = unique_names(path.stem for path in found)
    named = list(zip(names, found.values(), strict=True))
    sections = [
        _section(at, *one) for at, one in enumerate(counted("report", named, len(named)), 1)
    ]
    figure = summary_figure(results, list(found.values()))
    first = inline_svg(figure, "f0", "What was found") if figure is not None else ""
    rules, drawn = share_styles([first, *(section.figure for section in sections)])
    return _render(
        sections=[one._replace(figure=svg) for one, svg in zip(sections, drawn[1:], strict=True)],
        summary=drawn[0],
        figure_rules=rules,
        colours=dark_colours(rules + "".join(drawn)),
        notes=contents.notes(list(found.values())),
    )


def unique_names(texts: Iterable[str]) -> list[str]:
    """A name for each text that can be an id, none twice."""
    found: list[str] = []
    for text in texts:
        name = first = "recipe-" + (re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x")
        number = 2
        while name in found:
            name, number = f"{first}.{number}", number + 1
        found.append(name)
    return found


def _section(number: int, name: str, record: Record) -> Section:
    """The section with this number on the page."""
    shown = that_ran(record)
    shared = shared_settings(shown)
    arms = enumerate(shown.arms.items(), 1)
    figure = record_figure(record)
    told = [contents.from_authors(shown), *contents.caveats(shown), contents.where(shown)]
    return Section(
        name=name,
        record=record,
        command=" ".join(record.command.split()),
        verdict=verdict_text(record),
        ran=sum(len(arm.runs) for arm in record.arms.values()),
        planned=sum(len(_seeds(arm)) for arm in record.arms.values()),
        tables=contents.all_tables(shown) if shown.arms else [],
        told=[text for text in told if text] if shown.arms else [],
        not_run=contents.not_run(record),
        arms=[_arm(f"{name}.arm-{at}", shown, label, shared) for at, (label, _) in arms],
        shared=shared,
        figure=inline_svg(figure, f"f{number}", record.title) if figure is not None else "",
    )


def _seeds(arm: ArmRecord) -> set[int]:
    """Those planned and those that ran."""
    return {*arm.seeds, *(run.seed for run in arm.runs)}


def _arm(name: str, record: Record, label: str, shared: Settings) -> Arm:
    arm = record.arms[label]
    tables = {
        "Seeds": runs_table(record, arm),
        about_curves(record, arm): curves_table(record, arm),
        "Where": places_table(arm),
        "Settings that not all arms have": settings_table(arm, shared),
    }
    told = [(about, table) for about, table in tables.items() if table is not None]
    caveats = contents.caveats(record.model_copy(update={"arms": {label: arm}}))
    return Arm(name, label, status(arm), arm, told, caveats)


def _render(**what: Any) -> str:
    """The template with these; all texts are escaped, but figures and the style."""
    from jinja2 import Environment, StrictUndefined

    room = files("entp.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((room / "page.html").read_text(encoding="utf-8"))
    style = (room / "page.css").read_text(encoding="utf-8")
    return template.render(style=style, dark=DARK, **what)
