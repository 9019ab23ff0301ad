"""Figures show what records hold, and are on disk whole or as they were before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure as MplFigure
from small_records import (
    DIGITS,
    METRICS,
    arm_record,
    make_record,
    run_record,
    run_test,
    sliced_totals,
    sourced_run,
)
from small_sections import generation, growth, steps

from entp.report import bench
from entp.report.figures import draw_record
from entp.report.patterns import draw_demo
from entp.report.style import COLOURS, arm_colours, line_styles, new_figure, save_figure
from entp.report.summary import draw_summary
from entp.results.schema import (
    AuthorsCurve,
    Figure,
    PaperValue,
    Point,
    Record,
    SliceValues,
    Source,
    SplitPoint,
)
from entp.results.sections import read_sections, record_section
from entp.results.store import find_records, read_record
from entp.results.summary import values_of

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be saved, to look at their axes."""
    seen: list[Any] = []
    monkeypatch.setattr(MplFigure, "savefig", lambda self, *words, **options: seen.append(self))
    return seen


def axes(figure: Any) -> list[Any]:
    return [axis for row in figure.subfigs for axis in row.axes]


def xy(line: Any) -> tuple[list[float], list[float]]:
    return list(line.get_xdata()), list(line.get_ydata())


def grid_record(**changes: Any) -> Record:
    """Two modes by two depths by two lengths, 10 right sequences more with each."""
    arms = {}
    for mode in ("ENTP", "decoder"):
        for layers in (2, 12):
            for length in (32, 16):
                factors = {"mode": mode, "layers": layers, "length": length}
                arms[str(factors)] = arm_record(10 * (len(arms) + 1), **factors)
    return make_record(arms, **changes)


@dataclass
class Side:
    label: str = "ENTP"
    curve: list[tuple[int, float]] = field(default_factory=lambda: [(1, 0.0), (2, 0.5)])
    flops: float = 1e9


DRAWN: dict[str, Callable[[Path], object]] = {
    "demo": lambda path: draw_demo([Side(), Side("decoder")], path),
    "record": lambda path: draw_record(grid_record(), path),
    "bench": lambda path: bench.draw({"generate": generation()}, path),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN.keys())
def test_figure_that_fails_leaves_the_old_one(
    draw: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(self: MplFigure, target: Any, **options: Any) -> None:
        data = b"\x89PNG, half of it"
        target.write_bytes(data) if isinstance(target, Path) else target.write(data)
        raise OSError("no space left")

    monkeypatch.setattr(MplFigure, "savefig", half)
    (tmp_path / "old.png").write_bytes(b"old")
    with pytest.raises(OSError, match="no space left"):
        draw(tmp_path / "old.png")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"old.png": b"old"}


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml"), ("a", b"\x89PNG")],
)
def test_suffix_says_the_format(name: str, start: bytes, tmp_path: Path) -> None:
    save_figure(MplFigure(), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_without_matplotlib_there_is_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert new_figure(1, 1) is None
    assert not draw_record(grid_record(), tmp_path / "a.png")
    assert not draw_demo([Side()], tmp_path / "a.png")
    assert "pip install 'entp[plot]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_before_anything_ran_there_is_no_figure(tmp_path: Path) -> None:
    assert not draw_record(make_record({"a": arm_record()}), tmp_path / "a.png")


def curves_record(x: str = "") -> Record:
    second = run_record(1, curve=[Point(step=9, seconds=None, sequences=72, values={"loss": 2.0})])
    first = arm_record(runs=[run_record(), second])
    first.paper["exact_match"] = PaperValue(0.991, "Table 1")
    curve = {"steps": [10_000, 20_000], "sequences": [640_000, 1_280_000]}
    values = {"loss": [3.0, 1.0], "exact_match": [0.0, 0.9]}
    return make_record(
        {"a": first, "idle": arm_record()},
        figures=[Figure("curves", x=x, y=("loss", "exact_match"))],
        authors_curves={"ENTP": AuthorsCurve(**curve, values=values)},
    )


def test_curves_are_those_of_every_seed_beside_the_authors_and_the_papers_values(
    figures: list[Any], tmp_path: Path
) -> None:
    draw_record(curves_record(), tmp_path / "a.png")
    loss, exact = axes(figures[0])
    assert (loss.get_ylabel(), loss.get_yscale()) == ("validation loss", "log")
    assert loss.get_xlabel() == "optimizer steps (thousands)"
    authors, first, second = loss.get_lines()
    assert xy(authors) == ([10.0, 20.0], [3.0, 1.0])
    assert (authors.get_label(), authors.get_color()) == ("authors: ENTP", "0.6")
    assert xy(first) == ([0.005, 0.01], [1.0, 0.25])
    assert xy(second) == ([0.009], [2.0])
    assert first.get_color() == second.get_color() == COLOURS[0]
    dotted = exact.get_lines()[-1]
    assert (list(dotted.get_ydata()), dotted.get_linestyle()) == ([0.991, 0.991], ":")
    assert exact.get_ylim() == (-0.03, 1.03)
    assert figures[0].get_suptitle() == "A figure (dotted: the paper's value)"
    (legend,) = [one for row in figures[0].subfigs for one in row.legends]
    assert [text.get_text() for text in legend.get_texts()] == ["authors: ENTP", "a"]


def test_curves_against_seconds_leave_unknown_times_out(figures: list[Any], tmp_path: Path) -> None:
    draw_record(curves_record("seconds"), tmp_path / "a.png")
    loss = axes(figures[0])[0]
    assert [xy(line) for line in loss.get_lines()] == [([6.0, 12.0], [1.0, 0.25]), ([], [])]
    assert loss.get_xlabel() == "seconds of training"


def test_curves_against_sequences(figures: list[Any], tmp_path: Path) -> None:
    draw_record(curves_record("sequences"), tmp_path / "a.png")
    loss = axes(figures[0])[0]
    assert [line.get_xdata()[0] for line in loss.get_lines()] == [0.64, 40e-6, 72e-6]
    assert loss.get_xlabel() == "sequences read (millions)"


def test_metric_that_validation_has_not_is_drawn_of_the_test(
    figures: list[Any], tmp_path: Path
) -> None:
    run = run_record()
    curve = [p.model_copy(update={"values": {"loss": p.values["loss"]}}) for p in run.curve]
    splits = {
        "test": [SplitPoint(step=s, totals=sliced_totals(s, {"11": s})) for s in (5, 8, 10)],
        "other": [SplitPoint(step=5, totals=sliced_totals(99, {"11": 99}))],
    }
    run = run.model_copy(update={"curve": curve, "splits": splits})
    spec = [Figure("curves", x=x, y=("exact_match", "loss")) for x in ("", "seconds")]
    record = make_record({"a": arm_record(runs=[run])}, metrics=DIGITS, figures=spec)
    draw_record(record, tmp_path / "a.png")
    exact, loss, timed, _ = axes(figures[0])
    assert (exact.get_ylabel(), loss.get_ylabel()) == ("test exact match", "validation loss")
    assert xy(exact.get_lines()[0]) == ([0.005, 0.01], [0.05, 0.1])
    assert xy(loss.get_lines()[0]) == ([0.005, 0.01], [1.0, 0.25])
    assert xy(timed.get_lines()[0]) == ([6.0, 12.0], [0.05, 0.1])


def test_steps_of_unequal_batches_say_so(figures: list[Any], tmp_path: Path) -> None:
    config = {"task": {"name": "x"}, "batch_size": 64, "curriculum": {"batch_size": 256}}
    record = make_record({"a": arm_record(runs=[run_record(config=config)])})
    draw_record(record, tmp_path / "a.png")
    told = "optimizer steps (thousands), of 64 to 256 sequences"
    assert {axis.get_xlabel() for axis in axes(figures[0])} == {told}


def test_slices_against_a_factor(figures: list[Any], tmp_path: Path) -> None:
    spec = Figure("slices", x="length", y="exact_match", lines=("mode", "layers"))
    draw_record(grid_record(figures=[spec]), tmp_path / "a.png")
    (axis,) = axes(figures[0])
    assert [line.get_label() for line in axis.get_lines()] == [
        "ENTP, layers 2",
        "ENTP, layers 12",
        "decoder, layers 2",
        "decoder, layers 12",
    ]
    assert xy(axis.get_lines()[0]) == ([16, 32], [0.2, 0.1])
    assert xy(axis.get_lines()[3]) == ([16, 32], [0.8, 0.7])
    assert [text.get_text() for text in axis.get_xticklabels()] == ["16", "32"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("length", "test exact match")
    assert len(axis.collections) == 4  # intervals


def test_slices_against_a_slice_with_a_panel_for_each_value(
    figures: list[Any], tmp_path: Path
) -> None:
    """`length` is a factor and a slice: where panels have one length each, x is the slice."""
    spec = Figure("slices", x="length", y="token_accuracy", lines="mode", panels="length")
    draw_record(grid_record(figures=[spec]), tmp_path / "a.png")
    short, long = axes(figures[0])
    assert (short.get_title(), long.get_title()) == ("length 16", "length 32")
    line = short.get_lines()[0]
    assert line.get_label() == "ENTP"
    assert list(line.get_xdata()) == [1.0, 2.0]


def test_several_figures_stand_one_above_the_other(figures: list[Any], tmp_path: Path) -> None:
    kinds = [
        Figure("grid", x="length", y="exact_match", lines=("mode", "layers")),
        Figure("bars", y=("exact_match", "loss"), where={"length": [16]}),
    ]
    draw_record(grid_record(figures=kinds), tmp_path / "a.png")
    above, below = figures[0].subfigs
    (heat,) = above.axes
    assert [text.get_text() for text in heat.texts][:2] == ["0.2", "0.1"]
    assert heat.get_yticklabels()[0].get_text() == "ENTP, layers 2"
    exact, loss = below.axes
    assert [bar.get_width() for bar in exact.patches] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert loss.get_xlabel() == "test loss"


def test_darker_is_later_and_modes_keep_their_colours() -> None:
    styles = line_styles([(mode, n) for mode in ("ENTP", "decoder") for n in (1, 2, 12)])
    for mode, channel in (("ENTP", 2), ("decoder", 0)):
        colours = [style["color"][:3] for key, style in styles.items() if key[0] == mode]
        assert all(max(colour) == colour[channel] for colour in colours)
        assert all(sum(later) < sum(colour) for colour, later in pairwise(colours))
    assert len({style["marker"] for style in styles.values()}) == 3
    assert line_styles([("mine",)])[("mine",)]["color"]
    many = line_styles([(mode,) for mode in ("ENTP", *map(str, range(7)), "decoder")])
    assert len({str(style["color"]) for style in many.values()}) == 9
    assert (many[("ENTP",)]["color"], many[("decoder",)]["color"]) == ("C0", "C1")
    assert len({str(style) for style in arm_colours([str(n) for n in range(30)]).values()}) == 30


def test_dollars_are_no_formula(tmp_path: Path) -> None:
    arm = arm_record(5, mode="$x^$")
    spec = Figure("slices", x="length", y="token_accuracy", lines="mode")
    bars = Figure("bars", y="loss")
    record = make_record({"$x^$": arm}, title="$_$", figures=[bars, spec])
    assert draw_record(record, tmp_path / "a.png")


def test_every_kind_is_drawn_of_a_record_with_gaps(tmp_path: Path) -> None:
    """Arms without runs, without a test, without the factors that lines are made of."""
    arms = {
        "a": arm_record(5, None, mode="x", length=3),
        "b": arm_record(mode="y"),
        "c": arm_record(None, other=1),
    }
    kinds = [
        Figure("curves", y="loss", lines="mode"),
        Figure("slices", x="length", y="exact_match", lines="mode"),
        Figure("grid", x="length", y="exact_match", lines="mode"),
        Figure("bars", y="exact_match"),
    ]
    assert draw_record(make_record(arms, figures=kinds), tmp_path / "a.png")


def test_benchmarks_have_a_panel_for_every_measure(figures: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    assert bench.draw_sections(path) == "no figure"
    record_section(path, "generate", generation())
    assert bench.draw_sections(path) == f"figure: {path.with_suffix('.png')}"
    record_section(path, "step", steps(2.0))
    record_section(path, "scaling", growth())
    bench.draw_sections(path)
    assert [len(figure.axes) for figure in figures] == [1, 6]
    times, *_, memory = figures[1].axes
    assert [bar.get_height() for bar in times.patches] == pytest.approx([500, 500, 10])
    assert memory.get_lines()[0].get_ydata()[-1] == 32


def test_summary_shows_what_the_records_hold(figures: list[Any], tmp_path: Path) -> None:
    records = list(find_records(RESULTS).values())
    assert draw_summary(RESULTS, records, tmp_path / "a.png")
    minutes, reading, sums, longer, in_context, speeds = figures[0].axes
    count3 = next(record for record in records if record.recipe == "count3")
    run = count3.arms["ENTP medium, curriculum"].runs[0]
    shown = [xy(line) for line in minutes.get_lines()]
    times = [point.seconds for point in run.curve]
    assert (times, [point.values["exact_match"] for point in run.curve]) in shown
    speed = read_sections(RESULTS / "engine_speed.json")["step"]
    loop = bench.step_seconds(speed, "entp reference")
    assert loop is not None
    authors = count3.authors_curves["ENTP medium"]
    assert minutes.get_lines()[-1].get_xdata()[-1] == 150_000 * loop
    assert f"reference loop: {loop:.2f} s a step" in minutes.get_lines()[-1].get_label()
    assert reading.get_xlim() == (0, authors.sequences[-1] / 1e6)
    names = [text.get_text() for text in reading.get_legend().get_texts()]
    assert "decoder medium, matched steps" in names
    assert "ENTP medium, curriculum" not in names
    samples = next(record for record in records if record.recipe == "addition-samples")
    arm = samples.arms["ENTP small, reversed, examples 2500"]
    values = values_of(samples, arm, "exact_match")
    ours, paper = (xy(line) for line in sums.get_lines()[:2])
    assert ours[1][ours[0].index(2500)] == pytest.approx(sum(values) / len(values))
    assert paper[1][paper[0].index(2500)] == arm.paper["exact_match"].value
    assert sums.get_title().endswith(f", {len(values)} seeds")
    for panel, last in ((longer, 20), (in_context, 40)):
        assert [line.get_label() for line in panel.get_lines()] == ["ENTP", "decoder"]
        assert all(line.get_xdata()[-1] == last for line in panel.get_lines())
    kernels = [rows["entp triton"] for rows in bench.whole_shapes(speed).values()]
    assert [text.get_text() for text in speeds.texts] == [f"{row['ratio']:.0f}x" for row in kernels]


def test_summary_has_no_panel_for_what_is_not_there(figures: list[Any], tmp_path: Path) -> None:
    assert not draw_summary(tmp_path, [], tmp_path / "a.png")
    count3 = read_record(RESULTS / "count3.json")
    arms = {"ENTP medium, curriculum": count3.arms["ENTP medium, curriculum"]}
    few = count3.model_copy(update={"arms": arms})
    assert draw_summary(tmp_path, [few], tmp_path / "a.png")
    (minutes,) = figures[0].axes
    assert "learning Count3" in minutes.get_title()


def test_test_of_one_metric_is_drawn_alone(figures: list[Any], tmp_path: Path) -> None:
    run = run_record(test=run_test(3))
    record = make_record({"a": arm_record(runs=[run])}, figures=[Figure("bars", y="exact_match")])
    draw_record(record, tmp_path / "a.png")
    assert len(axes(figures[0])) == 1 < len(METRICS)


def digits_record(**changes: Any) -> Record:
    """Exact match by digits of two sources, and the authors' of one."""
    run = sourced_run(test={"11": 50, "12": 20}, last={"11": 40, "12": 10})
    arm = arm_record(runs=[run], mode="ENTP")
    values = {"12": 0.53, "11": 0.94, "13": 0.13}
    arm.authors.append(SliceValues("exact_match", "digits", values, "last", "x"))
    return make_record({"a": arm}, metrics=DIGITS, **changes)


@pytest.mark.parametrize(
    ("source", "ours", "label"),
    [("test", [0.5, 0.2], "test exact match"), ("last", [0.4, 0.1], "(last checkpoint)")],
)
def test_slices_are_of_their_source_beside_the_authors_values_in_grey(
    source: Source, ours: list[float], label: str, figures: list[Any], tmp_path: Path
) -> None:
    spec = Figure("slices", x="digits", y="exact_match", lines="mode", source=source)
    draw_record(digits_record(figures=[spec]), tmp_path / "a.png")
    (axis,) = axes(figures[0])
    first, *authors = axis.get_lines()
    assert xy(first) == ([11.0, 12.0], ours)
    assert axis.get_ylabel().endswith(label)
    assert [text.get_text() for text in axis.get_xticklabels()] == ["11", "12"]
    told = [(line.get_label(), line.get_color(), xy(line)) for line in authors]
    grey = ("authors: ENTP", "0.6", ([11.0, 12.0, 13.0], [0.94, 0.53, 0.13]))
    assert told == ([grey] if source == "last" else [])


def test_papers_values_against_a_factor_are_dotted(figures: list[Any], tmp_path: Path) -> None:
    arms = {str(n): arm_record(n // 500, mode="ENTP", examples=n) for n in (20_000, 1_250)}
    for n, arm in zip((20_000, 1_250), arms.values(), strict=True):
        arm.paper["exact_match"] = PaperValue(n / 40_000, "results.csv")
    spec = Figure("slices", x="examples", y="exact_match", lines="mode")
    draw_record(make_record(arms, figures=[spec]), tmp_path / "a.png")
    (axis,) = axes(figures[0])
    ours, paper = axis.get_lines()
    assert xy(ours) == ([1250, 20_000], [0.02, 0.4])
    assert xy(paper) == ([1250, 20_000], [0.03125, 0.5])
    assert (paper.get_linestyle(), paper.get_color()) == (":", ours.get_color())
    assert axis.get_xscale() == "log"


def pairs_record(count: int, **spec: Any) -> Record:
    """Arms with exact match by pairs of digits, and one without."""
    bins = {"1x1": 90, "1x2": 80, "11x2": 10, "other": 5}
    arms = {
        f"arm {n}": arm_record(runs=[sourced_run(test=bins, last={"2x3": 7})], number=n)
        for n in range(count)
    }
    arms["idle"] = arm_record(number=99)
    figure = Figure("grid", x="digits", y="exact_match", **spec)
    return make_record(arms, metrics=DIGITS, figures=[figure])


def test_grid_of_pairs_has_a_panel_for_every_arm(figures: list[Any], tmp_path: Path) -> None:
    draw_record(pairs_record(2), tmp_path / "a.png")
    one, other, bar = axes(figures[0])
    assert [axis.get_title() for axis in (one, other)] == ["arm 0", "arm 1"]
    (image,) = one.get_images()
    cells = image.get_array()
    assert cells.shape == (2, 2)
    assert cells.filled(-1).tolist() == [[0.9, 0.8], [-1, 0.1]]
    assert image.get_clim() == (0, 1)
    assert [text.get_text() for text in one.get_xticklabels()] == ["1", "2"]
    assert [text.get_text() for text in one.get_yticklabels()] == ["1", "11"]
    assert [text.get_text() for text in one.texts] == ["0.9", "0.8", "0.1"]
    assert bar.get_ylabel() == "test exact match"


def test_grids_of_pairs_stand_four_in_a_row(figures: list[Any], tmp_path: Path) -> None:
    draw_record(pairs_record(6, where={"number": [0, 1, 2, 3, 4]}), tmp_path / "a.png")
    shown = [axis.get_title() for axis in axes(figures[0]) if axis.get_images()]
    assert shown == [f"arm {n}" for n in range(5)]
    assert figures[0].get_size_inches().tolist() == pytest.approx([1 + 4.3 * 4, 2 * 4.4])


def test_grid_of_pairs_is_of_its_source(figures: list[Any], tmp_path: Path) -> None:
    draw_record(pairs_record(1, source="last"), tmp_path / "a.png")
    axis, bar = axes(figures[0])
    assert [text.get_text() for text in axis.texts] == ["0.07"]
    assert bar.get_ylabel() == "test exact match\n(last checkpoint)"


def test_grid_of_pairs_that_nothing_has_is_empty(tmp_path: Path) -> None:
    assert draw_record(pairs_record(1, source="best"), tmp_path / "a.png")
