"""Beyond the paper: the path-star task, on which decoders are said to stay at guessing the arm
(arXiv:2403.06963) and some encoders not to (arXiv:2410.13779).

Everything but the mode is the same: the same supervision, of every step of the path. On the way
back each step follows one edge, so that all are to learn it: the control.
"""

from __future__ import annotations

from dataclasses import replace

from entp.config import Run
from entp.experiments.recipe import Arm, Check, Figure, Recipe, Table
from entp.experiments.recipes.chase import graph_run, tiny_graph_run
from entp.experiments.recipes.count3 import MODES
from entp.tasks.path_star import PathStar

LENGTH, NODES = 5, 50
LAYERS, STEPS = 6, 20_000
LEARNED = 0.99
STARS = (2, 5)
"""Arms of a star: guessing is right in a half and in a fifth of all cases."""
ABOVE_GUESSING = 0.1
"""What a model that has learned more than guessing is above it, at least."""


def path_star_run(mode: str, arms: int, path: str) -> Run:
    task = PathStar(arms, LENGTH, NODES, path=path)  # type: ignore[arg-type]
    return graph_run(task, mode, LAYERS, STEPS)


def tiny_run(run: Run) -> Run:
    """Two arms of two nodes."""
    return tiny_graph_run(run, replace(run.task, arms=2, length=3, nodes=6))  # type: ignore[call-arg]


RECIPE = Recipe(
    name="path-star",
    title=f"The way from a star's centre to an arm's end, {LENGTH} nodes",
    question="Which modes learn to find the arm, when every step of the path is supervised?",
    arms=[
        Arm(path_star_run(mode, arms, path), mode=mode, arms=arms, path=path)
        for path in ("forward", "backward")
        for arms in (STARS if path == "forward" else STARS[-1:])
        for mode in MODES
    ],
    tiny_run=tiny_run,
    tiny_arms={"arms": 5},
    table=Table(rows=("path", "arms"), columns="mode", cells="exact_match", versus="mode"),
    figure=(
        Figure("slices", x="step", y="token_accuracy", lines=("mode", "arms", "path")),
        Figure("curves", y=("loss", "exact_match"), lines=("mode", "arms", "path")),
    ),
    reproduced_if=(
        "Not a claim of the paper. Written before these runs. ENTP separates from decoders if its "
        f"exact match is at least {LEARNED} with both numbers of arms, and a decoder's at most "
        f"{ABOVE_GUESSING} above guessing. The control: on the way back both have at least "
        f"{LEARNED}; if not, there is no verdict."
    ),
    checks=(
        Check(
            "the control: the way back is learned",
            {"mode": ["ENTP", "decoder"], "path": "backward"},
            "exact_match",
            "at least",
            LEARNED,
            control=True,
        ),
        Check(
            "ENTP finds the arm",
            {"mode": "ENTP", "path": "forward"},
            "exact_match",
            "at least",
            LEARNED,
        ),
        *(
            Check(
                f"a decoder stays at guessing one of {arms} arms",
                {"mode": "decoder", "path": "forward", "arms": arms},
                "exact_match",
                "at most",
                1 / arms + ABOVE_GUESSING,
            )
            for arms in STARS
        ),
    ),
)
