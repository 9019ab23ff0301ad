"""Recipes are data: complete, with the paper's settings, and wrong ones are noticed before
anything is trained."""

from __future__ import annotations

import json
import pickle
import sys
import types
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from small_records import small_recipe

from entp.config import MODES
from entp.config.json import config_hash, run_from_json
from entp.errors import InputError
from entp.experiments import RECIPES
from entp.experiments.collect import match_runs
from entp.experiments.recipe import (
    Arm,
    Check,
    Figure,
    PaperValue,
    Recipe,
    SliceValues,
    Table,
    check_recipe,
    find_recipe,
)
from entp.experiments.recipes.count3 import LONG_LR
from entp.experiments.settings import LR
from entp.results.schema import AuthorsCurve
from entp.results.store import read_record
from entp.training.plan import Plan

BEFORE = Path(__file__).parents[1] / "fixtures" / "before_the_move"
RESULTS = Path(__file__).parents[2] / "results"
RECORDED = [name for name in RECIPES if (RESULTS / f"{name}.json").is_file()]


def arms(name: str) -> dict[str, Arm]:
    return {arm.label: arm for arm in find_recipe(name).arms}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_complete(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe.name == name
    assert recipe.question.endswith("?")
    assert recipe.command == f"entp reproduce {name}"
    assert bool(recipe.checks) == bool(recipe.reproduced_if)
    assert all(value.source for arm in recipe.arms for value in arm.paper.values())
    assert recipe.record().arms.keys() == {arm.label for arm in recipe.arms}


@pytest.mark.parametrize("name", RECIPES)
def test_tiny_recipe_is_small(name: str) -> None:
    small = find_recipe(name).tiny()
    assert (small.name, small.command) == (f"{name}-tiny", f"entp reproduce {name} --tiny")
    assert all(arm.run.steps <= 50 for arm in small.arms)
    assert (small.checks, small.authors_curves) == ((), {})
    assert 1 < len(small.runs()) <= 5


@pytest.mark.parametrize(
    "name", ["count3", "count3-depth", "count3-longer", "count3-rates", "match3"]
)
def test_every_arm_from_before_the_move_is_an_arm_of_today(name: str) -> None:
    """By the identity of its configuration; labels have changed."""
    before = [
        one for one in json.loads((BEFORE / "arms.json").read_text()) if one["recipe"] == name
    ]
    today = {one.hash: one for one in find_recipe(name).runs()}
    found = {config_hash(run_from_json(one["settings"])) for one in before}
    assert found <= set(today)
    assert len(found) == len(before)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_are_those_of_their_recipe(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, record = find_recipe(name), read_record(RESULTS / f"{name}.json")
    kept = match_runs(record, recipe.runs(), RESULTS / f"{name}.json")
    assert capsys.readouterr().err == ""
    assert len(kept) == sum(len(arm.runs) for arm in record.arms.values())
    assert kept or record.baselines  # which may be recorded before any run
    assert record.arms.keys() == {arm.label for arm in recipe.arms}
    blank = recipe.record()
    for part in ("title", "question", "metrics", "table", "figures", "reproduced_if", "checks"):
        assert getattr(record, part) == getattr(blank, part), f"reproduce {name} --record again"


def test_label_is_made_from_factors() -> None:
    run = small_recipe().arms[0].run
    assert Arm(run, mode="ENTP", size="medium", training="tuned").label == "ENTP medium, tuned"
    assert Arm(run, mode="ENTP", layers=3, lr=1e-3).label == "ENTP, layers 3, lr 0.001"
    assert Arm(run, train_examples=10**7).label == "train examples 10000000"


def test_arms_travel_to_other_processes() -> None:
    recipe = find_recipe("count3")
    assert pickle.loads(pickle.dumps(recipe.runs())) == recipe.runs()
    assert pickle.loads(pickle.dumps(recipe.arms)) == recipe.arms


def test_runs_of_some_labels_and_of_one_seed() -> None:
    recipe = small_recipe()
    assert [one.name for one in recipe.runs()] == [
        "ENTP, seed 0",
        "ENTP, seed 1",
        "decoder, seed 0",
    ]
    assert [one.name for one in recipe.runs(["ENTP"], 1)] == ["ENTP, seed 1"]
    assert len({one.hash for one in recipe.runs()}) == 3


RUN = small_recipe().arms[0].run
OTHER = replace(RUN, mode="decoder")
CURVE = {"steps": [1], "sequences": [64]}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"name": "../mine"}, r"name is '\.\./mine': letters, digits"),
    "no arms": ({"arms": []}, "has no arms: give it at least one"),
    "no arm": ({"arms": [RUN]}, "among its arms: give it at least one Arm"),
    "no run": ({"arms": [Arm(3, mode="x")]}, "which is not a Run"),  # type: ignore[arg-type]
    "factor": ({"arms": [Arm(RUN, mode=None)]}, "factor mode of an arm is None"),  # type: ignore[arg-type]
    "not finite": ({"arms": [Arm(RUN, lr=float("nan"))]}, "must be a text or a number"),
    "seeds": ({"arms": [Arm(RUN, (0, 0), mode="x")]}, "give whole numbers, each once"),
    "no seeds": ({"arms": [Arm(RUN, (), mode="x")]}, "give whole numbers, each once"),
    "paper": (
        {"arms": [Arm(RUN, paper={"exact": PaperValue(1.0, "x")}, mode="x")]},
        "unknown metric in paper of arm 'x' 'exact': .*Did you mean",
    ),
    "labels": ({"arms": [Arm(RUN, mode="x"), Arm(OTHER, mode="x")]}, "two arms have the factors"),
    "twins": (
        {"arms": [Arm(RUN, mode="x"), Arm(RUN, mode="y")]},
        "y, seed 0 and x, seed 0 are the same run",
    ),
    "tiny arms": ({"tiny_arms": {"mode": "enpt"}}, "tiny_arms is .*no arm has these factors"),
    "sizes": ({"test_sequences": 0}, "test_sequences is 0"),
    "generated": (
        {"arms": [Arm(find_recipe("match3").arms[0].run, mode="x")], "generated_sequences": 8},
        "generated_sequences is 8, and match3 has nothing to generate",
    ),
    "rows": ({"table": Table(rows="modes")}, r"unknown factor in table.rows 'modes'"),
    "cells": ({"table": Table(rows="mode", cells="loos")}, "unknown metric in table 'loos'"),
    "lines": ({"figure": Figure("curves", lines="size")}, "unknown factor in figure 'size'"),
    "y": ({"figure": [Figure("bars", y="bleu")]}, "unknown metric in figure 'bleu'"),
    "slice": ({"figure": Figure("slices", x="digits")}, "unknown x of a figure of slices"),
    "check": (
        {"checks": [Check("it", {"mode": "RNN"}, "loss", "above", 1.0)]},
        "the check 'it' is about .*no arm has these factors",
    ),
    "arm of a check without another": (
        {
            "arms": [Arm(RUN, mode="ENTP", n=1), Arm(OTHER, mode="decoder", n=2)],
            "checks": [
                Check("it", {"mode": "ENTP"}, "loss", "below", {"mode": "decoder"}, same="n")
            ],
        },
        "the check 'it' has nothing to compare 'ENTP, n 1' with: no arm of .*decoder.* has its n",
    ),
    "metric of a check": (
        {"checks": [Check("it", {}, "bleu", "above", 1.0)]},
        "unknown metric in a check 'bleu'",
    ),
    "slice of a check": (
        {"checks": [Check("it", {}, "token_accuracy", "above", 1.0, by="digits", bin="3")]},
        "unknown slice in a check 'digits'",
    ),
    "versus": ({"table": Table(versus="modes")}, r"unknown factor in table\.versus 'modes'"),
    "grid": ({"figure": Figure("grid", x="operands")}, "unknown x of a figure of grid"),
    "authors": (
        {"arms": [Arm(RUN, authors=[0.5], mode="x")]},  # type: ignore[list-item]
        "authors of arm 'x' has 0.5: it must be SliceValues",
    ),
    "authors' metric": (
        {"arms": [Arm(RUN, authors=[SliceValues("bleu", "length", {})], mode="x")]},
        "unknown metric in authors of arm 'x' 'bleu'",
    ),
    "authors' slice": (
        {"arms": [Arm(RUN, authors=[SliceValues("token_accuracy", "size", {})], mode="x")]},
        "unknown slice in authors of arm 'x' 'size'",
    ),
    "curve": (
        {"authors_curves": {"x": AuthorsCurve(**CURVE, values={"bleu": [1.0]})}},
        "unknown metric in authors_curves of 'x' 'bleu'",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG.keys())
def test_invalid_recipe_fails_before_training(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = types.ModuleType("entp_test_recipe")
    own.MINE = small_recipe(**changes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, own.__name__, own)
    with pytest.raises(InputError, match=message):
        find_recipe("entp_test_recipe:MINE")


def test_recipe_of_ones_own_is_found_and_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    own = types.ModuleType("entp_test_recipe")
    own.MINE, own.NONE = small_recipe(), 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, own.__name__, own)
    assert find_recipe("entp_test_recipe:MINE").command == "entp reproduce entp_test_recipe:MINE"
    with pytest.raises(InputError, match=r"must be an entp\.experiments\.recipe\.Recipe"):
        find_recipe("entp_test_recipe:NONE")


def test_tiny_runs_that_are_one_are_noticed() -> None:
    def same(_run: Any) -> Any:
        return RUN

    with pytest.raises(InputError, match=r"after tiny_run and .* are the same run") as told:
        small_recipe(tiny_run=same).tiny()
    assert str(told.value).count("leave one of them out") == 1


def test_same_runs_are_named_once_and_not_for_every_seed() -> None:
    twins = [Arm(RUN, range(9), mode="x"), Arm(RUN, range(9), mode="y")]
    with pytest.raises(InputError) as told:
        check_recipe(small_recipe(arms=twins))
    assert str(told.value) == ("y, seed 0 and x, seed 0 are the same run: leave one of them out.")


def test_record_says_whether_all_seeds_have_one_test() -> None:
    """Those of a file do; sums are drawn anew for each seed."""
    found = {name: find_recipe(name).record().one_test for name in ("openwebtext", "clutrr")}
    assert all(found.values())
    assert not find_recipe("addition-samples").record().one_test


def test_arm_of_another_arm() -> None:
    """With more seeds, another run or another factor, as a recipe that attacks another needs it."""
    first = find_recipe("addition-samples").arms[0]
    more = replace(first, seeds=range(7))
    assert (more.seeds, more.label, more.paper) == (tuple(range(7)), first.label, first.paper)
    assert replace(first) == first
    faster = replace(first, run=RUN, factors={**first.factors, "lr": 1e-3})
    assert (faster.run, faster.label) == (RUN, f"{first.label}, lr 0.001")
    assert Arm(RUN, factors=first.factors, lr=1e-3).factors == faster.factors


def test_figure_by_a_factor_or_a_slice_is_valid() -> None:
    for x in ("mode", "length"):
        figures = [Figure("slices", x, y="token_accuracy"), Figure("grid", x, y="token_accuracy")]
        check_recipe(small_recipe(figure=figures))


def test_record_has_the_authors_values_and_runs_know_what_to_test() -> None:
    values = SliceValues("token_accuracy", "length", {"5": 0.5}, "last", "a file")
    arm = Arm(RUN, (0, 1), authors=[values], mode="x")
    recipe = small_recipe(arms=[arm], test_last=True)
    check_recipe(recipe)
    assert recipe.record().arms["x"].authors == [values]
    assert recipe.tiny().record().arms["x"].authors == []
    for one in (recipe, recipe.tiny()):
        assert [run.test_last for run in one.runs()] == [True, True]
    assert "authors" not in arm.factors
    assert not small_recipe().runs()[0].test_last


def test_count3_has_the_papers_settings() -> None:
    of_paper = [arm for arm in find_recipe("count3").arms if arm.factors["training"] == "paper"]
    assert [arm.label for arm in of_paper] == [
        "ENTP medium, paper",
        "decoder small, paper",
        "decoder medium, paper",
        "decoder large, paper",
        "prefix-lm decoder medium, paper",
    ]
    for run in (arm.run for arm in of_paper):
        assert (run.steps, run.batch_size) == (150_000, 64)
        assert (run.optim.lr, run.optim.min_lr, run.optim.warmup_steps) == (5e-4, 5e-5, 500)
        assert (run.task.model_needs()["context_length"], run.task.prefix) == (64, 16)


def test_authors_curves_are_thinned_and_end_where_theirs_do() -> None:
    curves = find_recipe("count3").authors_curves
    for curve in curves.values():
        assert set(curve.values) == {"loss", "token_accuracy", "exact_match"}
        steps = [0, *curve.steps]
        assert all(0 < b - a < 6000 for a, b in pairwise(steps))
        assert curve.steps[-1] == 150_000
        assert curve.sequences == [64 * step for step in curve.steps]
    assert max(curves["ENTP medium"].values["exact_match"]) > 0.98


def test_tuned_arms_differ_from_the_papers_in_optimizer_and_schedule_only() -> None:
    found = arms("count3")
    for model in ("ENTP medium", "decoder medium", "prefix-lm decoder medium"):
        slow, fast = found[f"{model}, paper"].run, found[f"{model}, tuned"].run
        assert (fast.task, fast.model, fast.mode) == (slow.task, slow.model, slow.mode)
        assert fast.optim.lr == (LONG_LR if fast.train.max_seconds else LR)


def test_decoders_get_the_time_that_entp_took() -> None:
    record = read_record(RESULTS / "count3.json")
    took = max(run.seconds for run in record.arms["ENTP medium, curriculum"].runs)
    for label in ("decoder medium, tuned", "prefix-lm decoder medium, tuned"):
        assert (arms("count3")[label].run.train.max_seconds or 0) >= took


def test_curriculum_begins_as_the_tuned_decoder() -> None:
    found = arms("count3")
    entp, decoder = (
        found[f"{one}"].run for one in ("ENTP medium, curriculum", "decoder medium, tuned")
    )
    assert entp.curriculum is not None
    assert Plan(entp).batch_size(0) == decoder.batch_size
    assert entp.curriculum.lr == decoder.optim.lr
    assert entp.optim.precondition_every == decoder.optim.precondition_every
    assert Plan(entp).sequences_by(88_001) == 88_000 * 256 + 512


def test_decoders_with_matched_steps_and_data_read_what_entp_reads() -> None:
    found = arms("count3")
    entp, steps, data = (
        found[label].run
        for label in (
            "ENTP medium, tuned",
            "decoder medium, matched steps",
            "decoder medium, matched data",
        )
    )
    assert replace(steps, mode="entp", importance=entp.importance, train=entp.train) == entp
    for run in (entp, steps, data):
        assert Plan(run).sequences_by(run.steps) == 6_208_000


def test_every_mode_is_tried_with_the_same_learning_rates_for_the_same_time() -> None:
    runs = [arm.run for arm in find_recipe("count3-rates").arms]
    tried = {mode: sorted(run.optim.lr for run in runs if run.mode == mode) for mode in MODES}
    assert set(tried) == {"entp", "decoder", "prefix-lm"}
    assert len({tuple(rates) for rates in tried.values()}) == 1
    assert {(run.train.max_seconds, run.optim.decay_by) for run in runs} == {(45.0, "seconds")}


def test_depth_asks_for_all_lengths_and_depths() -> None:
    depth, longer = arms("count3-depth"), arms("count3-longer")
    assert len(depth) == 5 * 8
    assert {arm.run.train.max_seconds for arm in depth.values()} == {60.0}
    assert {arm.run.train.max_seconds for arm in longer.values()} == {240.0}
    for label, arm in longer.items():
        run = depth[label].run
        assert (arm.run.task, arm.run.model, arm.run.mode) == (run.task, run.model, run.mode)


def test_chase_asks_what_its_rule_decides() -> None:
    recipe = find_recipe("chase")
    assert [arm.label for arm in recipe.arms] == [
        "ENTP, layers 4",
        "ENTP, layers 5",
        "decoder, layers 5",
        "decoder, layers 10",
        "decoder, layers 16",
    ]
    assert {(arm.run.steps, arm.run.batch_size) for arm in recipe.arms} == {(15_000, 128)}
    assert {(arm.run.model.width, arm.run.model.heads) for arm in recipe.arms} == {(256, 4)}
    assert {arm.run.model.layers == arm.factors["layers"] for arm in recipe.arms} == {True}
    assert isinstance(recipe, Recipe)


@pytest.mark.parametrize("name", ["path-star", "path-star-small"])
def test_path_star_arms_differ_in_the_mode_alone(name: str) -> None:
    runs: dict[Any, list[Any]] = {}
    for arm in find_recipe(name).arms:
        task, model, factors = arm.run.task, arm.run.model, arm.factors
        rest = tuple(value for factor, value in factors.items() if factor != "mode")
        told = (task.arms, task.path, model.position_embedding)  # type: ignore[attr-defined]
        assert rest in ((arm.run.steps,), told)
        runs.setdefault(rest, []).append(arm.run)
    assert len(runs) == (4 if name == "path-star" else 2)
    for same in runs.values():
        modes = [run.mode for run in same][:2]
        assert modes == ["entp", "decoder"] or same[0].steps == 18_000
        alike = [replace(run, mode=same[0].mode, train=same[0].train) for run in same]
        assert alike == [same[0]] * len(same)
