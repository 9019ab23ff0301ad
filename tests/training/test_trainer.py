"""The loop: exact resume, exact chunks, what it measures and saves, when it stops."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from small_runs import new_stepper, small_run
from torch import Tensor

from entp.config import BatchScheduleConfig, CurriculumConfig, Run, model_for
from entp.errors import DeviceFailed, InputError, TrainingStopped
from entp.tasks.addition import Addition
from entp.tasks.base import Batch, Split, Task
from entp.tasks.counting import Count3
from entp.tasks.metrics import (
    EXACT_MATCH,
    LOSS,
    TOKEN_ACCURACY,
    Metric,
    Predicted,
    Score,
    exact_match,
)
from entp.training import checkpoint, trainer
from entp.training.checkpoint import find, load
from entp.training.cuda_graph import Stepper
from entp.training.distributed import World
from entp.training.evaluate import evaluate, split_batches
from entp.training.forward import Forward
from entp.training.loggers import read_metrics
from entp.training.loss_meter import LossMeter
from entp.training.run_folder import check_folder
from entp.training.schedule import learning_rate
from entp.training.signals import StopSignals
from entp.training.trainer import Result, _check, train

GOLDEN = [2.337969, 2.297724, 2.260552, 2.236977, 2.224859]
"""Losses of the first steps of `small_run()`: a change here means that training changed."""


def fit(run: Run, out: Path, **options: Any) -> Result:
    return train(run, out, device="cpu", quiet=True, **options)


def weights(out: Path) -> dict[str, Tensor]:
    return load(out, "last").state_dict()


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def rows(out: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(out) if row["kind"] == kind]


def measured(out: Path, run: Run) -> dict[str, float]:
    """The validation metrics of the best weights."""
    batches = split_batches(run.task, "valid", run.train.eval_batches, run.batch_size, run.seed)
    return evaluate(load(out), run.task, batches, Forward.of(run)).values()


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps of `small_run()`. To be read only."""
    out = tmp_path_factory.mktemp("runs") / "ten"
    fit(small_run(), out)
    return out


KINDS: dict[str, dict[str, Any]] = {
    "entp": {},
    "decoder": {"mode": "decoder"},
    "prefix-lm": {"mode": "prefix-lm"},
    "refresh": {"mode": "refresh-3", "curriculum": CurriculumConfig(4, "refresh-5")},
    "muon": {"optim": {"name": "muon"}},
    "preconditioned": {"optim": {"name": "muon", "precondition_every": 2}},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_resumed_run_equals_one_run(ten: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    whole = ten
    if changes:
        whole = tmp_path / "whole"
        fit(small_run(**changes), whole)
    fit(small_run(**changes, steps=5), tmp_path / "parts")
    fit(small_run(**changes), tmp_path / "parts", resume=True)
    assert equal(weights(whole), weights(tmp_path / "parts"))
    losses = [[row["loss"] for row in read_metrics(out)] for out in (whole, tmp_path / "parts")]
    assert losses[0] == losses[1]


def test_seed_decides_the_run(ten: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        fit(small_run(seed=seed, steps=2), tmp_path / str(seed))
    zero, one, ten_steps = (
        [row["loss"] for row in rows(out, "train")] for out in (tmp_path / "0", tmp_path / "1", ten)
    )
    assert zero == ten_steps[:2]
    assert not any(a == b for a, b in zip(zero, one, strict=True))


def test_first_losses_are_golden(ten: Path) -> None:
    losses = [row["loss"] for row in rows(ten, "train")]
    assert losses[:5] == pytest.approx(GOLDEN, rel=1e-4)


def one_step(clip: float = 0.0, **train: object) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the first step in float64."""
    run = small_run(train=train, optim={"grad_clip": clip})
    stepper = new_stepper(run)
    stepper.state.model.double()
    loss = stepper(run.task.batch(0, "train", 0, run.batch_size)).loss
    named = stepper.state.model.named_parameters()
    return float(loss), {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize("budget", [1, 30, 100])
def test_chunks_add_up_to_the_whole_gradient(budget: int) -> None:
    loss, grads = one_step()
    chunked_loss, chunked = one_step(token_budget=budget)
    assert chunked_loss == pytest.approx(loss, rel=1e-6)  # losses are added up in float32
    assert grads.keys() == chunked.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(chunked[name], grad, rtol=1e-6, atol=1e-9, msg=name)


def test_reference_and_packed_have_the_same_gradient() -> None:
    _, packed = one_step(impl="packed")
    _, reference = one_step(impl="reference")
    for name, grad in reference.items():
        torch.testing.assert_close(packed[name], grad, rtol=1e-6, atol=1e-9, msg=name)


def test_grad_clip_bounds_the_norm_unless_zero() -> None:
    def norm(clip: float) -> float:
        return math.sqrt(sum(float(g.square().sum()) for g in one_step(clip)[1].values()))

    whole = norm(0.0)
    assert whole > 0.1
    assert norm(2 * whole) == pytest.approx(whole, rel=1e-9)
    assert norm(whole / 2) == pytest.approx(whole / 2, rel=1e-4)


def test_training_learns_and_keeps_the_best_evaluation(tmp_path: Path) -> None:
    """The first loss is log(vocab). Forty steps teach the frequencies at least."""
    every = {"eval_every": 8, "checkpoint_every": 40, "monitor": "loss"}
    run = small_run(steps=40, train=every)
    result = fit(run, tmp_path)
    first = rows(tmp_path, "train")[0]["loss"]
    assert first == pytest.approx(math.log(10), abs=0.05)
    assert result.metrics["loss"] < first - 0.2
    best = min(rows(tmp_path, "eval"), key=lambda row: row["loss"])
    assert result.best["step"] == best["step"]
    assert find(tmp_path).name == f"best-{best['step']:08d}"
    assert measured(tmp_path, run)["loss"] == pytest.approx(best["loss"], rel=1e-6)


SPREAD: dict[str, dict[str, Any]] = {
    "all along": {"batch_size": 2},
    "first": {"curriculum": CurriculumConfig(steps=6, batch_size=2)},
    "late": {"batch_schedule": BatchScheduleConfig(step=4, batch_size=2)},
}


@pytest.mark.parametrize("changes", SPREAD.values(), ids=SPREAD.keys())
def test_every_process_needs_a_sequence_in_every_step(changes: dict[str, Any]) -> None:
    _check(small_run(**changes), World(0, 2))
    with pytest.raises(InputError, match="a batch of 2 is smaller than the 3 processes"):
        _check(small_run(**changes), World(0, 3))


@dataclass(frozen=True)
class Stopping(Count3):
    """Count3 that asks the process to stop at training step 6."""

    name: ClassVar[str] = "stopping"

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        if split == "train" and step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(seed, split, step, size)


def test_signal_saves_at_once_and_measures_nothing_more(tmp_path: Path) -> None:
    rare = {"log_every": 10**6, "eval_every": 1, "checkpoint_every": 10**6}
    result = fit(small_run(task=Stopping(4, 10, 10), steps=10**4, train=rare), tmp_path)
    assert (result.stopped_by, result.step < 10**4) == (signal.SIGTERM, True)
    (line,) = rows(tmp_path, "train")
    assert (line["step"], line["seconds"]) == (result.step, round(result.seconds, 3))
    assert [row["step"] for row in rows(tmp_path, "eval")] == list(range(1, result.step))
    assert checkpoint.read_trainer(find(tmp_path, "last"))["seconds"] == result.seconds > 0


def test_signal_in_the_last_step_leaves_the_evaluation_to_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Stepper.__call__

    def signalled(stepper: Stepper, *rest: Any) -> Any:
        if stepper.state.step == 9:
            signal.raise_signal(signal.SIGTERM)
        return step(stepper, *rest)

    monkeypatch.setattr(Stepper, "__call__", signalled)
    run = small_run(train={"monitor": "loss"})
    stopped = fit(run, tmp_path)
    assert (stopped.step, stopped.stopped_by) == (10, signal.SIGTERM)
    assert [row["step"] for row in rows(tmp_path, "eval")] == [5]
    for _ in range(2):  # the second time nothing is left to do
        result = fit(run, tmp_path, resume=True)
        assert (result.step, result.reason) == (10, "all steps done")
        assert [row["step"] for row in rows(tmp_path, "eval")] == [5, 10]
        assert result.metrics["loss"] == rows(tmp_path, "eval")[-1]["loss"]
    best = min(rows(tmp_path, "eval"), key=lambda row: row["loss"])
    assert result.best["step"] == best["step"] == 10
    assert [p.name for p in (tmp_path / "checkpoints").glob("best-*")] == ["best-00000010"]
    assert measured(tmp_path, run)["loss"] == pytest.approx(best["loss"], rel=1e-6)


@pytest.mark.parametrize("ends", [True, False])
def test_evaluation_that_a_signal_left_out_is_made_by_resuming(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the best of all, or the one that reaches the goal. A fork has evaluations of its
    own steps alone."""
    step = Stepper.__call__

    def signalled(stepper: Stepper, *rest: Any) -> Any:
        if stepper.state.step in (3, 4):
            signal.raise_signal(signal.SIGTERM)
        return step(stepper, *rest)

    run = small_run(train={"monitor": "loss", "eval_splits": ("test",)})
    fit(run, tmp_path / "whole")
    if ends:
        goal = rows(tmp_path / "whole", "eval")[0]["loss"]
        run = replace(run, train=replace(run.train, stop_at=goal))
        shutil.rmtree(tmp_path / "whole")
        assert fit(run, tmp_path / "whole").step == 5
    monkeypatch.setattr(Stepper, "__call__", signalled)
    assert [fit(run, tmp_path / "run", resume=n > 0).step for n in range(2)] == [4, 5]
    assert not rows(tmp_path / "run", "eval")
    fork = fit(run, tmp_path / "fork", fork=tmp_path / "run")
    assert [row["step"] for row in rows(fork.out, "eval")] == [10]
    result = fit(run, tmp_path / "run", resume=True)
    assert result.step == (5 if ends else 10)
    for kind in ("train", "eval", "split"):
        found, wanted = (rows(tmp_path / name, kind) for name in ("run", "whole"))
        assert without_seconds(found) == without_seconds(wanted)
    assert find(tmp_path / "run").name == find(tmp_path / "whole").name
    assert equal(load(tmp_path / "run").state_dict(), load(tmp_path / "whole").state_dict())


def test_second_interrupt_does_not_wait_for_the_step(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes at once is the first: `timeout` and terminals may send theirs to a process and
    to its group."""
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert (signals.caught, signals.name()) == (signal.SIGTERM, "SIGTERM")
        assert capfd.readouterr().err.count("interrupt again to stop at once") == 1
        monkeypatch.setattr(time, "monotonic", lambda: signals.since + 0.6)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_last_step_is_logged_measured_and_saved_whatever_the_intervals(tmp_path: Path) -> None:
    rare = {"log_every": 5, "eval_every": 100, "checkpoint_every": 100}
    fit(small_run(steps=7, train=rare), tmp_path)
    found = [(row["kind"], row["step"]) for row in read_metrics(tmp_path)]
    assert found == [("train", 5), ("train", 7), ("eval", 7)]
    assert find(tmp_path, "last").name == "step-00000007"


def saved_steps(out: Path) -> list[int]:
    """The steps of the checkpoints that are kept."""
    return sorted(int(p.name.removeprefix("step-")) for p in (out / "checkpoints").glob("step-*"))


def test_checkpoint_by_the_clock_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between lines of metrics too: the losses that no line has yet are kept."""
    rare = {"log_every": 7, "eval_every": 4, "checkpoint_every": 10**6}
    fit(small_run(steps=12, train=rare), tmp_path / "whole")
    assert saved_steps(tmp_path / "whole") == [12]
    monkeypatch.setattr(trainer, "MOST_SAVING", math.inf)
    run = small_run(steps=12, train={**rare, "checkpoint_seconds": 1e-9})
    fit(run, tmp_path / "run")
    assert saved_steps(tmp_path / "run") == [11, 12]
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000012")
    fit(run, tmp_path / "run", resume=True)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "run"))
    found = [without_seconds(read_metrics(tmp_path / name)) for name in ("whole", "run")]
    assert found[0] == found[1]
    assert [row["step"] for row in found[0] if row["kind"] == "train"] == [7, 12]


def without_seconds(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in found]


def test_checkpoints_by_the_clock_take_little_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, saved = checkpoint.save_checkpoint, []

    def slowly(*args: Any) -> Path:
        time.sleep(0.02)
        saved.append(time.monotonic())
        return really(*args)

    monkeypatch.setattr(checkpoint, "save_checkpoint", slowly)
    monkeypatch.setattr(trainer, "MOST_SAVING", 0.2)  # several of them, on a slow disk as well
    rare = {"eval_every": 10**6, "checkpoint_every": 10**6, "checkpoint_seconds": 0.01}
    fit(small_run(steps=10**6, train={**rare, "max_seconds": 1.5}), tmp_path)
    by_clock = saved[:-2]  # the last two are of the end
    assert len(by_clock) >= 2
    assert all(b - a >= 0.02 / trainer.MOST_SAVING for a, b in pairwise(by_clock))


def test_how_often_the_clock_saves_may_change(ten: Path, tmp_path: Path) -> None:
    run = small_run(steps=8, train={"checkpoint_seconds": None})
    fit(run, tmp_path)
    fit(small_run(train={"checkpoint_seconds": 5.0}), tmp_path, resume=True)
    assert equal(weights(ten), weights(tmp_path))


def test_stop_at_ends_training_and_is_not_passed_again(tmp_path: Path) -> None:
    """Off the log grid as well, the time until then is known."""
    run = small_run(train={"monitor": "loss", "stop_at": 10.0, "log_every": 10**6})
    first = fit(run, tmp_path)
    assert (first.step, first.reason) == (5, "loss reached 10")
    assert round(first.seconds, 3) == rows(tmp_path, "eval")[-1]["seconds"] > 0
    again = fit(run, tmp_path, resume=True)
    assert (again.step, again.reason) == (5, "loss had reached 10")
    assert (again.metrics, again.best, again.seconds) == (first.metrics, first.best, first.seconds)
    lower = replace(run, train=replace(run.train, stop_at=0.0))
    assert fit(lower, tmp_path, resume=True).step == 10


def test_fewer_steps_than_there_are_are_refused(ten: Path, tmp_path: Path) -> None:
    """Nothing is changed: config.json says what was trained."""
    out = tmp_path / "copy"
    shutil.copytree(ten, out)
    before = (out / "config.json").read_bytes()
    with pytest.raises(InputError, match="is at step 10 already, and steps is 7: give --steps"):
        fit(small_run(steps=7), out, resume=True)
    assert (out / "config.json").read_bytes() == before


def test_patience_ends_training_and_resuming_counts_on(tmp_path: Path) -> None:
    """No loss is below that of the first evaluation where the learning rate is huge."""
    train = {"eval_every": 2, "checkpoint_every": 2, "monitor": "loss", "patience": 3}
    run = small_run(steps=40, train=train, optim={"lr": 1.0, "min_lr": 1.0, "warmup_steps": 0})
    whole = fit(run, tmp_path / "whole")
    losses = [row["loss"] for row in rows(tmp_path / "whole", "eval")]
    assert whole.step == 2 * len(losses) < 40
    assert whole.reason == "3 evaluations in a row brought no better loss"
    assert min(losses) == losses[-4] < min(losses[-3:])
    fit(replace(run, steps=whole.step - 2), tmp_path / "parts")
    resumed = fit(run, tmp_path / "parts", resume=True)
    assert (resumed.step, resumed.reason) == (whole.step, whole.reason)
    again = fit(run, tmp_path / "parts", resume=True)
    assert (again.step, again.metrics) == (whole.step, resumed.metrics)
    assert again.reason == "3 evaluations in a row had brought no better loss"


@dataclass(frozen=True)
class Longer(Count3):
    """Count3 with a further split of its own, and exact match by the first integer."""

    name: ClassVar[str] = "longer"

    @property
    def more_splits(self) -> tuple[str, ...]:
        return ("shifted",)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (replace(EXACT_MATCH, slices=("first",)), TOKEN_ACCURACY, LOSS)

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        found = super().measure(batch, got)
        return {**found, "exact_match": exact_match(batch, got, {"first": batch.x[:, 0] % 2})}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        moved = split == "shifted"
        return super().batch(seed, "test" if moved else split, step + 7 * moved, size)


def longer_run(**train: Any) -> Run:
    task = Longer(4, 10, 10)
    return small_run(task=task, train={"eval_splits": ("test", "shifted"), **train})


def test_further_splits_are_measured_at_every_evaluation(ten: Path, tmp_path: Path) -> None:
    run = longer_run()
    fit(run, tmp_path)
    found = rows(tmp_path, "split")
    times = {row["step"]: row["seconds"] for row in rows(tmp_path, "eval")}
    assert [(row["split"], row["step"]) for row in found] == [
        ("test", 5),
        ("shifted", 5),
        ("test", 10),
        ("shifted", 10),
    ]
    assert all(row["seconds"] == times[row["step"]] for row in found)
    for row in found[2:]:
        batches = split_batches(run.task, row["split"], 2, run.batch_size, run.seed)
        last = evaluate(load(tmp_path, "last"), run.task, batches, Forward.of(run))
        assert row["totals"] == json.loads(json.dumps(last.to_json()))
        assert set(row["totals"]["slices"]["exact_match"]["first"]) == {"0", "1"}
    assert found[2]["totals"] != found[3]["totals"]


def test_further_splits_change_neither_training_nor_evaluation(ten: Path, tmp_path: Path) -> None:
    fit(longer_run(), tmp_path)
    assert equal(weights(ten), weights(tmp_path))
    kept = ("kind", "step", "loss", "exact_match", "token_accuracy")
    for kind in ("train", "eval"):
        here, there = (
            [{k: row[k] for k in kept if k in row} for row in rows(out, kind)]
            for out in (tmp_path, ten)
        )
        assert here == there


def test_resuming_drops_splits_after_the_checkpoint(tmp_path: Path) -> None:
    run = longer_run(checkpoint_every=5, eval_every=1)
    fit(replace(run, steps=7), tmp_path)
    shutil.rmtree(find(tmp_path, "last"))
    fit(run, tmp_path, resume=True)
    assert [row["step"] for row in rows(tmp_path, "split")] == sorted(2 * list(range(1, 11)))


def test_max_seconds_ends_training_and_more_continue_it(tmp_path: Path) -> None:
    run = small_run(steps=10**6, train={"max_seconds": 0.3, "eval_every": 10**5})
    result = fit(run, tmp_path)
    assert result.reason == "0.3 seconds are over"
    assert 0.3 <= result.seconds < 30
    assert 1 <= result.step < 10**6
    assert result.metrics["n"] == 16  # measured at the end, as any run
    again = fit(run, tmp_path, resume=True)
    assert (again.step, again.reason) == (result.step, "0.3 seconds are over")
    assert len(rows(tmp_path, "eval")) == 1
    longer = replace(run, train=replace(run.train, max_seconds=result.seconds + 0.2))
    more = fit(longer, tmp_path, resume=True)
    assert more.step > result.step
    assert result.seconds + 0.2 <= more.seconds < 60


def test_learning_rate_follows_the_clock(tmp_path: Path) -> None:
    clock: dict[str, Any] = {"decay_by": "seconds", "warmup_steps": 1}
    run = small_run(steps=10**6, optim=clock, train={"max_seconds": 1.0, "log_every": 1})
    start = time.perf_counter()
    result = fit(run, tmp_path)
    assert result.seconds < time.perf_counter() - start  # no moment counts twice
    found = rows(tmp_path, "train")
    rates = [row["lr"] for row in found][1:]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0]
    assert found[-1]["seconds"] >= 1
    for before, row in pairwise(found):  # seconds are written with three digits
        expected = learning_rate(run.optim, row["step"] - 1, before["seconds"])
        assert row["lr"] == pytest.approx(expected, abs=3e-6)


def test_max_seconds_may_change_unless_the_learning_rate_follows_it(tmp_path: Path) -> None:
    """By the clock, the time is part of the schedule."""
    by_steps, by_clock = (
        small_run(steps=2, optim={"decay_by": by}, train={"max_seconds": 60.0})
        for by in ("steps", "seconds")
    )
    for name, run in (("steps", by_steps), ("clock", by_clock)):
        fit(run, tmp_path / name)
    more, less = (
        replace(run, steps=3, train=replace(run.train, max_seconds=50.0))
        for run in (by_steps, by_clock)
    )
    assert fit(more, tmp_path / "steps", resume=True).step == 3
    with pytest.raises(InputError, match=r"train\.max_seconds was 60\.0 and is now 50\.0"):
        fit(less, tmp_path / "clock", resume=True)
    check_folder(replace(by_clock, steps=3), tmp_path / "clock", resume=True)


def test_every_row_and_checkpoint_has_its_own_seconds(tmp_path: Path) -> None:
    """Also between the steps that are logged."""
    grid = {"log_every": 4, "eval_every": 3, "checkpoint_every": 5}
    fit(small_run(train=grid), tmp_path)
    found = read_metrics(tmp_path)
    assert [row["step"] for row in found] == [3, 4, 6, 8, 9, 10, 10]
    seconds = {row["step"]: row["seconds"] for row in found}
    assert list(seconds.values()) == sorted(set(seconds.values()))
    assert seconds[3] > 0
    saved = checkpoint.read_trainer(tmp_path / "checkpoints/step-00000005")["seconds"]
    assert seconds[4] < saved < seconds[6]
    (trained, evaluated) = found[-2:]
    assert trained["seconds"] == evaluated["seconds"]


@dataclass(frozen=True)
class Rotten(Task):
    """Sums of vectors; from training step 7 on the data are broken."""

    name: ClassVar[str] = "rotten"
    loss: ClassVar[Literal["cross_entropy", "squared_error"]] = "squared_error"

    def model_needs(self) -> dict[str, Any]:
        return {"input_dim": 2, "outputs": 1, "context_length": 4}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        x = self.rng(seed, split, step).standard_normal((size, 4, 2), dtype=np.float32)
        bad = split == "train" and step >= 7
        return Batch(x * np.float32(np.nan) if bad else x, x.sum(axis=(2,)))


def rotten_run(**changes: Any) -> Run:
    model = model_for(Rotten(), "small", layers=2, heads=2, width=16)
    return small_run(task=Rotten(), model=model, **changes)


@pytest.fixture(scope="module")
def five_good_steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    out = tmp_path_factory.mktemp("runs") / "good"
    fit(rotten_run(steps=5), out)
    return weights(out)


RARELY: dict[str, dict[str, int]] = {
    "line": {},
    "evaluation": {"log_every": 100},
    "checkpoint": {"log_every": 100, "eval_every": 100},
}


@pytest.mark.parametrize("rarely", RARELY.values(), ids=RARELY.keys())
def test_loss_that_is_not_finite_stops_and_overwrites_nothing(
    rarely: dict[str, int], five_good_steps: dict[str, Tensor], tmp_path: Path
) -> None:
    """Whichever is the first to come after it."""
    told = r"not finite at step 8 \(batch: seed 0, split train, step 7\)"
    with pytest.raises(TrainingStopped, match=told):
        fit(rotten_run(steps=20, train=rarely), tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000005"]
    assert equal(weights(tmp_path), five_good_steps)


def test_no_thread_is_left_behind_by_training_that_fails(tmp_path: Path) -> None:
    """Though the error still holds the loop: the garbage collector could close its batches in a
    thread that is just starting, and wait there for ever."""
    before = set(threading.enumerate())
    with pytest.raises(TrainingStopped) as caught:
        fit(rotten_run(steps=20), tmp_path)
    assert caught.tb is not None
    left = set(threading.enumerate()) - before
    assert not [thread.name for thread in left if thread.name.startswith("ThreadPoolExecutor")]


def test_best_weights_outlive_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    """Weights are written with checkpoints, not with evaluations; those of the best evaluation
    before the bad step are kept."""
    run = rotten_run(steps=20, train={"eval_every": 2, "checkpoint_every": 1000})
    with pytest.raises(TrainingStopped):
        fit(run, tmp_path)
    best = min(rows(tmp_path, "eval"), key=lambda row: row["loss"])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"best-{best['step']:08d}"]
    assert measured(tmp_path, run)["loss"] == pytest.approx(best["loss"], rel=1e-6)


@dataclass(frozen=True)
class Unmeasured(Count3):
    """Count3 with a metric that it never measures."""

    name: ClassVar[str] = "unmeasured"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (Metric("beauty"), LOSS)

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        return {**super().measure(batch, got), "beauty": None}


def test_monitored_metric_that_is_not_measured_is_an_error(tmp_path: Path) -> None:
    run = small_run(task=Unmeasured(4, 10, 10), steps=1)
    with pytest.raises(InputError, match=r"train\.monitor beauty was not measured .* were loss"):
        fit(run, tmp_path / "first")
    result = fit(replace(run, train=replace(run.train, monitor="loss")), tmp_path / "loss")
    assert set(result.metrics) == {"loss", "n"}


def failing_at(step: int, error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step of training raise this."""
    whole = Stepper.__call__

    def failing(stepper: Stepper, *rest: Any) -> Any:
        if stepper.state.step == step:
            raise error
        return whole(stepper, *rest)

    monkeypatch.setattr(Stepper, "__call__", failing)


@pytest.mark.parametrize(
    ("step", "kept"), [(7, r"continue from step-00000005 with --resume"), (2, "no checkpoint had")]
)
def test_failure_of_the_gpu_says_how_to_go_on(
    step: int, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at(step, RuntimeError("CUDA error: unspecified launch failure"), monkeypatch)
    told = rf"the GPU failed at about step {step} \(CUDA error: unspecified.*\); {kept}"
    with pytest.raises(DeviceFailed, match=told):
        fit(small_run(), tmp_path)


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), torch.OutOfMemoryError("CUDA error: out of memory")], ids=str
)
def test_other_errors_are_not_the_gpus(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at(1, error, monkeypatch)
    with pytest.raises(type(error), match=str(error)) as caught:
        fit(small_run(), tmp_path)
    assert caught.value is error


def test_used_folder_is_not_overwritten(tmp_path: Path) -> None:
    fit(small_run(steps=1), tmp_path / "run")
    with pytest.raises(InputError, match="already holds a run"):
        fit(small_run(steps=1), tmp_path / "run")
    with pytest.raises(InputError, match="batch_size was 8 and is now 4"):
        fit(small_run(steps=1, batch_size=4), tmp_path / "run", resume=True)
    with pytest.raises(InputError, match="no run to resume"):
        fit(small_run(), tmp_path / "other", resume=True)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file"):
        fit(small_run(), tmp_path / "file")


def test_resuming_drops_rows_after_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    fit(small_run(steps=2), tmp_path)
    late = {"kind": "train", "step": 3, "loss": 1.0, "lr": 1.0, "grad_norm": 1.0, "seconds": 1.0}
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(late) + '\n{"kind": "tra')
    fit(small_run(steps=4), tmp_path, resume=True)
    found = rows(tmp_path, "train")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert found[2]["loss"] != 1.0


def test_environment_names_every_place_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(small_run(steps=1), tmp_path)
    made = json.loads((tmp_path / "environment.json").read_text())
    assert made["torch"] == torch.__version__
    assert {"commit", "date", "device", "python", "entp", "threads"} <= made.keys()
    for times, commit in ((1, "a copy"), (2, "another")):
        monkeypatch.setenv("ENTP_COMMIT", commit)  # for source without git
        fit(small_run(steps=1 + times), tmp_path, resume=True)
        again = json.loads((tmp_path / "environment.json").read_text())
        assert {**again, "resumed": None} == {**made, "resumed": None}
        assert len(again["resumed"]) == times
    assert [place["commit"] for place in again["resumed"]] == ["a copy", "another"]


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train = {"logger": "tensorboard", "eval_splits": ("test",)}
    fit(small_run(steps=2, train=train), tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for kind in ("train", "eval"):
        copied = [event.value for event in events.Scalars(f"{kind}/loss")]
        assert copied == pytest.approx([row["loss"] for row in rows(tmp_path, kind)], rel=1e-6)
    (row,) = rows(tmp_path, "split")
    _, value, weight, *_ = row["totals"]["all"]["loss"]
    assert events.Scalars("test/loss")[0].value == pytest.approx(value / weight, rel=1e-6)


def test_tracker_of_ones_own_gets_every_line(tmp_path: Path) -> None:
    class Mine:
        def __init__(self) -> None:
            self.lines: list[tuple[int, dict[str, float]]] = []
            self.closed = 0

        def log(self, values: dict[str, float], step: int) -> None:
            self.lines.append((step, values))

        def close(self) -> None:
            self.closed += 1

    mine = Mine()
    run = small_run(steps=4, train={"log_every": 2, "eval_every": 2})
    train(run, tmp_path, device="cpu", quiet=True, tracker=mine)
    for kind in ("train", "eval"):
        told = [(step, v[f"{kind}/loss"]) for step, v in mine.lines if f"{kind}/loss" in v]
        assert told == [(row["step"], row["loss"]) for row in rows(tmp_path, kind)]
    assert [step for step, _ in mine.lines] == [2, 2, 4, 4]
    assert mine.closed == 1


def test_wandb_offline_and_trackio_get_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are installed: real trackers writing to disk, without network."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio-files"))  # read on import
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    for name in ("wandb", "trackio"):
        fit(small_run(steps=5, train={"logger": name}), tmp_path / name)
    assert list((tmp_path / "wandb").glob("wandb/offline-run-*"))
    assert list((tmp_path / "trackio-files").iterdir())


def test_logger_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)  # as if it could not be imported
    with pytest.raises(InputError, match=r"pip install 'entp\[trackio\]'"):
        fit(small_run(train={"logger": "trackio"}), tmp_path)


def test_quiet_training_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(small_run(steps=1), tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")
    train(small_run(steps=1), tmp_path / "loud", device="cpu")
    assert capfd.readouterr().err.startswith("count3 entp: step 1/1  exact_match ")


def test_sequences_of_different_lengths_train(tmp_path: Path) -> None:
    task = Addition(digits=1, train_examples=50)
    model = model_for(task, "small", layers=2, heads=2, width=16)
    result = fit(small_run(task=task, model=model, steps=3), tmp_path)
    assert math.isfinite(result.metrics["loss"])


def test_loss_meter_checks_and_averages_any_number_of_steps() -> None:
    """More steps between two lines than it keeps at a time, checks in between, and a loss that goes
    bad."""
    meter = LossMeter(3, 5000, torch.device("cpu"))
    for step in range(2345):
        meter.update(torch.tensor(float(step)), step)
        if step == 1500:
            meter.check()
    assert meter.mean() == 2344 / 2
    meter.update(torch.tensor(3.0), 2345)
    assert meter.mean() == 3.0
    for step in range(2346, 2400):
        meter.update(torch.tensor(float("inf") if step in (2390, 2395) else 1.0), step)
    with pytest.raises(TrainingStopped, match=r"not finite at step 2391 \(batch: seed 3"):
        meter.check()
