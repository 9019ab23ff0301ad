"""Tables show what was measured, and a dash for what was not."""

from __future__ import annotations

import re

import pytest
from small_records import (
    DIGITS,
    arm_record,
    counted,
    make_record,
    run_record,
    run_test,
    sourced_run,
)

from entp.report.cells import escape, markdown_table, number, span
from entp.report.comparisons import reach_table, versus_table
from entp.report.tables import arms_table, record_table, seeds_table, slice_tables
from entp.results.schema import (
    Check,
    MetricSpec,
    PaperValue,
    Point,
    Record,
    RunRecord,
    SliceValues,
    Table,
    TotalsData,
)
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
            "0.5000",
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


def test_losses_have_four_digits() -> None:
    """The authors' losses on text, 5.758 and 5.740, differ in the third."""
    loss = MetricSpec("loss", better="lower")
    shown = [number(v, loss) for v in (5.758, 0.00027, 1.47e-7)]
    assert shown == ["5.758", "0.0002700", "1.470e-07"]


def test_span_is_the_least_and_the_most() -> None:
    assert span([60, 1060, 100]) == "60 to 1,060"
    assert span([7, 7]) == "7"
    assert span([]) == "-"


def test_markdown_escapes_cells_and_keeps_columns() -> None:
    from entp.report.cells import TableText

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


def sourced_record(**changes: object) -> Record:
    """Two seeds by digits of every source, with the authors' last and best."""
    runs = [
        sourced_run(
            seed,
            test={"11": 50, "12": 20},
            last={"11": 40, "12": 10},
            best={"11": 60, "12": 30},
        )
        for seed in (0, 1)
    ]
    arm = arm_record(runs=runs, mode="ENTP")
    arm.authors.append(SliceValues("exact_match", "digits", {"11": 0.94, "13": 0.13}, "last", "x"))
    arm.authors.append(SliceValues("exact_match", "digits", {"11": 1.0}, "best", "x"))
    idle = arm_record(mode="decoder")
    return make_record({"a": arm, "b": idle}, metrics=DIGITS, **changes)


def test_every_source_has_a_table_by_slice_with_the_authors_below() -> None:
    best = "exact match by digits, best evaluation on the test itself, 7 evaluations"
    found = slice_tables(sourced_record())
    assert list(found) == [
        "exact match by digits",
        "exact match by digits, last checkpoint",
        best,
    ]
    assert found["exact match by digits"] == (["arm", "11", "12"], [["a", "0.5000", "0.2000"]])
    assert found["exact match by digits, last checkpoint"] == (
        ["arm", "11", "12", "13"],
        [["a", "0.4000", "0.1000", "-"], ["authors, a", "0.9400", "-", "0.1300"]],
    )
    assert found[best].rows == [["a", "0.6000", "0.3000"], ["authors, a", "1", "-"]]


def test_tables_by_slice_are_left_out_beside_a_grid_only() -> None:
    assert slice_tables(sourced_record(table=Table(rows="mode"))) == {}
    assert len(slice_tables(sourced_record(table=Table(versus="mode")))) == 3


def test_tables_have_a_column_for_every_source() -> None:
    more = ["last checkpoint's exact match", "best exact match on the test itself"]
    arms = arms_table(sourced_record())
    assert (arms.head[-2:], arms.rows[0][-2:]) == (more, ["0.4000", "0.6000"])
    assert arms.rows[1][-2:] == ["-", "-"]
    seeds = seeds_table(sourced_record())
    assert seeds is not None
    assert seeds.head[2:6] == ["test exact match", "generated exact match", *more]
    assert seeds.rows[0][2:6] == ["0.5000", "-", "0.4000", "0.6000"]


def versus_record(**changes: object) -> Record:
    rights = {
        ("ENTP", 1250): (30, 34, 38),
        ("decoder", 1250): (10, 12, 8),
        ("RNN", 1250): (5,),
        ("ENTP", 5000): (90,),
        ("decoder", 5000): (80, 82),
        ("decoder", 9000): (99,),
        ("ENTP", 20000): (),
        ("decoder", 20000): (99, 99),
    }
    arms = {
        f"{mode} {n}": arm_record(*right, mode=mode, examples=n)
        for (mode, n), right in rights.items()
    }
    return make_record(arms, **changes)


def test_arms_that_differ_in_one_factor_are_compared_over_seeds() -> None:
    """.34 +- .04 and .10 +- .02, three seeds each: Welch's t 9.295 of 2.94 degrees of freedom."""
    found = versus_table(versus_record(table=Table(versus="mode")))
    assert found is not None
    first, other, single = found.rows
    assert found.head[-3:] == ["difference", "95 % interval", "p"]
    assert first == [
        "ENTP 1250",
        "decoder 1250",
        "exact match",
        "0.3400, 0.0400, 3",
        "0.1000, 0.0200, 3",
        "0.2400",
        "0.1569 to 0.3231",
        "0.0029",
    ]
    assert other[:2] == ["ENTP 1250", "RNN 1250"]
    assert other[4:] == ["0.0500, -, 1", "0.2900", "-", "-"]
    assert single[:2] == ["ENTP 5000", "decoder 5000"]
    assert single[5:] == ["0.0900", "-", "-"]


def test_arms_that_the_recipe_names_are_compared_whatever_they_differ_in() -> None:
    pairs = [({"mode": "ENTP", "examples": 1250}, {"mode": "decoder", "examples": [5000, 9000]})]
    found = versus_table(versus_record(table=Table(pairs=pairs)))
    assert found is not None
    assert [row[:2] for row in found.rows] == [
        ["ENTP 1250", "decoder 5000"],
        ["ENTP 1250", "decoder 9000"],
    ]
    both = versus_table(versus_record(table=Table(versus="mode", pairs=pairs)))
    assert both is not None
    assert len(both.rows) == 5
    text = record_table(versus_record(table=Table(pairs=pairs)))
    assert "Arms that the recipe names, over seeds" in text


def test_paired_comparison_is_of_runs_of_one_seed() -> None:
    """Differences .20, .22, .30: Student's t 7.856 of 2 degrees of freedom. Other seeds: Welch."""
    record = versus_record(table=Table(versus="mode", paired=True))
    found = versus_table(record)
    assert found is not None
    assert found.rows[0][6:] == ["0.1086 to 0.3714", "0.016"]
    record.arms["decoder 1250"].runs[0].seed = 7
    found = versus_table(record)
    assert found is not None
    assert found.rows[0][6:] == ["0.1569 to 0.3231", "0.0029"]


def test_runs_of_different_seeds_are_no_pair_though_they_are_as_many() -> None:
    """Tested are seeds 0 and 1 (.10, .50) and 1 and 2 (.48, .90): paired in their order, the
    differences -.38 and -.40 would have p = .016."""
    arms = {
        "a": arm_record(10, 50, None, mode="ENTP"),
        "b": arm_record(None, 48, 90, mode="decoder"),
    }
    found = versus_table(make_record(arms, table=Table(versus="mode", paired=True)))
    assert found is not None
    assert found.rows[0][3:] == [
        "0.3000, 0.2828, 2",
        "0.6900, 0.2970, 2",
        "-0.3900",
        "-1.641 to 0.8606",
        "0.31",
    ]


def test_comparison_has_a_row_for_every_metric_of_the_cells() -> None:
    record = versus_record(table=Table(cells=("loss", "exact_match"), versus="mode"))
    found = versus_table(record)
    assert found is not None
    assert [row[2] for row in found.rows[:2]] == ["loss", "exact match"]
    assert found.rows[0][5:] == ["0", "0 to 0", "1"]


def test_comparison_is_printed_at_the_end() -> None:
    lines = record_table(versus_record(table=Table(versus="mode"))).splitlines()
    assert lines[-7].startswith("Arms that differ in mode alone, over seeds")
    assert lines[-1].startswith("ENTP 5000")
    assert "0.1569 to 0.3231" in lines[-3]
    assert "Arms that differ" not in record_table(versus_record())
    idle = make_record({"a": arm_record(mode="x"), "b": arm_record(mode="y")})
    assert versus_table(idle.model_copy(update={"table": Table(versus="mode")})) is None


def test_training_up_to_values_is_a_table() -> None:
    """Of two seeds one never has 0.9; the first evaluation that has a value counts."""

    def run(seed: int, *values: float) -> RunRecord:
        points = [
            Point(step=5 * n, seconds=10.4 * n, sequences=40 * n, values={"exact_match": value})
            for n, value in enumerate(values, 1)
        ]
        return run_record(seed, curve=points)

    arms = {
        "a": arm_record(runs=[run(0, 0.1, 0.6, 0.95, 0.4), run(1, 0.7, 0.2)], mode="ENTP"),
        "b": arm_record(mode="decoder"),
    }
    record = make_record(arms, table=Table(reach=(0.5, 0.9)))
    shown = reach_table(record)
    assert shown is not None
    head = ["arm", "steps to 0.5000", "seconds to 0.5000", "steps to 0.9000", "seconds to 0.9000"]
    assert shown.head == head
    cells = ["5 to 10", "10 to 21", "15, 1 not reached", "31, 1 not reached"]
    assert shown.rows == [["a", *cells]]
    assert "Training up to the first evaluation with this validation exact match" in record_table(
        record
    )
    assert reach_table(make_record(arms)) is None
