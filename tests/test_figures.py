"""A picture is on disk whole, or as it was before."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from entp.cli.demo import Side, demo_run
from entp.cli.demo import draw as draw_demo
from entp.cli.main import main
from entp.config import model_for
from entp.config.json import run_from_json
from entp.experiments.recipe import find_recipe
from entp.experiments.records import collect
from entp.model import Transformer
from entp.report import bench as picture
from entp.report.curves import draw_curves, draw_depth
from entp.report.style import save_figure
from entp.report.summary import draw_summary

RESULTS = Path(__file__).parent.parent / "results"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def demo_side() -> Side:
    run = demo_run("entp")
    return Side(
        "ENTP", run, Transformer(run.model), {}, seconds=1.0, flops=1e9, curve=[(1, 0.0), (2, 0.5)]
    )


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


def test_curves_are_those_of_every_seed_beside_the_authors_and_the_papers_values(
    figures: list[Any], tmp_path: Path
) -> None:
    """Of five curves of the authors none is lost; an arm that did not run, or is none of the
    recipe's, is not there."""
    recipe, found = find_recipe("count3"), read("count3")
    recipe = replace(recipe, curves={**recipe.curves, "a fifth": recipe.curves["ENTP medium"]})
    found["arms"] = {"not the recipe's": found["arms"]["ENTP medium"], **found["arms"]}
    del found["arms"]["decoder small"]["runs"]
    draw_curves(recipe, found, tmp_path / "a.png")
    drawn = {panel.get_ylabel(): panel for panel in figures[0].axes}
    assert list(drawn) == [
        "validation loss",
        "validation token accuracy",
        "validation sequence accuracy",
    ]
    for name, panel in drawn.items():
        metric = name.removeprefix("validation ").replace(" ", "_")
        lines = [
            (line.get_label(), list(line.get_xdata()), list(line.get_ydata()))
            for line in panel.get_lines()
        ]
        for label, curves in recipe.curves.items():
            assert (
                f"authors: {label}",
                *(
                    [*axis]
                    for axis in zip(*((s / 1000, v) for s, v in curves[metric]), strict=True)
                ),
            ) in lines
        ran = {
            label: arm
            for label, arm in found["arms"].items()
            if label in recipe.runs and arm.get("runs")
        }
        for run in (run for arm in ran.values() for run in arm["runs"]):
            points = (
                [row["step"] / 1000 for row in run["curve"]],
                [row[metric] for row in run["curve"]],
            )
            assert points in [(x, y) for _, x, y in lines]
        across = [
            line for line in panel.get_lines() if list(line.get_xdata()) == [0, 1]
        ]  # the paper's values of arms that ran
        assert {line.get_linestyle() for line in across} <= {":"}
        told = [arm["paper"][metric]["value"] for arm in ran.values() if metric in arm["paper"]]
        assert [line.get_ydata()[0] for line in across] == told
        assert panel.get_xlabel() == "optimizer steps (thousands), of 64 to 512 sequences"
        assert panel.get_yscale() == ("log" if metric == "loss" else "linear")
        low, high = panel.get_ylim()
        assert all(low < value < high for _, _, y in lines for value in y)
        assert metric == "loss" or (low < 0 and 1 < high < 1.1)
    colours = {line.get_label(): line.get_color() for line in drawn["validation loss"].get_lines()}
    assert {colour for label, colour in colours.items() if label.startswith("authors: ")} == {"0.6"}
    assert len({colours[label] for label in ran}) == len(ran)
    grey = [
        line
        for line in drawn["validation loss"].get_lines()
        if line.get_label().startswith("authors: ")
    ]
    assert {"-", "--", "-."} <= {line.get_linestyle() for line in grey}
    assert figures[0].get_suptitle().endswith(" (dotted: the paper's value)")
    names = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert names == [
        *(f"authors: {label}" for label in recipe.curves),
        *(label for label in recipe.runs if label in ran),
    ]


@pytest.mark.parametrize(
    ("label", "sizes"),
    [
        ("decoder medium", ""),
        ("ENTP medium, fast", ", of 64 to 256 sequences"),
        ("ENTP medium, decoder first", ", of 256 to 512 sequences"),
    ],
)
def test_steps_of_unequal_batches_say_so(
    label: str, sizes: str, figures: list[Any], tmp_path: Path
) -> None:
    found = read("count3")
    draw_curves(
        find_recipe("count3"), {**found, "arms": {label: found["arms"][label]}}, tmp_path / "a.png"
    )
    assert {panel.get_xlabel() for panel in figures[0].axes} == {
        f"optimizer steps (thousands){sizes}"
    }


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
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "count3-depth.json",
        "match3.json",
        "page.md",
    ]
    assert "![" not in (tmp_path / "page.md").read_text()  # no link to a picture that is not there


def test_depths_are_drawn_by_length_and_layers(figures: list[Any], tmp_path: Path) -> None:
    found = read("count3-depth")
    del found["arms"]["decoder, 3 layers, 24 integers"]["runs"][0]["final"][
        "by_length"
    ]  # another loss has none
    for label, arm in found["arms"].items():
        if label.endswith(", 16 integers"):
            right = arm["runs"][0]["final"]["by_length"]
            arm["runs"][0]["final"]["by_length"] = {n: right[n] for n in ("14", "15")}
    draw_depth(found, tmp_path / "a.png")
    above, below = figures[0].subfigs
    arms = {
        tuple(label.split(", ")): arm for label, arm in found["arms"].items() if arm.get("fresh")
    }
    lengths = sorted({int(integers.split()[0]) for _, _, integers in arms})
    for panel, metric in zip(above.axes, ("token_accuracy", "sequence_accuracy"), strict=True):
        assert panel.get_xlabel() == "integers in a sequence"
        assert panel.get_ylabel() == f"{metric.replace('_', ' ')} on fresh sequences"
        assert list(panel.get_xticks()) == lengths
        assert panel.get_ylim() == (-0.03, 1.03)
        for line in panel.get_lines():
            mode, layers = line.get_label().split(", ")
            assert layers.endswith("layer" if layers.startswith("1 ") else "layers")
            mine = {
                n: arms.get((mode, f"{layers.split()[0]} layers", f"{n} integers")) for n in lengths
            }
            want = {n: arm["fresh"][metric] for n, arm in mine.items() if arm}
            assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == want
            assert list(line.get_xdata()) == sorted(want)
        for mode, channel in (("ENTP", 2), ("decoder", 0)):  # blues, oranges
            colours = [
                line.get_color()[:3]
                for line in panel.get_lines()
                if line.get_label().startswith(mode)
            ]
            assert all(max(colour) == colour[channel] for colour in colours)
            assert all(
                sum(deeper) < sum(colour) for colour, deeper in pairwise(colours)
            )  # deeper is darker
            markers = [
                line.get_marker() for line in panel.get_lines() if line.get_label().startswith(mode)
            ]
            assert len({*markers}) == len(markers)
    inside, learning = below.axes[: len(lengths)], below.axes[len(lengths) :]
    for n, first, second in zip(lengths, inside, learning, strict=True):
        runs = [
            arm["runs"][0] for (_, _, integers), arm in arms.items() if integers == f"{n} integers"
        ]
        assert first.get_title() == f"{n} integers"
        assert (first.get_xlabel(), second.get_xlabel()) == (
            "integers read",
            "optimizer steps (thousands)",
        )
        for run, by_length, loss in zip(runs, first.get_lines(), second.get_lines(), strict=True):
            right = {int(read): share for read, share in run["final"].get("by_length", {}).items()}
            assert dict(zip(by_length.get_xdata(), by_length.get_ydata(), strict=True)) == right
            assert list(loss.get_xdata()) == [point["step"] / 1000 for point in run["curve"]]
            assert list(loss.get_ydata()) == [point["loss"] for point in run["curve"]]
        assert {line.get_marker() for line in (*first.get_lines(), *second.get_lines())} == {
            "None"
        }  # too many points
        assert all(
            tick == round(tick) for tick in first.get_xticks()
        )  # there is no half an integer
        assert first.get_ylim() == (-0.03, 1.03)
        assert second.get_ylim() == learning[0].get_ylim()
    assert learning[0].get_ylim()[0] == 0
    assert (inside[0].get_ylabel(), learning[0].get_ylabel()) == (
        "share of right answers",
        "validation loss",
    )
    names = [text.get_text() for text in above.axes[-1].get_legend().get_texts()]
    assert names == [line.get_label() for line in above.axes[0].get_lines()]
    assert figures[0].get_suptitle() == found["title"]


def test_the_summary_is_two_by_two_and_counts_sequences_in_millions(
    figures: list[Any], tmp_path: Path
) -> None:
    """Of the recorded files only some arms."""
    labels = {
        "ENTP medium, fast": "ENTP, here",
        "decoder medium, as many steps": "decoder, ENTP's settings",
        "decoder medium, as many sequences": "decoder, settings of its own",
        "decoder medium, fast": "decoder, for longer (33 million)",  # two seeds: 32.46 and 32.65
        "decoder, 3 layers, 64 integers": "",
    }
    for name in ("count3", "count3-depth", "engine_speed"):
        found = read(name)
        if "arms" in found:
            found["arms"] = {label: arm for label, arm in found["arms"].items() if label in labels}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert draw_summary(tmp_path, tmp_path / "a.png")
    _, reading, depths, _ = figures[0].axes
    assert reading.get_subplotspec().get_geometry()[:2] == (2, 2)
    *ours, authors = reading.get_lines()
    assert authors.get_xdata()[-1] == 150_000 * 64 / 1e6  # batches of 64
    assert reading.get_xlim() == (0, authors.get_xdata()[-1])
    assert reading.get_xlabel() == "sequences read (millions)"
    assert "without a decoder first" in reading.get_title()
    (depth,) = depths.get_lines()
    fresh = read("count3-depth")["arms"]["decoder, 3 layers, 64 integers"]["fresh"]
    assert (list(depth.get_xdata()), list(depth.get_ydata())) == (
        [64],
        [fresh["sequence_accuracy"]],
    )
    arms = read("count3")["arms"]
    ran = {name: arms[label]["runs"] for label, name in labels.items() if name}
    names = [text.get_text() for text in reading.get_legend().get_texts()]
    assert names == [*ran, "ENTP, the authors' run"]  # once for all seeds
    lines = iter(ours)
    styles = [
        {(line.get_color(), line.get_linestyle()) for line in islice(lines, len(runs))}
        for runs in ran.values()
    ]
    assert len(set.union(*styles)) == len(styles)
    assert not any(
        run["settings"].get("start", {}).get("steps") for runs in ran.values() for run in runs
    )
    for line, run in zip(ours, (run for runs in ran.values() for run in runs), strict=True):
        assert list(line.get_ydata()) == [point["sequence_accuracy"] for point in run["curve"]]
        assert (
            line.get_xdata()[-1]
            == run_from_json(run["settings"], "").sequences_by(run["curve"][-1]["step"]) / 1e6
        )


def test_titles_of_the_summary_are_true_of_what_is_shown(
    figures: list[Any], tmp_path: Path
) -> None:
    """And three panels are one row: here nothing was read without a decoder first."""
    kept = {
        "count3": "ENTP medium, decoder first",
        "count3-depth": "decoder, 3 layers, 64 integers",
    }
    found = {name: read(name) for name in (*kept, "engine_speed")}
    for name, data in found.items():
        data |= {"arms": {kept[name]: data["arms"][kept[name]]}} if name in kept else {}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    assert draw_summary(tmp_path, tmp_path / "a.png")
    learning, depths, speeds = figures[0].axes
    assert {panel.get_subplotspec().get_geometry()[:2] for panel in figures[0].axes} == {(1, 3)}
    slow, short = (
        run_from_json(found[name]["arms"][label]["runs"][0]["settings"], "")
        for name, label in kept.items()
    )
    assert (slow.model, slow.task.length) == (model_for(slow.task, "medium"), 64)  # type: ignore[attr-defined]
    assert "(64 integers, medium)" in learning.get_title()
    assert (short.model.width, short.train.max_seconds) == (192, 60)
    assert "one minute each, width 192" in depths.get_title()
    assert found["engine_speed"]["step"]["environment"]["device"] in speeds.get_title()
    device = found["count3"]["arms"][kept["count3"]]["runs"][0]["environment"]["device"]
    assert (learning.get_xlabel(), learning.get_xscale()) == (
        f"minutes of training on one {device}",
        "log",
    )
    assert (depths.get_xlabel(), list(depths.get_xticks())) == ("integers in a sequence", [64])
    assert (learning.get_ylabel(), depths.get_ylabel()) == (
        "validation sequences right (share)",
        "fresh sequences right (share)",
    )
    assert all(panel.get_legend() for panel in figures[0].axes)


def test_shapes_that_some_side_did_not_run_are_left_out(figures: list[Any], tmp_path: Path) -> None:
    speed = read("engine_speed")
    first, *others = speed["step"]["shapes"]
    first["steps"] = [row for row in first["steps"] if row["name"] != "decoder-triton"]
    (tmp_path / "engine_speed.json").write_text(json.dumps(speed))
    assert draw_summary(tmp_path, tmp_path / "a.png")
    assert [text.get_text() for text in figures[0].axes[0].get_xticklabels()] == [
        shape["name"] for shape in others
    ]


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml"), ("a", b"\x89PNG")],
)
def test_the_suffix_says_the_format(name: str, start: bytes, tmp_path: Path) -> None:
    save_figure(Figure(), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
