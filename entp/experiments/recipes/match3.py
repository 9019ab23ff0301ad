"""Table "Match3' performance": the task that a decoder can learn. The paper gives no settings:
these are our own.

Integers below 64, as Count3's, make the three-way sum 0 or 128 exactly; with integers below 128 it
wraps around.
"""

from __future__ import annotations

from dataclasses import replace

from entp.config import Mode, OptimConfig, Run, TrainConfig, model_for
from entp.experiments.recipe import PaperValue, Recipe
from entp.experiments.settings import decoder_first, fast_decoder, tiny_start
from entp.tasks.counting import Match3

BELOW_64 = Match3(values=64)
BELOW_128 = Match3()
WRAPPING_STEPS = 25_000
STEPS, AFTER_STEPS = 20_000, 4_000
"""Of a decoder, or of the start; of ENTP after that."""
TABLE = 'paper, Table "Match3\' performance"'


def tiny(run: Run) -> Run:
    """Match3' of 12 integers modulo 16, below 8 or 16, for a model of 2 layers."""
    task = Match3(length=12, modulus=16, values=8 if run.task == BELOW_64 else None)
    return replace(
        run,
        task=task,
        model=model_for(task, "small", layers=2, heads=2, width=32),
        steps=100,
        batch=32,
        optim=OptimConfig(max_lr=3e-3, min_lr=3e-4, warmup=10, decay_steps=100),
        train=TrainConfig(eval_every=25, eval_batches=4, checkpoint_every=50),
        start=tiny_start(run),
    )


def wrapping(mode: Mode) -> Run:
    """Integers below 128. Muon, no weight decay; in mode entp gradients of chosen predictions once
    most are right."""
    return Run(
        task=BELOW_128,
        model=model_for(BELOW_128, "medium"),
        mode=mode,
        steps=WRAPPING_STEPS,
        batch=64,
        optim=OptimConfig(
            "muon",
            7e-4,
            1.4e-5,
            warmup=500,
            decay_steps=WRAPPING_STEPS,
            weight_decay=0.0,
            select=mode == "entp",
        ),
        train=TrainConfig(
            eval_every=500, eval_batches=16, checkpoint_every=5000, token_budget=200_000
        ),
    )


RECIPE = Recipe(
    name="match3",
    title='Table "Match3\' performance"',
    question="Do both architectures learn Match3', whose modulus is fixed and whose third summand is the first integer?",
    runs={
        "decoder medium": fast_decoder(BELOW_64, STEPS),
        "ENTP medium": decoder_first(BELOW_64, STEPS, AFTER_STEPS),
        "decoder medium, integers below 128": wrapping("decoder"),
        "ENTP medium, integers below 128": wrapping("entp"),
    },
    metrics=("sequence_accuracy", "token_accuracy", "loss"),
    paper={
        "decoder medium": {
            "loss": PaperValue(0.0001, TABLE),
            "token_accuracy": PaperValue(0.9999, TABLE),
            "sequence_accuracy": PaperValue(0.9992, TABLE),
        },
        "ENTP medium": {
            "loss": PaperValue(0.0016, TABLE),
            "token_accuracy": PaperValue(0.9997, TABLE),
            "sequence_accuracy": PaperValue(0.995, TABLE),
        },
    },
    shrink=tiny,
)
