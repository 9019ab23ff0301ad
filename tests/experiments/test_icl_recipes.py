"""Recipes of in-context learning: what their arms share, and small runs from end to end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_records import small_recipe

from entp.config import ModelConfig, RandomTargetsConfig, Run
from entp.errors import InputError
from entp.experiments import running
from entp.experiments import study as study_module
from entp.experiments.orders import variance_over_orders
from entp.experiments.recipe import Arm, Check, Figure, Recipe, Table, check_recipe, find_recipe
from entp.experiments.recipes.icl import (
    BOTH,
    COUNTS,
    POINTS,
    RANDOM_PREFIX,
    RECIPE,
    icl_run,
    tiny_run,
)
from entp.experiments.recipes.icl_depth import RECIPE as DEPTH
from entp.experiments.recipes.icl_shift import RECIPE as SHIFT
from entp.experiments.reproduce import Outcome, reproduce
from entp.model import Transformer
from entp.results.store import read_record
from entp.tasks.base import Baseline
from entp.tasks.counting import Count3
from entp.tasks.in_context import SHIFTS, InContext
from entp.tasks.metrics import Predicted
from entp.training.forward import Forward
from entp.training.plan import Plan

LINEAR = "ENTP standard, linear"
CHEAP = {"least squares", "3 nearest neighbours", "averaging", "zero"}


@pytest.fixture(autouse=True)
def _quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures have tests of their own, and take a second each."""
    monkeypatch.setattr(
        study_module, "draw_record", lambda _, path: path.write_bytes(b"a small figure") > 0
    )


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run folders that training was called in, and baselines that answered, as it goes on."""
    names: list[str] = []
    train, answer = running.train, study_module.evaluate_baseline

    def noted_train(run: Run, out: Path, **options: Any) -> Any:
        names.append(out.name)
        return train(run, out, **options)

    def noted_answer(task: Any, name: str, batches: Any) -> Any:
        names.append(name)
        return answer(task, name, batches)

    monkeypatch.setattr(running, "train", noted_train)
    monkeypatch.setattr(study_module, "evaluate_baseline", noted_answer)
    return names


def run_tiny(recipe: Recipe, runs: Path, **options: Any) -> Outcome:
    return reproduce(recipe.tiny(), runs, device="cpu", seed=0, **options)


@pytest.mark.parametrize("function", POINTS)
def test_modes_differ_in_nothing_but_the_mode_and_its_targets(function: str) -> None:
    entp, decoder = (icl_run(mode, function) for mode in BOTH)
    assert (entp.random_targets, decoder.random_targets) == (RandomTargetsConfig(8), None)
    assert replace(entp, mode="decoder", random_targets=None) == decoder
    assert isinstance(entp.task, InContext)
    assert entp.task.stage(entp.steps // 4) == (20, POINTS[function])
    assert entp.task.stage(0) == (5, 11 if POINTS[function] == 41 else 26)


def test_random_prefixes_have_the_same_schedule_and_are_measured_as_entp() -> None:
    run, entp = icl_run(RANDOM_PREFIX, "linear"), icl_run("ENTP", "linear")
    assert run.mode == "entp"
    plan, other = Plan(run), Plan(entp)
    for step in (0, 100, 500, 10_000, 20_000, run.steps - 1):
        assert plan.mode(step) == "random-prefix"
        assert plan.learning_rate(step, 0) == pytest.approx(other.learning_rate(step, 0))
    assert run.task == entp.task
    assert run.model == entp.model


def test_targets_are_drawn_where_there_are_more_of_them() -> None:
    runs = [icl_run("ENTP", "linear", targets=count) for count in COUNTS]
    assert [run.random_targets and run.random_targets.count for run in runs] == [8, 1, 2, None]


def test_runs_that_recipes_share_are_trained_once() -> None:
    """They are the same runs, and lie in the same folder."""
    classes = {one.hash: one.label for one in RECIPE.runs()}
    shared = {r.name: [a.label for a in r.runs() if a.hash in classes] for r in (DEPTH, SHIFT)}
    assert shared["icl-depth"] == ["ENTP, layers 12", "decoder, layers 12"]
    assert len(shared["icl-shift"]) == len(SHIFT.runs()) == 7
    assert {DEPTH.folder, SHIFT.folder} == {RECIPE.name}
    assert SHIFT.tiny().folder == RECIPE.tiny().name


def test_rule_is_about_every_class_with_p_where_there_are_seeds() -> None:
    told = {(one.left["function"], one.bin): one.p for one in RECIPE.checks}
    assert told == {
        ("linear", "40"): 0.05,
        ("sparse", "40"): 0.05,
        ("net", "100"): None,
        ("tree", "100"): None,
    }
    for one in RECIPE.checks:
        arms = [arm for arm in RECIPE.arms if dict(one.left).items() <= dict(arm.factors).items()]
        assert [len(arm.seeds) for arm in arms] == [3 if one.p else 1]


def test_shared_runs_are_tested_on_what_each_recipe_asks_for(
    tmp_path: Path, called: list[str]
) -> None:
    shifted = run_tiny(SHIFT, tmp_path)
    assert len([name for name in called if name not in CHEAP]) == 3  # trained
    assert [called.count(name) for name in CHEAP] == [1 + len(SHIFTS)] * 4
    for arm in shifted.arms.values():
        (run,) = arm.runs
        assert run.test is not None
        assert list(run.test.splits) == [*SHIFTS, "permuted"]
        assert all(totals.sequences >= 64 for totals in run.test.splits.values())
        bins = run.test.splits["permuted"].slices["squared_error"]["examples"]
        assert list(bins) == ["2", "4", "6", "8"]
        assert run.test.bootstrap is not None
        assert len(run.test.bootstrap.slices["squared_error"]["examples"]) == 9
        assert [point.flops for point in run.curve if point.flops] != []
    streams = [(one.split, set(one.totals)) for one in shifted.baselines]
    assert streams == [(split, CHEAP) for split in ("test", *SHIFTS)]

    called.clear()
    classes = run_tiny(RECIPE, tmp_path)
    assert called == RECIPE.tiny().runs()[0].baseline_names
    (run,) = classes.arms[LINEAR].runs
    assert run.test is not None
    assert run.test.splits == {}  # not of this recipe
    assert run.test.totals == shifted.arms["ENTP"].runs[0].test.totals  # type: ignore[union-attr]

    called.clear()
    assert run_tiny(SHIFT, tmp_path).arms == shifted.arms
    assert called == []


def test_splits_that_a_recipe_asks_for_later_are_tested_later(
    tmp_path: Path, called: list[str]
) -> None:
    shift = SHIFT.tiny()
    first = replace(shift, arms=shift.arms[1:2], test_splits=SHIFTS[:1], checks=(), test_orders=0)
    first = replace(first, figure=Figure("curves"), baselines=("zero",))
    reproduce(first, tmp_path, device="cpu", seed=0)
    found = reproduce(
        replace(first, test_splits=SHIFTS[:2], test_orders=2), tmp_path, device="cpu", seed=0
    )
    (run,) = found.arms["decoder"].runs
    assert run.test is not None
    assert list(run.test.splits) == [*SHIFTS[:2], "permuted"]
    assert [name for name in called if name != "zero"] == [called[0]]  # trained once
    assert called.count("zero") == 3  # on the test and on each shift


def test_baselines_may_be_left_for_another_call_and_another_machine(
    tmp_path: Path, called: list[str]
) -> None:
    record = tmp_path / "icl.json"
    recipe = replace(RECIPE, arms=RECIPE.arms[1:2])
    first = run_tiny(recipe, tmp_path / "one", record=record, baselines=False)
    assert first.baselines == []
    (trained,) = called
    second = run_tiny(recipe, tmp_path / "two", record=record)
    assert [name for name in called if name == trained] == [trained]
    (answered,) = second.baselines
    assert set(answered.totals) == set(called) - {trained}
    assert read_record(record).baselines == second.baselines
    called.clear()
    third = run_tiny(recipe, tmp_path / "three", record=record)
    assert called == []
    assert third.baselines == second.baselines


@dataclass(frozen=True)
class Without(Count3):
    """A baseline that needs a library, and one that does not."""

    def baselines(self) -> dict[str, Baseline]:
        def missing(batch: Any) -> Predicted:
            raise InputError("pip install 'entp[baselines]' for this baseline.")

        return {"slow": missing, "zero": lambda b: Predicted(np.zeros(len(b.targets)), None)}


def test_baseline_that_cannot_answer_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipe(generated_sequences=0)
    run = replace(recipe.arms[1].run, task=Without(prompt_length=4, length=10, num_values=10))
    found = reproduce(replace(recipe, arms=[Arm(run, mode="decoder")]), tmp_path, device="cpu")
    (answered,) = found.baselines
    assert list(answered.totals) == ["zero"]
    assert "baseline slow is left out: pip install" in capsys.readouterr().err


def small_model(**changes: Any) -> tuple[Transformer, InContext]:
    task = InContext(dim=4, points=9)
    torch.manual_seed(0)
    config: dict[str, Any] = {**task.model_needs(), "layers": 2, "heads": 2, "width": 16}
    model = Transformer(ModelConfig(**{**config, **changes}))
    for parameter in model.parameters():
        parameter.data *= 8  # answers of the size of values
    return model, task


def orders_of(model: Any, task: InContext, mode: str, orders: int = 4, size: int = 16) -> Any:
    how = Forward(mode, None, "squared_error", "auto", None, "fp32")
    batches: Iterator[Any] = iter([task.batch(3, "test", step, size) for step in range(2)])
    return variance_over_orders(model, task, batches, how, orders)


def test_answers_of_a_model_that_sees_a_bag_do_not_vary_with_the_order() -> None:
    model, task = small_model(position_embedding="none")
    bag, causal = (orders_of(model, task, mode) for mode in ("entp", "decoder"))
    assert causal.value("squared_error") > 1e-3
    assert bag.value("squared_error") < 1e-9 * causal.value("squared_error")
    assert bag.sequences == 32
    assert list(bag.sliced("squared_error", "examples")) == ["2", "4", "6", "8"]


def test_variance_over_orders_is_in_units_of_the_squared_error() -> None:
    """A model that answers with the first value of its prompt: over orders, any of n values, whose
    variance is (n - 1) / n of dim."""

    def first_value(x: torch.Tensor, mode: str, at: torch.Tensor, **_: Any) -> torch.Tensor:
        return x[:, 1, :1]

    task = InContext(dim=4, points=9)
    found = orders_of(first_value, task, "entp", orders=6, size=1500)
    for examples, value in found.sliced("squared_error", "examples").items():
        n = int(examples)
        assert value == pytest.approx((n - 1) / n, rel=0.1)


def test_queries_are_asked_after_quarters_of_the_examples() -> None:
    assert InContext(points=41).asked_again() == [10, 20, 30, 40]
    assert InContext(points=3).asked_again() == [1, 2]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "split": ({"test_splits": ("sideways",)}, "split in test_splits of icl 'sideways'"),
    "orders": ({"test_orders": 1}, "give at least 2 orders"),
    "baseline": ({"baselines": ("guess",)}, "baseline in baselines 'guess'"),
    "excess": (
        {"table": Table(rows="mode", by="examples", bins="4", excess_over="guess")},
        "baseline in table.excess_over 'guess'",
    ),
    "slice": ({"table": Table(rows="mode", by="digits", bins="4")}, "slice in table.by 'digits'"),
    "folder": ({"folder": "../elsewhere"}, "the recipe's folder is '../elsewhere'"),
    "source": (
        {"figure": Figure("slices", x="examples", sources=("test", "split:noisy"))},
        "'split:noisy'",
    ),
    "check": (
        {"checks": (Check("x", {}, "squared_error", "below", 1.0, source="split:noisy"),)},
        "'split:noisy'",
    ),
}


@pytest.mark.parametrize(("changes", "told"), WRONG.values(), ids=WRONG.keys())
def test_invalid_recipe_fails_before_training(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=re.escape(told)):
        check_recipe(replace(RECIPE, **changes))


def test_orders_are_for_tasks_that_have_others() -> None:
    with pytest.raises(InputError, match=r"test_orders is 2, and .* has no other order"):
        check_recipe(small_recipe(test_orders=2))


def test_tiny_run_keeps_the_kind_of_training() -> None:
    entp, decoder, random = (tiny_run(icl_run(m, "linear")) for m in (*BOTH, RANDOM_PREFIX))
    assert entp.random_targets == RandomTargetsConfig(3)
    assert (decoder.mode, decoder.random_targets) == ("decoder", None)
    assert random.curriculum is not None
    assert random.curriculum.steps == random.steps


def test_names_are_known() -> None:
    for name in ("icl", "icl-rates", "icl-targets", "icl-depth", "icl-shift"):
        assert find_recipe(name).name == name
