"""What the pages say about records, as plain texts and tables: the page of Markdown and the one of
HTML mark the same things, and take every number from here."""

from __future__ import annotations

from pathlib import Path

from entp.errors import InputError
from entp.report.cells import TableText, title
from entp.report.comparisons import (
    about_equal,
    about_reach,
    about_versus,
    equal_table,
    reach_table,
    versus_table,
)
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
from entp.results.store import find_records
from entp.results.summary import estimate, sources_of

NOTES = {
    "Validation": (
        "the best evaluation during training, mean over seeds, as in the paper's tables."
    ),
    "Test": (
        "the best checkpoint on test sequences, mean over seeds. Its 95 % interval is Student's\n"
        "  over seeds, but no narrower than other test sequences would make it. An arm of one seed "
        'has\n  only the interval that other test sequences would give ("one seed, test sampling '
        'only"): other\n  seeds may differ by more.'
    ),
    "Generated": "answers that the model generates, reading what it wrote itself.",
    "Seconds": (
        "of training, evaluations included, by the code of the run's own commit; later code\n"
        "  may be faster."
    ),
}
"""What the words of the tables mean; the lines are broken for Markdown."""
BEYOND = {
    "Verdict": (
        "by the rule that stands in the recipe. A claim of the paper is reproduced or not;\n"
        "  shown, not shown: by the rule of a recipe that asks something else."
    )
}
MORE: dict[Source, dict[str, str]] = {
    "last": {"Last checkpoint": "on the same test sequences as the best one."},
    "best": {
        "Best on the test itself": (
            "of each number the best of all evaluations on test sequences\n  during training. "
            "The test chose them, and no one checkpoint has them all."
        )
    },
}
"""What else they mean where a record has such values."""
RESAMPLED = {
    "Bootstrap": (
        "arms of one seed that say so have a 90 % interval, from the 5th to the 95th\n  percentile "
        "over resampled test sequences, as Garg et al. have it; over seeds it is 95 %."
    )
}


def records_for(results: Path, out: Path) -> dict[Path, Record]:
    """The records of a folder for the page `out`; an InputError where one of both is not there."""
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}: make it first.")
    records = find_records(results)
    if not records:
        raise InputError(
            f"{results} has no results: `entp reproduce RECIPE --record {results}/RECIPE.json` "
            "adds some."
        )
    return records


def notes(records: list[Record]) -> dict[str, str]:
    """What the words of these records' tables mean."""
    there = {source for record in records for source in sources_of(record)}
    found = dict(NOTES)
    if any(record.verdict is not None and not record.of_paper for record in records):
        found |= BEYOND
    for source, text in MORE.items():
        found |= text if source in there else {}
    runs = [run for record in records for arm in record.arms.values() for run in arm.runs]
    if any(run.test is not None and run.test.bootstrap is not None for run in runs):
        found |= RESAMPLED
    return found


def verdict_text(record: Record) -> str:
    return record.verdict.verdict if record.verdict is not None else "no rule"


def that_ran(record: Record) -> Record:
    """The record with only the arms that ran."""
    return record.model_copy(
        update={"arms": {label: arm for label, arm in record.arms.items() if arm.runs}}
    )


def not_run(record: Record) -> list[str]:
    """Labels of the arms that did not run, and what is not run here, each with the reason."""
    idle = [label for label, arm in record.arms.items() if not arm.runs]
    return idle + [f"{label} ({why})" for label, why in record.not_run.items()]


def all_tables(record: Record) -> list[tuple[str, TableText]]:
    """The tables of a record, each with what stands above it: first the recipe's own grid, or a row
    for each arm with nothing above it."""
    grid = grid_table(record)
    first = (_about_grid(record), grid) if grid is not None else ("", arms_table(record))
    titled = {f"Test {name}": table for name, table in slice_tables(record).items()}
    others = {
        about_versus(record): versus_table(record),
        about_equal(record): equal_table(record),
        about_reach(record): reach_table(record),
        about_bins(record): bins_table(record),
        **titled,
        about_splits(record): splits_table(record),
        "Each seed": seeds_table(record),
        "Answers without a model": baselines_table(record),
    }
    return [first, *((about, table) for about, table in others.items() if table is not None)]


def _about_grid(record: Record) -> str:
    """What the cells of a grid are."""
    names = record.table.cells if record.table is not None else ()
    first, *others = names or (record.metrics[0].name,)
    text = f"Test {title(record.metric(first))}"
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


def from_authors(record: Record) -> str:
    """Where the authors' values of slices are from, each place once."""
    places = [one.told_in for arm in record.arms.values() for one in arm.authors if one.told_in]
    return f"Rows of the authors: {'; '.join(dict.fromkeys(places))}." if places else ""


def caveats(record: Record) -> list[str]:
    """What a reader must know, each thing once."""
    runs = [run for arm in record.arms.values() for run in arm.runs]
    told = [text for run in runs for text in run.caveats]
    told += [run.test.note for run in runs if run.test is not None and run.test.note]
    return list(dict.fromkeys(told))


def where(record: Record) -> str:
    """Devices, versions, commits and dates of all runs, each named once, and which runs shared the
    device."""
    places = [run.environment for arm in record.arms.values() for run in arm.runs]

    def each(values: list[str]) -> str:
        return ", ".join(sorted(set(values)))

    commits = each([(place.commit or "unknown")[:7] for place in places])
    return (
        f"On {each([place.device for place in places])}; torch "
        f"{each([place.torch for place in places])}; commits {commits}; "
        f"{each([place.date[:10] for place in places])}. {sharing(record.arms)}"
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
