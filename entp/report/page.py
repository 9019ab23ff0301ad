"""docs/results.md from the files in results/: `entp report`. Nothing on that page is written by
hand.

One section per recipe that has a file: its question, a row per arm with the paper's values, ours
and their intervals, the picture beside the file, and what was not run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from entp.config.json import run_from_json
from entp.errors import InputError
from entp.experiments import RECIPES
from entp.experiments.recipe import Recipe, find_recipe
from entp.experiments.records import read_file
from entp.experiments.reproduce import draw
from entp.stats import wilson

HEAD = """# Results

Made by `entp report` from the files in `results/`, which have every run's settings, curve, seed, device, versions, commit and
date. Best: the best evaluation during training, as in the paper's tables, mean over seeds. Fresh: what the best weights do on
sequences drawn anew, in no other use, all seeds together, with 95 % intervals; alone: sequences that the model continues by
itself, from what it is given, without any error. Intervals are of the weights that were tested: they say what other sequences
would change, not what other seeds would, which can be more. Paper: its tables; for count3, which it shows as curves, the
authors' published ones (ENTP's best, decoders' last values). Seconds are of training, evaluations included, on one device, by
the code of the run's own commit, which the files name: later code may be faster.
"""


def page(results: Path, beside: Path) -> str:
    """The page, to be written to the file `beside`, from which its pictures are linked."""
    found = _files(results)
    if not found:
        raise InputError(
            f"{results} has no results: `entp reproduce RECIPE --record {results}/RECIPE.json` "
            "adds some."
        )
    sections = [_section(find_recipe(name), path, beside) for name, path in found.items()]
    missing = [f"`entp reproduce {name}`" for name in RECIPES if name not in found]
    left = f"\nNot recorded yet: {', '.join(missing)}.\n" if missing else ""
    return HEAD + "".join(sections) + left


def draw_again(results: Path) -> None:
    """The pictures beside the files, as `entp reproduce --record` draws them when it ends, from
    what the files hold now."""
    for name, path in _files(results).items():
        recipe = find_recipe(name)
        draw(recipe, read_file(path, recipe), path.with_suffix(".png"))


def _files(results: Path) -> dict[str, Path]:
    """The files of results by recipe."""
    return {
        name: results / f"{name}.json" for name in RECIPES if (results / f"{name}.json").is_file()
    }


def _section(recipe: Recipe, path: Path, beside: Path) -> str:
    younger: dict[str, Any] = {
        label: {} for label in recipe.runs
    }  # arms that the file may not name
    arms = younger | read_file(path, recipe)["arms"]
    ran = {label: arm for label, arm in arms.items() if arm.get("runs")}
    idle = {label: arm for label, arm in arms.items() if not arm.get("runs")}
    lines = [
        f"\n## {recipe.name}\n",
        f"{recipe.title}. {recipe.question}\n",
        f"    entp reproduce {recipe.name}\n",
    ]
    if ran:
        lines += [*(_grid(ran) or _table(recipe, ran)), *_seen(ran), f"\n{_where(ran)}"]
    if idle:
        names = [
            f"{label} ({arm['why']})" if "why" in arm else label for label, arm in idle.items()
        ]
        lines.append(f"\nNot run: {'; '.join(names)}.")
    picture = path.with_suffix(".png")
    if picture.is_file():
        lines.append(
            f"\n![{recipe.title}]({Path(os.path.relpath(picture, beside.parent)).as_posix()})"
        )
    return "\n".join(lines) + "\n"


def _grid(ran: dict[str, Any]) -> list[str]:
    """Arms named "row, column" that fill a grid, each with its fresh sequences; nothing if they do
    not."""
    cells = {tuple(label.rsplit(", ", 1)): arm for label, arm in ran.items()}
    rows, columns = ([*dict.fromkeys(key[n] for key in cells if len(key) == 2)] for n in (0, 1))
    whole = [
        arm
        for arm in ran.values()
        if arm["status"] == "done" and "sequence_accuracy_interval" in (arm["fresh"] or {})
    ]
    if min(len(rows), len(columns)) < 2 or not len(cells) == len(rows) * len(columns) == len(whole):
        return []
    seconds = sorted({f"{arm['seconds']:.0f}" for arm in whole})
    n = sorted({f"{arm['fresh']['n']:,}" for arm in whole})
    told = f"Of {', '.join(n)} fresh sequences wholly right, and tokens right, after {', '.join(seconds)} seconds of training."
    lines = [f"{told}\n", _line(["", *columns]), _line(["---"] * (1 + len(columns)))]
    return lines + [
        _line([row, *(_cell(cells[row, column]["fresh"]) for column in columns)]) for row in rows
    ]


def _seen(ran: dict[str, Any]) -> list[str]:
    """Where training read more sequences than there are, so that those drawn anew are hardly
    unseen: Count3 of few integers."""
    read: dict[tuple[int, int], list[int]] = {}
    for run in (run for arm in ran.values() for run in arm["runs"]):
        task, most = (
            run["settings"]["task"],
            run_from_json(run["settings"], "a recorded run").sequences_by(run["steps"]),
        )
        if "prompt_length" in task and (there := task["values"] ** task["prompt_length"]) < most:
            read.setdefault((task["length"], there), []).append(most)
    return [
        f"\nThere are only {there:,} different sequences of {length} integers, and training read "
        f"{_span(each)}: most of the "
        "fresh ones had been seen, so that their shares do not tell a rule that was learned from "
        "sequences kept in mind."
        for (length, there), each in read.items()
    ]


def _cell(fresh: dict[str, Any]) -> str:
    low, high = fresh["sequence_accuracy_interval"]
    return f"{fresh['sequence_accuracy']:.3f} ({low:.3f} to {high:.3f}), tokens {fresh['token_accuracy']:.3f}"


def _table(recipe: Recipe, ran: dict[str, Any]) -> list[str]:
    """A row per arm."""
    told = {m for arm in ran.values() for m in arm["paper"]}
    columns = [
        f"{m.replace('_', ' ')}: {who}"
        for m in recipe.metrics
        for who in ("paper", "best")
        if who == "best" or m in told
    ]
    alone = any((arm.get("fresh") or {}).get("generated") for arm in ran.values())
    head = [
        "arm",
        "seeds",
        "steps",
        "seconds",
        *columns,
        "fresh sequences right",
        *(["right alone"] if alone else []),
    ]
    rows = [_row(recipe, label, arm, told, alone) for label, arm in ran.items()]
    return [_line(head), _line(["---"] * len(head)), *map(_line, rows), *_by_seed(ran)]


def _by_seed(ran: dict[str, Any]) -> list[str]:
    """What each seed has on fresh sequences, for arms of several."""
    lines = []
    for label, arm in ran.items():
        told = [
            f"seed {run['seed']} {_tested(run)}"
            for run in arm["runs"]
            if "sequence_accuracy" in run.get("final", {})
        ]
        lines += [f"\n{label}, fresh sequences right: {'; '.join(told)}."] if len(told) > 1 else []
    return lines


def _tested(run: dict[str, Any]) -> str:
    final = run["final"]
    low, high = wilson(round(final["sequence_accuracy"] * final["n"]), final["n"])
    own = final.get("generated")
    alone = f", {own['right']} of {own['n']} alone" if own else ""
    return f"{final['sequence_accuracy']:.4f} ({low:.4f} to {high:.4f}){alone} after {run['seconds']:.0f} s"


def _span(values: list[int]) -> str:
    """The least and the most, if they differ."""
    return " to ".join(f"{value:,}" for value in sorted({min(values), max(values)}))


def _row(recipe: Recipe, label: str, arm: dict[str, Any], told: set[str], alone: bool) -> list[str]:
    done = arm["status"] == "done"
    row = [
        label if done else f"{label} ({arm['status']})",
        str(len(arm["seeds"])),
        _span([run["steps"] for run in arm["runs"]]),
        _span([round(run["seconds"]) for run in arm["runs"]]),
    ]
    for metric in recipe.metrics:
        paper = arm["paper"].get(metric)
        row += [f"{paper['value']:.4g}" if paper else ""] if metric in told else []
        row.append(_exact(arm["ours"][metric], "#.3g" if metric == "loss" else ".4f"))
    fresh = arm["fresh"] or {}
    share, inside = fresh.get("sequence_accuracy"), fresh.get("sequence_accuracy_interval")
    row.append(
        f"{share:.4f} ({inside[0]:.4f} to {inside[1]:.4f}), n = {fresh['n']:,}" if inside else ""
    )
    if alone:
        own = fresh.get("generated")
        row.append(
            f"{own['right']} of {own['n']} ({own['interval'][0]:.4f} to {own['interval'][1]:.4f})"
            if own
            else ""
        )
    return row


def _exact(value: float, form: str) -> str:
    """0 and 1 without decimals where they are exact, so that 0.00 and 1.0000 are rounded ones."""
    return f"{value:.0f}" if value in (0, 1) else f"{value:{form}}"


def _where(ran: dict[str, Any]) -> str:
    """Devices, versions and commits of all runs, each named once, and which arms shared the device,
    if not all did."""
    places = [run["environment"] for arm in ran.values() for run in arm["runs"]]

    def each(key: str, length: int | None = None) -> str:
        return ", ".join(sorted({(place[key] or "unknown")[:length] for place in places}))

    shared: dict[int, list[str]] = {}
    for label, arm in ran.items():
        for runs in {run.get("final", {}).get("trained_side_by_side", 1) for run in arm["runs"]} - {
            1
        }:
            shared.setdefault(runs, []).append(label)
    told = "".join(
        f", {runs} runs at a time" + ("" if len(labels) == len(ran) else f" ({'; '.join(labels)})")
        for runs, labels in sorted(shared.items())
    )
    return f"On {each('device')}{told}; torch {each('torch')}; commits {each('commit', 7)}; {each('date', 10)}."


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
