"""Another batch size from some step on, and what each step of a run is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import tiny_run

import entp
from entp.config import BatchScheduleConfig, CurriculumConfig, ImportanceConfig, Run
from entp.errors import InputError
from entp.training import checkpoint
from entp.training.plan import Plan
from entp.training.techniques import importance_sampling
from entp.training.trainer import _batches

CPU = torch.device("cpu")
LATE = BatchScheduleConfig(step=6, batch_size=12)


def late_run(**changes: Any) -> Run:
    """Ten steps: six of 8 sequences, four of 12."""
    return tiny_run(**{"batch_schedule": LATE, **changes})


def batches_of(run: Run, start: int) -> list[Any]:
    return list(_batches(run.task, run.seed, Plan(run), run.steps, start, CPU))


@pytest.mark.parametrize("start", [0, 3, 6, 8])
@pytest.mark.parametrize(
    ("run", "first", "last"),
    [
        (late_run(), 8, 12),
        (tiny_run(curriculum=CurriculumConfig(6, batch_size=5)), 5, 8),
        (late_run(curriculum=CurriculumConfig(6, batch_size=5)), 5, 12),
    ],
    ids=["batch schedule", "curriculum", "both"],
)
def test_every_step_gets_its_batch(run: Run, first: int, last: int, start: int) -> None:
    found = batches_of(run, start)
    assert [len(batch.x) for batch in found] == [first if n < 6 else last for n in range(start, 10)]
    for number, batch in enumerate(found, start):
        want = run.task.batch(run.seed, "train", number, len(batch.x))
        assert np.array_equal(batch.x, want.x)
        assert np.array_equal(batch.y, want.y)


CURRICULA = [
    None,
    CurriculumConfig(3),
    CurriculumConfig(3, batch_size=5),
    CurriculumConfig(6, batch_size=5),
    CurriculumConfig(8, batch_size=5),
]


@pytest.mark.parametrize("curriculum", CURRICULA)
@pytest.mark.parametrize("schedule", [LATE, None])
def test_sequences_add_up(
    curriculum: CurriculumConfig | None, schedule: BatchScheduleConfig | None
) -> None:
    run = tiny_run(optim={"warmup_steps": 1}, curriculum=curriculum, batch_schedule=schedule)
    plan = Plan(run)
    for reached in range(run.steps + 1):
        sizes = [plan.batch_size(number) for number in range(reached)]
        assert plan.sequences_by(reached) == sum(sizes)


@pytest.mark.parametrize("start", range(13))
def test_segments_cover_the_steps_that_are_left(start: int) -> None:
    """None after the last: a run that is resumed with fewer steps than it has done is done."""
    plan = Plan(late_run(optim={"warmup_steps": 1}, curriculum=CurriculumConfig(3)))
    segments = list(plan.segments(start, 10))
    assert [step for part in segments for step in part] == list(range(start, 10))
    for part in segments:
        assert len({(plan.mode(step), plan.batch_size(step)) for step in part}) == 1


def test_run_resumed_with_fewer_steps_than_it_has_done_stays_as_it_is(tmp_path: Path) -> None:
    entp.train(late_run(), tmp_path, device="cpu", quiet=True)
    before = entp.load(tmp_path, "last").state_dict()
    with pytest.raises(InputError, match="is at step 10 already, and steps is 7"):
        entp.train(late_run(steps=7), tmp_path, device="cpu", quiet=True, resume=True)
    after = entp.load(tmp_path, "last").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("step", [10, 50])
def test_step_after_the_last_is_never(step: int) -> None:
    run = late_run(batch_schedule=BatchScheduleConfig(step, 12))
    assert {len(batch.x) for batch in batches_of(run, 0)} == {8}


def test_stopped_run_continues_bit_for_bit(tmp_path: Path) -> None:
    """Stopped before, at and after the change."""
    entp.train(late_run(), tmp_path / "whole", device="cpu", quiet=True)
    for steps in (3, 6, 7, 10):
        again = late_run(steps=steps)
        entp.train(again, tmp_path / "parts", device="cpu", quiet=True, resume=steps > 3)
    a, b = (entp.load(tmp_path / name, "last").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_sampled_targets_follow_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when numbers are due to be decided anew."""
    monkeypatch.setattr(importance_sampling, "PAYS_BELOW", 100.0)
    monkeypatch.setattr(importance_sampling, "RENEW", 4)
    run = late_run(importance=ImportanceConfig(), train={"checkpoint_every": 1})
    for steps, size in ((6, 8), (7, 12), (10, 12)):
        now = replace(run, steps=steps)
        entp.train(now, tmp_path, device="cpu", quiet=True, resume=steps > 6)
        saved = checkpoint.read_trainer(checkpoint.find(tmp_path, "last"))["techniques"]
        assert saved["importance"]["batch"] == size
    assert max(saved["importance"]["scored"]) <= 12
