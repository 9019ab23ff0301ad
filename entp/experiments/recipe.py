"""What a recipe is: the question, the runs, the paper's values with their source, and a version for
a CPU minute."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from entp.config import Run
from entp.errors import InputError, one_of
from entp.experiments import RECIPES
from entp.experiments.paper_curves import Curve
from entp.fields import complain
from entp.registry import find_named


@dataclass(frozen=True)
class PaperValue:
    """A number of the paper, or of its authors' published curves, and where it stands."""

    value: float
    source: str


@dataclass(frozen=True)
class Recipe:
    """A figure or table of the paper as runs to carry out."""

    name: str
    title: str
    """The figure or table."""
    question: str
    """What is being asked."""
    runs: dict[str, Run]
    """Label to run, in the order of the table."""
    metrics: tuple[str, ...]
    """What the table shows of each run: the best value that any of its evaluations reached, as the
    paper's tables do."""
    paper: dict[str, dict[str, PaperValue]]
    """Label to metric to the paper's value."""
    shrink: Callable[[Run], Run]
    """A run small enough for a few CPU seconds, of the same kind."""
    seeds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Label to the seeds it is run with, where that is not its own seed alone."""
    curves: dict[str, dict[str, Curve]] = field(default_factory=dict)
    """Label to metric to the authors' curve, drawn in grey."""
    fresh: int = 10_000
    """Sequences, drawn anew, on which the best weights of a finished run are tested."""
    alone: int = 0
    """Sequences that it then continues by itself."""
    picture: Callable[[dict[str, Any], Path], None] | None = None
    """Draws the results in its own way, instead of the curves."""
    few: tuple[str, ...] = ()
    """Arms of the tiny version, where all of them would be too many."""
    missing: dict[str, str] = field(default_factory=dict)
    """Parts of the figure that are not run here, and why."""
    source: str = ""
    """How `find_recipe` found it: processes of its own find it again by this."""

    def arms(self, only: Sequence[str] = (), seed: int | None = None) -> list[tuple[str, Run]]:
        """Every run with its label, one for each seed; or those of some labels, or of one seed."""
        return [
            (label, replace(run, seed=own))
            for label, run in self.runs.items()
            for own in self.seeds.get(label, (run.seed,))
            if (not only or label in only) and seed in (None, own)
        ]

    def tiny(self) -> Recipe:
        """The same recipe for a CPU minute: it shows that everything works, not the result."""
        runs = {
            label: self.shrink(run)
            for label, run in self.runs.items()
            if label in (self.few or self.runs)
        }
        small = {"fresh": min(self.fresh, 64), "alone": min(self.alone, 32), "curves": {}}
        return replace(
            self, name=f"{self.name}-tiny", runs=runs, title=f"{self.title}, tiny runs", **small
        )  # type: ignore[arg-type]


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, or one of your own as `module:NAME`."""
    found = find_named("recipe", name, RECIPES, "module:NAME")
    if not isinstance(found, Recipe):
        raise InputError(
            f"recipe {name!r} is {found!r}: it must be an entp.experiments.recipe.Recipe."
        )
    complain(_problems(found))
    return replace(found, source=name)


def _problems(recipe: Recipe) -> list[str]:
    """What would only come to light while its arms are run, or after that."""
    problems = []
    if not re.fullmatch(r"\w[\w.-]*", recipe.name):
        problems.append(
            f"the recipe's name is {recipe.name!r}: letters, digits, - and _ are allowed, as it "
            "names a folder"
        )
    if not recipe.runs:
        problems.append(f"recipe {recipe.name} has no runs: give it at least one")
    for part in ("paper", "seeds", "few"):
        strangers = [label for label in getattr(recipe, part) if label not in recipe.runs]
        problems += [
            str(one_of(f"arm in {part}", label, recipe.runs)).rstrip(".") for label in strangers
        ]
    goals = {
        run.goal: label for label, run in recipe.runs.items() if run.goal not in recipe.metrics
    }
    problems += [
        f"{label} is chosen by {goal}, which is not among the recipe's metrics"
        for goal, label in goals.items()
    ]
    return problems
