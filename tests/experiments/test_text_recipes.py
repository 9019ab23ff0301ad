"""Recipes on text: runs that begin with those of another recipe, and tests on another task."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import small_run

from entp.config import Run
from entp.config.json import read_run
from entp.data.prepare import resolve
from entp.engine.flops import decoder_flops, engine_flops
from entp.errors import InputError
from entp.experiments.collect import find_folder, match_runs
from entp.experiments.recipe import Arm, Recipe, check_recipe, find_recipe
from entp.experiments.recipes import text, text_tasks
from entp.experiments.reproduce import reproduce
from entp.report.comparisons import pairs_of
from entp.results.store import read_record
from entp.tasks.base import Batch
from entp.tasks.counting import Count3
from entp.tasks.text import Text
from entp.training.initialise import read_init, weights_hash
from entp.training.techniques.random_targets import RandomTargets


def pretrained() -> Recipe:
    """Two arms with two seeds each."""
    arms = [Arm(replace(small_run(), mode=mode), (0, 1), mode=mode) for mode in ("entp", "decoder")]
    return Recipe("first", "First", "Who?", arms, tiny_run=lambda run: run, test_sequences=16)


def finetuned() -> Recipe:
    """One arm for each, and one that begins with nothing."""
    source = pretrained()
    run = small_run(optim={"lr": 1e-3})
    arms = [
        Arm(replace(run, mode=arm.run.mode), (0, 1), begins=arm.label, begins_with=arm.label)
        for arm in source.arms
    ]
    arms.append(Arm(run, (0,), begins_with="nothing"))
    more = {"tiny_run": lambda run: run, "test_sequences": 16, "source": source}
    return Recipe("second", "Second", "Who?", arms, **more)  # type: ignore[arg-type]


def test_runs_begin_with_the_weights_of_their_source(tmp_path: Path) -> None:
    """What is missing of the source is trained first, as that recipe would."""
    recipe = finetuned()
    only = [recipe.arms[1].label, recipe.arms[2].label]
    found = reproduce(recipe, tmp_path, only=only, record=tmp_path / "second.json")
    assert [len(arm.runs) for arm in found.arms.values()] == [0, 2, 1]
    assert len(list((tmp_path / "first").glob("*/config.json"))) == 2  # the decoders alone
    for arm in recipe.runs(only[:1]):
        assert arm.source is not None
        folder, source = find_folder(arm, tmp_path / "second"), tmp_path / "first"
        init = read_init(find_folder(arm.source, source))
        assert read_run(folder / "config.json").init == init.name
        told = json.loads((folder / "environment.json").read_text())["init"]
        assert told["weights"] == weights_hash(init.weights)
    alone = next(iter(recipe.runs(only[1:])))
    assert read_run(find_folder(alone, tmp_path / "second") / "config.json").init == ""


def test_a_source_that_is_done_is_not_begun_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes for runs that have nothing left to do took 20 seconds before the first step."""
    recipe = finetuned()
    only = [recipe.arms[0].label]
    assert recipe.source is not None
    reproduce(recipe.source, tmp_path, only=[recipe.source.arms[0].label])
    capsys.readouterr()
    reproduce(recipe, tmp_path, only=only)
    told = capsys.readouterr().err
    assert "[1/2] " + recipe.arms[0].label in told
    assert "[1/1]" not in told  # each seed of the source came alone


def test_recorded_runs_with_a_source_are_found_again(tmp_path: Path) -> None:
    """By what they began with, on a machine that has neither folder."""
    recipe, record = finetuned(), tmp_path / "second.json"
    only = [recipe.arms[0].label]
    reproduce(recipe, tmp_path / "here", only=only, record=record)
    before = read_record(record).arms[only[0]].runs
    again = reproduce(recipe, tmp_path / "there", only=only, record=record)
    assert again.arms[only[0]].runs == before
    assert not list((tmp_path / "there").glob("*/*/config.json"))
    other = replace(recipe, arms=[replace_source(recipe.arms[0], recipe.arms[1].begins)])
    assert match_runs(read_record(record), recipe.runs(), record, quiet=True)
    assert not match_runs(read_record(record), other.runs(), record, quiet=True)


def replace_source(arm: Arm, begins: str) -> Arm:
    return Arm(arm.run, arm.seeds, begins=begins, **arm.factors)


def test_source_that_is_not_there_is_refused() -> None:
    recipe = finetuned()
    arms = [replace_source(recipe.arms[0], "somebody")]
    with pytest.raises(InputError, match=r"begins with.*somebody"):
        check_recipe(replace(recipe, arms=arms))
    arms = [Arm(small_run(), (0, 7), begins=recipe.arms[0].begins, mode="x")]
    with pytest.raises(InputError, match=r"seed 7 begins with .* does not have this seed"):
        check_recipe(replace(recipe, arms=arms))


def tiny_text(mode: str = "decoder") -> Run:
    return replace(text.tiny_run(text.text_run("decoder", 25)), mode=mode, steps=6)


def test_recipe_tests_its_runs_on_another_task(tmp_path: Path) -> None:
    """As often as another recipe asks, without training them again."""
    run = tiny_text()
    assert isinstance(run.task, Text)
    arms = [Arm(run, mode="decoder")]
    plain = Recipe("plain", "Plain", "?", arms, tiny_run=lambda run: run, test_sequences=16)
    other = replace(plain, name="strided", folder="plain", test_on=replace(run.task, stride=4))
    first = reproduce(plain, tmp_path, baselines=False).arms["decoder"].runs[0]
    second = reproduce(other, tmp_path, baselines=False).arms["decoder"].runs[0]
    assert first.test is not None
    assert second.test is not None
    assert second.seconds == first.seconds
    assert {path.name for path in tmp_path.glob("plain/*/test*.json")} == {
        "test.json",
        "test-strided.json",
    }
    tokens = len(resolve("pydoc").tokens("test"))
    assert second.test.totals.all["loss"][2] == tokens  # the whole split, each target once
    assert first.test.totals.all["loss"][2] == 16 * run.task.block
    assert second.curve[-1].values == {}


def test_task_without_an_end_is_no_other_task() -> None:
    with pytest.raises(InputError, match="test_on is count3, whose test has no end"):
        check_recipe(replace(pretrained(), test_on=Count3()))


def test_recipe_takes_other_data(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("the cat sat on the mat. " * 400)
    recipe = find_recipe("text-targets").tiny().with_data(str(path))
    assert {arm.run.task.corpus for arm in recipe.arms} == {resolve(str(path)).hash}  # type: ignore[attr-defined]
    found = reproduce(recipe, tmp_path, only=[recipe.arms[-1].label], baselines=False)
    assert "caveats" in found.arms[recipe.arms[-1].label].runs[0].model_dump()
    with pytest.raises(InputError, match="count3 makes its own data"):
        find_recipe("count3").with_data(str(path))


@pytest.mark.parametrize("name", ["openwebtext", "winogrande", "clutrr"])
def test_missing_data_is_told_once_before_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENTP_DATA", str(tmp_path))
    with pytest.raises(InputError) as told:
        reproduce(find_recipe(name), tmp_path)
    assert len(str(told.value)) < 600
    if name == "clutrr":
        assert "clutrr/train.csv" in str(told.value)
    else:
        assert "entp data prepare enwik8_clean" in str(told.value)
    assert not list(tmp_path.glob("*/*/config.json"))


def test_both_modes_of_a_comparison_read_the_same() -> None:
    """Nothing but the mode differs, and the targets that carry the loss."""
    recipes = (text.RECIPE, text.RATES_RECIPE, text.EPOCHS_RECIPE, text.BLOCK_RECIPE)
    for recipe in recipes:
        others = {
            tuple((k, v) for k, v in arm.factors.items() if k != "mode"): arm
            for arm in recipe.arms
            if arm.factors["mode"] == "decoder"
        }
        for arm in recipe.arms:
            key = tuple((k, v) for k, v in arm.factors.items() if k != "mode")
            if arm.factors["mode"] == "ENTP" and key in others:
                same = replace(others[key].run, mode="entp", random_targets=arm.run.random_targets)
                assert arm.run == same
                assert arm.seeds == others[key].seeds


def test_paper_settings_of_openwebtext() -> None:
    arm = text.RECIPE.arms[0]
    optim = arm.run.optim
    assert (optim.lr, optim.min_lr, optim.beta1, optim.beta2) == (6e-4, 6e-5, 0.9, 0.95)
    assert (optim.warmup_steps, optim.decay_steps, optim.weight_decay) == (2_000, 600_000, 0.1)
    assert (arm.run.batch_size, arm.run.model.context_length) == (32, 128)
    assert (arm.run.model.layers, arm.run.model.width, arm.run.model.vocab) == (6, 384, 50304)
    assert arm.run.steps * 32 * 128 == pytest.approx(25e6, rel=1e-3)
    assert arm.paper["loss"].value == 4.650
    few = text.EPOCHS_RECIPE.arms[-1].run
    assert few.steps * 32 * 128 == pytest.approx(16 * few.task.train_tokens, rel=1e-3)  # type: ignore[attr-defined]


def test_downstream_runs_begin_with_language_models_of_their_seed() -> None:
    for arm in text_tasks.CLUTRR_RECIPE.runs():
        assert arm.source is not None
        assert (arm.source.run.mode, arm.source.run.seed) == (arm.run.mode, arm.run.seed)
        assert arm.source.run.steps == text.steps_for(25)
        assert arm.run.task.split_seed == arm.run.seed  # type: ignore[attr-defined]
    pretraining = {arm.hash for arm in text.RECIPE.runs()}
    assert {arm.hash for arm in text_tasks.WINOGRANDE_RECIPE.runs()} <= pretraining


def test_decoder_of_equal_flops_has_entps() -> None:
    """Operations of a step of 32 sequences of 128 tokens, all of them targets."""
    model = text.text_run("ENTP", 25).model
    targets = torch.ones(text.BATCH_SIZE, text.ALL, dtype=torch.bool)
    ratio = engine_flops(model, targets).total / decoder_flops(model, targets).total
    assert 25 * ratio == pytest.approx(text.EQUAL_FLOPS, rel=0.01)


def test_long_blocks_draw_every_position_so_that_steps_repeat() -> None:
    run = next(arm.run for arm in text.BLOCK_RECIPE.arms if arm.factors["mode"] == "ENTP")
    assert run.random_targets is not None
    assert run.batch_size * run.random_targets.count >= text.LONG_BLOCK
    y = np.zeros((run.batch_size, text.LONG_BLOCK), dtype=np.int64)
    draws = [RandomTargets(run).draw(step, Batch(y, y)) for step in range(3)]
    assert draws[0] is not None
    masks = [draw.mask for draw in draws if draw is not None]
    assert all(np.array_equal(masks[0], mask) for mask in masks)


FACTORS = {"schedule": "own", "tokens": 25, "targets": text.ALL}


def test_compute_is_compared_in_the_table() -> None:
    """ENTP of 25 million tokens meets the decoders that read more."""
    recipe = find_recipe("openwebtext")
    assert recipe.table is not None
    record = recipe.record()
    pairs = list(pairs_of(record))
    entp = next(arm.label for arm in recipe.arms if arm.factors == {**FACTORS, "mode": "ENTP"})
    for tokens in (text.EQUAL_SECONDS, text.EQUAL_FLOPS):
        (decoder,) = (arm.label for arm in recipe.arms if arm.factors["tokens"] == tokens)
        assert (entp, decoder) in pairs


def test_tuned_settings_are_the_best_that_were_recorded() -> None:
    """By validation loss, as a person would choose who has no test."""
    path = Path(__file__).parents[2] / "results" / "text-rates.json"
    if not path.exists():
        assert set(text.TUNED.values()) == {("adamw", text.LR)}  # the paper's until then
        return
    arms = read_record(path).arms.values()
    for mode, tuned in text.TUNED.items():
        mine = [arm for arm in arms if arm.factors["mode"] == mode and arm.runs]
        best = min(mine, key=lambda arm: arm.runs[0].best["loss"])
        assert tuned == (best.factors["optimizer"], best.factors["rate"])
