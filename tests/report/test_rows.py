"""Rows of CSV have every number of every seed once, and say what each is of."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from small_records import DIGITS, arm_record, make_record, run_record, run_test, sourced_run

from entp.cli.main import main
from entp.report.rows import COLUMNS, rows_of
from entp.results.schema import Record, SplitPoint
from entp.results.store import write_record


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def numbers(record: Record, **wanted: Any) -> list[float]:
    """The values of the rows that have all of this."""
    rows = list(rows_of(record))
    return [row["value"] for row in rows if {k: row.get(k) for k in wanted} == wanted]


def test_evaluations_and_tests_of_every_seed() -> None:
    record = make_record({"ENTP": arm_record(50, 60, mode="ENTP"), "x": arm_record(None, mode="x")})
    assert numbers(record, arm="ENTP", seed=1, metric="loss", step=5) == [1.0]
    assert numbers(record, arm="x", metric="loss", source="valid") == [1.0, 0.25]
    exact = {"source": "test", "metric": "exact_match", "step": None}
    assert numbers(record, **exact) == [0.5, 0.6]
    assert numbers(record, **{**exact, "metric": "token_accuracy"}, seed=0, by=None) == [0.375]
    assert numbers(record, source="test", by="length", bin="2") == [0.25, 0.3]
    first = next(row for row in rows_of(record) if row["source"] == "test")
    assert (first["low"], first["high"]) == pytest.approx((0.404, 0.596), abs=1e-3)
    assert first["factor.mode"] == "ENTP"


def test_every_source_and_split() -> None:
    half = run_test(50).totals
    tested = run_test(50, generated=run_test(40).totals, splits={"longer": run_test(10).totals})
    measured = {"longer": [SplitPoint(step=5, totals=half), SplitPoint(step=10, totals=half)]}
    record = make_record({"a": arm_record(runs=[run_record(test=tested, splits=measured)])})
    one = {"metric": "exact_match"}
    assert numbers(record, source="generated", **one) == [0.4]
    assert numbers(record, source="split:longer", **one) == [0.1]
    assert numbers(record, source="longer", step=10, **one) == [0.5]
    runs = [sourced_run(test={"3": 5}, last={"3": 4}, best={"3": 9})]
    record = make_record({"a": arm_record(runs=runs)}, metrics=DIGITS)
    for source, value in (("test", 0.05), ("last", 0.04), ("best", 0.09)):
        assert numbers(record, source=source, by="digits", bin="3") == [value]


def test_command_writes_all_records_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    label = 'ENTP, "wide"'
    write_record(tmp_path / "a.json", make_record({label: arm_record(50, mode="ENTP")}))
    write_record(tmp_path / "b.json", make_record({"b": arm_record(50, lr=1e-3)}, recipe="other"))
    out = tmp_path / "all.csv"
    assert main(["report", f"--results={tmp_path}", f"--out={out}"]) == 0
    rows = read(out)
    assert capsys.readouterr().out == f"rows: {out}, {len(rows):,} numbers\n"
    assert list(rows[0]) == [*COLUMNS, "factor.lr", "factor.mode"]
    assert {(row["recipe"], row["arm"]) for row in rows} == {("mine", label), ("other", "b")}
    assert {row["factor.lr"] for row in rows if row["recipe"] == "other"} == {"0.001"}
    assert {row["seconds"] for row in rows if row["step"] == "5"} == {"6.0"}
