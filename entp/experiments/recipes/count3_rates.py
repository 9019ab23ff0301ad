"""Which learning rate suits each mode? Count3 on sequences half as long, every mode with the same
learning rates and the same time.

1e-3 was best for each of them. The learning rates of `count3`'s tuned arms began there; longer runs
have moved them since (docs/LOG.md).
"""

from __future__ import annotations

from entp.config import Mode, OptimConfig, Run, TrainConfig, model_for
from entp.experiments.recipe import Arm, Figure, Recipe, Table
from entp.experiments.recipes.count3 import MODES, tiny_run
from entp.tasks.counting import Count3

TASK = Count3(prompt_length=16, length=32, num_values=32)
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
SECONDS = 45.0


def rate_run(mode: Mode, lr: float) -> Run:
    """Medium, as the tuned arms: preconditioned Muon, no weight decay, linear decay that ends with
    the time."""
    return Run(
        task=TASK,
        model=model_for(TASK, "medium"),
        mode=mode,
        steps=10**7,
        batch_size=64,
        optim=OptimConfig(
            "muon",
            lr,
            lr / 50,
            warmup_steps=200,
            decay_by="seconds",
            schedule="linear",
            weight_decay=0.0,
            precondition_every=300,
        ),
        train=TrainConfig(
            eval_every=1000,
            eval_batches=8,
            checkpoint_every=10**6,
            max_seconds=SECONDS,
            token_budget=200_000,
            monitor="loss",
        ),
    )


RECIPE = Recipe(
    name="count3-rates",
    title="Count3 of 32 integers: learning rates, 45 seconds of training each",
    question="Which learning rate suits each mode?",
    arms=[Arm(rate_run(MODES[mode], lr), mode=mode, lr=lr) for mode in MODES for lr in RATES],
    tiny_run=tiny_run,
    tiny_arms={"lr": 1e-3},
    table=Table(rows="lr", columns="mode", cells=("loss", "exact_match", "token_accuracy")),
    figure=(
        Figure("slices", x="lr", y=("loss", "exact_match"), lines="mode"),
        Figure("curves", y=("loss", "token_accuracy"), lines=("mode", "lr")),
    ),
    test_sequences=1024,
)
