"""Runs that the tests of configurations share."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from entp.config import (
    BatchScheduleConfig,
    CurriculumConfig,
    EmaConfig,
    ImportanceConfig,
    OptimConfig,
    RandomTargetsConfig,
    Run,
    TrainConfig,
    model_for,
)
from entp.config.json import run_to_json
from entp.tasks.addition import Addition
from entp.tasks.composition import Compose
from entp.tasks.counting import Count2, Count3, Match3
from entp.tasks.path_star import PathStar
from entp.tasks.pointers import Chase

DEFAULTS = Run(Count3(), model_for(Count3()))
TECHNIQUES = Run(
    Count3(),
    model_for(Count3()),
    ema=EmaConfig(4),
    importance=ImportanceConfig(200, "decoder"),
    batch_schedule=BatchScheduleConfig(800, 32),
    curriculum=CurriculumConfig(600, "random-prefix", 16, 1e-3, uniform_lengths=True),
)
RANDOM_TARGETS = replace(TECHNIQUES, importance=None, random_targets=RandomTargetsConfig(12))
"""These two exclude each other."""
SMALL = Count2(4, 9, 5)
ALL_SET = Run(
    SMALL,
    model_for(
        SMALL,
        "small-deep",
        norm="none",
        activation="relu",
        position_embedding="none",
        attention_scale="one",
    ),
    mode="prefix-lm",
    steps=7,
    batch_size=3,
    seed=11,
    optim=OptimConfig(
        "muon",
        lr=0.1,
        min_lr=0.01,
        warmup_steps=5,
        decay_steps=50,
        beta1=0.8,
        beta2=0.95,
        grad_clip=0.0,
        precondition_every=4,
    ),
    train=TrainConfig(
        eval_every=1,
        eval_splits=("test",),
        monitor="loss",
        stop_at=0.5,
        patience=3,
        patience_from=2.0,
        impl="reference",
        token_budget=100,
    ),
)
MATCH3 = Run(
    Match3(),
    model_for(Match3(), "medium"),
    mode="decoder",
    train=TrainConfig(monitor="token_accuracy"),
)
RUNS = {
    "defaults": DEFAULTS,
    "techniques": TECHNIQUES,
    "random targets": RANDOM_TARGETS,
    "all set": ALL_SET,
    "match3": MATCH3,
    "addition": Run(Addition(), model_for(Addition())),
    "chase": Run(Chase(), model_for(Chase()), mode="prefix-lm"),
    "compose": Run(Compose(order="last-to-first"), model_for(Compose())),
    "path-star": Run(PathStar(query="first"), model_for(PathStar())),
}


def as_json(run: Run) -> dict[str, Any]:
    """The run's JSON, through a text."""
    return json.loads(json.dumps(run_to_json(run)))


def changed(run: Run, path: str, value: Any) -> dict[str, Any]:
    """The run's JSON with the value at a path such as model.layers replaced or added."""
    data = as_json(run)
    *parents, last = path.split(".")
    inner = data
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return data
