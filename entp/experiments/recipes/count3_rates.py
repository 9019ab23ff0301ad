"""Which learning rate suits each mode? Count3 on sequences half as long, every mode with the same
rates and the same time.

1e-3 was best for each of them. The rates of `count3`'s fast arms began there; longer runs have
moved them since (docs/LOG.md).
"""

from __future__ import annotations

from entp.config import Mode, OptimConfig, Run, TrainConfig, model_for
from entp.experiments.recipe import Recipe
from entp.experiments.recipes.count3 import tiny
from entp.tasks.counting import Count3

TASK = Count3(prompt_length=16, length=32, values=32)
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
MODES: dict[str, Mode] = {"ENTP": "entp", "decoder": "decoder", "prefix decoder": "prefix-lm"}
SECONDS = 45.0


def rate_run(mode: Mode, rate: float) -> Run:
    """Medium, as the fast arms: whitened Muon, no weight decay, a rate that falls on a line and
    ends with the time."""
    optim = OptimConfig(
        "muon",
        rate,
        rate / 50,
        warmup=200,
        decay="seconds",
        shape="linear",
        weight_decay=0.0,
        whiten=300,
    )
    return Run(
        task=TASK,
        model=model_for(TASK, "medium"),
        mode=mode,
        steps=10**7,
        batch=64,
        optim=optim,
        train=TrainConfig(
            eval_every=1000,
            eval_batches=8,
            checkpoint_every=10**6,
            max_seconds=SECONDS,
            token_budget=200_000,
            target_metric="loss",
        ),
    )


RECIPE = Recipe(
    name="count3-rates",
    title="Count3 of 32 integers: learning rates, 45 seconds of training each",
    question="Which learning rate suits each mode?",
    runs={
        f"{label} at {rate:g}": rate_run(mode, rate)
        for label, mode in MODES.items()
        for rate in RATES
    },
    metrics=("token_accuracy", "sequence_accuracy", "loss"),
    paper={},
    shrink=tiny,
    fresh=1024,
    few=("ENTP at 0.001", "decoder at 0.0005"),
)
