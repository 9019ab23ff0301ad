"""Carry a recipe out: train what is missing, test it on fresh sequences, then the table paper |
ours and the pictures.

runs/count3/
  ENTP-medium-3f2a91c0de/     one run folder per arm and seed; final.json: its best weights on fresh sequences
  results.json                per arm and seed: values with intervals, the paper's, curve, steps, seconds, device, commit, date
  curves.png                  loss and accuracy against steps, the authors' curves in grey
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from entp.config import Run
from entp.config.json import parse_json
from entp.errors import InputError, one_of
from entp.experiments.recipe import Recipe, find_recipe
from entp.experiments.records import FINAL, collect, read_final, read_results, run_folder
from entp.experiments.workers import side_by_side
from entp.report.curves import draw_curves
from entp.training.checkpoint import alone_in, find, load, write_file
from entp.training.trainer import train

MOST_MINUTES = 1e9


class How(NamedTuple):
    """How runs are carried out."""

    runs: Path
    device: str
    jobs: int
    """Runs at a time, which share the device."""
    minutes: float | None
    """Most training time of each."""


def reproduce(
    recipe: Recipe,
    runs: Path,
    *,
    device: str = "auto",
    only: Sequence[str] = (),
    seed: int | None = None,
    jobs: int = 1,
    record: Path | None = None,
    minutes: float | None = None,
) -> dict[str, Any]:
    """Train the arms that are not finished, or `only` some, or those of one seed, and write what
    came out. Returns the results.

    minutes: most training time of an arm, for arms whose schedule does not follow the clock anyway.
        What an arm has by then is
        tested and recorded with its number of steps; without the limit it goes on from there.
    record: a results file that may hold runs of other machines. Those that are done in it are not
        trained again; what comes out
        here is added to it, the picture of the curves is drawn beside it, and the results are all
        of it.
    """
    kept = read_results(recipe, record) if record is not None else {}
    for label in only:
        if label not in recipe.runs:
            raise one_of(f"arm of {recipe.name}", label, recipe.runs)
    if not recipe.arms(only, seed):
        raise one_of("seed", str(seed), sorted({str(run.seed) for _, run in recipe.arms(only)}))
    if jobs < 1:
        raise InputError(f"--jobs is {jobs}: it must be at least 1.")
    if minutes is not None and not 0 < minutes <= MOST_MINUTES:
        told = f"it must be above 0 and at most {MOST_MINUTES:g}; leave it out to train to the end"
        raise InputError(f"--minutes is {minutes:g}: {told}.")
    folder = runs / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    done = {key for key, run in kept.items() if run["status"] == "done"}
    arms = [(label, run) for label, run in recipe.arms(only, seed) if (label, run.seed) not in done]
    places = {folder / "results.json": folder / "curves.png"}
    if record is not None:
        places[record] = record.with_suffix(".png")
        _keep_what_is_left_out(record, len(kept))
    stopped, results = None, _write(recipe, runs, record, places)
    how = How(runs, device, jobs, minutes)
    for signal_caught in (
        _side_by_side(recipe, arms, how) if jobs > 1 else _one_by_one(recipe, arms, how)
    ):
        stopped, results = (
            signal_caught,
            _write(recipe, runs, record, places),
        )  # what is done is not lost with what is not
    if stopped:
        results = _write(recipe, runs, record, places)  # those beside it have saved since
    for picture in places.values():
        draw(recipe, results, picture)
    return {**results, "stopped_by": stopped}


def _keep_what_is_left_out(record: Path, kept: int) -> None:
    """A copy of a record that is about to lose runs with other settings: they may be hours of a
    GPU, and nowhere else."""
    arms = parse_json(record.read_text())["arms"] if record.exists() else {}
    if sum(len(arm.get("runs", [])) for arm in arms.values()) > kept:
        names = (
            record.with_name(f"{record.name}.old{number or ''}") for number in itertools.count()
        )
        copy = next(path for path in names if not path.exists())
        write_file(copy, record.read_bytes())
        print(f"{record}: what is left out is still in {copy}.", file=sys.stderr)


def _write(
    recipe: Recipe, runs: Path, record: Path | None, places: Iterable[Path]
) -> dict[str, Any]:
    """Collect what there is and write it to these files. Another process may have added to the
    record since it was read."""
    with alone_in(record.parent if record is not None else runs):
        kept = read_results(recipe, record, quiet=True) if record is not None else {}
        results = collect(recipe, runs, kept)
        for path in places:
            write_file(path, (json.dumps(results, indent=1) + "\n").encode())
    return results


def draw(recipe: Recipe, results: dict[str, Any], picture: Path) -> None:
    """The recipe's own picture if it has one, else the curves."""
    if recipe.picture is not None:
        recipe.picture(results, picture)
    else:
        draw_curves(recipe, results, picture)


def _one_by_one(recipe: Recipe, arms: list[tuple[str, Run]], how: How) -> Iterator[int | None]:
    """After each arm, the signal that stopped it, if one did."""
    start = time.monotonic()
    for number, (label, run) in enumerate(arms, 1):
        left = time_left(time.monotonic() - start, number - 1, len(arms))
        print(f"[{number}/{len(arms)}] {label}, seed {run.seed}{left}", file=sys.stderr, flush=True)
        stopped = carry_out(recipe, label, run, how)
        yield stopped
        if stopped:
            return


def _side_by_side(recipe: Recipe, arms: list[tuple[str, Run]], how: How) -> Iterator[int | None]:
    """Several at once, each in a process of its own. A signal stops all; those that train save what
    they have."""
    tasks = [(recipe.source, recipe.name, label, run.seed, how) for label, run in arms]
    print(f"{len(arms)} runs, {how.jobs} at a time", file=sys.stderr, flush=True)
    start = time.monotonic()
    for done, (number, stopped) in enumerate(side_by_side(how.jobs, _in_process, tasks), 1):
        label, run = arms[number]
        state = (
            "stopped"
            if stopped
            else "done" + time_left(time.monotonic() - start, done, len(arms), how.jobs)
        )
        print(
            f"[{done}/{len(arms)}] {label}, seed {run.seed}: {state}", file=sys.stderr, flush=True
        )
        yield stopped


def time_left(seconds: float, done: int, runs: int, jobs: int = 1) -> str:
    """A word on how long the other runs will take, where they come in rounds that take as long as
    those before."""
    if not 0 < done < runs:
        return ""
    left = seconds / math.ceil(done / jobs) * math.ceil((runs - done) / jobs)
    return f", about {left:.0f} s left" if left < 100 else f", about {left / 60:.0f} min left"


def _in_process(source: str, name: str, label: str, seed: int, how: How) -> int | None:
    """The arm of a recipe that this process looks up again: recipes hold functions, which do not
    travel."""
    found = find_recipe(source)
    recipe = found if found.name == name else found.tiny()
    run = next(run for _, run in recipe.arms([label], seed))
    return carry_out(recipe, label, run, how, quiet=True)


def carry_out(recipe: Recipe, label: str, run: Run, how: How, quiet: bool = False) -> int | None:
    """Train one run, or what is left of it, and test its best weights. Returns the signal that
    stopped it, if one did."""
    folder = run_folder(recipe, label, run, how.runs)
    if how.minutes is not None and run.optim.decay == "steps":
        seconds = min(60 * how.minutes, run.train.max_seconds or math.inf)
        run = dataclasses.replace(run, train=dataclasses.replace(run.train, max_seconds=seconds))
    result = train(
        run, folder, device=how.device, resume=(folder / "config.json").exists(), quiet=quiet
    )
    if not result.stopped_by:
        measure_best(recipe, run, folder, how)
    return result.stopped_by


def measure_best(recipe: Recipe, run: Run, folder: Path, how: How) -> None:
    """final.json: the best weights of a run on fresh sequences, unless it is there for these
    weights already."""
    from entp.training.distributed import World, pick_device
    from entp.training.evaluate import accuracy_by_length, evaluate, fresh_batches, generated_right

    best, path = find(folder), folder / FINAL
    if (read_final(folder) or {}).get("weights") == best.name:
        return
    where = pick_device(how.device, World())
    model = load(folder, device=where)
    values = evaluate(model, run, batches=fresh_batches(run, recipe.fresh), device=where)
    found: dict[str, Any] = {"weights": best.name, "trained_side_by_side": how.jobs, **values}
    if run.task.loss == "cross_entropy":
        found["by_length"] = accuracy_by_length(
            model, run, fresh_batches(run, min(recipe.fresh, 2048)), where
        )
    if recipe.alone:
        right, tried = generated_right(model, run, fresh_batches(run, recipe.alone), where)
        found["generated"] = {"right": right, "n": tried}
    write_file(path, (json.dumps(found) + "\n").encode())
