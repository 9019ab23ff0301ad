"""Beyond the paper: at which length does a decoder fail on Count3, and does depth help? Equal
wall-clock for everyone.

`count3-depth` gives everyone a minute and the same settings; nobody learns more than 24 integers in that. `count3-longer` asks
again where that leaves it open, with four minutes, and for each mode the settings that served it
best since (docs/LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from entp.config import Mode, OptimConfig, Run, TrainConfig, model_for
from entp.experiments.recipe import Recipe
from entp.experiments.recipes.count3 import LONG_WHITEN
from entp.experiments.recipes.count3 import tiny as tiny_count3
from entp.experiments.settings import MANY
from entp.report.curves import draw_depth
from entp.tasks.counting import Count3

LENGTHS = (16, 24, 32, 48, 64)
Depths = dict[str, tuple[Mode, tuple[int, ...]]]
"""Layers to try of each mode, by the name it has in labels."""
DEPTHS: Depths = {"decoder": ("decoder", (1, 2, 3, 6, 12)), "ENTP": ("entp", (2, 3, 6))}
SECONDS = 60.0
LONGER_LENGTHS = (32, 48)
LONGER_DEPTHS: Depths = {"decoder": ("decoder", (2, 3, 6)), "ENTP": ("entp", (2, 3, 6))}
LONGER_SECONDS = 240.0


def depth_run(mode: Mode, layers: int, length: int) -> Run:
    """Width 192, a quarter of the sequence random, whitened Muon with a rate that falls on a line
    and ends with the minute.

    Of 16 integers half are random: 4 would leave only 16⁴ sequences, which a minute of training
    reads several times over.
    """
    optim = OptimConfig(
        "muon",
        1e-3,
        2e-5,
        warmup=200,
        decay="seconds",
        shape="linear",
        weight_decay=0.0,
        whiten=300,
    )
    task = Count3(prompt_length=8 if length == 16 else length // 4, length=length, values=length)
    return Run(
        task=task,
        model=model_for(task, "small", layers=layers),
        mode=mode,
        steps=10**7,
        batch=64,
        optim=optim,
        train=TrainConfig(
            eval_every=1000, eval_batches=8, checkpoint_every=5000, max_seconds=SECONDS
        ),
    )


def longer_run(mode: Mode, layers: int, length: int) -> Run:
    """Four times as long, with the mean of the weights; decoders with more sequences a step, ENTP
    with chosen predictions."""
    run = depth_run(mode, layers, length)
    own = {"select": True} if mode == "entp" else {"whiten": LONG_WHITEN}
    return replace(
        run,
        batch=run.batch if mode == "entp" else MANY,
        optim=replace(run.optim, average=1000, **own),
        train=replace(run.train, max_seconds=LONGER_SECONDS),
    )


def tiny(run: Run) -> Run:
    """As the tiny Count3, with this run's layers."""
    small = tiny_count3(run)
    return replace(
        small,
        model=model_for(small.task, "small", layers=min(3, run.model.layers), heads=2, width=32),
    )


def grid(make: Callable[[Mode, int, int], Run], depths: Depths, *lengths: int) -> dict[str, Run]:
    """A run for every depth and length, by a name from which the picture reads both."""
    return {
        f"{label}, {layers} layers, {length} integers": make(mode, layers, length)
        for label, (mode, each) in depths.items()
        for layers in each
        for length in lengths
    }


RECIPE = Recipe(
    name="count3-depth",
    title="Count3 by length and depth, one minute of training each",
    question="At which length does a decoder fail to learn Count3 where ENTP does not, and does depth help?",
    runs=grid(depth_run, DEPTHS, *LENGTHS),
    metrics=("sequence_accuracy", "token_accuracy", "loss"),
    paper={},
    shrink=tiny,
    fresh=2048,
    picture=draw_depth,
    few=(
        "decoder, 3 layers, 16 integers",
        "ENTP, 2 layers, 16 integers",
        "decoder, 1 layers, 64 integers",
    ),
)
LONGER = replace(
    RECIPE,
    name="count3-longer",
    title="Count3 of 32 and 48 integers, four minutes of training each",
    question="With four minutes instead of one, who learns Count3 of 32 and 48 integers, and does depth help?",
    runs=grid(longer_run, LONGER_DEPTHS, *LONGER_LENGTHS),
    few=("decoder, 3 layers, 32 integers", "ENTP, 2 layers, 32 integers"),
)
