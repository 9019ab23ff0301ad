"""Runs are gathered from their folders by configuration, with their own evaluations and times."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from small_records import run_record, sliced_totals, small_recipe
from small_runs import small_run

from entp.config.json import run_to_json
from entp.errors import InputError
from entp.experiments.collect import (
    MOST_BINS,
    POINTS,
    _curve,
    _seconds,
    add_metrics,
    collect,
    find_folder,
    match_runs,
    read_folder,
    read_test,
)
from entp.experiments.cost import flops_by
from entp.experiments.recipe import Arm, ArmRun, find_recipe
from entp.results.schema import MetricSpec, Table
from entp.results.store import read_record
from entp.results.summary import until
from entp.training.plan import Plan

BEFORE = Path(__file__).parents[1] / "fixtures" / "before_the_move"
OLD_RUN = BEFORE / "runs" / "match3-tiny" / "decoder-medium-e183b532ad"


def write_run(folder: Path, run: Any, rows: list[dict[str, Any]], **environment: Any) -> None:
    """A run folder made by hand."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(run_to_json(run)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if environment:
        (folder / "environment.json").write_text(json.dumps(environment))


def evaluation(step: int, exact: float, **more: Any) -> dict[str, Any]:
    values = {"exact_match": exact, "token_accuracy": exact, "loss": 1 - exact, "n": 16}
    return {"kind": "eval", "step": step, **values, **more}


def training(step: int, seconds: float) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 1.0, "lr": 0.1, "seconds": seconds}


TWICE = [evaluation(4, 0.5), evaluation(5, 0.5)]
"""Evaluations of which the second is no better."""


def one_run(**changes: Any) -> ArmRun:
    run = small_run(**changes)
    return ArmRun("mine", run, 16, 0)


def test_folder_from_before_the_move_is_found_by_its_configuration(tmp_path: Path) -> None:
    shutil.copytree(OLD_RUN, tmp_path / "match3-tiny" / "some-other-name")
    arm = find_recipe("match3").tiny().runs()[0]
    assert find_folder(arm, tmp_path / "match3-tiny").name == "some-other-name"
    run = read_folder(arm, tmp_path / "match3-tiny")
    assert run is not None
    assert (run.status, run.steps, run.seconds) == ("done", 100, 20.145)
    assert run.best["exact_match"] == 0.484375
    assert run.test is not None
    assert run.test.totals.all["exact_match"][:2] == [64, 39]
    assert run.sequences == 3200
    times = [point.seconds for point in run.curve]
    assert times == [pytest.approx((2.168 + 2.641) / 2), 8.281, pytest.approx(12.8305), 20.145]


def test_records_without_operations_are_given_them(tmp_path: Path) -> None:
    recipe = small_recipe()
    arm = recipe.runs()[0]
    old = run_record()
    assert [point.flops for point in old.curve] == [None, None]
    found = collect(recipe.record(), recipe.runs(), tmp_path, {arm.hash: old})
    (run,) = found.arms[arm.label].runs
    assert [point.flops for point in run.curve] == flops_by(arm.run, [p.step for p in old.curve])
    assert [point.values for point in run.curve] == [point.values for point in old.curve]


def test_new_folder_is_named_by_label_and_hash(tmp_path: Path) -> None:
    arm = one_run()
    assert find_folder(arm, tmp_path) == tmp_path / f"mine-{arm.hash}"
    write_run(tmp_path / "a", arm.run, [])
    write_run(tmp_path / f"mine-{arm.hash}", arm.run, [])
    assert find_folder(arm, tmp_path) == tmp_path / f"mine-{arm.hash}"
    assert read_folder(arm, tmp_path) is None


def test_folder_that_cannot_be_read_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arm = one_run()
    write_run(tmp_path / "good", arm.run, [])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{")
    assert find_folder(arm, tmp_path).name == "good"
    assert "bad is passed over" in capsys.readouterr().err


def test_evaluations_of_a_forks_source_are_not_its_own(tmp_path: Path) -> None:
    """As forks of earlier versions have them: the best and the goal would be another run's."""
    arm = one_run(train={"stop_at": 0.8})
    rows = [training(5, 1.0), evaluation(5, 0.9), training(8, 2.0)]
    forked = {"run": "other", "step": 5}
    write_run(tmp_path / "before", arm.run, rows, forked=forked)
    assert read_folder(arm, tmp_path) is None
    shutil.rmtree(tmp_path / "before")
    write_run(tmp_path / "after", arm.run, [*rows, evaluation(8, 0.2)], forked=forked)
    run = read_folder(arm, tmp_path)
    assert run is not None
    assert (run.best["exact_match"], run.status) == (0.2, "8 of 10 steps")
    assert [point.step for point in run.curve] == [8]


@pytest.mark.parametrize(("step", "told"), [(5, 1.5), (15, 3.0), (20, 4.0), (3, None), (25, None)])
def test_time_of_an_old_evaluation_is_between_its_neighbours(step: int, told: float | None) -> None:
    steps = [training(4, 1.4), training(10, 2.0), training(20, 4.0)]
    assert _seconds(evaluation(step, 0.5), steps) == pytest.approx(told)


def test_evaluation_knows_its_own_time() -> None:
    assert _seconds(evaluation(3, 0.5, seconds=0.75), [training(4, 1.4)]) == 0.75


@pytest.mark.parametrize("count", [1, POINTS, POINTS + 1, 3 * POINTS - 1])
def test_long_curve_is_thinned_and_keeps_its_last_point(count: int) -> None:
    run = small_run(steps=10_000)
    rows = [evaluation(10 * n, 0.5) for n in range(1, count + 1)]
    steps = [training(n, n / 2) for n in range(1, 10 * count + 1)]
    found = _curve(Plan(run), rows, steps)
    assert min(count, POINTS / 2) <= len(found) <= POINTS
    last = found[-1]
    assert (last.step, last.seconds, last.sequences) == (10 * count, 5.0 * count, 80 * count)
    assert len({b.step - a.step for a, b in pairwise(found)}) <= 1


def test_thinned_curve_keeps_the_first_evaluations_that_reached_a_value(tmp_path: Path) -> None:
    """Steps to .9 would be a few evaluations more, or, of a value that did not last, none."""
    arm, count = one_run(steps=10_000), 3 * POINTS
    values = {101: 0.7, 103: 0.95, 104: 0.6}
    rows = [evaluation(n, values.get(n, 0.1)) for n in range(1, count + 1)]
    write_run(tmp_path / "a", arm.run, [training(count, 9.0), *rows])
    goals = [("exact_match", value) for value in (0.5, 0.9, 0.99)]
    table = Table(reach=[value for _, value in goals[:2]])
    recipe = small_recipe(arms=[Arm(arm.run, mode="ENTP")], table=table)
    assert recipe.runs()[0].reach == (*goals[:2],)
    for reach, steps in ((goals, [101, 103]), ([], [])):
        found = read_folder(replace(arm, reach=tuple(reach)), tmp_path)
        assert found is not None
        assert [p.step for p in found.curve if p.values["exact_match"] > 0.5] == steps
        assert len(found.curve) == POINTS + len(steps)
        metric = MetricSpec.of(arm.run.task.metrics[0])
        assert until(found, metric, 0.9, "steps") == (103 if steps else math.inf)


@pytest.mark.parametrize(
    ("train", "rows", "status"),
    [
        ({}, [training(10, 1.0), evaluation(10, 0.5)], "done"),
        ({}, [training(9, 1.0), evaluation(9, 0.5)], "9 of 10 steps"),
        ({}, [evaluation(5, 0.5), training(10, 1.0)], "10 of 10 steps"),
        ({"stop_at": 0.5}, [training(5, 1.0), evaluation(5, 0.5)], "done"),
        ({"stop_at": 0.5}, [training(5, 1.0), evaluation(5, 0.4)], "5 of 10 steps"),
        ({"stop_at": 0.6, "monitor": "loss"}, [training(5, 1.0), evaluation(5, 0.5)], "done"),
        ({"max_seconds": 1.0}, [training(5, 1.0), evaluation(5, 0.5)], "done"),
        ({"patience": 1}, [training(5, 1.0), *TWICE], "done"),
        ({"patience": 2}, [training(5, 1.0), *TWICE], "5 of 10 steps"),
        ({"patience": 1, "patience_from": 0.6}, [training(5, 1.0), *TWICE], "5 of 10 steps"),
    ],
)
def test_run_is_done_when_its_last_evaluation_is(
    train: dict[str, Any], rows: list[dict[str, Any]], status: str, tmp_path: Path
) -> None:
    arm = one_run(train=train)
    write_run(tmp_path / "a", arm.run, rows)
    run = read_folder(arm, tmp_path)
    assert run is not None
    assert run.status == status


def test_best_follows_the_direction_of_each_metric(tmp_path: Path) -> None:
    arm = one_run()
    rows = [training(5, 1.0), evaluation(5, 0.9), training(10, 2.0), evaluation(10, 0.4)]
    write_run(tmp_path / "a", arm.run, rows)
    run = read_folder(arm, tmp_path)
    assert run is not None
    assert run.best == pytest.approx({"exact_match": 0.9, "token_accuracy": 0.9, "loss": 0.1})


def test_tested_run_without_evaluations_is_an_input_error(tmp_path: Path) -> None:
    arm = one_run()
    write_run(tmp_path / "a", arm.run, [])
    (tmp_path / "a" / "test.json").write_text("{}")
    with pytest.raises(InputError, match="put it back, or remove the folder"):
        read_folder(arm, tmp_path)


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"n": 3, "generated": {}}'])
def test_damaged_test_is_made_again(damage: str, tmp_path: Path) -> None:
    (tmp_path / "test.json").write_text(damage)
    assert read_test(tmp_path, small_run()) is None


def test_place_that_is_lost_is_unknown(tmp_path: Path) -> None:
    arm = one_run()
    write_run(tmp_path / "a", arm.run, [training(10, 1.0), evaluation(10, 0.5)])
    run = read_folder(arm, tmp_path)
    assert run is not None
    assert run.environment.device == "an unknown device"


def test_recorded_runs_are_matched_over_all_labels(capsys: pytest.CaptureFixture[str]) -> None:
    path = BEFORE / "match3.json"
    arms = find_recipe("match3").runs()
    kept = match_runs(read_record(path), arms, path)
    assert set(kept) == {arm.hash for arm in arms}
    assert all(run.config_hash == key for key, run in kept.items())
    assert capsys.readouterr().err == ""


def test_runs_with_other_settings_are_not_taken_for_these(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = BEFORE / "match3.json"
    record = read_record(path)
    record.arms["ENTP medium"].runs[0].config["optim"]["weight_decay"] = 0.5
    kept = match_runs(record, find_recipe("match3").runs(), path)
    assert len(kept) == 3
    assert "ENTP medium, seed 0 has other settings than now" in capsys.readouterr().err
    match_runs(record, find_recipe("match3").runs(), path, quiet=True)
    assert capsys.readouterr().err == ""


def test_caveats_are_those_of_today(tmp_path: Path) -> None:
    """Count3 of 10 integers with one random: ten sequences, of which training read eighty."""
    run = small_run()
    few = replace(run, task=replace(run.task, prompt_length=1))
    arm = ArmRun("mine", few, 16, 0)
    write_run(tmp_path / "a", few, [training(10, 1.0), evaluation(10, 0.5)])
    found = read_folder(arm, tmp_path)
    assert found is not None
    assert found.caveats[0].startswith("There are only 10 different sequences")
    assert "read 80" in found.caveats[0]


def test_metrics_of_kept_runs_are_not_lost() -> None:
    blank = small_recipe().record()
    more = blank.model_copy(update={"metrics": [*blank.metrics, MetricSpec("bleu")]})
    kept = {"a": run_record(best={"bleu": 3.0})}
    assert [m.name for m in add_metrics(blank, more, kept).metrics][-1] == "bleu"
    assert add_metrics(blank, more, {"a": run_record()}).metrics == blank.metrics


def test_arm_label_in_a_folder_name_is_plain(tmp_path: Path) -> None:
    arm = Arm(small_run(), mode="ENTP", lr=1e-3)
    made = ArmRun(arm.label, arm.run, 1, 0)
    assert find_folder(made, tmp_path).name == f"ENTP-lr-0-001-{made.hash}"


def split_row(step: int, bins: dict[str, int], loss: float, split: str = "test") -> dict[str, Any]:
    """An evaluation on a further split: exact match by digits, and a loss."""
    totals = sliced_totals(next(iter(bins.values())), bins).model_dump()
    totals["all"]["loss"] = [100, 100 * loss, 100.0, None, None, None]
    return {"kind": "split", "step": step, "split": split, "seconds": 1.0, "totals": totals}


ENDING = [training(10, 1.0), evaluation(10, 0.5)]


def test_evaluations_on_further_splits_are_kept_with_the_best_of_each_number(
    tmp_path: Path,
) -> None:
    arm = one_run()
    rows = [
        split_row(5, {"11": 60, "12": 0}, 0.9),
        split_row(5, {"11": 7}, 0.9, "longer"),
        split_row(10, {"11": 50, "12": 20}, 0.4),
    ]
    write_run(tmp_path / "a", arm.run, [*rows, *ENDING])
    run = read_folder(arm, tmp_path)
    assert run is not None
    assert (run.status, [point.step for point in run.curve]) == ("done", [10])
    assert [point.step for point in run.splits["test"]] == [5, 10]
    first = run.splits["test"][0].totals.totals([MetricSpec.of(m) for m in arm.run.task.metrics])
    assert first.sliced("exact_match", "digits") == {"11": 0.6, "12": 0.0}
    best = run.best_of_splits["test"]
    assert best.evaluations == 2
    assert best.totals.all["exact_match"][1] == 60
    assert best.totals.all["loss"][1] == pytest.approx(40)
    bins = best.totals.slices["exact_match"]["digits"]
    assert {key: sums[1] for key, sums in bins.items()} == {"11": 60, "12": 20}
    assert run.best_of_splits["longer"].evaluations == 1


def test_long_run_has_few_points_of_a_split_and_the_best_of_all(tmp_path: Path) -> None:
    arm, count = one_run(), 3 * POINTS - 1
    rows = [split_row(n, {"11": 99 if n == 1 else 1}, 1.0) for n in range(1, count + 1)]
    write_run(tmp_path / "a", arm.run, [*rows, *ENDING])
    run = read_folder(arm, tmp_path)
    assert run is not None
    steps = [point.step for point in run.splits["test"]]
    assert POINTS / 2 <= len(steps) <= POINTS
    assert steps[-1] == count
    assert 1 not in steps
    assert run.best_of_splits["test"].evaluations == count
    assert run.best_of_splits["test"].totals.all["exact_match"][1] == 99


def test_slices_of_many_bins_are_kept_of_the_best_only(tmp_path: Path) -> None:
    arm = one_run()
    bins = {f"{n}x1": n for n in range(MOST_BINS + 1)}
    write_run(tmp_path / "a", arm.run, [split_row(10, bins, 1.0), *ENDING])
    run = read_folder(arm, tmp_path)
    assert run is not None
    assert run.splits["test"][0].totals.slices["exact_match"] == {}
    assert len(run.best_of_splits["test"].totals.slices["exact_match"]["digits"]) == len(bins)


def test_splits_of_a_forks_source_are_not_its_own(tmp_path: Path) -> None:
    arm = one_run()
    rows = [split_row(5, {"11": 99}, 1.0), split_row(10, {"11": 3}, 1.0), *ENDING]
    write_run(tmp_path / "a", arm.run, rows, forked={"run": "other", "step": 5})
    run = read_folder(arm, tmp_path)
    assert run is not None
    assert [point.step for point in run.splits["test"]] == [10]
    assert run.best_of_splits["test"].totals.all["exact_match"][1] == 3
