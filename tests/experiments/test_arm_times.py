"""`entp bench arms`: what a step of each arm of a recipe takes here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_runs import small_run

from entp.cli.main import main
from entp.experiments import arm_times
from entp.experiments.recipe import Arm, Recipe


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    arms = [Arm(replace(small_run(), mode=mode), mode=mode) for mode in ("entp", "decoder")]
    found = Recipe("small", "Small", "Who?", arms, tiny_run=lambda run: run, test_sequences=16)
    monkeypatch.setattr(arm_times, "find_recipe", lambda name: found)
    return found


def rows(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    lines = capsys.readouterr().out.splitlines()
    return [line.split() for line in lines[2:]]


@pytest.mark.usefixtures("recipe")
def test_each_arm_is_timed_on_its_own_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "arms", "small", "--steps", "3", "--device", "cpu"]) == 0
    found = rows(capsys)
    assert [row[0] for row in found] == ["entp", "decoder"]
    for row in found:
        milliseconds, steps, minutes = (float(cell) for cell in row[1:4])
        assert milliseconds > 0
        assert steps == small_run().steps
        assert minutes == pytest.approx(milliseconds * steps / 60_000, abs=0.06)


def test_some_arms_and_later_steps(
    recipe: Recipe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    task = type(recipe.arms[0].run.task)
    plain = task.batch

    def batch(self: Any, seed: int, split: str, step: int, size: int) -> Any:
        seen.append(step)
        return plain(self, seed, split, step, size)

    monkeypatch.setattr(task, "batch", batch)
    words = ["--only", recipe.arms[1].label, "--steps", "2", "--first", "2", "--device", "cpu"]
    assert main(["bench", "arms", "small", *words]) == 0
    assert len(rows(capsys)) == 1
    assert min(seen) == 2


@pytest.mark.usefixtures("recipe")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["small", "--only", "nobody"], "unknown arm of small 'nobody': allowed are"),
        (["small", "--steps", "0"], "must be at least 1"),
        ([], "give a recipe: entp bench arms RECIPE"),
        (["small", "--init", "nowhere"], "has no arm of a pretrained model"),
    ],
)
def test_bad_words_are_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "arms", *words]) == 2
    assert told in capsys.readouterr().err
