"""FLOPs of training up to a step are the sum of what its steps compute."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from small_runs import small_run

from entp.config import (
    BatchScheduleConfig,
    CurriculumConfig,
    ImportanceConfig,
    RandomTargetsConfig,
    Run,
    model_for,
)
from entp.engine.flops import decoder_flops, engine_flops, refresh_flops
from entp.errors import InputError
from entp.experiments.cost import CELLS, carrying, flops_by
from entp.tasks.base import Batch, Split
from entp.tasks.counting import Count3
from entp.tasks.in_context import InContext


def mask_of(run: Run, step: int = 0, size: int | None = None) -> torch.Tensor:
    batch = run.task.batch(run.seed, "train", step, size or run.batch_size)
    return torch.from_numpy(batch.target_mask)


@pytest.mark.parametrize(("mode", "formula"), [("entp", engine_flops), ("decoder", decoder_flops)])
def test_flops_are_those_of_every_step(mode: str, formula: object) -> None:
    run = small_run(mode=mode)
    assert callable(formula)
    one = formula(run.model, mask_of(run)).total
    assert flops_by(run, [0, 3, 10]) == [0, 3 * one, 10 * one]


def test_flops_of_refresh_are_those_of_every_step() -> None:
    run = small_run(mode="refresh-3", curriculum=CurriculumConfig(4, "refresh-5"))
    three, five = (refresh_flops(run.model, mask_of(run), every).total for every in (3, 5))
    assert three > five
    assert flops_by(run, [0, 4, 10]) == [0, 4 * five, 4 * five + 6 * three]


def test_large_batches_cost_as_many_small_ones() -> None:
    small, large = small_run(batch_size=64), small_run(batch_size=256)
    (one,), (other,) = flops_by(small, [10]) or [], flops_by(large, [10]) or []
    assert other == pytest.approx(4 * one)


def test_first_steps_cost_what_their_mode_and_batch_size_cost() -> None:
    run = small_run(
        curriculum=CurriculumConfig(4, "random-prefix", batch_size=16),
        batch_schedule=BatchScheduleConfig(7, 24),
    )
    first = decoder_flops(run.model, mask_of(run, size=16)).total
    middle = engine_flops(run.model, mask_of(run, size=8)).total
    late = engine_flops(run.model, mask_of(run, size=24)).total
    wanted = [2 * first, 4 * first, 4 * first + 3 * middle, 4 * first + 3 * middle + 3 * late]
    assert flops_by(run, [2, 4, 7, 10]) == pytest.approx(wanted)


def test_random_targets_cost_what_carries_the_loss() -> None:
    run = small_run(random_targets=RandomTargetsConfig(2))
    batch = run.task.batch(0, "train", 3, 8)
    kept = carrying(run, 3, batch)
    assert kept.sum(1).tolist() == [2] * 8
    assert not (kept & ~torch.from_numpy(batch.target_mask)).any()
    (few,), (every,) = flops_by(run, [10]) or [], flops_by(small_run(), [10]) or []
    targets = int(batch.target_mask.sum()) // 8
    assert targets > 2
    assert few < every
    assert few == pytest.approx(10 * engine_flops(run.model, kept).total, rel=0.02)
    more = replace(run, random_targets=RandomTargetsConfig(targets))
    assert flops_by(more, [10]) == [every]


def test_sequences_that_grow_cost_more_as_they_grow() -> None:
    task = InContext(dim=8, points=21, curriculum_steps=30)
    run = small_run(task=task, model=model_for(task, "small", layers=3, heads=2, width=16))
    run = replace(run, steps=40)
    each = [engine_flops(run.model, mask_of(run, step)).total for step in range(40)]
    assert each[0] < each[10] < each[-1]
    found = flops_by(run, list(range(41)))
    assert found == pytest.approx([sum(each[:step]) for step in range(41)])


def test_long_run_is_measured_in_cells() -> None:
    task = InContext(dim=8, points=21, curriculum_steps=1000)
    run = small_run(task=task, model=model_for(task, "small", layers=3, heads=2, width=16))
    run = replace(run, steps=10 * CELLS)
    every = [engine_flops(run.model, mask_of(run, step)).total for step in range(run.steps)]
    (found,) = flops_by(run, [run.steps]) or []
    assert found == pytest.approx(sum(every), rel=0.01)


def test_nobody_knows_the_flops_of_targets_sampled_by_error() -> None:
    assert flops_by(small_run(importance=ImportanceConfig()), [5]) is None


@dataclass(frozen=True)
class Undrawn(Count3):
    """Draws nothing."""

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        raise InputError("the corpus is not on this machine.")


def test_nobody_knows_the_flops_of_a_task_that_cannot_be_drawn() -> None:
    run = small_run()
    task = Undrawn(prompt_length=4, length=10, num_values=10)
    assert flops_by(replace(run, task=task), [5]) is None
