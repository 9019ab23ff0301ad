"""A picture is on disk whole, or as it was before."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from entp.bench import picture
from entp.cli import main
from entp.config_json import run_from_json
from entp.demo import Side, demo_run
from entp.demo import draw as draw_demo
from entp.experiments.pictures import draw_curves, draw_depth
from entp.experiments.recipe import find_recipe
from entp.experiments.records import collect
from entp.experiments.summary import draw_summary
from entp.figures import save_figure
from entp.model import Transformer

RESULTS = Path(__file__).parent.parent / "results"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def demo_side() -> Side:
    run = demo_run("entp")
    return Side("ENTP", run, Transformer(run.model), {}, seconds=1.0, flops=1e9, curve=[(1, 0.0), (2, 0.5)])


DRAWN: dict[str, Callable[[Path], object]] = {
    "demo": lambda path: draw_demo([demo_side()], path),
    "curves": lambda path: draw_curves(find_recipe("match3"), read("match3"), path),
    "depth": lambda path: draw_depth(read("count3-depth"), path),
    "summary": lambda path: draw_summary(RESULTS, path),
    "bench": lambda path: picture.draw(read("engine_speed"), path),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN.keys())
def test_a_picture_that_fails_leaves_the_old_one(
    draw: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(self: Figure, target: Any, **options: Any) -> None:
        data = b"\x89PNG, half of it"
        target.write_bytes(data) if isinstance(target, Path) else target.write(data)
        raise OSError("no space left")

    monkeypatch.setattr(Figure, "savefig", half)
    (tmp_path / "old.png").write_bytes(b"old")
    with pytest.raises(OSError, match="no space left"):
        draw(tmp_path / "old.png")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"old.png": b"old"}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be saved, to look at their axes."""
    seen: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *words, **options: seen.append(self))
    return seen


def test_curves_are_those_of_every_seed_beside_the_authors_and_the_papers_values(figures: list[Any], tmp_path: Path) -> None:
    """Of five curves of the authors none is lost; an arm that did not run, or is none of the recipe's, is not there."""
    recipe, found = find_recipe("count3"), read("count3")
    recipe = replace(recipe, curves={**recipe.curves, "a fifth": recipe.curves["ENTP medium"]})
    found["arms"] = {"not the recipe's": found["arms"]["ENTP medium"], **found["arms"]}
    del found["arms"]["decoder small"]["runs"]
    draw_curves(recipe, found, tmp_path / "a.png")
    drawn = {panel.get_ylabel(): panel for panel in figures[0].axes}
    assert list(drawn) == ["validation loss", "validation token accuracy", "validation sequence accuracy"]
    for name, panel in drawn.items():
        metric = name.removeprefix("validation ").replace(" ", "_")
        lines = [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in panel.get_lines()]
        for label, curves in recipe.curves.items():
            assert (
                f"authors: {label}",
                *([*axis] for axis in zip(*((s / 1000, v) for s, v in curves[metric]), strict=True)),
            ) in lines
        ran = {label: arm for label, arm in found["arms"].items() if label in recipe.runs and arm.get("runs")}
        for run in (run for arm in ran.values() for run in arm["runs"]):
            points = [row["step"] / 1000 for row in run["curve"]], [row[metric] for row in run["curve"]]
            assert points in [(x, y) for _, x, y in lines]
        flat = [y[0] for _, x, y in lines if x == [0, 1]]  # over the whole width: the paper's values of arms that ran
        assert flat == [arm["paper"][metric]["value"] for arm in ran.values() if metric in arm["paper"]]
        assert panel.get_xlabel() == "optimizer steps (thousands), of 64 to 512 sequences"
        assert panel.get_yscale() == ("log" if metric == "loss" else "linear")
        low, high = panel.get_ylim()
        assert all(low < value < high for _, _, y in lines for value in y)
        assert metric == "loss" or (low < 0 and 1 < high < 1.1)
    colours = {line.get_label(): line.get_color() for line in drawn["validation loss"].get_lines()}
    assert {colour for label, colour in colours.items() if label.startswith("authors: ")} == {"0.6"}
    assert len({colours[label] for label in ran}) == len(ran)
    assert figures[0].get_suptitle().endswith(" (dotted: the paper's value)")
    names = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert names == [*(f"authors: {label}" for label in recipe.curves), *(label for label in recipe.runs if label in ran)]


def test_before_anything_ran_there_is_no_legend_no_value_of_the_paper_and_no_picture_by_depth(
    figures: list[Any], tmp_path: Path
) -> None:
    match3, depth = find_recipe("match3"), find_recipe("count3-depth")
    assert match3.paper
    draw_curves(match3, collect(match3, tmp_path), tmp_path / "a.png")
    draw_depth(collect(depth, tmp_path), tmp_path / "b.png")
    (curves,) = figures
    assert (curves.get_suptitle(), curves.legends) == (match3.title, [])
    assert not any(panel.get_lines() for panel in curves.axes)


def test_without_matplotlib_a_report_is_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("match3", "count3-depth"):
        (tmp_path / f"{name}.json").write_bytes((RESULTS / f"{name}.json").read_bytes())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", f"--results={tmp_path}", f"--out={tmp_path / 'page.md'}"]) == 0
    told = capsys.readouterr()
    assert told.out == f"page: {tmp_path / 'page.md'}\n"
    assert "no picture: pip install 'entp[plot]' to draw one." in told.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["count3-depth.json", "match3.json", "page.md"]
    assert "![" not in (tmp_path / "page.md").read_text()  # no link to a picture that is not there


def test_depths_are_drawn_by_length_and_layers(figures: list[Any], tmp_path: Path) -> None:
    found = read("count3-depth")
    del found["arms"]["decoder, 3 layers, 24 integers"]["runs"][0]["final"]["by_length"]  # another loss has none
    draw_depth(found, tmp_path / "a.png")
    above, below = figures[0].subfigs
    arms = {tuple(label.split(", ")): arm for label, arm in found["arms"].items() if arm.get("fresh")}
    lengths = sorted({int(integers.split()[0]) for _, _, integers in arms})
    for panel, metric in zip(above.axes, ("token_accuracy", "sequence_accuracy"), strict=True):
        assert panel.get_xlabel() == "integers in a sequence"
        assert panel.get_ylabel() == f"{metric.replace('_', ' ')} on fresh sequences"
        for line in panel.get_lines():
            mode, layers = line.get_label().split(", ")
            assert layers.endswith("layer" if layers.startswith("1 ") else "layers")
            mine = {n: arms.get((mode, f"{layers.split()[0]} layers", f"{n} integers")) for n in lengths}
            want = {n: arm["fresh"][metric] for n, arm in mine.items() if arm}
            assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == want
            assert list(line.get_xdata()) == sorted(want)
        for mode, channel in (("ENTP", 2), ("decoder", 0)):  # blues, oranges
            colours = [line.get_color()[:3] for line in panel.get_lines() if line.get_label().startswith(mode)]
            assert all(max(colour) == colour[channel] for colour in colours)
            assert all(sum(deeper) < sum(colour) for colour, deeper in pairwise(colours))  # deeper is darker
            markers = [line.get_marker() for line in panel.get_lines() if line.get_label().startswith(mode)]
            assert len({*markers}) == len(markers)
    inside, learning = below.axes[: len(lengths)], below.axes[len(lengths) :]
    for n, first, second in zip(lengths, inside, learning, strict=True):
        runs = [arm["runs"][0] for (_, _, integers), arm in arms.items() if integers == f"{n} integers"]
        assert first.get_title() == f"{n} integers"
        assert (first.get_xlabel(), second.get_xlabel()) == ("integers read", "optimizer steps (thousands)")
        for run, by_length, loss in zip(runs, first.get_lines(), second.get_lines(), strict=True):
            right = {int(read): share for read, share in run["final"].get("by_length", {}).items()}
            assert dict(zip(by_length.get_xdata(), by_length.get_ydata(), strict=True)) == right
            assert list(loss.get_xdata()) == [point["step"] / 1000 for point in run["curve"]]
            assert list(loss.get_ydata()) == [point["loss"] for point in run["curve"]]
    assert (inside[0].get_ylabel(), learning[0].get_ylabel()) == ("share of right answers", "validation loss")


def test_the_summary_is_two_by_two_and_counts_sequences_in_millions(figures: list[Any], tmp_path: Path) -> None:
    """Of the recorded files only some arms, and one run of each."""
    labels = {
        "ENTP medium, fast": "ENTP, here",
        "decoder medium, as many steps": "decoder, ENTP's settings",
        "decoder medium, as many sequences": "decoder, settings of its own",
        "decoder medium, fast": "decoder, for longer (32 million)",
        "decoder, 3 layers, 64 integers": "",
    }
    for name in ("count3", "count3-depth", "engine_speed"):
        found = read(name)
        if "arms" in found:
            arms = {label: arm for label, arm in found["arms"].items() if label in labels and arm.get("runs")}
            found["arms"] = {label: {**arm, "runs": arm["runs"][:1]} for label, arm in arms.items()}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert draw_summary(tmp_path, tmp_path / "a.png")
    _, reading, depths, _ = figures[0].axes
    assert reading.get_subplotspec().get_geometry()[:2] == (2, 2)
    *ours, authors = reading.get_lines()
    assert authors.get_xdata()[-1] == 150_000 * 64 / 1e6  # batches of 64
    assert reading.get_xlim() == (0, authors.get_xdata()[-1])
    assert reading.get_xlabel() == "sequences read (millions)"
    (depth,) = depths.get_lines()
    fresh = read("count3-depth")["arms"]["decoder, 3 layers, 64 integers"]["fresh"]
    assert (list(depth.get_xdata()), list(depth.get_ydata())) == ([64], [fresh["sequence_accuracy"]])
    arms = read("count3")["arms"]
    ran = {name: arms[label]["runs"][0] for label, name in labels.items() if arms.get(label, {}).get("runs")}
    assert [line.get_label() for line in ours] == list(ran)
    for line, run in zip(ours, ran.values(), strict=True):
        assert list(line.get_ydata()) == [point["sequence_accuracy"] for point in run["curve"]]
        assert line.get_xdata()[-1] == run_from_json(run["settings"], "").sequences_by(run["curve"][-1]["step"]) / 1e6


def test_shapes_that_some_side_did_not_run_are_left_out(figures: list[Any], tmp_path: Path) -> None:
    speed = read("engine_speed")
    first, *others = speed["step"]["shapes"]
    first["steps"] = [row for row in first["steps"] if row["name"] != "decoder-triton"]
    (tmp_path / "engine_speed.json").write_text(json.dumps(speed))
    assert draw_summary(tmp_path, tmp_path / "a.png")
    assert [text.get_text() for text in figures[0].axes[0].get_xticklabels()] == [shape["name"] for shape in others]


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml"), ("a", b"\x89PNG")])
def test_the_suffix_says_the_format(name: str, start: bytes, tmp_path: Path) -> None:
    save_figure(Figure(), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
