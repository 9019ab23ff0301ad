"""Figure "Training loss and sequence accuracy curve for Count3": can each architecture learn it?"""

from __future__ import annotations

from dataclasses import replace

from entp.config import OptimConfig, Run, TrainConfig, model_for
from entp.experiments.recipe import PaperValue, Recipe
from entp.tasks.counting import Count3

TASK = Count3()
ARMS = {
    "ENTP medium": ("entp", "medium"),
    "decoder small": ("decoder", "small"),
    "decoder medium": ("decoder", "medium"),
    "decoder large": ("decoder", "large"),
    "prefix decoder medium": ("prefix", "medium"),
}
CURVES = "authors' published Count3 curves, 150k steps"


def tiny(run: Run) -> Run:
    """Count3 of 12 integers for a model of 2 layers."""
    task = Count3(seed_length=6, length=12, values=12)
    return replace(
        run,
        task=task,
        model=model_for(task, "small", layers=2, heads=2, width=32),
        steps=60,
        batch=32,
        optim=OptimConfig(max_lr=3e-3, min_lr=3e-4, warmup=10, decay_steps=60),
        train=TrainConfig(eval_every=20, eval_batches=4, checkpoint_every=20),
    )


RECIPE = Recipe(
    name="count3",
    title='Figure "Training loss and sequence accuracy curve for Count3"',
    question="Which architectures learn Count3 on sequences of 64 integers?",
    runs={
        label: Run(
            task=TASK,
            model=model_for(TASK, size),
            mode=mode,  # type: ignore[arg-type]
            steps=150_000,
            batch=64,
            train=TrainConfig(eval_every=500, eval_batches=16, checkpoint_every=1000),
        )
        for label, (mode, size) in ARMS.items()
    },
    metrics=("sequence_accuracy", "token_accuracy", "loss"),
    paper={
        "ENTP medium": {"sequence_accuracy": PaperValue(0.991, CURVES)},
        "decoder small": {"sequence_accuracy": PaperValue(0.0, CURVES), "token_accuracy": PaperValue(0.247, CURVES)},
        "decoder medium": {"sequence_accuracy": PaperValue(0.0, CURVES), "token_accuracy": PaperValue(0.706, CURVES)},
        "decoder large": {"sequence_accuracy": PaperValue(0.0, CURVES), "token_accuracy": PaperValue(0.755, CURVES)},
    },
    shrink=tiny,
    missing={
        "BERT as ENTP": "needs pretrained weights; not part of this recipe yet",
        "Llama-3-8B, GPT-4o": "the paper's fine-tuned language models; not part of this recipe yet",
    },
)
