"""Floating-point operations of training up to a step, by formula.

The operations of a step are those of entp.engine.flops for the targets that carry its loss. A run
is cut into CELLS parts, and where its mode or batch size changes; the batch in the middle of a part
tells what its steps cost. Sequences that grow during training are counted as they grow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from entp.config import PretrainedConfig, Run
from entp.engine.flops import mode_flops
from entp.tasks.base import IGNORE, Batch
from entp.training.distributed import World
from entp.training.plan import Plan
from entp.training.techniques.base import make_techniques

CELLS = 200
"""Parts of a run that may cost differently."""
SAMPLE = 64
"""Sequences at most by which a batch is measured."""


def flops_by(run: Run, steps: Sequence[int]) -> list[float] | None:
    """Operations of training before each of these steps; None where nobody knows: targets that are
    sampled by their errors are as many as the errors ask for, LoRA leaves most weights without
    gradients, and a task may be unable to draw."""
    lora = isinstance(run.model, PretrainedConfig) and run.model.lora_rank > 0
    if run.importance is not None or lora or not steps:
        return None
    try:
        return _flops_by(run, steps)
    except Exception:  # an error of the task, which training would have told
        return None


def _flops_by(run: Run, steps: Sequence[int]) -> list[float]:
    plan, last = Plan(run), max(steps)
    edges, totals = [0], [0.0]
    for part in plan.segments(0, max(run.steps, last)):
        mode, size = plan.mode(part[0]), plan.batch_size(part[0])
        for cell in _cells(part, max(1, run.steps // CELLS)):
            if cell.start < last:
                cost = step_flops(run, mode, size, cell[len(cell) // 2])
                edges.append(cell.stop)
                totals.append(totals[-1] + len(cell) * cost)
    return [float(total) for total in np.interp(steps, edges, totals)]


def _cells(part: range, size: int) -> Iterator[range]:
    """A range cut at the multiples of a number."""
    start = part.start
    while start < part.stop:
        stop = min(part.stop, (start // size + 1) * size)
        yield range(start, stop)
        start = stop


def step_flops(run: Run, mode: str, batch_size: int, step: int) -> float:
    """Operations of one step in this mode."""
    sample = min(batch_size, SAMPLE)
    return _sample_flops(run, mode, step, sample) * batch_size / sample


@lru_cache(maxsize=2**16)
def _sample_flops(run: Run, mode: str, step: int, size: int) -> int:
    """Operations of a step of so many sequences."""
    batch = run.task.batch(run.seed, "train", step, size)
    return mode_flops(run.model, carrying(run, step, batch), mode).total


def carrying(run: Run, step: int, batch: Batch) -> Tensor:
    """(B, T) where the targets are that carry the loss of a step, the others being dropped."""
    targets = torch.from_numpy(batch.y)
    for technique in make_techniques(run):
        targets = technique.arrays(step, batch, World()).get("y", targets)
    return targets != IGNORE
