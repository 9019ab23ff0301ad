"""`entp report`: the page is made from the files in results/, and is up to date."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from small_runs import entp

from entp.cli.main import main
from entp.experiments import RECIPES
from entp.experiments.paper_curves import COUNT3
from entp.experiments.recipe import find_recipe
from entp.experiments.records import collect, read_results
from entp.report.curves import depth_lines, draw_depth, new_figure
from entp.report.page import page
from entp.report.summary import SIDES, _learning, _speeds, _step, draw_summary

ROOT = Path(__file__).parent.parent
RECORDED = [name for name in RECIPES if (ROOT / "results" / f"{name}.json").is_file()]


def test_the_page_is_that_of_the_files() -> None:
    path = ROOT / "docs" / "results.md"
    assert path.read_text() == page(ROOT / "results", path), "run `entp report`"


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_have_the_settings_of_their_recipe(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "results" / f"{name}.json"
    kept = read_results(find_recipe(name), path)
    assert capsys.readouterr().err == ""
    assert kept
    for run in kept.values():
        assert re.fullmatch(r"[0-9a-f]{40}", run["environment"]["commit"])
        assert run["environment"]["device"]
        assert run["curve"]


def test_decoders_get_the_time_that_entp_took() -> None:
    """The recipe's time for fast decoders follows what is recorded of ENTP after a decoder, the
    faster of the fast ones."""
    arms = json.loads((ROOT / "results" / "count3.json").read_text())["arms"]
    took = max(run["seconds"] for run in arms["ENTP medium, decoder first"]["runs"])
    runs = find_recipe("count3").runs
    for label in ("decoder medium, fast", "prefix decoder medium, fast"):
        assert (runs[label].train.max_seconds or 0) >= took


def test_arms_that_fill_a_grid_are_shown_as_one(tmp_path: Path) -> None:
    found = json.loads((ROOT / "results" / "count3-depth.json").read_text())
    (tmp_path / "results").mkdir()

    def lines() -> list[str]:
        (tmp_path / "results" / "count3-depth.json").write_text(json.dumps(found))
        return page(tmp_path / "results", tmp_path / "page.md").splitlines()

    grid = lines()
    row = (
        next(line for line in grid if line.startswith("| decoder, 3 layers |"))
        .strip("| ")
        .split(" | ")
    )
    for length, cell in zip((16, 24, 32, 48, 64), row[1:], strict=True):
        fresh = found["arms"][f"decoder, 3 layers, {length} integers"]["fresh"]
        assert cell.startswith(f"{fresh['sequence_accuracy']:.3f} (")
        assert cell.endswith(f"tokens {fresh['token_accuracy']:.3f}")
    assert any(line.startswith("Of 2,048 fresh sequences wholly right") for line in grid)
    assert not any(line.startswith("There are only ") for line in grid)
    whole = found["arms"]
    few = [arm["runs"][0] for label, arm in whole.items() if label.endswith(", 16 integers")]
    random = few[0]["settings"]["task"]["prompt_length"]
    for run in few:
        run["settings"]["task"]["prompt_length"] = 4
    (seen,) = [
        line for line in lines() if line.startswith("There are only ")
    ]  # of 24 integers there are many more
    read = sorted(64 * run["steps"] for run in few)
    assert seen.startswith(
        f"There are only 65,536 different sequences of 16 integers, and training read {read[0]:,} "
        f"to {read[-1]:,}: "
    )
    for run in few:
        run["settings"]["task"]["prompt_length"] = random
    found["arms"] = {**whole, "decoder, 3 layers, 48 integers": {"status": "not run", "paper": {}}}
    table = lines()
    assert any(
        line.startswith("| decoder, 3 layers, 32 integers | 1 |") for line in table
    )  # a row per arm
    assert not any(
        "paper" in line for line in table if line.startswith("| arm |")
    )  # which says nothing about these
    found["arms"] = {
        **whole,
        "decoder, 3 layers, 48 integers": {
            **whole["decoder, 3 layers, 48 integers"],
            "status": "half",
        },
    }
    assert any(line.startswith("| decoder, 3 layers, 48 integers (half) | 1 |") for line in lines())
    found["arms"] = {label: arm for label, arm in whole.items() if label.endswith(", 16 integers")}
    assert any(
        line.startswith("| decoder, 3 layers, 16 integers | 1 |") for line in lines()
    )  # one column is no grid


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a tiny run of one arm recorded, as if it were count3's."""
    folder = tmp_path_factory.mktemp("tiny")
    done = entp(
        "reproduce",
        "count3",
        "--tiny",
        "--device=cpu",
        "--only=ENTP medium",
        "--record=all.json",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads((folder / "all.json").read_text()), "recipe": "count3"}


def page_of(found: dict[str, Any], folder: Path) -> str:
    (folder / "count3.json").write_text(json.dumps(found))
    return page(folder, folder / "page.md")


def test_a_row_holds_what_its_arm_measured(tiny: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "count3.json").write_text(json.dumps(tiny))
    told = entp("report", "--out=page.md", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    text = (tmp_path / "page.md").read_text()
    assert "](results/count3.png)" in text
    assert (
        tmp_path / "results" / "count3.png"
    ).stat().st_size > 10_000  # drawn from the file: it was recorded elsewhere
    row = (
        next(line for line in text.splitlines() if line.startswith("| ENTP medium |"))
        .strip("| ")
        .split(" | ")
    )
    arm = tiny["arms"]["ENTP medium"]
    assert row[1:3] == ["1", "60"]
    assert row[4] == "0.991"
    assert float(row[5]) == pytest.approx(arm["ours"]["sequence_accuracy"], abs=5e-5)
    assert row[-3] == f"{arm['ours']['loss']:#.3g}"
    assert row[-2].endswith("n = 64")
    assert row[-1].startswith(f"{arm['fresh']['generated']['right']} of 32 ")
    idle = text.partition("Not run: ")[2].splitlines()[0]
    assert idle.startswith(
        "decoder small; decoder medium; "
    )  # also arms that the file does not name: a recipe may have grown
    assert "prefix decoder medium" in idle
    assert "ENTP medium;" not in idle
    assert "`entp reproduce match3`" in text.partition("Not recorded yet:")[2]


@pytest.mark.parametrize(
    ("value", "cell"),
    [(0.0, "0"), (1.0, "1"), (0.99999, "1.0000"), (0.00001, "0.0000"), (0.25, "0.2500")],
)
def test_0_and_1_are_exact_without_decimals(
    value: float, cell: str, tiny: dict[str, Any], tmp_path: Path
) -> None:
    found = copy.deepcopy(tiny)
    found["arms"]["ENTP medium"]["ours"]["sequence_accuracy"] = value
    assert f" | 0.991 | {cell} | " in page_of(found, tmp_path)


def test_a_page_says_where_its_runs_were_made(tiny: dict[str, Any], tmp_path: Path) -> None:
    found = copy.deepcopy(tiny)
    arm = found["arms"]["ENTP medium"]
    run, text = arm["runs"][0], page_of(found, tmp_path)
    place = run["environment"]
    told = f"torch {place['torch']}; commits {(place['commit'] or 'unknown')[:7]}; {place['date'][:10]}."
    assert f"\nOn {place['device']}; {told}\n" in text
    assert "at a time" not in text
    place["commit"] = None  # a copy of the source that is no checkout
    run["final"]["trained_side_by_side"] = 4
    text = page_of(found, tmp_path)
    assert ", 4 runs at a time; torch" in text
    assert "; commits unknown; " in text
    other = copy.deepcopy(arm)
    other["runs"][0]["final"]["trained_side_by_side"] = 1
    found["arms"]["prefix decoder medium"] = (
        other  # not all arms shared the device: those that did are named
    )
    assert ", 4 runs at a time (ENTP medium); torch" in page_of(found, tmp_path)


def test_seeds_are_told_apart(tiny: dict[str, Any], tmp_path: Path) -> None:
    found = copy.deepcopy(tiny)
    runs = found["arms"]["ENTP medium"]["runs"]
    second = {**runs[0], "seed": 1, "steps": 1060, "seconds": 1e4}
    runs.append({**second, "final": {**second["final"], "sequence_accuracy": 0.29, "n": 100}})
    text = page_of(found, tmp_path)
    assert "| 60 to 1,060 |" in text  # seeds that took different times are not one number
    assert " to 10,000 |" in text
    told = next(
        line
        for line in text.splitlines()
        if line.startswith("ENTP medium, fresh sequences right: seed 0 ")
    )
    assert "; seed 1 0.2900 (0.2101 to 0.3854), " in told
    assert told.endswith(" of 32 alone after 10000 s.")


def test_a_record_in_which_nothing_ran_yet_says_only_that(tmp_path: Path) -> None:
    """As `entp reproduce --record` writes it before the first arm."""
    recipe = find_recipe("match3")
    (tmp_path / "match3.json").write_text(json.dumps(collect(recipe, tmp_path / "runs")))
    section = (
        page(tmp_path, tmp_path / "page.md")
        .partition("## match3")[2]
        .partition("\nNot recorded yet")[0]
    )
    assert section.endswith(f"    entp reproduce match3\n\n\nNot run: {'; '.join(recipe.runs)}.\n")


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "has no results"), ("{", "is not a file of results"), ('{"recipe": "x"}', "of x, not")],
)
def test_what_is_not_a_file_of_results_is_a_sentence(
    content: str | None, told: str, tmp_path: Path
) -> None:
    (tmp_path / "results").mkdir()
    if content is not None:
        (tmp_path / "results" / "match3.json").write_text(content)
    done = entp("report", "--out=page.md", cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    missing = entp("report", "--out=nowhere/page.md", cwd=tmp_path)
    assert missing.returncode == 2
    assert "make nowhere first" in missing.stderr


def test_the_picture_has_a_panel_for_each_file_that_is_there(tmp_path: Path) -> None:
    """Real tiny runs, and the recorded speeds; the axes are read back from the figure's own text."""
    args = ("--tiny", "--device=cpu")
    for name, only in (
        ("count3", "ENTP medium, decoder first"),
        ("count3-depth", "ENTP, 2 layers, 16 integers"),
    ):
        done = entp(
            "reproduce", name, *args, f"--only={only}", f"--record={name}.json", cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    picture = tmp_path / "all.svg"
    assert not draw_summary(tmp_path / "nowhere", picture)
    for name, words in (
        ("count3", ["learning Count3", "ENTP, here", "minutes of training"]),
        ("count3-depth", ["integers in a sequence"]),
        ("engine_speed", ["a training step", "paper's loop", "authors' run"]),
    ):
        found = tmp_path / f"{name}.json"
        folder = tmp_path / "results"
        folder.mkdir(exist_ok=True)
        text = (found if found.exists() else ROOT / "results" / found.name).read_text()
        (folder / found.name).write_text(text.replace(f'"{name}-tiny"', f'"{name}"'))
        matplotlib.rcParams["svg.fonttype"] = "none"
        assert draw_summary(folder, picture)
        assert all(word in picture.read_text() for word in words), words
    assert (
        "sequences read" not in picture.read_text()
    )  # "decoder first" alone says nothing about them
    assert draw_summary(ROOT / "results", picture)
    assert all(
        words in picture.read_text()
        for words in ("sequences read", "decoder, ENTP's settings", "minutes of training")
    )


def test_the_picture_shows_what_the_files_hold() -> None:
    count3, speed = (
        json.loads((ROOT / "results" / f"{name}.json").read_text())
        for name in ("count3", "engine_speed")
    )
    learning, speeds = new_figure(9, 4).subplots(1, 2)
    _learning(learning, count3, 0.5)
    *ours, authors = learning.get_lines()
    fast = [
        arm
        for label, arm in count3["arms"].items()
        if label.endswith((", fast", ", decoder first"))
    ]
    shown = [run for arm in fast for run in arm.get("runs", [])]
    for line, run in zip(ours, shown, strict=True):
        assert line.get_xdata() == pytest.approx([row["seconds"] / 60 for row in run["curve"]])
        assert list(line.get_ydata()) == [row["sequence_accuracy"] for row in run["curve"]]
        started = bool(run["settings"].get("start", {}).get("steps"))
        assert line.get_linestyle() == ("--" if started else "-")
        if not line.get_label().startswith("_"):  # the first of its seeds
            mode = {"entp": "ENTP", "decoder": "decoder", "prefix-lm": "prefix decoder"}[
                run["settings"]["mode"]
            ]
            assert line.get_label() == f"{mode}, here" + (", a decoder first" if started else "")
    colours = {
        (run["settings"]["mode"], line.get_color()) for line, run in zip(ours, shown, strict=True)
    }
    assert (
        len(colours)
        == len({mode for mode, _ in colours})
        == len({colour for _, colour in colours})
        == 3
    )  # of modes
    names = [text.get_text() for text in learning.get_legend().get_texts()]
    assert len(names) == len(set(names)) >= 3  # one for all seeds
    steps, right = zip(*COUNT3["ENTP medium"]["sequence_accuracy"], strict=True)
    assert authors.get_xdata() == pytest.approx([step * 0.5 / 60 for step in steps])
    assert tuple(authors.get_ydata()) == right
    assert "0.50 s a step" in names[-1]
    shapes = {
        shape["name"]: {row["name"]: row for row in shape["steps"]}
        for shape in speed["step"]["shapes"]
    }
    assert (
        _step({"shapes": speed["step"]["shapes"][::-1]}, "entp triton")
        == shapes["count3"]["entp triton"]["median"]
    )
    assert _step(speed["step"], "nobody") is None
    _speeds(speeds, speed["step"])
    for side, bars in zip(SIDES, speeds.containers, strict=True):
        heights = [1e3 * rows[side]["median"] for rows in shapes.values()]
        assert [bar.get_height() for bar in bars] == pytest.approx(heights)
    assert (speeds.get_ylabel(), speeds.get_yscale()) == ("ms", "log")
    assert len({bars[0].get_facecolor() for bars in speeds.containers}) == 3
    kernels = [rows["entp triton"] for rows in shapes.values()]
    assert [text.get_text() for text in speeds.texts] == [f"{row['ratio']:.0f}x" for row in kernels]
    assert [text.xy for text in speeds.texts] == [
        (n, 1e3 * row["median"]) for n, row in enumerate(kernels)
    ]


@pytest.mark.parametrize("name", ["count3", "count3-depth"])
def test_a_file_without_what_is_drawn_gets_no_panel(name: str, tmp_path: Path) -> None:
    found = json.loads((ROOT / "results" / f"{name}.json").read_text())
    slow = {
        label: arm
        for label, arm in found["arms"].items()
        if label in ("ENTP medium", "decoder small")
    }
    (tmp_path / f"{name}.json").write_text(
        json.dumps({**found, "arms": {**slow, "x": {"status": "not run"}}})
    )
    assert not draw_summary(tmp_path, tmp_path / "all.png")


def remove(path: str) -> Callable[[Any], None]:
    """What takes a key out of a record: "arms.ENTP medium.runs.0.environment.commit"."""

    def damage(found: Any) -> None:
        *way, last = path.split(".")
        for key in way:
            found = found[int(key) if isinstance(found, list) else key]
        del found[last]

    return damage


DAMAGE: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "nothing": ("count3", dict.clear, "it has no 'recipe'"),
    "no arms": ("count3", remove("arms"), "it has no 'arms'"),
    "arms a number": (
        "count3",
        lambda found: found.update(arms=3),
        "arms is 3: it must be an object",
    ),
    "an arm a number": (
        "count3",
        lambda found: found["arms"].update(x=3),
        "arms.x is 3: it must be an object",
    ),
    "runs a number": (
        "count3",
        lambda found: found["arms"]["ENTP medium"].update(runs=3),
        "runs is 3: it must be a list",
    ),
    "no commit": (
        "count3",
        remove("arms.ENTP medium.runs.0.environment.commit"),
        "arms.ENTP medium.runs.0.environment has no 'commit'",
    ),
    "seconds a text": (
        "count3",
        lambda found: found["arms"]["ENTP medium"]["runs"][0].update(seconds="12"),
        "runs.0.seconds is '12': it must be a number",
    ),
    "seconds true": (
        "count3",
        lambda found: found["arms"]["ENTP medium"]["runs"][0].update(seconds=True),
        "runs.0.seconds is True: it must be a number",
    ),
    "nothing in fresh": (
        "count3",
        lambda found: found["arms"]["ENTP medium"].update(fresh={}),
        "fresh has no 'loss'",
    ),
    "no fresh token accuracy": (
        "count3",
        remove("arms.ENTP medium.fresh.token_accuracy"),
        "arms.ENTP medium.fresh has no 'token_accuracy'",
    ),
    "no curve": (
        "match3",
        lambda found: found["arms"]["ENTP medium"]["runs"][0].update(curve=[]),
        "curve is []",
    ),
    "no token accuracy": (
        "count3",
        remove("arms.ENTP medium.runs.0.best.token_accuracy"),
        "arms.ENTP medium.runs.0.best has no 'token_accuracy'",
    ),
    "no task": (
        "count3",
        remove("arms.ENTP medium.runs.0.settings.task"),
        "it has no task with a name",
    ),
    "fresh without runs": (
        "count3-depth",
        remove("arms.ENTP, 2 layers, 16 integers.runs"),
        "has no 'runs'",
    ),
    "an interval of one": (
        "count3-depth",
        lambda found: found["arms"]["ENTP, 2 layers, 16 integers"]["fresh"].update(
            sequence_accuracy_interval=[0.1]
        ),
        "sequence_accuracy_interval is [0.1]: it must be a list of 2",
    ),
    "shapes a number": (
        "engine_speed",
        lambda found: found["step"].update(shapes=3),
        "step.shapes is 3",
    ),
    "no device": (
        "engine_speed",
        remove("step.environment.device"),
        "step.environment has no 'device'",
    ),
    "no steps": (
        "engine_speed",
        lambda found: found["step"]["shapes"][0].update(steps=[]),
        "step.shapes.0.steps is []",
    ),
}


@pytest.mark.parametrize(("name", "damage", "told"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_record_is_named_with_its_key(
    name: str,
    damage: Callable[[Any], None],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "results").mkdir()
    for file in {name, "match3"}:
        (tmp_path / "results" / f"{file}.json").write_bytes(
            (ROOT / "results" / f"{file}.json").read_bytes()
        )
    path = tmp_path / "results" / f"{name}.json"
    found = json.loads(path.read_text())
    damage(found)
    path.write_text(json.dumps(found))
    assert (
        main(["report", f"--results={tmp_path / 'results'}", f"--out={tmp_path / 'page.md'}"]) == 2
    )
    said = capsys.readouterr().err
    assert f"{path} is" in said
    assert told in said
    assert (
        name != "engine_speed"
        or f"remove 'step' from it, and make it anew with `entp bench step --out {path}`" in said
    )
    other = (
        ["bench", "generate", "--out"]
        if name == "engine_speed"
        else ["reproduce", name, "--record"]
    )
    assert (
        main([*other, str(path), *([f"--out={tmp_path}"] if name != "engine_speed" else [])]) == 2
    )
    assert told in capsys.readouterr().err


def test_speeds_without_kernels_or_steps_get_no_panel(tmp_path: Path) -> None:
    """As `entp bench generate`, or `entp bench step` on a CPU, writes them."""
    speed = json.loads((ROOT / "results" / "engine_speed.json").read_text())
    for shape in speed["step"]["shapes"]:
        shape["steps"] = [row for row in shape["steps"] if "triton" not in row["name"]]
    for sections in (speed, {"generate": speed["generate"]}, {}):
        (tmp_path / "engine_speed.json").write_text(json.dumps(sections))
        assert not draw_summary(tmp_path, tmp_path / "all.png")


def test_arms_of_other_names_are_not_drawn_by_depth(tmp_path: Path) -> None:
    found = json.loads((ROOT / "results" / "count3-depth.json").read_text())
    lines = depth_lines(found, "sequence_accuracy")
    for label in ("something else", "ENTP, 2 layers, 99 integers, again"):
        found["arms"][label] = found["arms"]["ENTP, 2 layers, 16 integers"]
    assert depth_lines(found, "sequence_accuracy") == lines
    draw_depth(found, tmp_path / "depth.png")
    assert (tmp_path / "depth.png").stat().st_size > 10_000
