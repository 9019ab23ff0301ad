"""Recipes: the paper's settings as data, tiny versions that run, and runs that continue instead of repeating."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import entp

from entp.experiments import RECIPES
from entp.experiments.recipe import find_recipe
from entp.experiments.reproduce import collect, reproduce, results_table, run_folder


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


def test_count3_has_the_papers_settings() -> None:
    recipe = find_recipe("count3")
    assert list(recipe.runs) == ["ENTP medium", "decoder small", "decoder medium", "decoder large", "prefix decoder medium"]
    for run in recipe.runs.values():
        assert (run.steps, run.batch, run.optim.max_lr, run.optim.min_lr, run.optim.warmup) == (150_000, 64, 5e-4, 5e-5, 500)
        assert (run.task.model_needs()["positions"], run.task.prefix) == (64, 16)


def test_what_was_not_run_is_shown_as_not_run(tmp_path: Path) -> None:
    recipe = find_recipe("count3")
    results = collect(recipe, tmp_path)
    assert {arm["status"] for arm in results["arms"].values()} == {"not run"}
    table = results_table(results, recipe.metrics)
    assert table.count("not run") == len(results["arms"])
    assert "0.991" in table  # the paper's value stands even so


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
        assert {"ours", "paper", "n", "seconds", "seeds", "config", "environment", "steps"} <= arm.keys()
        assert {"torch", "commit", "date", "device"} <= arm["environment"].keys()
    assert (folder / "curves.png").stat().st_size > 10_000
    assert "sequence_accuracy paper" in first.stdout
    kept = {p: p.stat().st_mtime_ns for p in folder.glob("*/checkpoints/*/model.safetensors")}
    again = entp("reproduce", name, "--tiny", "--device=cpu", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert {p: p.stat().st_mtime_ns for p in folder.glob("*/checkpoints/*/model.safetensors")} == kept
    assert "step" not in again.stderr  # nothing was trained again


def test_an_unfinished_arm_goes_on(tmp_path: Path) -> None:
    from dataclasses import replace

    recipe = find_recipe("count3").tiny()
    label = "decoder small"
    short = replace(recipe, runs={label: replace(recipe.runs[label], steps=20)})
    assert reproduce(short, tmp_path, device="cpu")["arms"][label]["status"] == "done"
    assert run_folder(short, label, tmp_path) == run_folder(recipe, label, tmp_path)
    assert collect(recipe, tmp_path)["arms"][label]["status"] == "20 of 60 steps"
    assert reproduce(recipe, tmp_path, device="cpu", only=label)["arms"][label]["steps"] == 60
