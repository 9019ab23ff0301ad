"""Everything in the paper as one command, and how far it is.

`entp reproduce all` carries the recipes of the paper's figures and tables out, one after the other;
`entp reproduce` without a name shows what is recorded, what is left, and the verdicts.
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
from typing import Any, NamedTuple

from entp.errors import InputError, TrainingStopped
from entp.experiments import RECIPES
from entp.experiments.collect import match_runs
from entp.experiments.jobs import expected_seconds
from entp.experiments.recipe import ArmRun, Recipe, find_recipe
from entp.experiments.reproduce import MOST_MINUTES, Outcome, reproduce
from entp.results.schema import Record, RunRecord
from entp.results.store import read_record

ALL = "all"
PAPER = (
    *("count3", "count3-bert", "count3-llm", "count2-llm", "match3"),
    *("addition-samples", "addition-length", "icl"),
    *("openwebtext", "clutrr", "tinywinogrande"),
)
"""Recipes of the paper's figures and tables, in its order; the others go beyond it."""


class State(NamedTuple):
    """How far a recipe is."""

    name: str
    done: int
    """Runs that are trained and tested."""
    runs: int
    minutes: float
    """About how long the others take on an H200, one after the other; without those that another
    recipe trains."""
    needs: str
    """What they need that is not here: data, weights, or nothing."""
    verdict: str


def state_of(name: str, records: Path) -> State:
    """How far a recipe is, by its record in a folder."""
    recipe = find_recipe(name)
    arms, path = recipe.runs(), records / f"{name}.json"
    record = read_record(path) if path.exists() else None
    kept = {} if record is None else match_runs(record, arms, path, quiet=True)
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
    *,
    tiny: bool = False,
    data: str | None = None,
    inits: Mapping[str, Path] | None = None,
    **options: Any,
) -> Ended:
    """Carry recipes out, one after the other; what cannot begin or fails does not stop the others.

    records: the folder of their records, RECIPE.json; tiny runs have none. inits: folders of
        pretrained weights by recipe. options: of `reproduce`.
    """
    ended = Ended({}, {}, {}, None)
    for number, name in enumerate(names, start=1):
        recipe = find_recipe(name).tiny() if tiny else find_recipe(name)
        print(f"\n[{number}/{len(names)}] {recipe.name}: {recipe.title}", flush=True)
        if data is not None and any(arm.run.task.takes_data for arm in recipe.arms):
            recipe = recipe.with_data(data)
        record = None if records is None or tiny else records / f"{name}.json"
        init = (inits or {}).get(name)
        try:
            found = reproduce(recipe, runs, record=record, init=init, **options)
        except TrainingStopped as error:
            ended.failed[name] = str(error)
            continue
        except InputError as error:
            ended.skipped[name] = str(error)
            print(f"skipped: {error}", file=sys.stderr, flush=True)
            continue
        ended.done[name] = found
        if found.stopped_by:
            return ended._replace(stopped_by=found.stopped_by)
    return ended


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
        raise InputError(f"--total-minutes is {minutes:g}: it must be above 0.")

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
