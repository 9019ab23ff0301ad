"""docs/results.md from the records in results/: `entp report`. Nothing on that page is written by
hand, and nothing is imported but what the files hold.

One section per record: its question, rule and verdict, its table, its figure, what was not run.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from entp.files import write_file
from entp.report.cells import TableText, escape, markdown_table
from entp.report.contents import (
    all_tables,
    caveats,
    from_authors,
    not_run,
    notes,
    records_for,
    that_ran,
    verdict_text,
    where,
)
from entp.report.figures import draw_record
from entp.report.summary import draw_summary
from entp.results.schema import Record
from entp.results.store import complete
from entp.terminal import counted

HEAD = """# Results

Made by `entp report` from the files in `results/`, which have every run's configuration, curve,
seed, device, versions, commit and date.

"""


def write_report(results: Path, out: Path) -> str:
    """Draw all figures, write the page, and return a message for a person."""
    records = records_for(results, out)
    for path, record in counted("report", records.items(), len(records)):
        draw_record(record, path.with_suffix(".png"))
    figure = out.with_suffix(".png")
    drawn = draw_summary(results, list(records.values()), figure)
    write_file(out, page(records, out).encode())
    return f"page: {out}" + (f", figure: {figure}" if drawn else "")


def page(records: dict[Path, Record], beside: Path) -> str:
    """The page of these records by file, to be written to the file `beside`, from which its
    figures are linked."""
    found = {path: complete(record) for path, record in records.items()}
    told = [[record.recipe, record.question, verdict_text(record)] for record in found.values()]
    index = markdown_table(TableText(["recipe", "question", "verdict"], told))
    sections = [_section(record, path, beside) for path, record in found.items()]
    return "\n".join([_head(list(found.values())), *index, ""]) + "".join(sections)


def _head(records: list[Record]) -> str:
    return HEAD + "".join(f"- **{term}**: {text}\n" for term, text in notes(records).items())


def _section(record: Record, path: Path, beside: Path) -> str:
    lines = [f"\n## {escape(record.recipe)}\n"]
    lines += [f"{escape(record.title)}. {escape(record.question)}\n"]
    lines += [f"    {' '.join(record.command.split())}\n", *_rule(record)]
    shown = that_ran(record)
    if shown.arms:
        told = [*caveats(shown), where(shown)]
        lines += [*_tables(shown), *(f"\n{escape(text)}" for text in told)]
    idle = not_run(record)
    if idle:
        lines.append(f"\nNot run: {escape('; '.join(idle))}.")
    lines += _image(record, path.with_suffix(".png"), beside)
    return "\n".join(lines) + "\n"


def _rule(record: Record) -> list[str]:
    """The rule, the verdict and what it rests on."""
    if not record.reproduced_if and record.verdict is None:
        return []
    lines = [f"Rule: {escape(record.reproduced_if)}\n"] if record.reproduced_if else []
    if record.verdict is None:
        return lines
    lines.append(f"Verdict: **{record.verdict.verdict}**.\n")
    for check in record.verdict.checks:
        lines.append(f"- {check.outcome}: {escape(check.says)} ({escape('; '.join(check.why))})")
    return [*lines, ""]


def _tables(record: Record) -> list[str]:
    (about, first), *others = all_tables(record)
    lines = [f"{escape(about)}\n"] if about else []
    lines += markdown_table(first)
    for title, table in others:
        lines += [f"\n{escape(title)}:\n", *markdown_table(table)]
    authors = from_authors(record)
    return [*lines, f"\n{escape(authors)}"] if authors else lines


def _image(record: Record, figure: Path, beside: Path) -> list[str]:
    if not figure.is_file():
        return []
    link = Path(os.path.relpath(figure, beside.parent)).as_posix()
    return [f"\n![{escape(record.title)}]({quote(link, safe='/.-_')})"]
