"""Everything in the paper as one command, and how far it is.

`entp reproduce all` carries the recipes of the paper's figures and tables out, one after the other
or as one queue; `entp reproduce` without a name shows what is recorded, what is left, and the
verdicts.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

from entp.errors import DeviceFailed, InputError, TrainingStopped
from entp.experiments import PAPER, RECIPES
from entp.experiments.jobs import expected_seconds
from entp.experiments.recipe import ArmRun, Recipe, find_recipe
from entp.experiments.reproduce import (
    MOST_MINUTES,
    Chosen,
    Outcome,
    Part,
    carry_out,
    finish,
    plan,
)
from entp.experiments.study import Study
from entp.results.schema import Record, RunRecord
from entp.results.store import read_record

ALL = "all"


class State(NamedTuple):
    """How far a recipe is."""

    name: str
    done: int
    """Runs that are trained and tested, those of another recipe's record too."""
    runs: int
    minutes: float
    """About how long the others take on an H200, one after the other; without those that another
    recipe trains."""
    needs: str
    """What they need that is not here: data, weights, or nothing."""
    verdict: str


def state_of(name: str, records: Path) -> State:
    """How far a recipe is, by its record in a folder, and that of the recipe that it shares runs
    with."""
    recipe = find_recipe(name)
    arms, path = recipe.runs(), records / f"{name}.json"
    record = read_record(path) if path.exists() else None
    folders = Path(recipe.folder or name)
    kept = Study(recipe.record(), arms, Path(name), folders, path).read_known()
    left = [arm for arm in arms if not _is_done(kept.get(arm.hash))]
    others = find_recipe(recipe.folder).runs() if recipe.folder else []
    elsewhere = {arm.hash for arm in others}
    own = [arm for arm in left if arm.hash not in elsewhere]
    seconds = sum(_seconds_left(arm, kept.get(arm.hash)) for arm in own)
    done = len(arms) - len(left)
    return State(
        name, done, len(arms), seconds / 60, _needs(recipe, left), _verdict(recipe, record)
    )


def _is_done(run: RunRecord | None) -> bool:
    return run is not None and run.done and run.test is not None


def _needs(recipe: Recipe, arms: Sequence[ArmRun]) -> str:
    tasks = {task: None for arm in arms for task in (arm.run.task, arm.test_task)}
    found = []
    try:
        for task in tasks:
            if task.takes_data or task is recipe.test_on:
                task.split_batches("test", 1)
    except InputError:
        found.append("data")
    if any(arm.needs_weights for arm in arms):
        found.append("weights")
    return " and ".join(found)


def _seconds_left(arm: ArmRun, run: RunRecord | None) -> float:
    if run is not None and run.done:
        return 0.0
    return expected_seconds(arm.run, 0 if run is None else run.steps)


def _verdict(recipe: Recipe, record: Record | None) -> str:
    if record is not None and record.verdict is not None:
        return record.verdict.verdict
    return "-" if recipe.checks else "no rule"


def state_rows(names: Sequence[str], records: Path) -> list[list[str]]:
    """For a table: recipe, whether it is the paper's, runs done, minutes left, verdict."""
    rows = []
    for name in names:
        state = state_of(name, records)
        left = f"{state.minutes:,.0f}" if state.done < state.runs else "-"
        part = "paper" if name in PAPER else "beyond"
        runs = f"{state.done} of {state.runs}"
        rows.append([name, part, runs, left, state.needs or "-", state.verdict])
    return rows


STATE_HEAD = ["recipe", "of the", "runs recorded", "minutes left", "needs", "verdict"]


class Ended(NamedTuple):
    """What became of the recipes."""

    done: dict[str, Outcome]
    skipped: dict[str, str]
    """Recipes that could not begin, and why: data or weights that are not here."""
    failed: dict[str, str]
    stopped_by: int | None


def reproduce_all(
    names: Sequence[str],
    runs: Path,
    records: Path | None,
    chosen: Chosen,
    *,
    tiny: bool = False,
    data: str | None = None,
    inits: Mapping[str, Path] | None = None,
) -> Ended:
    """Carry recipes out; what cannot begin or fails does not stop the others. One after the other,
    or, where several runs are wanted at a time, as one queue, so that no GPU is left to the last
    run of each.

    records: the folder of their records, RECIPE.json; tiny runs have none. inits: folders of
        pretrained weights by recipe.
    """
    ended = Ended({}, {}, {}, None)
    recipes = [find_recipe(name).tiny() if tiny else find_recipe(name) for name in names]
    for wave in waves(recipes, chosen.jobs):
        parts: dict[str, Part] = {}
        for number in wave:
            name, recipe = names[number], recipes[number]
            print(f"\n[{number + 1}/{len(names)}] {recipe.name}: {recipe.title}", flush=True)
            if data is not None and any(arm.run.task.takes_data for arm in recipe.arms):
                recipe = recipe.with_data(data)
            record = None if records is None or tiny else records / f"{name}.json"
            try:
                init = (inits or {}).get(name)
                parts[name] = plan(recipe, runs, chosen, record=record, init=init)
            except InputError as error:
                ended.skipped[name] = str(error)
                print(f"skipped: {error}", file=sys.stderr, flush=True)
        stopped = _carry_out(parts, runs, chosen, ended)
        if stopped:
            return ended._replace(stopped_by=stopped)
    return ended


def _carry_out(parts: Mapping[str, Part], runs: Path, chosen: Chosen, ended: Ended) -> int | None:
    """Carry the recipes of a wave out, and note how each ended. Returns the signal that stopped
    them, if one did."""
    try:
        stopped = carry_out(list(parts.values()), runs, chosen) if parts else None
    except DeviceFailed as error:
        ended.failed.update(dict.fromkeys(parts, str(error)))
        return None
    for name, part in parts.items():
        try:
            ended.done[name] = finish(part, chosen, stopped)
        except TrainingStopped as error:
            ended.failed[name] = str(error)
        except InputError as error:
            ended.skipped[name] = str(error)
            print(f"skipped: {error}", file=sys.stderr, flush=True)
    return stopped


def waves(recipes: Sequence[Recipe], jobs: int | Literal["auto"]) -> list[list[int]]:
    """Which recipes are carried out together: each alone where runs are, else as many as do without
    the runs of another."""
    found: list[list[int]] = []
    for number, recipe in enumerate(recipes):
        wave = found[-1] if found else []
        together = {recipes[other].folder or recipes[other].name for other in wave}
        needs = {recipe.folder or recipe.name}
        if recipe.source is not None:
            needs.add(recipe.source.folder or recipe.source.name)
        if jobs == 1 or not found or needs & together:
            found.append([number])
        else:
            wave.append(number)
    return found


def names_of(words: Sequence[str]) -> list[str]:
    """The recipes that words name; `all` is all of the paper's."""
    names = [name for word in words for name in (PAPER if word == ALL else (word,))]
    return list(dict.fromkeys(names))


def parse_inits(words: Sequence[str], names: Sequence[str]) -> dict[str, Path]:
    """RECIPE=FOLDER, each for one of these recipes."""
    found = {}
    for word in words:
        name, given, folder = word.partition("=")
        if not given or name not in names or not folder:
            raise InputError(
                f"--init {word!r}: with several recipes give RECIPE=FOLDER, and a RECIPE among "
                f"{', '.join(names)}."
            )
        found[name] = Path(folder)
    return found


def every_recipe() -> list[str]:
    """The paper's, then the others."""
    return [*PAPER, *(name for name in RECIPES if name not in PAPER)]


@contextmanager
def time_limit(minutes: float | None) -> Iterator[list[bool]]:
    """Inside, this process stops as by SIGTERM after so many minutes: training saves what it has,
    and anything else ends, without an error. Yields a list that is not empty once the time is up.
    """
    told: list[bool] = []
    if minutes is None:
        yield told
        return
    if not 0 < minutes <= MOST_MINUTES:
        raise InputError(
            f"--total-minutes is {minutes:g}: it must be above 0 and at most {MOST_MINUTES:g}; "
            "leave it out to go on to the end."
        )

    def end() -> None:
        told.append(True)
        os.kill(os.getpid(), signal.SIGTERM)

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt  # between two trainings: what is done has been written

    before = signal.signal(signal.SIGTERM, stop)
    timer = threading.Timer(60 * minutes, end)
    timer.daemon = True
    timer.start()
    try:
        yield told
    except KeyboardInterrupt:
        if not told:
            raise
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)
