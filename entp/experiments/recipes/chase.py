"""Beyond the paper: pointer chasing, where full attention over the table doubles the hops that a
layer can follow."""

from __future__ import annotations

from dataclasses import replace

from entp.config import EmaConfig, OptimConfig, Run, TrainConfig, model_for
from entp.experiments.recipe import Arm, Check, Figure, Recipe
from entp.experiments.recipes.count3 import LONG_PRECONDITION, MODES
from entp.experiments.settings import AT_ONCE, tuned_optim
from entp.tasks.base import Task
from entp.tasks.pointers import Chase

TASK = Chase(nodes=32, hops=16, table="cycle")
LAYERS = {"ENTP": (4, 5), "decoder": (5, 10, 16)}
STEPS = 15_000
LEARNED = 0.99


def graph_run(task: Task, mode: str, layers: int, steps: int) -> Run:
    """Width 256, 4 heads, batches of 128, preconditioned Muon with linear decay, EMA."""
    optim = replace(tuned_optim(steps, 1e-3), precondition_every=LONG_PRECONDITION)
    return Run(
        task,
        model_for(task, "small", layers=layers, heads=4, width=256),
        MODES[mode],
        steps=steps,
        batch_size=128,
        optim=optim,
        train=TrainConfig(
            eval_every=500,
            eval_batches=8,
            log_every=100,
            checkpoint_every=5000,
            token_budget=AT_ONCE if mode == "ENTP" else None,
        ),
        ema=EmaConfig(1000),
    )


def tiny_graph_run(run: Run, task: Task) -> Run:
    """The run on a small task, with a model of 2 layers."""
    return replace(
        run,
        task=task,
        model=model_for(task, "small", layers=2, heads=2, width=32),
        steps=30,
        batch_size=16,
        optim=OptimConfig(lr=3e-3, min_lr=3e-4, warmup_steps=5, decay_steps=30),
        train=TrainConfig(eval_every=10, eval_batches=2, checkpoint_every=10),
        ema=EmaConfig(10),
    )


def tiny_run(run: Run) -> Run:
    """Four hops on a cycle of 8."""
    return tiny_graph_run(run, Chase(nodes=8, hops=4))


RECIPE = Recipe(
    name="chase",
    title="Pointer chasing on one cycle of 32 nodes, up to 16 hops",
    question="How many layers does each architecture need to follow 16 pointers?",
    arms=[
        Arm(graph_run(TASK, mode, layers, STEPS), mode=mode, layers=layers)
        for mode, each in LAYERS.items()
        for layers in each
    ],
    tiny_run=tiny_run,
    tiny_arms={"layers": 5},
    figure=(
        Figure("slices", x="hops", y="token_accuracy", lines=("mode", "layers")),
        Figure("curves", y=("loss", "exact_match"), lines=("mode", "layers")),
    ),
    reproduced_if=(
        "Written before these runs. ENTP of 5 layers reaches an exact match of at least 0.99, and "
        "every decoder of at most 10 layers stays below it."
    ),
    checks=(
        Check(
            "ENTP of 5 layers learns 16 hops",
            {"mode": "ENTP", "layers": 5},
            "exact_match",
            "at least",
            LEARNED,
        ),
        Check(
            "decoders of at most 10 layers do not",
            {"mode": "decoder", "layers": [5, 10]},
            "exact_match",
            "below",
            LEARNED,
        ),
    ),
)
