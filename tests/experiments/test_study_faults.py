"""Results and claims whose disk fails, or whose process ends, at any call: results are the old ones
or the new, and every run can be taken."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from faulty_disk import Call, Copies, Disk, Fails, contents, ends_at, in_memory
from killed_runs import two_runs
from small_runs import fit

from entp.errors import InputError
from entp.experiments import claims
from entp.experiments import study as study_module
from entp.experiments.claims import UnderWay, claimed
from entp.experiments.recipe import Arm, Recipe
from entp.experiments.reproduce import Outcome, reproduce
from entp.experiments.study import Study
from entp.results.schema import Record
from entp.results.store import read_record


@pytest.fixture(autouse=True)
def _without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_module, "draw_record", lambda *_: False)


@pytest.fixture
def place() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


def study_of(recipe: Recipe, root: Path) -> Study:
    return Study(recipe.record(), recipe.runs(), root, root / "runs", root / "small.json")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose results are of one run, and where another has been trained since."""
    root = tmp_path_factory.mktemp("before")
    study = study_of(two_runs(2), root)
    first, second = study.arms
    fit(first.run, root / "runs" / "first")
    study.write()
    fit(second.run, root / "runs" / "second")
    return root


def seeds(record: Record) -> list[int]:
    return [run.seed for run in record.arms["decoder"].runs]


def assert_old_or_new(root: Path) -> list[list[int]]:
    """The seeds that each file of results has; written once more, all have all of them."""
    study = study_of(two_runs(2), root)
    found = [seeds(read_record(path)) for path in study.places]
    assert all(one in ([0], [0, 1]) for one in found)
    assert seeds(study.write()) == [0, 1]
    assert [seeds(read_record(path)) for path in study.places] == [[0, 1]] * 2
    assert not list(root.glob(".*"))
    return found


def test_results_are_old_or_new_whenever_the_process_ends(before: Path, place: Path) -> None:
    root, copies = Path(shutil.copytree(before, place / "root")), Copies(place / "copies")
    with Disk(root, copies) as disk:
        study_of(two_runs(2), root).write()
    found = [assert_old_or_new(copy) for _, copy in copies]
    assert [[0], [0]] in found
    assert [[0, 1], [0]] in found
    assert len(disk.calls) >= 12


@pytest.mark.parametrize(
    ("code", "told"), [(errno.ENOSPC, "Make room"), (errno.EIO, "Give another")]
)
def test_results_are_old_or_new_whatever_call_fails(
    code: int, told: str, before: Path, place: Path
) -> None:
    for number in itertools.count(1):
        root = Path(shutil.copytree(before, place / str(number)))
        with Disk(root, Fails(number, code)) as disk:
            said = error_of(root)
        if number > len(disk.calls):
            break
        assert f"cannot be written: {os.strerror(code)}. {told}" in said
        assert not list(root.glob(".*"))
        assert_old_or_new(root)
    assert number > 12


def error_of(root: Path) -> str:
    """What writing says when it fails; empty if it does not."""
    try:
        study_of(two_runs(2), root).write()
    except InputError as error:
        return str(error)
    return ""


CLAIM = f"{claims.FOLDER}/run.json"


def claim(folder: Path) -> None:
    with claimed(folder, "run"):
        pass


def assert_can_be_taken(folder: Path, at_once: bool = False) -> None:
    """The run, if not at once then when the claim has not been touched for a while."""
    try:
        claim(folder)
    except UnderWay:
        assert not at_once
        for path in (folder / claims.FOLDER).iterdir():
            os.utime(path, (0, 0))
        claim(folder)
    assert list(contents(folder)) == [claims.FOLDER]


def left_claim(folder: Path) -> None:
    """A claim that another machine has left long ago."""
    path = folder / CLAIM
    path.parent.mkdir(parents=True)
    path.write_text('{"host": "elsewhere", "system": "another", "pid": 1}')
    os.utime(path, (0, 0))


@pytest.mark.parametrize("left", [False, True], ids=["new", "left by another"])
def test_run_can_be_taken_whenever_its_owner_ends(left: bool, place: Path) -> None:
    for number in itertools.count(1):
        folder = place / str(number)
        if left:
            left_claim(folder)
        if not ends_at(number, folder, partial(claim, folder)):
            break
        there = contents(folder).get(CLAIM)
        assert_can_be_taken(folder, at_once=there is None or there.endswith(b"}"))
    assert number > 5


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_run_can_be_taken_whatever_call_of_its_owner_fails(code: int, place: Path) -> None:
    for number in itertools.count(1):
        folder = place / str(number)
        with Disk(folder, Fails(number, code)) as disk:
            try:
                claim(folder)
            except OSError:
                given_back = disk.calls[number - 1].kind != "remove"
            else:
                break
        assert_can_be_taken(folder, at_once=given_back)
    assert number > 5


def is_not_inside(call: Call) -> bool:
    """Not of a checkpoint or line that is being written: training's own tests go through those."""
    line = call.kind == "write" and call.path.name == "metrics.jsonl"
    return not line and not call.path.parent.name.endswith(".tmp")


def result(found: Outcome) -> list[object]:
    """What runs came to."""
    return [
        (run.seed, run.status, run.best, run.test and (run.test.checkpoint, run.test.totals))
        for run in found.arms["decoder"].runs
    ]


@pytest.mark.slow
def test_recipe_comes_to_the_same_whenever_the_process_ends(place: Path) -> None:
    both = two_runs(4)
    recipe = replace(both, arms=[Arm(both.arms[0].run, (0,), mode="decoder")])
    copies = Copies(place / "copies", about=is_not_inside)
    with Disk(place / "run", copies):
        found = reproduce(recipe, place / "run", device="cpu", record=place / "run/all.json")
    assert found.arms["decoder"].runs[0].test is not None
    for call, root in copies:
        for path in root.glob(f"*/{claims.FOLDER}/*"):
            os.utime(path, (0, 0))
        again = reproduce(recipe, root, device="cpu", record=root / "all.json")
        assert result(again) == result(found), call
        assert not [path for path in root.rglob(".*") if path.name != claims.FOLDER], call
    assert len(copies.found) > 50
