"""What a training step takes on this CPU, told before the first one where that is long."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from entp.config import RandomTargetsConfig, Run
from entp.experiments.cost import step_flops
from entp.training.plan import Plan

LONG = 10.0
"""Seconds of a step from which on something is said."""
FEW_TARGETS, FEW_SEQUENCES = 8, 16
MATRIX = 512
"""Rows of the matrices whose product is timed."""


def long_step(run: Run, device: str) -> str | None:
    """A sentence about the first step, with a cheaper one; None on a GPU, or where it is short.

    Small matrices and attention are slower than the product that is timed: it is a lower bound.
    """
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return None
    speed = matrix_speed()
    try:
        run.task.batch(run.seed, "train", 0, Plan(run).batch_size(0))  # may not fit into memory
        seconds = first_step(run) / speed
    except Exception:  # an error of the task, which training will tell
        return None
    if seconds < LONG:
        return None
    cheap, options = _cheaper(run)
    told = f"A step takes {_text(seconds)} or more on this CPU (by operations)."
    if not options:
        return told
    return f"{told} With {options} that is {_text(first_step(cheap) / speed)}."


def first_step(run: Run) -> float:
    """Operations of the first step."""
    plan = Plan(run)
    return step_flops(run, plan.mode(0), plan.batch_size(0), 0)


def matrix_speed() -> float:
    """Operations per second of matrix products on this CPU."""
    a = torch.rand(MATRIX, MATRIX)
    a @ a
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * MATRIX**3 / best


def _cheaper(run: Run) -> tuple[Run, str]:
    """The run with few targets and few sequences a step, and the options for that."""
    options = []
    plain = run.random_targets is None and run.importance is None
    if run.mode == "entp" and plain:
        run = replace(run, random_targets=RandomTargetsConfig(FEW_TARGETS))
        options.append(f"--random-targets.count {FEW_TARGETS}")
    if run.batch_size > FEW_SEQUENCES:
        run = replace(run, batch_size=FEW_SEQUENCES)
        options.append(f"--batch-size {FEW_SEQUENCES}")
    return run, " ".join(options)


def _text(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= LONG else f"{seconds:.1f} s"
