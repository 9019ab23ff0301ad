"""Runs that another recipe has in its record, beside ours, are not trained again where that has all
that ours asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_records import small_recipe

from entp.experiments import running
from entp.experiments import study as study_module
from entp.experiments.recipe import Arm, Recipe
from entp.experiments.reproduce import Outcome, reproduce
from entp.results.schema import RunRecord
from entp.results.store import read_record, write_record
from entp.results.summary import status

RUN = replace(small_recipe().arms[0].run, mode="decoder")
PLAIN: dict[str, Any] = {"generated_sequences": 0, "not_run": {}}


def owner(**changes: Any) -> Recipe:
    """One seed of a decoder, in the recipe's own folder."""
    return small_recipe(**{**PLAIN, "name": "owner", "arms": [Arm(RUN, size=1)], **changes})


def guest(**changes: Any) -> Recipe:
    """The same run under another label and one more, in the folder of the other recipe."""
    arms = [Arm(RUN, (0, 1), depth="two")]
    return small_recipe(**{**PLAIN, "name": "guest", "folder": "owner", "arms": arms, **changes})


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Machine and seed of each training, as it goes on; no figures, which take a second each."""
    found: list[tuple[str, int]] = []
    really = running.train

    def noted(run: Any, out: Path, **options: Any) -> Any:
        found.append((out.parts[-3], run.seed))
        return really(run, out, **options)

    monkeypatch.setattr(running, "train", noted)
    monkeypatch.setattr(study_module, "draw_record", lambda *_: False)
    return found


def on(machine: Path, recipe: Recipe) -> Outcome:
    """The recipe on a machine with folders of its own; records lie beside each other."""
    record = machine.parent / f"{recipe.name}.json"
    return reproduce(recipe, machine, device="cpu", record=record)


def the_first(found: Outcome) -> RunRecord:
    return next(iter(found.arms.values())).runs[0]


def test_run_that_the_other_record_has_is_not_trained_again(
    tmp_path: Path, trained: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    first = on(tmp_path / "one", owner())
    capsys.readouterr()
    second = on(tmp_path / "two", guest())
    assert trained == [("one", 0), ("two", 1)]
    assert the_first(second) == the_first(first)
    assert [status(arm) for arm in second.arms.values()] == ["done"]
    told = f"two, seed 0: as {tmp_path / 'owner.json'} has it\n"
    assert capsys.readouterr().err.count(told) == 1
    (tmp_path / "owner.json").unlink()
    assert on(tmp_path / "three", guest()) == second  # it is in our record now
    assert len(trained) == 2
    assert not list(tmp_path.glob("*.old"))
    assert told not in capsys.readouterr().err


MORE: dict[str, dict[str, Any]] = {
    "a split": {"test_splits": ("valid",)},
    "a bootstrap": {"bootstrap": True},
    "the last checkpoint": {"test_last": True},
    "more sequences": {"test_sequences": 17},
    "generated answers": {"generated_sequences": 8},
}


@pytest.mark.parametrize("changes", MORE.values(), ids=MORE.keys())
def test_run_whose_test_lacks_something_is_trained_again(
    changes: dict[str, Any], tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    on(tmp_path / "one", owner())
    found = on(tmp_path / "two", guest(**changes))
    assert trained == [("one", 0), ("two", 0), ("two", 1)]
    assert [status(arm) for arm in found.arms.values()] == ["done"]


@pytest.mark.parametrize("changes", MORE.values(), ids=MORE.keys())
def test_what_ours_asks_for_may_be_all_that_the_other_has(
    changes: dict[str, Any], tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    on(tmp_path / "one", owner(**changes))
    found = on(tmp_path / "two", guest(**changes))
    assert trained == [("one", 0), ("two", 1)]
    assert [status(arm) for arm in found.arms.values()] == ["done"]


def test_splits_that_ours_does_not_ask_for_are_left_out(
    tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    first = the_first(on(tmp_path / "one", owner(test_splits=("valid",)))).test
    second = the_first(on(tmp_path / "two", guest())).test
    assert trained == [("one", 0), ("two", 1)]
    assert first is not None
    assert second is not None
    assert (list(first.splits), list(second.splits)) == (["valid"], [])
    assert first.totals == second.totals


def untested(path: Path) -> None:
    """As a run that was stopped before its test."""
    _change(path, {"test": None})


def unfinished(path: Path) -> None:
    _change(path, {"status": "3 of 6 steps"})


def of_another_task(path: Path) -> None:
    """As of a recipe that tests on another task than it trains on."""
    _change(path, {"best": {}})


def of_another_recipe(path: Path) -> None:
    write_record(path, read_record(path).model_copy(update={"recipe": "stranger"}))


def damaged(path: Path) -> None:
    path.write_text("{")


def _change(path: Path, changes: dict[str, Any]) -> None:
    record = read_record(path)
    arms = {
        label: arm.model_copy(update={"runs": [r.model_copy(update=changes) for r in arm.runs]})
        for label, arm in record.arms.items()
    }
    write_record(path, record.model_copy(update={"arms": arms}))


@pytest.mark.parametrize(
    "spoil", [untested, unfinished, of_another_task, of_another_recipe, damaged]
)
def test_record_that_does_not_serve_is_left_alone(
    spoil: Callable[[Path], None], tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    other = tmp_path / "owner.json"
    on(tmp_path / "one", owner())
    spoil(other)
    before = other.read_bytes()
    found = on(tmp_path / "two", guest())
    assert trained == [("one", 0), ("two", 0), ("two", 1)]
    assert [status(arm) for arm in found.arms.values()] == ["done"]
    assert other.read_bytes() == before


def test_damaged_record_beside_ours_is_named(
    tmp_path: Path, trained: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "owner.json").write_text("{")
    on(tmp_path / "two", guest())
    assert capsys.readouterr().err.count("owner.json is passed over: ") == 1


def test_without_the_folder_of_another_recipe_no_record_is_looked_into(
    tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    on(tmp_path / "one", owner())
    on(tmp_path / "two", guest(folder=""))
    assert trained == [("one", 0), ("two", 0), ("two", 1)]
