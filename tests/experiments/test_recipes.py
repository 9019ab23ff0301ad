"""Recipes: the paper's settings as data, tiny versions that run, and runs that continue instead of
repeating."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from small_runs import entp, start_entp

from entp.config import MODES, OptimConfig
from entp.config.json import run_to_json
from entp.errors import InputError
from entp.experiments import RECIPES
from entp.experiments.paper_curves import COUNT3
from entp.experiments.recipe import find_recipe
from entp.experiments.recipes.count3 import LONG_RATE, PAPER_ARMS
from entp.experiments.records import (
    POINTS,
    _curve,
    _fresh,
    _further,
    collect,
    read_results,
    results_table,
    run_folder,
)
from entp.experiments.reproduce import How, carry_out, reproduce, time_left
from entp.experiments.settings import RATE
from entp.report.summary import read_by
from entp.stats import wilson
from entp.training.checkpoint import alone_in, load
from entp.training.evaluate import evaluate
from entp.training.loggers import read_metrics


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_complete(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe.name == name
    assert recipe.question.endswith("?")
    assert set(recipe.paper) <= set(recipe.runs)
    for values in recipe.paper.values():
        assert set(values) <= set(recipe.metrics)
        assert all(v.source for v in values.values())
    assert all(run.goal in recipe.metrics for run in recipe.runs.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../mine"}, r"name is '\.\./mine': letters, digits"),
        ({"runs": {}, "few": (), "paper": {}, "seeds": {}}, "recipe count3 has no runs"),
        ({"few": ("ENTP mediun",)}, "unknown arm in few 'ENTP mediun': .*Did you mean"),
        ({"seeds": {"x": (1, 2)}}, "unknown arm in seeds 'x': allowed are"),
        (
            {"metrics": ("loss",)},
            "is chosen by sequence_accuracy, which is not among the recipe's metrics",
        ),
    ],
)
def test_what_is_wrong_with_a_recipe_of_ones_own_is_said_before_it_runs(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = types.ModuleType("entp_test_recipe")
    own.MINE = replace(find_recipe("count3"), **changes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, own.__name__, own)
    with pytest.raises(InputError, match=message):
        find_recipe("entp_test_recipe:MINE")


def test_count3_has_the_papers_settings() -> None:
    recipe = find_recipe("count3")
    assert list(PAPER_ARMS) == [
        "ENTP medium",
        "decoder small",
        "decoder medium",
        "decoder large",
        "prefix decoder medium",
    ]
    for run in (recipe.runs[label] for label in PAPER_ARMS):
        assert (run.steps, run.batch, run.optim.max_lr, run.optim.min_lr, run.optim.warmup) == (
            150_000,
            64,
            5e-4,
            5e-5,
            500,
        )
        assert (run.task.model_needs()["context_length"], run.task.prefix) == (64, 16)


def test_what_was_not_run_is_shown_as_not_run(tmp_path: Path) -> None:
    recipe = find_recipe("count3")
    results = collect(recipe, tmp_path)
    assert {arm["status"] for arm in results["arms"].values()} == {"not run"}
    table = results_table(results, recipe.metrics)
    assert table.count("not run") == len(results["arms"])
    assert "0.991" in table  # the paper's value stands even so
    assert recipe.missing
    assert {label: results["arms"][label].get("why") for label in recipe.missing} == recipe.missing


def test_a_table_shows_what_was_measured_and_a_dash_for_what_was_not() -> None:
    fresh = {"sequence_accuracy": 0.5, "sequence_accuracy_interval": (0.4, 0.6), "n": 128}
    fresh["generated"] = {"right": 3, "n": 32, "interval": (0.03, 0.25)}
    ours = {"loss": 0.125, "sequence_accuracy": 0.75}
    paper = {"sequence_accuracy": {"value": 0.991}}
    arms = {
        "a": {
            "status": "done",
            "ours": ours,
            "paper": paper,
            "fresh": fresh,
            "seeds": [0, 1],
            "seconds": 12.4,
        },
        "b": {
            "status": "5 of 9 steps",
            "ours": ours,
            "paper": {},
            "fresh": None,
            "seeds": [0],
            "seconds": 3.0,
        },
        "c": {"status": "not run", "why": "too long"},
    }
    head, _, *rows = results_table({"arms": arms}, ("sequence_accuracy", "loss")).splitlines()
    assert (
        "sequence_accuracy paper  sequence_accuracy ours  loss ours" in head
    )  # the paper has no loss anywhere
    assert [re.split(r"\s{2,}", row) for row in rows] == [
        [
            "a",
            "done",
            "0.991",
            "0.75",
            "0.125",
            "0.5000 (0.4000..0.6000, n 128)",
            "3 of 32 (0.0300..0.2500)",
            "2",
            "12",
        ],
        ["b", "5 of 9 steps", "-", "0.75", "0.125", "-", "-", "1", "3"],
        ["c", "not run", "-", "-", "-", "-", "-", "-", "-"],
    ]


def test_a_record_is_taken_only_where_it_came_further_than_the_folder() -> None:
    """As far is not further: the folder may have been tested since it was recorded."""
    here, longer = {"steps": 5, "final": {"n": 1}}, {"steps": 6}
    assert _further(here, {"steps": 5}) is here
    assert _further(here, longer) is longer
    assert (_further(here, None), _further(None, longer)) == (here, longer)


@pytest.mark.parametrize("name", RECIPES)
def test_tiny_runs_and_continues(name: str, tmp_path: Path) -> None:
    first = entp("reproduce", name, "--tiny", "--device=cpu", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    recipe = find_recipe(name).tiny()
    folder = tmp_path / "runs" / recipe.name
    results = json.loads((folder / "results.json").read_text())
    done = {label: arm for label, arm in results["arms"].items() if arm["status"] == "done"}
    assert list(done) == list(recipe.runs)
    for arm in done.values():
        assert {"ours", "paper", "fresh", "n", "seconds", "seeds", "steps", "runs"} <= arm.keys()
        for run in arm["runs"]:
            assert {
                "seed",
                "best",
                "final",
                "curve",
                "config",
                "environment",
                "seconds",
            } <= run.keys()
            assert {"torch", "commit", "date", "device"} <= run["environment"].keys()
            assert run["final"]["n"] >= recipe.fresh
    assert (folder / "curves.png").stat().st_size > 10_000
    assert "sequence_accuracy ours" in first.stdout
    assert ("sequence_accuracy paper" in first.stdout) == bool(recipe.paper)
    kept = {p: p.stat().st_mtime_ns for p in folder.glob("*/checkpoints/*/model.safetensors")}
    again = entp("reproduce", name, "--tiny", "--device=cpu", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert {
        p: p.stat().st_mtime_ns for p in folder.glob("*/checkpoints/*/model.safetensors")
    } == kept
    assert "step " not in again.stderr  # nothing was trained again


def test_an_unfinished_arm_goes_on(tmp_path: Path) -> None:
    recipe = find_recipe("count3").tiny()
    label = "prefix decoder medium"
    short = replace(recipe, runs={label: replace(recipe.runs[label], steps=20)})
    assert reproduce(short, tmp_path, device="cpu")["arms"][label]["status"] == "done"
    assert run_folder(short, label, short.runs[label], tmp_path) == run_folder(
        recipe, label, recipe.runs[label], tmp_path
    )
    assert collect(recipe, tmp_path)["arms"][label]["status"] == "20 of 60 steps"
    assert reproduce(recipe, tmp_path, device="cpu", only=[label])["arms"][label]["steps"] == 60


def test_an_arm_is_done_when_all_its_seeds_are(tmp_path: Path) -> None:
    recipe, label = find_recipe("count3").tiny(), "prefix decoder medium"
    for seed, steps in ((0, 20), (1, 5)):
        run = replace(recipe.runs[label], steps=steps, seed=seed)
        carry_out(recipe, label, run, How(tmp_path, "cpu", 1, minutes=None))
    for seeds, status in (
        ((0, 1), "done, 5 of 20 steps"),
        ((0, 1, 2), "done, 5 of 20 steps, 1 seed not run"),
    ):
        own = replace(
            recipe, runs={label: replace(recipe.runs[label], steps=20)}, seeds={label: seeds}
        )
        assert collect(own, tmp_path)["arms"][label]["status"] == status


def test_an_arm_may_be_given_minutes(tmp_path: Path) -> None:
    """Stopped by the clock, tested as it is, and continued by a call without a limit; the record of
    both is one run."""
    recipe, label = find_recipe("count3").tiny(), "prefix decoder medium"
    long = replace(recipe, runs={label: replace(recipe.runs[label], steps=100_000)})
    path = tmp_path / "all.json"
    short = reproduce(long, tmp_path, device="cpu", record=path, minutes=0.02)["arms"][label]
    assert re.fullmatch(r"\d+ of 100000 steps", short["status"])
    assert 1.2 <= short["seconds"] < 60
    assert short["fresh"]["n"] == recipe.fresh
    assert (
        short["runs"][0]["settings"]["train"]["max_seconds"] == 1.2
    )  # what it was trained with, not what the recipe says
    again = reproduce(long, tmp_path, device="cpu", record=path, minutes=0.02)["arms"][label]
    assert again["steps"] == short["steps"]
    further = reproduce(
        long, tmp_path, device="cpu", record=path, minutes=short["seconds"] / 60 + 0.02
    )["arms"][label]
    assert further["steps"] > short["steps"]
    assert (
        further["runs"][0]["curve"][: len(short["runs"][0]["curve"]) - 1]
        == short["runs"][0]["curve"][:-1]
    )
    wrong = entp("reproduce", "count3", "--tiny", "--minutes=0", "--device=cpu", cwd=tmp_path)
    assert (wrong.returncode, "--minutes is 0: it must be above 0" in wrong.stderr) == (2, True)


def test_minutes_leave_arms_alone_whose_schedule_follows_the_clock(tmp_path: Path) -> None:
    recipe, label = find_recipe("count3-rates").tiny(), "decoder at 0.0005"
    timed = replace(recipe.runs[label], train=replace(recipe.runs[label].train, max_seconds=1.5))
    timed = replace(timed, steps=10**6, optim=OptimConfig(decay="seconds"))
    found = reproduce(replace(recipe, runs={label: timed}), tmp_path, device="cpu", minutes=0.001)[
        "arms"
    ][label]
    assert found["status"] == "done"
    assert found["seconds"] >= 1.5


def test_two_that_write_one_record_wait_for_each_other_and_keep_each_others_arms(
    tmp_path: Path,
) -> None:
    """One holds the record's folder, as another process does while it adds its arm to the record."""
    recipe, arms, record = (
        find_recipe("count3").tiny(),
        ("prefix decoder medium", "ENTP medium"),
        tmp_path / "all.json",
    )
    reproduce(recipe, tmp_path, device="cpu", only=arms[:1])
    with ThreadPoolExecutor(1) as pool, alone_in(tmp_path):
        other = pool.submit(
            reproduce, recipe, tmp_path / "two", device="cpu", only=arms[1:], record=record
        )
        assert not wait([other], timeout=2).done
        assert not record.exists()
        record.write_bytes((tmp_path / recipe.name / "results.json").read_bytes())
    found = json.loads(record.read_text())["arms"]
    assert {label for label, arm in found.items() if arm["status"] == "done"} == set(arms)


def test_arms_side_by_side_are_the_arms_one_by_one(tmp_path: Path) -> None:
    """The same weights in processes of their own; the picture by depth is drawn from them."""
    one = entp("reproduce", "count3-depth", "--tiny", "--device=cpu", "--out=one", cwd=tmp_path)
    two = entp(
        "reproduce", "count3-depth", "--tiny", "--device=cpu", "--out=two", "--jobs=2", cwd=tmp_path
    )
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    assert re.search(r"\[2/3\] .*, seed 0, about \d+ s left\n", one.stderr)
    assert "3 runs, 2 at a time\n" in two.stderr
    assert re.findall(r"\[(\d)/3\] .*: done(?:, about \d+ s left)?\n", two.stderr) == [
        "1",
        "2",
        "3",
    ]
    found = [
        json.loads((tmp_path / name / "count3-depth-tiny" / "results.json").read_text())["arms"]
        for name in ("one", "two")
    ]
    for label in find_recipe("count3-depth").tiny().runs:
        first, second = (arms[label]["runs"][0] for arms in found)
        assert [run["final"].pop("trained_side_by_side") for run in (first, second)] == [1, 2]
        assert first["final"] == second["final"]
        assert [r["loss"] for r in first["curve"]] == [r["loss"] for r in second["curve"]]
    assert (tmp_path / "one/count3-depth-tiny/curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("told", "seconds", "done", "runs", "jobs"),
    [
        ("", 0, 0, 8, 4),  # nothing is known yet
        (", about 65 s left", 65, 4, 8, 4),  # one round of two
        (", about 65 s left", 65, 1, 5, 4),  # the other three of the first round are about to end
        (", about 2 min left", 65, 1, 8, 4),
        (", about 40 min left", 600, 1, 5, 1),
        ("", 600, 8, 8, 4),
    ],
)
def test_the_time_that_is_left(told: str, seconds: float, done: int, runs: int, jobs: int) -> None:
    assert time_left(seconds, done, runs, jobs) == told


def test_some_arms_at_once_and_no_other(tmp_path: Path) -> None:
    first, _, third = find_recipe("count3-depth").tiny().runs
    words = ("reproduce", "count3-depth", "--tiny", "--device=cpu")
    made = entp(*words, "--jobs=2", "--only", first, third, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    arms = json.loads((tmp_path / "runs/count3-depth-tiny/results.json").read_text())["arms"]
    assert [label for label, arm in arms.items() if arm["status"] == "done"] == [first, third]
    wrong = entp(*words, "--only", first, "fourth", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "unknown arm of count3-depth-tiny 'fourth'" in wrong.stderr
    assert third in wrong.stderr


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="needs Linux's list of child processes"
)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_parent_alone_stops_what_is_trained_side_by_side(
    how: signal.Signals, tmp_path: Path
) -> None:
    """As a batch system sends it: its processes save what they have, results are written, and
    nobody is left behind."""
    words = ("reproduce", "count3", "--tiny", "--device=cpu", "--jobs=2", "--out=runs")
    parent = start_entp(*words, cwd=tmp_path)
    while not any(
        '"eval"' in path.read_text() for path in tmp_path.glob("runs/count3-tiny/*/metrics.jsonl")
    ):
        assert parent.poll() is None
        time.sleep(0.05)
    children = [
        int(word)
        for word in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    ]
    assert len(children) >= 2
    parent.send_signal(how)
    told, _ = parent.communicate(timeout=120)
    assert parent.returncode == (143 if how == signal.SIGTERM else -9)
    if how == signal.SIGTERM:
        assert "run the same command again to go on" in told
        arms = json.loads((tmp_path / "runs/count3-tiny/results.json").read_text())["arms"]
        recorded = {
            run["config"]: run["steps"] for arm in arms.values() for run in arm.get("runs", [])
        }
        assert recorded
        for config, steps in recorded.items():  # what was saved after the first had stopped, too
            rows = read_metrics(next(tmp_path.glob(f"runs/count3-tiny/*{config}")))
            assert steps == max(row["step"] for row in rows if row["kind"] == "train")
    limit = time.monotonic() + 120
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < limit
        time.sleep(0.1)
    assert list(tmp_path.glob("runs/count3-tiny/*/checkpoints/step-*"))


def test_several_seeds_and_what_they_did_on_fresh_sequences(tmp_path: Path) -> None:
    recipe = find_recipe("count3").tiny()
    label = "ENTP medium, decoder first"
    arm = reproduce(recipe, tmp_path, device="cpu", only=[label])["arms"][label]
    assert arm["seeds"] == [0, 1, 2]
    finals = [run["final"] for run in arm["runs"]]
    assert len({final["loss"] for final in finals}) == 3
    assert arm["fresh"]["n"] == sum(final["n"] for final in finals) == 192
    assert arm["fresh"]["token_accuracy"] == pytest.approx(
        sum(final["token_accuracy"] for final in finals) / 3
    )
    assert arm["fresh"]["generated"]["n"] == 96
    rows = [
        read_metrics(run_folder(recipe, label, run, tmp_path)) for _, run in recipe.arms([label])
    ]
    for metric in recipe.metrics:
        better = min if metric == "loss" else max
        best = [better(row[metric] for row in one if row["kind"] == "eval") for one in rows]
        assert arm["ours"][metric] == pytest.approx(sum(best) / 3)
    assert arm["seconds"] == pytest.approx(sum(run["seconds"] for run in arm["runs"]) / 3)
    for made, one in zip(arm["runs"], rows, strict=True):
        seconds = {row["step"]: row["seconds"] for row in one if row["kind"] == "train"}
        assert made["seconds"] == seconds[made["steps"]]
        points = [
            (row["step"], seconds[row["step"]], row["token_accuracy"])
            for row in one
            if row["kind"] == "eval"
        ]
        assert [
            (point["step"], point["seconds"], point["token_accuracy"]) for point in made["curve"]
        ] == points
    assert list(finals[0]["by_length"]) == [str(n) for n in range(6, 12)]
    run = recipe.arms([label])[0][1]
    folder = run_folder(recipe, label, run, tmp_path)
    model, seed = load(folder), 2**32 - 1
    assert evaluate(model, run, split="test", seed=seed, batches=2)["loss"] == finals[0]["loss"]


def test_seeds_count_by_the_number_of_their_fresh_sequences() -> None:
    """Shares become whole numbers again, 0.29 of 100 among them; what only some seeds have is not
    everyone's."""
    first = {
        "weights": "best-00000001",
        "loss": 1.0,
        "sequence_accuracy": 0.29,
        "n": 100,
        "token_accuracy": 0.5,
    }
    first["generated"] = {"right": 3, "n": 20}
    found = _fresh([first, {"loss": 4.0, "sequence_accuracy": 0.59, "n": 300}])
    assert found == {
        "n": 400,
        "loss": 3.25,
        "sequence_accuracy": pytest.approx(206 / 400),
        "sequence_accuracy_interval": wilson(206, 400),
        "generated": {"right": 3, "n": 20, "interval": wilson(3, 20)},
    }
    alone = _fresh([first])
    assert alone is not None
    assert alone["sequence_accuracy_interval"] == wilson(29, 100)


@pytest.mark.parametrize("count", [1, POINTS, POINTS + 1, 3 * POINTS - 1])
def test_a_long_curve_is_thinned_and_keeps_its_last_point(count: int) -> None:
    evaluations = [{"step": 10 * n, "loss": float(n)} for n in range(1, count + 1)]
    steps = [{"step": n, "seconds": n / 2} for n in range(1, 10 * count + 1)]
    found = _curve(evaluations, steps, ("loss",))
    assert min(count, POINTS / 2) <= len(found) <= POINTS
    assert found[-1] == {"step": 10 * count, "seconds": 5.0 * count, "loss": float(count)}
    assert len({b["step"] - a["step"] for a, b in pairwise(found)}) <= 1


def test_an_arm_is_done_at_its_target_or_when_its_own_time_is_over(tmp_path: Path) -> None:
    """More minutes than it has do not make its time longer."""
    recipe, label = find_recipe("count3").tiny(), "prefix decoder medium"
    run = replace(recipe.runs[label], steps=100_000)
    easy = replace(run, train=replace(run.train, target_metric="loss", target=100.0))
    short = replace(run, train=replace(run.train, max_seconds=0.5))
    for name, one in (("target", easy), ("time", short)):
        own = replace(recipe, runs={label: one})
        carry_out(own, label, one, How(tmp_path / name, "cpu", 1, minutes=1.0))
        found = collect(own, tmp_path / name)["arms"][label]
        assert (found["status"], found["seconds"] < 30) == ("done", True)


def test_one_seed_of_several(tmp_path: Path) -> None:
    """One machine per seed: a record that holds one seed says which are not run, and the rest can
    be added."""
    words = (
        "reproduce",
        "count3",
        "--tiny",
        "--device=cpu",
        "--record=all.json",
        "--only=ENTP medium, decoder first",
    )
    one = entp(*words, "--seed=1", "--out=one", cwd=tmp_path)
    assert (one.returncode, "[1/1] ENTP medium, decoder first, seed 1" in one.stderr) == (
        0,
        True,
    ), one.stderr
    found = json.loads((tmp_path / "all.json").read_text())["arms"]["ENTP medium, decoder first"]
    assert (found["seeds"], found["status"]) == ([1], "done, 2 seeds not run")
    both = entp(*words, "--seed=2", "--out=two", cwd=tmp_path)
    assert both.returncode == 0, both.stderr
    found = json.loads((tmp_path / "all.json").read_text())["arms"]["ENTP medium, decoder first"]
    assert (found["seeds"], found["status"]) == ([1, 2], "done, 1 seed not run")
    wrong = entp(*words, "--seed=7", cwd=tmp_path)
    assert (wrong.returncode, "seed" in wrong.stderr, "0, 1, 2" in wrong.stderr) == (
        2,
        True,
        True,
    ), wrong.stderr


def test_fresh_sequences_are_measured_again_only_for_new_weights(tmp_path: Path) -> None:
    recipe = find_recipe("count3").tiny()
    label = "ENTP medium"
    folder = run_folder(recipe, label, recipe.runs[label], tmp_path)
    reproduce(recipe, tmp_path, device="cpu", only=[label])
    before = (folder / "final.json").stat().st_mtime_ns
    reproduce(recipe, tmp_path, device="cpu", only=[label])
    assert (folder / "final.json").stat().st_mtime_ns == before
    (folder / "final.json").write_text('{"weights": "best-00000001", "n": 1}')
    reproduce(recipe, tmp_path, device="cpu", only=[label])
    assert json.loads((folder / "final.json").read_text())["n"] == 64


@pytest.mark.parametrize("damage", ["", "[]", "{}"])
def test_a_damaged_measurement_is_made_again(damage: str, tmp_path: Path) -> None:
    recipe = find_recipe("count3").tiny()
    label = "prefix decoder medium"
    folder = run_folder(recipe, label, recipe.runs[label], tmp_path)
    first = reproduce(recipe, tmp_path, device="cpu", only=[label])
    (folder / "final.json").write_text(damage)
    assert "final" not in collect(recipe, tmp_path)["arms"][label]["runs"][0]
    assert (
        reproduce(recipe, tmp_path, device="cpu", only=[label])["arms"][label]["fresh"]
        == first["arms"][label]["fresh"]
    )


def test_a_record_is_copied_before_runs_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, label = find_recipe("count3").tiny(), "prefix decoder medium"
    record = tmp_path / "all.json"
    reproduce(recipe, tmp_path / "one", device="cpu", only=[label], record=record)
    before = record.read_bytes()
    slower = replace(recipe, runs={**recipe.runs, label: replace(recipe.runs[label], batch=16)})
    for number in ("", "1"):
        reproduce(
            slower if not number else recipe,
            tmp_path / f"two{number}",
            device="cpu",
            only=[label],
            record=record,
        )
        told = capsys.readouterr().err
        assert told.count(f"what is left out is still in {record}.old{number}.") == 1
        assert told.count(f"{label}, seed 0 has other settings than now, and is left out.") == 1
    assert (tmp_path / "all.json.old").read_bytes() == before
    assert (
        json.loads((tmp_path / "all.json.old1").read_text())["arms"][label]["runs"][0]["settings"][
            "batch"
        ]
        == 16
    )


def test_the_authors_curves_are_thinned_and_end_where_theirs_do() -> None:
    for curves in COUNT3.values():
        assert set(curves) == {"loss", "token_accuracy", "sequence_accuracy"}
        for curve in curves.values():
            steps = [step for step, _ in curve]
            assert all(
                0 < later - step < 6000 for step, later in zip([0, *steps], steps, strict=False)
            )
            assert steps[-1] == 150_000
    assert max(value for _, value in COUNT3["ENTP medium"]["sequence_accuracy"]) > 0.98


def test_fast_arms_differ_from_the_papers_in_optimizer_and_schedule_only() -> None:
    runs = find_recipe("count3").runs
    for label in ("ENTP medium", "decoder medium", "prefix decoder medium"):
        slow, fast = runs[label], runs[f"{label}, fast"]
        assert (fast.task, fast.model, fast.mode) == (slow.task, slow.model, slow.mode)
        assert fast.optim.max_lr == (LONG_RATE if fast.train.max_seconds else RATE)


def test_the_decoder_that_comes_first_is_trained_as_the_fast_one() -> None:
    runs = find_recipe("count3").runs
    first, fast, entp = (
        runs[label]
        for label in ("ENTP medium, decoder first", "decoder medium, fast", "ENTP medium")
    )
    assert (first.task, first.model, first.mode) == (entp.task, entp.model, entp.mode)
    start = first.at(0)
    assert (start.mode, start.batch, start.optim.max_lr) == (
        fast.mode,
        fast.batch,
        fast.optim.max_lr,
    )
    assert (start.optim.name, start.optim.whiten) == (fast.optim.name, fast.optim.whiten)


def test_every_mode_is_tried_with_the_same_rates_for_the_same_time() -> None:
    runs = find_recipe("count3-rates").runs
    tried = {
        mode: sorted(run.optim.max_lr for run in runs.values() if run.mode == mode)
        for mode in MODES
    }
    assert set(tried) == {"entp", "decoder", "prefix-lm"}
    assert len({tuple(rates) for rates in tried.values()}) == 1
    assert {(run.train.max_seconds, run.optim.decay, run.model) for run in runs.values()} == {
        (45.0, "seconds", next(iter(runs.values())).model)
    }


def test_depth_asks_for_all_lengths_and_depths() -> None:
    runs = find_recipe("count3-depth").runs
    assert len(runs) == 5 * 8
    assert {run.train.max_seconds for run in runs.values()} == {60.0}
    assert {(run.model.width, run.optim.decay) for run in runs.values()} == {(192, "seconds")}
    longer = find_recipe("count3-longer").runs
    assert {run.train.max_seconds for run in longer.values()} == {240.0}
    for label, run in longer.items():
        assert (run.task, run.model, run.mode) == (
            runs[label].task,
            runs[label].model,
            runs[label].mode,
        )


def test_a_decoder_reads_what_entp_reads() -> None:
    """The arm "as many steps" differs from ENTP from scratch in its mode, and in that all
    predictions have gradients."""
    runs = find_recipe("count3").runs
    entp, decoder = runs["ENTP medium, fast"], runs["decoder medium, as many steps"]
    assert (decoder.task, decoder.model, decoder.steps, decoder.seed) == (
        entp.task,
        entp.model,
        entp.steps,
        entp.seed,
    )
    assert all(decoder.batch_at(step) == entp.batch_at(step) for step in range(0, entp.steps, 1000))
    assert replace(decoder.optim, select=True) == entp.optim
    assert decoder.train.target == entp.train.target
    own = runs["decoder medium, as many sequences"]
    assert (own.task, own.model, own.mode) == (decoder.task, decoder.model, "decoder")
    for run in (entp, decoder, own):
        curve = [{"step": step} for step in (1, 24_000, run.steps)]
        early = 24_000 * run.batch  # before anything changes
        assert read_by({"settings": run_to_json(run), "curve": curve}) == [
            run.batch,
            early,
            6_208_000,
        ]


def test_sequences_that_a_start_reads_count() -> None:
    run = find_recipe("count3").runs["ENTP medium, decoder first"]
    curve = [{"step": step} for step in (88_000, 88_001)]
    assert read_by({"settings": run_to_json(run), "curve": curve}) == [
        88_000 * 256,
        88_000 * 256 + 512,
    ]


def test_a_record_gathers_arms_of_several_machines(tmp_path: Path) -> None:
    """Two folders stand for two machines: the second does what the first has not done, and the file
    holds both."""
    args = ("reproduce", "count3", "--tiny", "--device=cpu", "--record=all.json")
    first = entp(*args, "--out=one", "--only=ENTP medium", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    alone = json.loads((tmp_path / "all.json").read_text())["arms"]
    assert {label for label, arm in alone.items() if arm["status"] == "done"} == {"ENTP medium"}
    second = entp(*args, "--out=two", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "ENTP medium, seed" not in second.stderr
    tiny = find_recipe("count3").tiny()
    assert not run_folder(tiny, "ENTP medium", tiny.runs["ENTP medium"], tmp_path / "two").exists()
    both = json.loads((tmp_path / "all.json").read_text())["arms"]
    assert both["ENTP medium"] == alone["ENTP medium"]
    assert {label for label, arm in both.items() if arm["status"] == "done"} == set(
        find_recipe("count3").tiny().runs
    )
    assert (tmp_path / "all.png").stat().st_size > 10_000
    assert both["ENTP medium"]["runs"][0]["settings"]["steps"] == 60


def test_runs_with_other_settings_are_not_taken_for_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = find_recipe("count3").tiny()
    label = "ENTP medium"
    path = tmp_path / "all.json"
    reproduce(recipe, tmp_path, device="cpu", only=[label], record=path)
    assert list(read_results(recipe, path)) == [(label, 0)]
    kept = json.loads(path.read_text())
    kept["arms"][label]["runs"][0]["settings"]["optim"]["max_lr"] = 1e-3
    path.write_text(json.dumps(kept))
    assert read_results(recipe, path) == {}
    assert f"{label}, seed 0 has other settings" in capsys.readouterr().err
    assert read_results(recipe, path, quiet=True) == {}
    assert capsys.readouterr().err == ""
    del kept["arms"][label]["runs"][0]["settings"]["optim"][
        "max_lr"
    ]  # an option that was new since then: its default
    path.write_text(json.dumps(kept))
    faster = replace(
        recipe.runs[label], optim=replace(recipe.runs[label].optim, max_lr=OptimConfig().max_lr)
    )
    assert list(read_results(replace(recipe, runs={label: faster}), path)) == [(label, 0)]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "is not a file of results"),
        ("[]", "is not a file of results"),
        ('{"recipe": "match3", "arms": {}}', "of match3, not"),
    ],
)
def test_a_record_that_is_something_else_is_left_alone(
    content: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "all.json").write_text(content)
    done = entp("reproduce", "count3", "--tiny", "--device=cpu", "--record=all.json", cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "all.json").read_text() == content
    missing = entp("reproduce", "count3", "--tiny", "--record=nowhere/all.json", cwd=tmp_path)
    assert missing.returncode == 2
    assert "nowhere" in missing.stderr


def test_what_is_done_is_recorded_before_the_next_begins(tmp_path: Path) -> None:
    """Killed in the second of three seeds: the first stands in the record, and is not trained
    again."""
    words = (
        "reproduce",
        "count3",
        "--tiny",
        "--device=cpu",
        "--record=all.json",
        "--only=ENTP medium, decoder first",
    )
    process = start_entp(*words, cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[2/3]"):
            process.kill()
            break
    process.communicate()
    found = json.loads((tmp_path / "all.json").read_text())["arms"]["ENTP medium, decoder first"]
    assert [run["seed"] for run in found["runs"]] == [0]
    assert found["runs"][0]["final"]["n"] == 64
    again = entp(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "[1/2] ENTP medium, decoder first, seed 1" in again.stderr
    assert json.loads((tmp_path / "all.json").read_text())["arms"]["ENTP medium, decoder first"][
        "seeds"
    ] == [0, 1, 2]


def test_a_run_whose_place_is_lost_is_recorded_without_it(tmp_path: Path) -> None:
    recipe, label = find_recipe("count3").tiny(), "ENTP medium"
    reproduce(recipe, tmp_path, device="cpu", only=[label])
    place = run_folder(recipe, label, recipe.runs[label], tmp_path) / "environment.json"
    place.write_text("5")
    with pytest.raises(
        InputError,
        match=r"environment\.json is damaged \(it is 5: it must be an object\): repair or remove it",
    ):
        collect(recipe, tmp_path)
    place.unlink()
    assert (
        collect(recipe, tmp_path)["arms"][label]["runs"][0]["environment"]["device"]
        == "an unknown device"
    )


def test_a_finished_run_that_lost_its_measurements_is_a_sentence(tmp_path: Path) -> None:
    args = ("reproduce", "count3", "--tiny", "--device=cpu", "--only=ENTP medium")
    assert entp(*args, cwd=tmp_path).returncode == 0
    (metrics,) = tmp_path.glob("runs/count3-tiny/ENTP-medium-*/metrics.jsonl")
    text = metrics.read_text()
    metrics.unlink()
    lost = entp(*args, cwd=tmp_path)
    assert lost.returncode == 2
    assert "put it back, or remove the folder to train this run again" in lost.stderr
    assert "Traceback" not in lost.stderr
    metrics.write_text(text)
    again = entp(*args, cwd=tmp_path)
    assert again.returncode == 0
    assert "done" in again.stdout
