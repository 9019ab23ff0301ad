"""More sequences per step late in training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import FLAGS, small_run
from small_runs import entp as command

import entp
from entp.config import OptimConfig, Run, StartConfig
from entp.errors import InputError
from entp.training import checkpoint, selection, step
from entp.training.trainer import _batches

CPU = torch.device("cpu")


def late_run(**changes: Any) -> Run:
    """Ten steps: six of 8 sequences, four of 12."""
    return small_run(optim={"late_batch": 12, "late_at": 6, **changes.pop("optim", {})}, **changes)


@pytest.mark.parametrize("start", [0, 3, 6, 8])
def test_every_step_gets_its_batch(start: int) -> None:
    run = late_run()
    found = list(_batches(run, start, CPU))
    assert len(found) == 10 - start
    for number, batch in enumerate(found, start):
        assert run.batch_at(number) == (8 if number < 6 else 12)
        want = run.task.batch(run.seed, "train", number, run.batch_at(number))
        assert np.array_equal(batch.x, want.x)
        assert np.array_equal(batch.y, want.y)


STARTS = [
    StartConfig(),
    StartConfig(steps=3),
    StartConfig(steps=3, batch_size=5),
    StartConfig(steps=8, batch_size=5),
]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    "late", [{"late_batch": 12, "late_at": 6}, {"late_batch": 0, "late_at": 0}]
)
def test_sequences_add_up(start: StartConfig, late: dict[str, Any]) -> None:
    run = late_run(optim={**late, "warmup": 1}, start=start)
    for reached in range(run.steps + 1):
        assert run.sequences_by(reached) == sum(run.batch_at(number) for number in range(reached))


@pytest.mark.parametrize("late_at", [10, 50])
def test_later_than_the_last_step_is_never(late_at: int) -> None:
    assert {len(batch.x) for batch in _batches(late_run(optim={"late_at": late_at}), 0, CPU)} == {8}


@pytest.mark.parametrize("stops", [(5,), (6,), (7,), (3, 8)])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path, stops: tuple[int, ...]) -> None:
    entp.train(late_run(), tmp_path / "whole", device="cpu", quiet=True)
    for n, steps in enumerate((*stops, 10)):
        entp.train(
            late_run(steps=steps), tmp_path / "parts", device="cpu", quiet=True, resume=n > 0
        )
    a, b = (entp.load(tmp_path / name, "last").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_what_is_chosen_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "PAYS_BELOW", 100.0)
    monkeypatch.setattr(step, "RENEW", 4)
    run = late_run(optim={"select": True}, train={"checkpoint_every": 1})
    for steps, batch in ((6, 8), (7, 12), (10, 12)):  # at once, not when it is due
        entp.train(
            replace(run, steps=steps), tmp_path / "run", device="cpu", quiet=True, resume=steps > 6
        )
        saved = checkpoint.read_trainer(checkpoint.find(tmp_path / "run", "last"))["selection"]
        assert saved["batch"] == batch
    assert max(saved["tried"]) <= 12


@pytest.mark.parametrize(("at", "batch"), [(0, 12), (6, 0), (6, -1), (-1, 12), (-1, -1)])
def test_both_or_neither(at: int, batch: int) -> None:
    with pytest.raises(
        InputError, match=rf"optim\.late_at is {at} and optim\.late_batch {batch}: give both"
    ):
        OptimConfig(late_at=at, late_batch=batch)


def test_on_the_command_line(tmp_path: Path) -> None:
    done = command("train", "count3", *FLAGS, "--optim.late-batch_size=12", cwd=tmp_path)
    assert done.returncode == 2
    assert "optim.late_at is 0 and optim.late_batch 12: give both" in done.stderr
