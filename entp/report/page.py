"""docs/results.md from the records in results/: `entp report`. Nothing on that page is written by
hand, and nothing is imported but what the files hold.

One section per record: its question, rule and verdict, its table, its figure, what was not run.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from entp.errors import InputError
from entp.files import write_file
from entp.report.cells import TableText, escape, markdown_table
from entp.report.comparisons import (
    about_equal,
    about_reach,
    about_versus,
    equal_table,
    reach_table,
    versus_table,
)
from entp.report.figures import draw_record
from entp.report.summary import draw_summary
from entp.report.tables import (
    about_bins,
    about_splits,
    arms_table,
    baselines_table,
    bins_table,
    grid_table,
    seeds_table,
    slice_tables,
    splits_table,
)
from entp.results.schema import ArmRecord, Record, Source
from entp.results.store import complete, find_records
from entp.results.summary import estimate, sources_of

HEAD = """# Results

Made by `entp report` from the files in `results/`, which have every run's configuration, curve,
seed, device, versions, commit and date.

- **Validation**: the best evaluation during training, mean over seeds, as in the paper's tables.
- **Test**: the best checkpoint on test sequences, mean over seeds. Its 95 % interval is Student's
  over seeds. An arm of one seed has only the interval that other test sequences would give ("one
  seed, test sampling only"): other seeds may differ by more.
- **Generated**: answers that the model generates, reading what it wrote itself.
- **Seconds**: of training, evaluations included, by the code of the run's own commit; later code
  may be faster.
"""
MORE: dict[Source, str] = {
    "last": "- **Last checkpoint**: on the same test sequences as the best one.",
    "best": (
        "- **Best on the test itself**: of each number the best of all evaluations on test "
        "sequences\n  during training. The test chose them, and no one checkpoint has them all."
    ),
}
"""What the page says at its beginning where a record has such values."""
RESAMPLED = (
    "- **Bootstrap**: arms of one seed that say so have a 90 % interval, from the 5th to the 95th\n"
    "  percentile over resampled test sequences, as Garg et al. have it; over seeds it is 95 %."
)


def write_report(results: Path, out: Path) -> str:
    """Draw all figures, write the page, and return a message for a person."""
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}: make it first.")
    records = find_records(results)
    if not records:
        raise InputError(
            f"{results} has no results: `entp reproduce RECIPE --record {results}/RECIPE.json` "
            "adds some."
        )
    for path, record in records.items():
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
    there = {source for record in records for source in sources_of(record)}
    told = [text for source, text in MORE.items() if source in there]
    runs = [run for record in records for arm in record.arms.values() for run in arm.runs]
    if any(run.test is not None and run.test.bootstrap is not None for run in runs):
        told.append(RESAMPLED)
    return HEAD + "".join(f"{text}\n" for text in told)


def verdict_text(record: Record) -> str:
    return record.verdict.verdict if record.verdict is not None else "no rule"


def _section(record: Record, path: Path, beside: Path) -> str:
    lines = [f"\n## {escape(record.recipe)}\n"]
    lines += [f"{escape(record.title)}. {escape(record.question)}\n"]
    lines += [f"    {' '.join(record.command.split())}\n", *_rule(record)]
    ran = {label: arm for label, arm in record.arms.items() if arm.runs}
    if ran:
        shown = record.model_copy(update={"arms": ran})
        lines += [*_tables(shown), *_caveats(shown), _where(ran)]
    idle = [label for label in record.arms if label not in ran]
    idle += [f"{label} ({why})" for label, why in record.not_run.items()]
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
    grid = grid_table(record)
    lines = markdown_table(grid or arms_table(record))
    if grid is not None:
        lines = [f"{escape(_about_grid(record))}\n", *lines]
    titled = {f"Test {name}": table for name, table in slice_tables(record).items()}
    for title, table in {
        about_versus(record): versus_table(record),
        about_equal(record): equal_table(record),
        about_reach(record): reach_table(record),
        about_bins(record): bins_table(record),
        **titled,
        about_splits(record): splits_table(record),
        "Each seed": seeds_table(record),
        "Answers without a model": baselines_table(record),
    }.items():
        if table is not None:
            lines += [f"\n{escape(title)}:\n", *markdown_table(table)]
    return lines + _authors(record)


def _authors(record: Record) -> list[str]:
    """Where the authors' values of slices are from, each place once."""
    places = [one.told_in for arm in record.arms.values() for one in arm.authors if one.told_in]
    if not places:
        return []
    return [f"\nRows of the authors: {escape('; '.join(dict.fromkeys(places)))}."]


def _about_grid(record: Record) -> str:
    """What the cells of a grid are."""
    names = record.table.cells if record.table is not None else ()
    first, *others = names or (record.metrics[0].name,)
    text = f"Test {first.replace('_', ' ')}"
    found = [estimate(record, arm, first) for arm in record.arms.values()]
    basis = {one.basis for one in found if one is not None and one.interval is not None}
    if basis:
        text += f" with its {_level(basis)}interval ({'; '.join(sorted(basis))})"
    if others:
        text += f", and {', '.join(others).replace('_', ' ')}"
    return f"{text}."


def _level(basis: set[str]) -> str:
    """ "95 % "; nothing where each basis has a level of its own."""
    return "" if any("bootstrap" in one for one in basis) else "95 % "


def _caveats(record: Record) -> list[str]:
    """What a reader must know, each thing once."""
    runs = [run for arm in record.arms.values() for run in arm.runs]
    told = [text for run in runs for text in run.caveats]
    told += [run.test.note for run in runs if run.test is not None and run.test.note]
    return [f"\n{escape(text)}" for text in dict.fromkeys(told)]


def _where(ran: dict[str, ArmRecord]) -> str:
    """Devices, versions, commits and dates of all runs, each named once, and which runs shared the
    device."""
    places = [run.environment for arm in ran.values() for run in arm.runs]

    def each(values: list[str]) -> str:
        return escape(", ".join(sorted(set(values))))

    commits = each([(place.commit or "unknown")[:7] for place in places])
    return (
        f"\nOn {each([place.device for place in places])}; torch "
        f"{each([place.torch for place in places])}; commits {commits}; "
        f"{each([place.date[:10] for place in places])}. {escape(sharing(ran))}"
    )


def sharing(ran: dict[str, ArmRecord]) -> str:
    """Which runs shared the device."""
    groups: dict[int | None, list[str]] = {}
    for label, arm in ran.items():
        for run in arm.runs:
            runs = run.test.concurrent_runs if run.test is not None else None
            if label not in groups.setdefault(runs, []):
                groups[runs].append(label)
    told = []
    for runs, labels in groups.items():
        if runs != 1:
            many = f"{runs} at a time" if runs is not None else "unknown whether alone"
            told.append(f"{many}: {which(labels, ran)}")
    if not told:
        return "Every run had the device to itself."
    rest = ". Other runs had it to themselves." if 1 in groups else "."
    return f"Runs that shared the device: {'. '.join(told)}{rest}"


def which(labels: list[str], ran: dict[str, ArmRecord]) -> str:
    """These arms in few words: "all", "length 24, 32", or their labels."""
    if len(labels) == len(ran):
        return "all"
    for name in dict.fromkeys(name for label in labels for name in ran[label].factors):
        values = [ran[label].factors.get(name) for label in labels]
        same = [label for label, arm in ran.items() if arm.factors.get(name) in values]
        if same == labels and len(labels) > 1:
            told = ", ".join(str(value) for value in dict.fromkeys(values))
            return f"{name.replace('_', ' ')} {told}"
    return "; ".join(labels)


def _image(record: Record, figure: Path, beside: Path) -> list[str]:
    if not figure.is_file():
        return []
    link = Path(os.path.relpath(figure, beside.parent)).as_posix()
    return [f"\n![{escape(record.title)}]({quote(link, safe='/.-_')})"]
