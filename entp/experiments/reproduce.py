"""Carry a recipe out: train what is missing, then the table paper | ours, results.json and the picture.

runs/count3/
  ENTP-medium-3f2a91c0de/     one run folder per arm
  results.json                value, paper's value, n, steps, seconds, seed, device, versions, commit, date
  curves.png
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

from entp.config import Run, config_hash
from entp.errors import one_of
from entp.experiments.recipe import Recipe
from entp.table import format_table
from entp.training.checkpoint import write_file
from entp.training.metrics import read_metrics
from entp.training.trainer import train


def run_folder(recipe: Recipe, label: str, runs: Path) -> Path:
    """Where an arm of a recipe is trained."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", label)
    return runs / recipe.name / f"{plain}-{config_hash(recipe.runs[label])}"


def reproduce(recipe: Recipe, runs: Path, *, device: str = "auto", only: str | None = None) -> dict[str, Any]:
    """Train the arms that are not finished (all, or `only` one), and write what came out. Returns the results."""
    if only is not None and only not in recipe.runs:
        raise one_of("arm", only, recipe.runs)
    stopped = None
    for label, run in recipe.runs.items():
        if only in (None, label) and not stopped:
            folder = run_folder(recipe, label, runs)
            result = train(run, folder, device=device, resume=(folder / "config.json").exists())
            stopped = result.stopped_by
    results = collect(recipe, runs)
    folder = runs / recipe.name
    write_file(folder / "results.json", json.dumps(results, indent=1).encode())
    draw_curves(recipe, runs, folder / "curves.png")
    return {**results, "stopped_by": stopped}


def collect(recipe: Recipe, runs: Path) -> dict[str, Any]:
    """What the run folders hold, beside the paper's values; an arm without an evaluation is `not run`."""
    arms = {label: _arm(recipe, label, run, run_folder(recipe, label, runs)) for label, run in recipe.runs.items()}
    missing = {label: {"status": "not run", "why": why} for label, why in recipe.missing.items()}
    return {"recipe": recipe.name, "title": recipe.title, "question": recipe.question, "arms": {**arms, **missing}}


def _arm(recipe: Recipe, label: str, run: Run, folder: Path) -> dict[str, Any]:
    paper = {m: dataclasses.asdict(v) for m, v in recipe.paper.get(label, {}).items()}
    evaluations = [row for row in read_metrics(folder) if row["kind"] == "eval"]
    if not evaluations:
        return {"status": "not run", "paper": paper}
    best = {m: (min if m == "loss" else max)(row[m] for row in evaluations) for m in recipe.metrics}
    train_rows = [row for row in read_metrics(folder) if row["kind"] == "train"]
    step = train_rows[-1]["step"]
    return {
        "status": "done" if step >= run.steps else f"{step} of {run.steps} steps",
        "ours": best,
        "paper": paper,
        "n": evaluations[-1]["n"],
        "steps": step,
        "seconds": train_rows[-1]["seconds"],
        "seeds": [run.seed],
        "config": config_hash(run),
        "environment": json.loads((folder / "environment.json").read_text()),
    }


def results_table(results: dict[str, Any], metrics: tuple[str, ...]) -> str:
    """The table paper | ours; a dash where the paper gives no number."""
    rows = []
    for label, arm in results["arms"].items():
        row = [label, arm["status"]]
        for metric in metrics:
            paper = arm.get("paper", {}).get(metric)
            row += [f"{paper['value']:.4g}" if paper else "-", f"{arm['ours'][metric]:.4g}" if "ours" in arm else "-"]
        rows.append([*row, str(arm.get("n", "-")), f"{arm['seconds']:.0f}" if "seconds" in arm else "-"])
    head = ["", "status", *(f"{m} {who}" for m in metrics for who in ("paper", "ours")), "n", "seconds"]
    return format_table(head, rows)


def draw_curves(recipe: Recipe, runs: Path, path: Path) -> None:
    """Validation loss and the recipe's first metric against steps, one line per arm, the paper's values dashed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install 'entp[plot]' to draw one.", file=sys.stderr)
        return
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    for label in recipe.runs:
        rows = [row for row in read_metrics(run_folder(recipe, label, runs)) if row["kind"] == "eval"]
        for panel, metric in zip(panels, ("loss", recipe.metrics[0]), strict=True):
            (line,) = panel.plot([r["step"] for r in rows], [r[metric] for r in rows], label=label, marker=".")
            known = recipe.paper.get(label, {}).get(metric)
            if known:
                panel.axhline(known.value, color=line.get_color(), linestyle="--", linewidth=1, alpha=0.6)
    for panel, metric in zip(panels, ("loss", recipe.metrics[0]), strict=True):
        panel.set(xlabel="optimizer steps", ylabel=f"validation {metric.replace('_', ' ')}")
    panels[0].legend(fontsize=8)
    figure.suptitle(f"{recipe.title} (dashed: the paper's value)", fontsize=10)
    figure.savefig(path, dpi=120)
