"""Beyond the paper: at which length does a decoder fail on Count3, and does depth help? Equal
wall-clock for everyone.

`count3-depth` gives everyone a minute and the same settings; nobody learns more than 24 integers in
that. `count3-longer` asks again where that leaves it open, with four minutes, and for each mode the
settings that served it best since (docs/LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from entp.config import (
    EmaConfig,
    ImportanceConfig,
    Mode,
    OptimConfig,
    Run,
    TrainConfig,
    model_for,
)
from entp.experiments.recipe import Arm, Figure, Recipe, Table
from entp.experiments.recipes.count3 import LONG_PRECONDITION, MODES
from entp.experiments.recipes.count3 import tiny_run as tiny_count3
from entp.experiments.settings import MANY
from entp.tasks.counting import Count3

LENGTHS = (16, 24, 32, 48, 64)
DEPTHS = {"decoder": (1, 2, 3, 6, 12), "ENTP": (2, 3, 6)}
"""Layers to try of each mode."""
SECONDS = 60.0
LONGER_LENGTHS = (32, 48)
LONGER_DEPTHS = {"decoder": (2, 3, 6), "ENTP": (2, 3, 6)}
LONGER_SECONDS = 240.0
LINES = ("mode", "layers")


def depth_run(mode: Mode, layers: int, length: int) -> Run:
    """Width 192, a quarter of the sequence random, preconditioned Muon with linear decay that ends
    with the minute.

    Of 16 integers half are random: 4 would leave only 16⁴ sequences, which a minute of training
    reads several times over.
    """
    random = 8 if length == 16 else length // 4
    task = Count3(prompt_length=random, length=length, num_values=length)
    return Run(
        task=task,
        model=model_for(task, "small", layers=layers),
        mode=mode,
        steps=10**7,
        batch_size=64,
        optim=OptimConfig(
            "muon",
            1e-3,
            2e-5,
            warmup_steps=200,
            decay_by="seconds",
            schedule="linear",
            weight_decay=0.0,
            precondition_every=300,
        ),
        train=TrainConfig(
            eval_every=1000, eval_batches=8, checkpoint_every=5000, max_seconds=SECONDS
        ),
    )


def longer_run(mode: Mode, layers: int, length: int) -> Run:
    """Four times as long, with EMA; decoders with more sequences per step, ENTP with sampled
    targets."""
    run = depth_run(mode, layers, length)
    run = replace(run, train=replace(run.train, max_seconds=LONGER_SECONDS), ema=EmaConfig(1000))
    if mode == "entp":
        return replace(run, importance=ImportanceConfig())
    optim = replace(run.optim, precondition_every=LONG_PRECONDITION)
    return replace(run, batch_size=MANY, optim=optim)


def tiny_run(run: Run) -> Run:
    """As the tiny Count3, with this run's layers."""
    small = tiny_count3(run)
    model = model_for(small.task, "small", layers=min(3, run.model.layers), heads=2, width=32)
    return replace(small, model=model)


def depth_arms(
    make: Callable[[Mode, int, int], Run],
    depths: Mapping[str, Sequence[int]],
    lengths: Sequence[int],
) -> list[Arm]:
    """An arm for every mode, depth and length."""
    return [
        Arm(make(MODES[mode], layers, length), mode=mode, layers=layers, length=length)
        for mode, each in depths.items()
        for layers in each
        for length in lengths
    ]


RECIPE = Recipe(
    name="count3-depth",
    title="Count3 by length and depth, one minute of training each",
    question="At which length does a decoder fail to learn Count3 where ENTP does not, and does "
    "depth help?",
    arms=depth_arms(depth_run, DEPTHS, LENGTHS),
    tiny_run=tiny_run,
    tiny_arms={"layers": [2, 3], "length": 16},
    table=Table(rows=LINES, columns="length", cells=("exact_match", "token_accuracy")),
    figure=(
        Figure("slices", x="length", y=("exact_match", "token_accuracy"), lines=LINES),
        Figure("slices", x="length", y="token_accuracy", lines=LINES, panels="length"),
        Figure("curves", y="loss", lines=LINES, panels="length"),
    ),
    test_sequences=2048,
)
LONGER = replace(
    RECIPE,
    name="count3-longer",
    title="Count3 of 32 and 48 integers, four minutes of training each",
    question="With four minutes instead of one, who learns Count3 of 32 and 48 integers, and does "
    "depth help?",
    arms=depth_arms(longer_run, LONGER_DEPTHS, LONGER_LENGTHS),
    tiny_arms={"layers": 2, "length": 32},
)
