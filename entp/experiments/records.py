"""What runs of a recipe left, gathered: from run folders and files of results, beside the paper's
values; as a table too."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from entp.config import Run
from entp.config.json import config_hash, parse_json, read_run, run_from_json, run_to_json
from entp.errors import InputError
from entp.experiments.recipe import Recipe
from entp.results.schema import FINAL as FINAL_SHAPE
from entp.results.schema import check_results, check_shape
from entp.stats import wilson
from entp.terminal import format_table
from entp.training.loggers import read_environment, read_metrics
from entp.training.trainer import reached

POINTS = 160
"""Evaluations of a run that results.json keeps at most, evenly spread."""
FINAL = "final.json"
UNKNOWN = {"device": "an unknown device", "torch": "unknown", "commit": None, "date": "unknown"}
"""What is recorded of a run without environment.json."""


def run_folder(recipe: Recipe, label: str, run: Run, runs: Path) -> Path:
    """Where a run of a recipe is trained."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", label)
    return runs / recipe.name / f"{plain}-{config_hash(run)}"


def read_final(folder: Path) -> dict[str, Any] | None:
    """What was measured of a run's best weights; None if that has to be done, or done again because
    the file is damaged."""
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
        raise InputError(
            f"{path} is not a file of results ({error}): give another name, or remove it."
        ) from None
    raise InputError(
        f"{path} holds results of {found['recipe']}, not of {recipe.name}: give another name."
    )


def read_results(recipe: Recipe, path: Path, quiet: bool = False) -> Kept:
    """The runs in a results file that have this recipe's settings; none where there is no file yet."""
    if not path.exists():
        return {}
    arms = read_file(path, recipe)["arms"]
    current = {(label, run.seed): config_hash(run) for label, run in recipe.arms()}
    kept: Kept = {}
    for key, run in (
        ((label, run["seed"]), run) for label, arm in arms.items() for run in arm.get("runs", [])
    ):
        if config_hash(run_from_json(run["settings"], str(path))) == current.get(key):
            kept[key] = run
        elif not quiet:
            print(
                f"{path}: {key[0]}, seed {key[1]} has other settings than now, and is left out.",
                file=sys.stderr,
            )
    return kept


def collect(recipe: Recipe, runs: Path, kept: Kept | None = None) -> dict[str, Any]:
    """What the run folders hold, or was kept, beside the paper's values; an arm without an
    evaluation is `not run`."""
    arms = {label: _arm(recipe, label, runs, kept or {}) for label in recipe.runs}
    missing = {label: {"status": "not run", "why": why} for label, why in recipe.missing.items()}
    return {
        "recipe": recipe.name,
        "title": recipe.title,
        "question": recipe.question,
        "arms": {**arms, **missing},
    }


def _arm(recipe: Recipe, label: str, runs: Path, kept: Kept) -> dict[str, Any]:
    """An arm over its seeds: means of the best evaluations, fresh sequences added up."""
    paper = {m: dataclasses.asdict(v) for m, v in recipe.paper.get(label, {}).items()}
    found = [
        _further(_one_run(recipe, label, run, runs), kept.get((label, run.seed)))
        for _, run in recipe.arms([label])
    ]
    ran = [one for one in found if one is not None]
    if not ran:
        return {"status": "not run", "paper": paper}
    states, idle = list(dict.fromkeys(one["status"] for one in ran)), len(found) - len(ran)
    return {
        "status": ", ".join(
            [*states, f"{idle} {'seeds' if idle > 1 else 'seed'} not run"] if idle else states
        ),
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
    if (not evaluations or not steps) and (folder / FINAL).exists():
        told = "holds no evaluation: put it back, or remove the folder to train this run again"
        raise InputError(f"{folder} has {FINAL}, but its metrics.jsonl {told}.")
    if not evaluations or not steps:
        return None
    limit, last = run.train.max_seconds, steps[-1]
    finished = last["step"] >= run.steps or (limit is not None and last["seconds"] >= limit)
    finished = finished or any(reached(run, row) for row in evaluations)
    final = read_final(folder)
    return {
        "seed": run.seed,
        "status": "done" if finished else f"{last['step']} of {run.steps} steps",
        "best": {
            m: (min if m == "loss" else max)(row[m] for row in evaluations) for m in recipe.metrics
        },
        **({"final": final} if final else {}),
        "n": evaluations[-1]["n"],
        "steps": last["step"],
        "seconds": last["seconds"],
        "curve": _curve(evaluations, steps, recipe.metrics),
        "config": config_hash(run),
        "settings": run_to_json(read_run(folder / "config.json")),
        "environment": {**UNKNOWN, **read_environment(folder)},
    }


def _curve(
    evaluations: list[dict[str, Any]], steps: list[dict[str, Any]], metrics: tuple[str, ...]
) -> list[dict[str, float]]:
    """Step, seconds and metrics of evaluations, at most POINTS of them, the last one included."""
    seconds = {row["step"]: row["seconds"] for row in steps}
    stride = -(-len(evaluations) // POINTS)
    kept = evaluations[::-1][::stride][::-1]
    return [
        {"step": r["step"], "seconds": seconds.get(r["step"], 0.0), **{m: r[m] for m in metrics}}
        for r in kept
    ]


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
    """The table paper | ours; a dash where the paper gives no number, or nothing was measured. No
    column of dashes only."""
    told = {metric for arm in results["arms"].values() for metric in arm.get("paper", {})}
    rows = []
    for label, arm in results["arms"].items():
        row = [label, arm["status"]]
        for metric in metrics:
            paper = arm.get("paper", {}).get(metric)
            row += [f"{paper['value']:.4g}" if paper else "-"] if metric in told else []
            row.append(f"{arm['ours'][metric]:.4g}" if "ours" in arm else "-")
        seeds = str(len(arm["seeds"])) if "seeds" in arm else "-"
        rows.append(
            [
                *row,
                *_fresh_cells(arm.get("fresh")),
                seeds,
                f"{arm['seconds']:.0f}" if "seconds" in arm else "-",
            ]
        )
    head = [
        "",
        "status",
        *(f"{m} {who}" for m in metrics for who in ("paper", "ours") if who == "ours" or m in told),
    ]
    return format_table(
        [*head, "fresh sequences right", "continued right", "seeds", "seconds"], rows
    )


def _fresh_cells(fresh: dict[str, Any] | None) -> list[str]:
    """Shares of right sequences with their intervals, read and written by the model itself."""
    cells = ["-", "-"]
    if fresh and "sequence_accuracy_interval" in fresh:
        low, high = fresh["sequence_accuracy_interval"]
        cells[0] = f"{fresh['sequence_accuracy']:.4f} ({low:.4f}..{high:.4f}, n {fresh['n']})"
    if fresh and "generated" in fresh:
        low, high = fresh["generated"]["interval"]
        cells[1] = (
            f"{fresh['generated']['right']} of {fresh['generated']['n']} ({low:.4f}..{high:.4f})"
        )
    return cells
