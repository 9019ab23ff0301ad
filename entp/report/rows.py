"""All recorded numbers as rows of CSV: `entp report --out results.csv`, for pandas, R or a
spreadsheet.

A row is one number of one seed: of an evaluation during training where it has a step, else of the
test at the end, of all sequences or of one bin of a slice. The tables and figures of the pages are
of the same numbers.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from entp.files import write_file
from entp.report.contents import records_for
from entp.results.schema import SPLIT, Record, RunRecord
from entp.results.summary import run_totals, sources_of, splits_of
from entp.tasks.metrics import Totals

COLUMNS = (
    *("recipe", "arm", "seed", "source", "step", "sequences", "seconds", "flops"),
    *("metric", "by", "bin", "value", "low", "high"),
)
"""Before the factors, which are called factor.NAME. `low` and `high` are the ends of the 95 %
interval over sequences."""
VALIDATION = "valid"


def write_rows(results: Path, out: Path) -> str:
    """Write the file, and return a message for a person."""
    found = [row for record in records_for(results, out).values() for row in rows_of(record)]
    factors = {name for row in found for name in row if name not in COLUMNS}
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, *sorted(factors)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    write_file(out, text.getvalue().encode())
    return f"rows: {out}, {len(found):,} numbers"


def rows_of(record: Record) -> Iterator[dict[str, Any]]:
    """The numbers of a record, arm by arm and seed by seed."""
    for label, arm in record.arms.items():
        factors = {f"factor.{name}": value for name, value in arm.factors.items()}
        for run in arm.runs:
            first = {"recipe": record.recipe, "arm": label, "seed": run.seed}
            for row in (*_training(record, run), *_tests(record, run)):
                yield {**first, **row, **factors}


def _training(record: Record, run: RunRecord) -> Iterator[dict[str, Any]]:
    """Of each evaluation during training."""
    for point in run.curve:
        told = point.model_dump(include={"step", "sequences", "seconds", "flops"})
        for metric, value in point.values.items():
            yield {"source": VALIDATION, **told, "metric": metric, "value": value}
    for split, points in run.splits.items():
        for one in points:
            for row in _values(one.totals.totals(record.metrics)):
                yield {"source": split, "step": one.step, **row}


def _tests(record: Record, run: RunRecord) -> Iterator[dict[str, Any]]:
    """Of each test at the end."""
    splits = [SPLIT + name for arm in record.arms.values() for name in splits_of([arm])]
    for source in dict.fromkeys([*sources_of(record), *splits]):
        totals = run_totals(record, run, source)
        for row in [] if totals is None else _values(totals):
            yield {"source": source, **row}


def _values(totals: Totals) -> Iterable[dict[str, Any]]:
    """Of all sequences, and of each bin of each slice."""
    for metric in totals.all:
        yield from _row(totals.value(metric), totals.interval(metric), metric=metric)
        for by in totals.slices.get(metric, {}):
            for key, value in totals.sliced(metric, by).items():
                ends = totals.sliced_interval(metric, by, key)
                yield from _row(value, ends, metric=metric, by=by, bin=key)


def _row(value: float, ends: tuple[float, float] | None, **more: str) -> Iterator[dict[str, Any]]:
    if math.isfinite(value):
        low, high = ends or (None, None)
        yield {**more, "value": value, "low": low, "high": high}
