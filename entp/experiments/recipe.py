"""What a recipe is: the question, the runs, the paper's values with their source, and a version for a CPU minute."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from entp.config import Run
from entp.errors import one_of
from entp.experiments import RECIPES


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
    """What the table shows of each run: the best value that any of its evaluations reached, as the paper's tables do."""
    paper: dict[str, dict[str, PaperValue]]
    """Label to metric to the paper's value."""
    shrink: Callable[[Run], Run]
    """A run small enough for a few CPU seconds, of the same kind."""
    missing: dict[str, str] = field(default_factory=dict)
    """Parts of the figure that are not run here, and why."""

    def tiny(self) -> Recipe:
        """The same recipe for a CPU minute: it shows that everything works, not the result."""
        runs = {label: self.shrink(run) for label, run in self.runs.items()}
        return replace(self, name=f"{self.name}-tiny", runs=runs, title=f"{self.title}, tiny runs")


def find_recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise one_of("recipe", name, RECIPES)
    module, _, attribute = RECIPES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
