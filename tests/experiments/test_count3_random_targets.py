"""ENTP with random targets on Count3, and a decoder at half of its learning rate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from entp.config import Run
from entp.engine.flops import engine_flops
from entp.experiments.recipe import Arm
from entp.experiments.recipes.count3 import RANDOM_SECONDS, RECIPE
from entp.training.distributed import World
from entp.training.inputs import step_arrays
from entp.training.plan import Plan

ARMS: dict[str, Arm] = {arm.label: arm for arm in RECIPE.arms}
TUNED_STEP = 0.0194
"""Seconds of a step of tuned ENTP with 64 sequences on an H200 (docs/LOG.md)."""


def step_flops(run: Run) -> int:
    """Of the first step."""
    plan = Plan(run)
    batch = run.task.batch(0, "train", 0, plan.batch_size(0))
    y = step_arrays(batch, 0, plan.techniques, World())["y"]
    return engine_flops(run.model, torch.as_tensor(y != -100)).total


def test_random_targets_keep_the_tuned_settings() -> None:
    run, tuned = (ARMS[f"ENTP medium, {name}"].run for name in ("random targets", "tuned"))
    assert run.random_targets is not None
    assert (run.mode, run.batch_size, run.random_targets.count) == ("entp", 256, 12)
    by_steps = {"decay_steps": tuned.steps, "decay_by": "steps"}
    assert replace(run.optim, **by_steps) == replace(tuned.optim, **by_steps)
    assert run.optim.decay_by == "seconds"
    assert (run.task, run.model, run.ema) == (tuned.task, tuned.model, tuned.ema)
    assert run.importance is run.batch_schedule is run.curriculum is None
    assert (run.train.stop_at, run.train.eval_batches * run.batch_size) == (0.98, 1024)


def test_random_targets_fit_into_their_time() -> None:
    """About 80,000 steps at the FLOP/s of tuned ENTP's first ones: the clock ends the run, and the
    learning rate follows it."""
    run, tuned = (ARMS[f"ENTP medium, {name}"].run for name in ("random targets", "tuned"))
    tuned = replace(tuned, importance=None)  # pays late only
    cost = step_flops(run) / step_flops(tuned)
    assert cost == pytest.approx(1.006, abs=0.001)
    assert RANDOM_SECONDS / (TUNED_STEP * cost) == pytest.approx(80_000, rel=0.01)
    assert run.steps > 100_000
    assert run.train.max_seconds == RANDOM_SECONDS < 28 * 60


def test_decoder_at_half_the_learning_rate_reads_the_same_data() -> None:
    half, data = (ARMS[f"decoder medium, matched data{name}"] for name in (", 1e-3", ""))
    assert half.seeds == data.seeds == (0, 1, 2)
    optim = replace(half.run.optim, lr=2e-3, min_lr=data.run.optim.min_lr)
    assert replace(half.run, optim=optim) == data.run
    assert (half.run.optim.lr, half.run.optim.min_lr) == (1e-3, 1e-3 / 50)
