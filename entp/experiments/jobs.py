"""How many runs one device serves best at a time, and in which order they begin."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from entp.config import PretrainedConfig, Run
from entp.engine.budget import BUSY
from entp.engine.flops import mode_flops
from entp.engine.refreshed import computed_rows
from entp.errors import InputError
from entp.experiments.collect import read_folder
from entp.experiments.cost import carrying
from entp.experiments.recipe import ArmRun
from entp.training import prefetch
from entp.training.cover import Cover, prefix_rows
from entp.training.cuda_graph import MOST_COVER
from entp.training.drawn import drawn
from entp.training.forward import Forward
from entp.training.plan import Plan
from entp.training.prefix_rows import PrefixRows

AT_ONCE, IN_TURNS = 8, 2
"""Most runs that share a GPU, where their kernels run at the same time and where they take turns:
more gain nothing (`entp bench sweep`). In turns steps gain nothing at all, but one run can start or
write while another trains."""
FILL = 3.0
"""Work of the runs of one GPU together, in units of what keeps it busy: they do not all compute all
the time."""
MEMORY = 0.8
"""The part of a GPU's memory that runs may fill."""
OWN_BYTES = 2**30
"""What a process holds on a GPU before it trains."""
ROW_BYTES = 3 * 24
"""Bytes of a row of prefixes, for each layer and unit of width (docs/engine.md)."""
WEIGHT_BYTES = 16
"""Bytes of a weight, with its gradient and AdamW's state."""
STEP_SECONDS, LAYER_SECONDS = 0.3e-3, 0.15e-3
"""A step of a small model on a GPU, and each of its layers: a decoder's step takes 0.72 ms with 3
layers and 1.6 ms with 8 (docs/LOG.md)."""
RATE, RATE_OF_WIDTH, MOST_RATE = 75e12, 0.77e12, 4e14
"""FLOPs a second of what is computed in addition, and by width: fitted to steps of widths 128, 192,
256 and 384, which are 173, 223, 272 and 371e12 (results/engine_speed.json)."""
PRETRAINED_RATE = 9e13
"""The same of HuggingFace's models: a decoder's step of SmolLM2 with LoRA, 6e12, takes 66 ms."""
COVERED = 32
"""Padded batches that tell what a captured step of them computes."""


class Step(NamedTuple):
    """What a training step computes."""

    rows: int
    """Rows of prefixes, or of what is read between two refreshes; in other modes tokens of
    sequences."""
    flops: int


Part = tuple[range, Step]
"""Some steps of a run, and what each of them computes."""


def step_of(run: Run) -> Step:
    """The mean step of a run, over its modes and batch sizes."""
    parts = parts_of(run)
    steps = sum(len(part) for part, _ in parts)
    rows, flops = (sum(len(part) * step[n] for part, step in parts) / steps for n in (0, 1))
    return Step(round(rows), round(flops))


def parts_of(run: Run) -> tuple[Part, ...]:
    """The steps of a run, cut where their mode or batch size changes, each part with a typical
    step. Where its task cannot tell, since its data is not here, say, one whose tokens are all
    targets."""
    try:
        return _parts(replace(run, task=run.task.for_seed(0), seed=0))
    except Exception:
        return ((range(run.steps), _blind_step(run)),)


@lru_cache(maxsize=256)
def _parts(run: Run) -> tuple[Part, ...]:
    plan = Plan(run)
    return tuple((part, _step(run, plan, part[-1])) for part in plan.segments(0, run.steps))


def _step(run: Run, plan: Plan, step: int) -> Step:
    """One step; a task's own curriculum is over at the end of a part, if at all."""
    size = plan.batch_size(step)
    batch = run.task.batch(0, "train", step, size)
    targets, mode = carrying(run, step, batch), plan.mode(step)
    if batch.lengths is not None:  # what a captured step computes
        cover, alone = Cover(), PrefixRows()
        for other in range(max(0, step - COVERED), step + 1):
            given = run.task.batch(0, "train", other, size)
            own = drawn(given, Forward.of(run, mode), other, plan.techniques)
            if own is None:
                break
            cover.grow(own)
            alone.grow(own)
        else:
            assert own is not None
            if cover.cost(own, mode) <= MOST_COVER:
                targets = torch.from_numpy(cover.mask)
            elif _alone(run, mode) and 0 < alone.rows <= MOST_COVER * prefix_rows(own):
                targets, mode = torch.zeros(alone.count, alone.width, dtype=torch.bool), "prefix-lm"
                targets[:, 0] = True
    return _computed(run, targets, mode)


def _computed(run: Run, targets: Tensor, mode: str) -> Step:
    """A step with these targets in this mode."""
    return Step(computed_rows(targets, mode), mode_flops(run.model, targets, mode).total)


def _alone(run: Run, mode: str) -> bool:
    """Whether prefixes may stand in rows of their own."""
    return mode == "entp" and not getattr(run.model, "causal_layers", 0)


def _blind_step(run: Run) -> Step:
    """A step of which only the sizes are known."""
    time = run.model.context_length
    with contextlib.suppress(Exception):
        time = run.task.model_needs().get("context_length", time)
    targets = torch.ones(run.batch_size, time, dtype=torch.bool)
    if run.task.sequence_targets is not None:
        targets[:, : -run.task.sequence_targets] = False
    elif run.random_targets is not None:  # evenly spread
        targets[:] = torch.arange(time) % max(1, time // run.random_targets.count) == 0
    return _computed(run, targets, run.mode)


def expected_seconds(run: Run, done: int = 0) -> float:
    """About how long a run takes on a GPU after so many steps: good for comparisons."""
    seconds, overhead = 0.0, STEP_SECONDS + run.model.depth * LAYER_SECONDS
    for part, step in parts_of(run):
        left = len(range(max(done, part.start), part.stop))
        seconds += left * (overhead + step.flops / flops_per_second(run))
    return min(seconds, run.train.max_seconds or math.inf)


def flops_per_second(run: Run) -> float:
    """About how fast an H200 computes the steps of a model of this width."""
    if isinstance(run.model, PretrainedConfig):
        return PRETRAINED_RATE
    return min(MOST_RATE, RATE + RATE_OF_WIDTH * run.model.width)


def seconds_left(arm: ArmRun, root: Path, max_minutes: float | None = None) -> float:
    """About how long a run still trains on a GPU, by what its folder has.

    max_minutes: most training time of a run whose schedule does not follow the clock.
    """
    try:
        found = read_folder(arm, root)
    except InputError:  # a damaged folder: whoever trains it says so
        found = None
    if found is not None and found.done:
        return 0.0
    steps, seconds = (0, 0.0) if found is None else (found.steps, found.seconds)
    left = expected_seconds(arm.run, steps)
    if max_minutes is None or arm.run.optim.decay_by == "seconds":
        return left
    return min(left, max(0.0, 60 * max_minutes - seconds))


def how_many(arms: Sequence[ArmRun], device: torch.device, at_once: bool, gpus: int = 1) -> int:
    """Runs at a time that the device serves best; on a CPU one, which has all its cores.

    at_once: whether kernels of different processes run at the same time.
    gpus: of this kind, which share the cores: runs on all of them.
    """
    if device.type != "cuda":
        return 1
    memory = torch.cuda.get_device_properties(device).total_memory
    runs = [arm.run for arm in arms]
    return min(len(runs), gpus * fitting(runs, memory, prefetch.cores() // gpus, at_once))


def gpus_of(device: str) -> int:
    """The GPUs that runs may be spread over: all there are, unless one is named."""
    if device not in ("auto", "cuda") or not torch.cuda.is_available():
        return 1
    return torch.cuda.device_count()


def spread(
    gpus: int, environment: Mapping[str, str], visible: str | None
) -> list[Mapping[str, str]]:
    """Variables of processes of each GPU, which sees no other.

    visible: CUDA_VISIBLE_DEVICES as it is, or None.
    """
    if gpus == 1:
        return [environment]
    names = visible.split(",") if visible else [str(number) for number in range(gpus)]
    return [{**environment, "CUDA_VISIBLE_DEVICES": name.strip()} for name in names[:gpus]]


def fitting(runs: Sequence[Run], memory: float, cores: int, at_once: bool) -> int:
    """Runs at a time on a GPU of so many bytes, each with a core and a half of its own: at most as
    many as fill it, and as fit in its memory."""
    if not runs:
        return 1
    work = sum(step_of(run).rows * run.model.width * run.model.depth for run in runs) / len(runs)
    limits = (
        len(runs),
        AT_ONCE if at_once else IN_TURNS,
        int(cores / 1.5),
        math.ceil(FILL * BUSY / work),
        int(MEMORY * memory / max(map(run_bytes, runs))),
    )
    return max(1, min(limits))


def run_bytes(run: Run) -> int:
    """Bytes of a GPU's memory that a run may take, roughly and rather too many."""
    model = run.model
    per_row = ROW_BYTES * model.depth * model.width
    weights = 12 * model.layers * model.width**2
    rows = max(step.rows for _, step in parts_of(run))
    return OWN_BYTES + rows * per_row + WEIGHT_BYTES * weights
