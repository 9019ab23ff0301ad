"""Tables show what was measured, and a dash for what was not."""

from __future__ import annotations

import re

import pytest
from small_records import arm_record, counted, make_record, run_record, run_test

from entp.report.tables import escape, markdown_table, number, record_table, span
from entp.results.schema import Check, MetricSpec, PaperValue, Table, TotalsData
from entp.results.store import complete


def test_terminal_table_is_paper_and_ours() -> None:
    generated = TotalsData(sequences=20, all={"exact_match": counted(3, 20)})
    first = arm_record(
        runs=[
            run_record(0, test=run_test(40, generated=generated)),
            run_record(1, test=run_test(60, generated=generated), steps=1010, seconds=14.4),
        ]
    )
    first.paper["exact_match"] = PaperValue(0.991, "Table 1")
    half = arm_record(runs=[run_record(right=None, status="5 of 9 steps", steps=5)])
    record = make_record(
        {"a": first, "b": half, "c": arm_record()},
        checks=[Check("a learns", {}, "exact_match", "above", 0.1)],
        not_run={"d": "too long"},
    )
    head, _, *rows = record_table(complete(record)).splitlines()
    assert re.split(r"\s{2,}", head) == [
        "arm",
        "status",
        "seeds",
        "steps",
        "seconds",
        "exact match: paper",
        "exact match: validation",
        "exact match: test",
        "token accuracy: test",
        "loss: test",
        "95 % interval of test exact match",
        "generated exact match",
    ]
    cells = [re.split(r"\s{2,}", row) for row in rows[:3]]
    assert cells[0][:10] == (
        [
            "a",
            "done",
            "2",
            "10 to 1,010",
            "12 to 14",
            "0.991",
            "0.5000",
            "0.5000",
            "0.3750",
            "0.500",
        ]
    )
    assert cells[0][10:] == ["0 to 1, 2 seeds", "0.1500"]
    assert cells[1] == ["b", "5 of 9 steps", "1", "5", "12", "-", "0.5000", *["-"] * 5]
    assert cells[2] == ["c", "not run", "0", *["-"] * 9]
    assert rows[3:] == ["verdict: undecided", "  undecided: a learns", "not run: d (too long)"]


@pytest.mark.parametrize(
    ("value", "cell"),
    [(0.0, "0"), (1.0, "1"), (0.99999, "1.0000"), (0.00001, "0.0000"), (0.25, "0.2500")],
)
def test_0_and_1_are_exact_without_decimals(value: float, cell: str) -> None:
    assert number(value, MetricSpec("exact_match")) == cell


def test_losses_have_three_digits() -> None:
    loss = MetricSpec("loss", better="lower")
    assert [number(v, loss) for v in (1.2, 0.00027, 1.47e-7)] == ["1.20", "0.000270", "1.47e-07"]


def test_span_is_the_least_and_the_most() -> None:
    assert span([60, 1060, 100]) == "60 to 1,060"
    assert span([7, 7]) == "7"
    assert span([]) == "-"


def test_markdown_escapes_cells_and_keeps_columns() -> None:
    from entp.report.tables import TableText

    lines = markdown_table(TableText(["a|b", "c"], [["x\ny", "<b>"]]))
    assert lines == [r"| a\|b | c |", "| --- | --- |", "| x y | &lt;b&gt; |"]


def test_escaped_text_is_one_line() -> None:
    assert escape("  a\n\n# b\t`c`") == r"a \# b \`c\`"
    assert escape("a & b <i>") == "a &amp; b &lt;i&gt;"


def test_table_by_a_slice_is_a_row_per_arm() -> None:
    """A table whose columns are no factor is not a grid."""
    from entp.report.tables import grid_table

    record = make_record({"a": arm_record(5, mode="x")}, table=Table(rows="mode", columns="length"))
    assert grid_table(record) is None
