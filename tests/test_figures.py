"""A picture is on disk whole, or as it was before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from entp.bench import picture
from entp.config_json import run_from_json
from entp.demo import Side, demo_run
from entp.demo import draw as draw_demo
from entp.experiments.pictures import draw_curves, draw_depth
from entp.experiments.recipe import find_recipe
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
    recipe, found = find_recipe("count3"), read("count3")
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
        ran = {label: arm for label, arm in found["arms"].items() if arm.get("runs")}
        for run in (run for arm in ran.values() for run in arm["runs"]):
            points = [row["step"] / 1000 for row in run["curve"]], [row[metric] for row in run["curve"]]
            assert points in [(x, y) for _, x, y in lines]
        flat = [y[0] for _, x, y in lines if x == [0, 1]]  # over the whole width: the paper's values of arms that ran
        assert flat == [arm["paper"][metric]["value"] for arm in ran.values() if metric in arm["paper"]]
    names = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert names == [*(f"authors: {label}" for label in recipe.curves), *(label for label in recipe.runs if label in ran)]


def test_depths_are_drawn_by_length_and_layers(figures: list[Any], tmp_path: Path) -> None:
    found = read("count3-depth")
    draw_depth(found, tmp_path / "a.png")
    above, below = figures[0].subfigs
    arms = {tuple(label.split(", ")): arm for label, arm in found["arms"].items() if arm.get("fresh")}
    lengths = sorted({int(integers.split()[0]) for _, _, integers in arms})
    for panel, metric in zip(above.axes, ("token_accuracy", "sequence_accuracy"), strict=True):
        for line in panel.get_lines():
            mode, layers = line.get_label().split(", ")
            mine = {n: arms.get((mode, f"{layers.split()[0]} layers", f"{n} integers")) for n in lengths}
            want = {n: arm["fresh"][metric] for n, arm in mine.items() if arm}
            assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == want
            assert list(line.get_xdata()) == sorted(want)
    inside, learning = below.axes[: len(lengths)], below.axes[len(lengths) :]
    for n, first, second in zip(lengths, inside, learning, strict=True):
        runs = [arm["runs"][0] for (_, _, integers), arm in arms.items() if integers == f"{n} integers"]
        assert first.get_title() == f"{n} integers"
        assert [list(line.get_ydata()) for line in first.get_lines()] == [[*run["final"]["by_length"].values()] for run in runs]
        assert [line.get_xdata()[-1] for line in second.get_lines()] == [run["curve"][-1]["step"] / 1000 for run in runs]


def test_the_summary_is_two_by_two_and_counts_sequences_in_millions(figures: list[Any], tmp_path: Path) -> None:
    """Of the recorded files only some arms, and one run of each."""
    labels = {
        "ENTP medium, fast": "ENTP, here",
        "decoder medium, as many steps": "decoder, ENTP's settings",
        "decoder medium, as many sequences": "decoder, settings of its own",
        "decoder medium, fast": "decoder, settings for longer",
        "ENTP, 2 layers, 16 integers": "",
    }
    for name in ("count3", "count3-depth", "engine_speed"):
        found = read(name)
        if "arms" in found:
            arms = {label: arm for label, arm in found["arms"].items() if label in labels and arm.get("runs")}
            found["arms"] = {label: {**arm, "runs": arm["runs"][:1]} for label, arm in arms.items()}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert draw_summary(tmp_path, tmp_path / "a.png")
    _, reading, _, _ = figures[0].axes
    assert reading.get_subplotspec().get_geometry()[:2] == (2, 2)
    *ours, authors = reading.get_lines()
    assert authors.get_xdata()[-1] == 150_000 * 64 / 1e6  # batches of 64
    assert reading.get_xlim() == (0, authors.get_xdata()[-1])
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
