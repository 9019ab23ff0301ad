"""Further splits and baselines in figures, tables and checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure as MplFigure
from pydantic import ValidationError
from small_records import (
    DIGITS,
    arm_record,
    make_record,
    run_record,
    run_test,
    sliced_totals,
)

from entp.report.comparisons import equal_table
from entp.report.figures import draw_record
from entp.report.page import page
from entp.report.tables import baselines_table, bins_table, record_table, splits_table
from entp.results.schema import (
    BaselineRecord,
    Bootstrap,
    Check,
    Figure,
    MetricSpec,
    Point,
    Record,
    RunRecord,
    RunTest,
    Table,
)
from entp.results.store import read_record, write_record
from entp.results.summary import baselines_of, estimate
from entp.results.verdict import check_record
from entp.tasks.metrics import Sums

ERROR = MetricSpec("error", better="lower", slices=("examples",))


def run_of(bins: dict[str, int], task: str = "linear", **splits: int) -> RunRecord:
    """A run with exact match by digits, in all as in the first bin; further splits have a total."""
    totals = sliced_totals(next(iter(bins.values())), bins)
    more = {name: sliced_totals(right, {"11": right}) for name, right in splits.items()}
    test = RunTest(checkpoint="best-1", concurrent_runs=1, totals=totals, splits=more)
    config = {"task": {"name": "icl", "function": task}, "mode": "entp", "batch_size": 8}
    return run_record(test=test, config=config)


def baseline(task: str, split: str = "test", **rights: int) -> BaselineRecord:
    """Baselines with so many of 100 right with 12 digits, and with 11 half as many."""
    return BaselineRecord(
        task={"name": "icl", "function": task},
        seed=0,
        split=split,
        batch_size=8,
        sequences=100,
        totals={
            name: sliced_totals(right, {"12": right, "11": right // 2})
            for name, right in rights.items()
        },
    )


def shifted_record(**changes: Any) -> Record:
    """Two modes on two tasks, of which one was also tested on a shift."""
    arms = {
        "ENTP": arm_record(
            runs=[run_of({"11": 50, "12": 40}, shift=30)], mode="ENTP", task="linear"
        ),
        "decoder": arm_record(
            runs=[run_of({"11": 40, "12": 30}, shift=20)], mode="decoder", task="linear"
        ),
        "other": arm_record(runs=[run_of({"11": 10, "12": 5}, "tree")], mode="ENTP", task="tree"),
    }
    told = [
        baseline("linear", least_squares=80, zero=10),
        baseline("linear", "shift", least_squares=60),
        baseline("tree", zero=20),
    ]
    return make_record(arms, metrics=DIGITS, baselines=told, **changes)


def test_baselines_of_a_task_that_nothing_is_trained_on_are_those_of_all_arms() -> None:
    """Runs of text, all of them tested on winogrande."""
    record = shifted_record()
    asked = BaselineRecord(
        task={"name": "winogrande", "items": "tiny"},
        seed=0,
        batch_size=8,
        sequences=100,
        totals={"always first": sliced_totals(45, {"12": 45})},
    )
    record = record.model_copy(update={"baselines": [asked]})
    assert list(baselines_of(record, [record.arms["ENTP"]])) == ["always first"]
    assert baselines_of(record, []) == {}
    assert baselines_table(record) is not None


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be saved."""
    seen: list[Any] = []
    monkeypatch.setattr(MplFigure, "savefig", lambda self, *words, **options: seen.append(self))
    return seen


def axes(figure: Any) -> list[Any]:
    return [axis for row in figure.subfigs for axis in row.axes]


def drawn(axis: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axis.get_lines()
    }


def test_baselines_of_a_panels_task_are_black_and_dashed(
    figures: list[Any], tmp_path: Path
) -> None:
    spec = Figure("slices", x="digits", y="exact_match", lines="mode", panels="task")
    draw_record(shifted_record(figures=[spec]), tmp_path / "a.png")
    linear, tree = axes(figures[0])
    assert drawn(linear) == {
        "ENTP": ([11, 12], [0.5, 0.4]),
        "decoder": ([11, 12], [0.4, 0.3]),
        "least_squares": ([11, 12], [0.4, 0.8]),
        "zero": ([11, 12], [0.05, 0.1]),
    }
    assert drawn(tree)["zero"] == ([11, 12], [0.1, 0.2])
    assert "least_squares" not in drawn(tree)
    black = [line for line in linear.get_lines() if line.get_color() == "k"]
    assert [line.get_label() for line in black] == ["least_squares", "zero"]
    assert {line.get_linestyle() for line in black} == {"--"}
    assert len({line.get_marker() for line in black}) == 2


def test_figure_shows_the_baselines_that_it_names(figures: list[Any], tmp_path: Path) -> None:
    spec = Figure("slices", x="digits", y="exact_match", lines="mode", baselines="zero")
    draw_record(shifted_record(figures=[spec]), tmp_path / "a.png")
    (axis,) = axes(figures[0])
    assert set(drawn(axis)) == {"ENTP", "decoder", "zero"}


def test_several_sources_have_panels_of_their_own(figures: list[Any], tmp_path: Path) -> None:
    sources = ("test", "split:shift", "last", "generated", "best")
    spec = Figure("slices", x="digits", y="exact_match", lines="mode", sources=sources)
    draw_record(shifted_record(figures=[spec]), tmp_path / "a.png")
    shown = axes(figures[0])
    assert len(shown) == 8  # two rows of four, the last three empty
    assert [axis.axison for axis in shown] == [True] * 5 + [False] * 3
    assert drawn(shown[1]) == {
        "ENTP": ([11], [0.3]),
        "decoder": ([11], [0.2]),
        "least_squares": ([11, 12], [0.3, 0.6]),
    }
    assert shown[1].get_ylabel() == "test exact match\n(split shift)"
    assert "least_squares" not in drawn(shown[2])  # no baseline has a last checkpoint


def test_exact_baseline_does_not_stretch_a_log_axis(figures: list[Any], tmp_path: Path) -> None:
    def totals(values: list[float]) -> Any:
        bins = {
            str(at): Sums(9, 9 * v, 9, 9 * v * v, 9 * v, 9).to_json() for at, v in enumerate(values)
        }
        whole = {"error": Sums(9, sum(values), len(values), 1, 1, 1).to_json()}
        return {"sequences": 9, "all": whole, "slices": {"error": {"examples": bins}}}

    task = {"name": "icl"}
    test = RunTest(checkpoint="b", concurrent_runs=1, totals=totals([1.0, 0.5, 0.1]))
    run = run_record(
        test=test,
        best={},
        curve=[Point(step=1, seconds=1, sequences=1, values={})],
        config={"task": task},
    )
    exact = {"least squares": totals([1.0, 0.5, 1e-25])}
    told = BaselineRecord(task=task, seed=0, batch_size=8, sequences=9, totals=exact)
    record = make_record(
        {"a": arm_record(runs=[run], mode="ENTP")},
        metrics=[ERROR],
        baselines=[told],
        figures=[Figure("slices", x="examples", lines="mode")],
    )
    draw_record(record, tmp_path / "a.png")
    (axis,) = axes(figures[0])
    assert axis.get_yscale() == "log"
    assert axis.get_ylim()[0] > 0.01
    assert drawn(axis)["least squares"][1] == [1.0, 0.5, 1e-25]


def test_curves_against_flops_leave_unknown_ones_out(figures: list[Any], tmp_path: Path) -> None:
    curve = [
        Point(step=5, seconds=6.0, sequences=40, values={"loss": 1.0}),
        Point(step=10, seconds=12.0, sequences=80, values={"loss": 0.5}, flops=3e15),
    ]
    arms = {"a": arm_record(runs=[run_record(curve=curve)])}
    draw_record(make_record(arms, figures=[Figure("curves", x="flops", y="loss")]), tmp_path / "a")
    (axis,) = axes(figures[0])
    assert drawn(axis) == {"a": ([3.0], [0.5])}
    assert "FLOPs" in axis.get_xlabel()


def trained(*points: tuple[int, float, float | None, float], seed: int = 0) -> RunRecord:
    """A run with evaluations at these sequences, seconds and FLOPs, and their exact match."""
    curve = [
        Point(step=n, seconds=seconds, sequences=read, values={"exact_match": value}, flops=flops)
        for n, (read, seconds, flops, value) in enumerate(points, 1)
    ]
    return run_record(seed, curve=curve)


def test_modes_are_compared_at_equal_sequences_flops_and_seconds() -> None:
    slow = [
        trained((50, 10, 1e15, 0.1), (100, 20, 2e15, 0.3), (150, 30, 3e15, 0.6)),
        trained((50, 10, 1e15, 0.1), (100, 20, 2e15, 0.5), (150, 30, 3e15, 0.6), seed=1),
    ]
    fast = [trained((50, 2, 5e14, 0.2), (150, 21, 1.5e15, 0.25))]
    arms = {
        "ENTP": arm_record(runs=slow, mode="ENTP"),
        "decoder": arm_record(runs=fast, mode="decoder"),
    }
    spec = Table(rows="mode", cells="exact_match", versus="mode")
    curves = Figure("curves", x="flops", y="exact_match")
    record = make_record(arms, table=spec, figures=[curves])
    table = equal_table(record)
    assert table is not None
    assert [row[2:] for row in table.rows] == [
        ["150 sequences", "0.6000, 0, 2", "0.2500, -, 1"],
        ["1.5e+15 FLOPs", "0.1000, 0, 2", "0.2500, -, 1"],
        ["21 seconds", "0.4000, 0.1414, 2", "0.2500, -, 1"],
    ]
    assert "21 seconds" in page({Path("a.json"): record}, Path("page.md"))
    assert "21 seconds" in record_table(record)
    without = make_record(arms, table=spec, figures=[Figure("curves", x="seconds")])
    assert equal_table(without) is None
    fast[0].curve[-1].flops = None
    table = equal_table(record)
    assert table is not None
    assert [row[2].split()[-1] for row in table.rows] == ["sequences", "seconds"]


def test_splits_table_has_arms_and_baselines_on_every_split() -> None:
    table = splits_table(shifted_record())
    assert table is not None
    assert table.head == ["split", "ENTP", "decoder", "least_squares", "zero"]
    assert [[row[0], *row[3:]] for row in table.rows] == [
        ["test", "0.8000", "0.1000"],
        ["shift", "0.6000", "-"],
    ]
    assert [cell.split(" ")[0] for row in table.rows for cell in row[1:3]] == [
        "0.5000",
        "0.4000",
        "0.3000",
        "0.2000",
    ]
    assert splits_table(make_record({"a": arm_record(5)})) is None


def test_bins_table_has_the_arms_and_baselines_of_each_task() -> None:
    spec = Table(rows="mode", columns="task", cells="exact_match", by="digits", bins=("11", "13"))
    table = bins_table(shifted_record(table=spec))
    assert table is not None
    assert table.head == ["arm", "11", "13"]
    cells = {row[0]: [cell.split(" ")[0] for cell in row[1:]] for row in table.rows}
    assert cells == {
        "ENTP": ["0.5000", "-"],
        "decoder": ["0.4000", "-"],
        "least_squares (linear)": ["0.4000", "-"],
        "zero (linear)": ["0.0500", "-"],
        "other": ["0.1000", "-"],
        "zero (tree)": ["0.1000", "-"],
    }


def test_excess_is_what_arms_have_above_a_baseline() -> None:
    spec = Table(
        rows="mode",
        columns="task",
        cells="exact_match",
        by="digits",
        bins=("11", "12"),
        excess_over="least_squares",
    )
    record = shifted_record(table=spec)
    table = bins_table(record)
    assert table is not None
    cells = {row[0]: [float(cell.split(" ")[0]) for cell in row[1:]] for row in table.rows}
    assert cells == {
        "ENTP": pytest.approx([0.1, -0.4]),
        "decoder": pytest.approx([0, -0.5], abs=1e-9),
    }
    text = page({Path("mine.json"): record}, Path("page.md"))
    assert "Test exact match by digits, above that of least\\_squares on the same sequences" in text
    assert "Test exact match on further splits" in text


@pytest.mark.parametrize(
    "wrong", [{"by": "digits"}, {"bins": "11"}, {"excess_over": "zero"}], ids=str
)
def test_half_a_table_of_bins_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="give by and bins together"):
        Table(**wrong)


def test_baselines_are_those_of_the_task_and_split() -> None:
    record = shifted_record()
    arms = record.arms
    assert set(baselines_of(record, [arms["ENTP"]])) == {"least_squares", "zero"}
    assert set(baselines_of(record, [arms["other"]])) == {"zero"}
    assert set(baselines_of(record, [arms["ENTP"]], "split:shift")) == {"least_squares"}
    assert baselines_of(record, [arms["ENTP"]], "last") == {}
    table = baselines_table(record)
    assert table is not None
    assert [[row[0], row[1], row[-1]] for row in table.rows] == [
        ["least_squares", "0.8000", "ENTP; decoder"],
        ["zero", "0.1000", "ENTP; decoder"],
        ["zero", "0.2000", "other"],
    ]


def test_baselines_of_a_task_from_before_it_got_a_field_stay_its_own() -> None:
    record = shifted_record()
    record.baselines[0].task["new"] = 0
    assert set(baselines_of(record, [record.arms["ENTP"]])) == {"least_squares", "zero"}
    record.baselines[0].task["function"] = "net"
    assert baselines_of(record, [record.arms["ENTP"]]) == {}


def test_check_is_about_a_split() -> None:
    record = shifted_record()
    says = ("shifted", {"task": "linear", "mode": "ENTP"}, "exact_match")
    right = {"task": "linear", "mode": "decoder"}
    found = check_record(record, Check(*says, "above", right, source="split:shift"))
    assert (found.outcome, found.why) == (
        "holds",
        ["ENTP, split shift: 0.3 is above 0.2 of decoder"],
    )
    missing = check_record(record, Check(*says, "above", right, source="split:other"))
    assert missing.outcome == "undecided"


@pytest.mark.parametrize(("times", "outcome"), [(1.25, "holds"), (1.2, "fails")])
def test_check_allows_so_much_more(times: float, outcome: str) -> None:
    record = shifted_record()
    one = Check(
        "x",
        {"mode": "ENTP", "task": "linear"},
        "exact_match",
        "at most",
        {"mode": "decoder"},
        times=times,
    )
    found = check_record(record, one)
    assert found.outcome == outcome
    assert f"{times:g} times 0.4 of decoder" in found.why[0]
    number = Check("x", {"mode": "decoder"}, "exact_match", "at most", 0.32, times=times)
    assert check_record(record, number).outcome == outcome


@pytest.mark.parametrize("source", ["split:", "shift", "tests"])
def test_unknown_source_is_refused(source: str) -> None:
    with pytest.raises(ValidationError, match="split:NAME"):
        Figure("slices", x="digits", source=source)


def test_record_with_all_of_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    spec = Figure("slices", x="digits", y="exact_match", sources=("test", "split:shift"))
    record = shifted_record(figures=[spec])
    written = write_record(tmp_path / "a.json", record)
    assert read_record(tmp_path / "a.json") == written
    found = written.arms["ENTP"].summary
    assert found is not None
    assert found.splits["shift"]["exact_match"] == estimate(
        record, record.arms["ENTP"], "exact_match", "split:shift"
    )


def test_baseline_of_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ValidationError, match="which is not in metrics"):
        make_record({"a": arm_record(5)}, metrics=[ERROR], baselines=[baseline("linear", zero=1)])


def test_page_explains_a_bootstrap_where_there_is_one() -> None:
    ends = Bootstrap(level=0.9, resamples=10, all={"exact_match": [0.41, 0.62]})
    resampled = arm_record(runs=[run_record(test=run_test(50, bootstrap=ends))])
    for arm, there in ((resampled, True), (arm_record(50), False)):
        text = page({Path("a.json"): make_record({"a": arm})}, Path("page.md"))
        assert ("**Bootstrap**" in text) == there
        assert ("0.4100 to 0.6200, one seed, 90 % bootstrap" in text) == there
