"""Carry a recipe out: train what is missing, test it on fresh sequences, then the table paper | ours and the pictures.

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
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from entp.config import Run
from entp.config_json import config_hash, parse_json, read_run, run_from_json, run_to_json
from entp.errors import InputError, one_of
from entp.experiments.pictures import draw_curves
from entp.experiments.pool import side_by_side
from entp.experiments.recipe import Recipe, find_recipe
from entp.intervals import wilson
from entp.record_shapes import FINAL as FINAL_SHAPE
from entp.record_shapes import check_results, check_shape
from entp.table import format_table
from entp.training.checkpoint import alone_in, find, load, write_file
from entp.training.metrics import read_environment, read_metrics
from entp.training.trainer import reached, train

POINTS = 160
"""Evaluations of a run that results.json keeps at most, evenly spread."""
FINAL = "final.json"
MOST_MINUTES = 1e9
UNKNOWN = {"device": "an unknown device", "torch": "unknown", "commit": None, "date": "unknown"}
"""What is recorded of a run without environment.json."""


class How(NamedTuple):
    """How runs are carried out."""

    runs: Path
    device: str
    jobs: int
    """Runs at a time, which share the device."""
    minutes: float | None
    """Most training time of each."""


def run_folder(recipe: Recipe, label: str, run: Run, runs: Path) -> Path:
    """Where a run of a recipe is trained."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", label)
    return runs / recipe.name / f"{plain}-{config_hash(run)}"


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
    """Train the arms that are not finished, or `only` some, or those of one seed, and write what came out. Returns the results.

    minutes: most training time of an arm, for arms whose schedule does not follow the clock anyway. What an arm has by then is
        tested and recorded with its number of steps; without the limit it goes on from there.
    record: a results file that may hold runs of other machines. Those that are done in it are not trained again; what comes out
        here is added to it, the picture of the curves is drawn beside it, and the results are all of it.
    """
    kept = read_results(recipe, record) if record is not None else {}
    for label in only:
        if label not in recipe.runs:
            raise one_of("arm", label, recipe.runs)
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
    for signal_caught in _side_by_side(recipe, arms, how) if jobs > 1 else _one_by_one(recipe, arms, how):
        stopped, results = signal_caught, _write(recipe, runs, record, places)  # what is done is not lost with what is not
    for picture in places.values():
        draw(recipe, results, picture)
    return {**results, "stopped_by": stopped}


def _keep_what_is_left_out(record: Path, kept: int) -> None:
    """A copy of a record that is about to lose runs with other settings: they may be hours of a GPU, and nowhere else."""
    arms = parse_json(record.read_text())["arms"] if record.exists() else {}
    if sum(len(arm.get("runs", [])) for arm in arms.values()) > kept:
        names = (record.with_name(f"{record.name}.old{number or ''}") for number in itertools.count())
        copy = next(path for path in names if not path.exists())
        write_file(copy, record.read_bytes())
        print(f"{record}: what is left out is still in {copy}.", file=sys.stderr)


def _write(recipe: Recipe, runs: Path, record: Path | None, places: Iterable[Path]) -> dict[str, Any]:
    """Collect what there is and write it to these files. Another process may have added to the record since it was read."""
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
    for number, (label, run) in enumerate(arms, 1):
        print(f"[{number}/{len(arms)}] {label}, seed {run.seed}", file=sys.stderr, flush=True)
        stopped = carry_out(recipe, label, run, how)
        yield stopped
        if stopped:
            return


def _side_by_side(recipe: Recipe, arms: list[tuple[str, Run]], how: How) -> Iterator[int | None]:
    """Several at once, each in a process of its own. A signal stops all; those that train save what they have."""
    tasks = [(recipe.source, recipe.name, label, run.seed, how) for label, run in arms]
    for done, (number, stopped) in enumerate(side_by_side(how.jobs, _in_process, tasks), 1):
        label, run = arms[number]
        state = "stopped" if stopped else "done"
        print(f"[{done}/{len(arms)}] {label}, seed {run.seed}: {state}", file=sys.stderr, flush=True)
        yield stopped


def _in_process(source: str, name: str, label: str, seed: int, how: How) -> int | None:
    """The arm of a recipe that this process looks up again: recipes hold functions, which do not travel."""
    found = find_recipe(source)
    recipe = found if found.name == name else found.tiny()
    run = next(run for _, run in recipe.arms([label], seed))
    return carry_out(recipe, label, run, how, quiet=True)


def carry_out(recipe: Recipe, label: str, run: Run, how: How, quiet: bool = False) -> int | None:
    """Train one run, or what is left of it, and test its best weights. Returns the signal that stopped it, if one did."""
    folder = run_folder(recipe, label, run, how.runs)
    if how.minutes is not None and run.optim.decay == "steps":
        seconds = min(60 * how.minutes, run.train.max_seconds or math.inf)
        run = dataclasses.replace(run, train=dataclasses.replace(run.train, max_seconds=seconds))
    result = train(run, folder, device=how.device, resume=(folder / "config.json").exists(), quiet=quiet)
    if not result.stopped_by:
        measure_best(recipe, run, folder, how)
    return result.stopped_by


def measure_best(recipe: Recipe, run: Run, folder: Path, how: How) -> None:
    """final.json: the best weights of a run on fresh sequences, unless it is there for these weights already."""
    from entp.training.distributed import World, pick_device
    from entp.training.evaluation import accuracy_by_length, evaluate, fresh_batches, generated_right

    best, path = find(folder), folder / FINAL
    if (_read_final(folder) or {}).get("weights") == best.name:
        return
    where = pick_device(how.device, World())
    model = load(folder, device=where)
    values = evaluate(model, run, batches=fresh_batches(run, recipe.fresh), device=where)
    found: dict[str, Any] = {"weights": best.name, "trained_side_by_side": how.jobs, **values}
    if run.task.loss == "cross_entropy":
        found["by_length"] = accuracy_by_length(model, run, fresh_batches(run, min(recipe.fresh, 2048)), where)
    if recipe.alone:
        right, tried = generated_right(model, run, fresh_batches(run, recipe.alone), where)
        found["generated"] = {"right": right, "n": tried}
    write_file(path, (json.dumps(found) + "\n").encode())


def _read_final(folder: Path) -> dict[str, Any] | None:
    """What was measured of a run's best weights; None if that has to be done, or done again because the file is damaged."""
    try:
        found = parse_json((folder / FINAL).read_text())
        check_shape(found, FINAL_SHAPE)
    except (OSError, ValueError):
        return None
    return found


Kept = dict[tuple[str, int], dict[str, Any]]
"""Recorded runs by label and seed."""


def read_file(path: Path, recipe: Recipe) -> dict[str, Any]:
    """A file of results of the recipe."""
    try:
        found = parse_json(path.read_text())
        check_shape(found, {"recipe": str})
        if found["recipe"] == recipe.name:
            check_results(found, recipe.metrics)
            for arm in found["arms"].values():
                for run in arm.get("runs", []):
                    run_from_json(run["settings"], str(path))
            return found
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a file of results ({error}): give another name, or remove it.") from None
    raise InputError(f"{path} holds results of {found['recipe']}, not of {recipe.name}: give another name.")


def read_results(recipe: Recipe, path: Path, quiet: bool = False) -> Kept:
    """The runs in a results file that have this recipe's settings; none where there is no file yet."""
    if not path.exists():
        return {}
    arms = read_file(path, recipe)["arms"]
    current = {(label, run.seed): config_hash(run) for label, run in recipe.arms()}
    kept: Kept = {}
    for key, run in (((label, run["seed"]), run) for label, arm in arms.items() for run in arm.get("runs", [])):
        if config_hash(run_from_json(run["settings"], str(path))) == current.get(key):
            kept[key] = run
        elif not quiet:
            print(f"{path}: {key[0]}, seed {key[1]} has other settings than now, and is left out.", file=sys.stderr)
    return kept


def collect(recipe: Recipe, runs: Path, kept: Kept | None = None) -> dict[str, Any]:
    """What the run folders hold, or was kept, beside the paper's values; an arm without an evaluation is `not run`."""
    arms = {label: _arm(recipe, label, runs, kept or {}) for label in recipe.runs}
    missing = {label: {"status": "not run", "why": why} for label, why in recipe.missing.items()}
    return {"recipe": recipe.name, "title": recipe.title, "question": recipe.question, "arms": {**arms, **missing}}


def _arm(recipe: Recipe, label: str, runs: Path, kept: Kept) -> dict[str, Any]:
    """An arm over its seeds: means of the best evaluations, fresh sequences added up."""
    paper = {m: dataclasses.asdict(v) for m, v in recipe.paper.get(label, {}).items()}
    found = [_further(_one_run(recipe, label, run, runs), kept.get((label, run.seed))) for _, run in recipe.arms([label])]
    ran = [one for one in found if one is not None]
    if not ran:
        return {"status": "not run", "paper": paper}
    states, idle = list(dict.fromkeys(one["status"] for one in ran)), len(found) - len(ran)
    return {
        "status": ", ".join([*states, f"{idle} {'seeds' if idle > 1 else 'seed'} not run"] if idle else states),
        "ours": {m: sum(one["best"][m] for one in ran) / len(ran) for m in recipe.metrics},
        "paper": paper,
        "fresh": _fresh([one["final"] for one in ran if "final" in one]),
        "n": ran[0]["n"],
        "steps": ran[0]["steps"],
        "seconds": sum(one["seconds"] for one in ran) / len(ran),
        "seeds": [one["seed"] for one in ran],
        "runs": ran,
    }


def _further(here: dict[str, Any] | None, kept: dict[str, Any] | None) -> dict[str, Any] | None:
    """The run that came further."""
    return kept if here is None or (kept is not None and kept["steps"] > here["steps"]) else here


def _one_run(recipe: Recipe, label: str, run: Run, runs: Path) -> dict[str, Any] | None:
    """One seed of an arm; None before its first evaluation."""
    folder = run_folder(recipe, label, run, runs)
    rows = read_metrics(folder)
    evaluations = [row for row in rows if row["kind"] == "eval"]
    steps = [row for row in rows if row["kind"] == "train"]
    if not evaluations or not steps:
        return None
    limit, last = run.train.max_seconds, steps[-1]
    finished = last["step"] >= run.steps or (limit is not None and last["seconds"] >= limit)
    finished = finished or any(reached(run, row) for row in evaluations)
    final = _read_final(folder)
    return {
        "seed": run.seed,
        "status": "done" if finished else f"{last['step']} of {run.steps} steps",
        "best": {m: (min if m == "loss" else max)(row[m] for row in evaluations) for m in recipe.metrics},
        **({"final": final} if final else {}),
        "n": evaluations[-1]["n"],
        "steps": last["step"],
        "seconds": last["seconds"],
        "curve": _curve(evaluations, steps, recipe.metrics),
        "config": config_hash(run),
        "settings": run_to_json(read_run(folder / "config.json")),
        "environment": {**UNKNOWN, **read_environment(folder)},
    }


def _curve(evaluations: list[dict[str, Any]], steps: list[dict[str, Any]], metrics: tuple[str, ...]) -> list[dict[str, float]]:
    """Step, seconds and metrics of evaluations, at most POINTS of them, the last one included."""
    seconds = {row["step"]: row["seconds"] for row in steps}
    stride = -(-len(evaluations) // POINTS)
    kept = evaluations[::-1][::stride][::-1]
    return [{"step": r["step"], "seconds": seconds.get(r["step"], 0.0), **{m: r[m] for m in metrics}} for r in kept]


def _fresh(finals: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Fresh sequences of all seeds together, with 95 % intervals; None where nothing was tested."""
    if not finals:
        return None
    n = sum(one["n"] for one in finals)
    every = [m for m in finals[0] if all(isinstance(one.get(m), float) for one in finals)]
    mean = {m: sum(one[m] * one["n"] for one in finals) / n for m in every}
    found: dict[str, Any] = {"n": n, **mean}
    if "sequence_accuracy" in mean:
        found["sequence_accuracy_interval"] = wilson(round(mean["sequence_accuracy"] * n), n)
    told = [one["generated"] for one in finals if "generated" in one]
    if told:
        right, tried = sum(t["right"] for t in told), sum(t["n"] for t in told)
        found["generated"] = {"right": right, "n": tried, "interval": wilson(right, tried)}
    return found


def results_table(results: dict[str, Any], metrics: tuple[str, ...]) -> str:
    """The table paper | ours; a dash where the paper gives no number, or nothing was measured. No column of dashes only."""
    told = {metric for arm in results["arms"].values() for metric in arm.get("paper", {})}
    rows = []
    for label, arm in results["arms"].items():
        row = [label, arm["status"]]
        for metric in metrics:
            paper = arm.get("paper", {}).get(metric)
            row += [f"{paper['value']:.4g}" if paper else "-"] if metric in told else []
            row.append(f"{arm['ours'][metric]:.4g}" if "ours" in arm else "-")
        seeds = str(len(arm["seeds"])) if "seeds" in arm else "-"
        rows.append([*row, *_fresh_cells(arm.get("fresh")), seeds, f"{arm['seconds']:.0f}" if "seconds" in arm else "-"])
    head = ["", "status", *(f"{m} {who}" for m in metrics for who in ("paper", "ours") if who == "ours" or m in told)]
    return format_table([*head, "fresh sequences right", "continued right", "seeds", "seconds"], rows)


def _fresh_cells(fresh: dict[str, Any] | None) -> list[str]:
    """Shares of right sequences with their intervals, read and written by the model itself."""
    cells = ["-", "-"]
    if fresh and "sequence_accuracy_interval" in fresh:
        low, high = fresh["sequence_accuracy_interval"]
        cells[0] = f"{fresh['sequence_accuracy']:.4f} ({low:.4f}..{high:.4f}, n {fresh['n']})"
    if fresh and "generated" in fresh:
        low, high = fresh["generated"]["interval"]
        cells[1] = f"{fresh['generated']['right']} of {fresh['generated']['n']} ({low:.4f}..{high:.4f})"
    return cells
