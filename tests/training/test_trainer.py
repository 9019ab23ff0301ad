"""The loop: exact resume, exact chunks, what it measures, when it stops."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from small_runs import TASK, small_run

import entp
from entp.config import Run, StartConfig, model_for
from entp.errors import InputError, TrainingStopped
from entp.model import Transformer
from entp.tasks.addition import Addition
from entp.tasks.base import IGNORE, Batch, Split, Task
from entp.tasks.counting import Count3, Match3
from entp.training import checkpoint
from entp.training.distributed import World
from entp.training.evaluate import (
    accuracy_by_length,
    evaluate,
    fresh_batches,
    generated_right,
    some_batches,
)
from entp.training.loggers import read_metrics
from entp.training.optimizers import make_optimizers
from entp.training.signals import LossWatch, StopSignals
from entp.training.step import State, train_step
from entp.training.trainer import _check, _is_better, reached


def weights(out: Path) -> dict[str, torch.Tensor]:
    return entp.load(out, "last").state_dict()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


OPTIMIZERS = {"adamw": {}, "muon": {"name": "muon"}, "whitened": {"name": "muon", "whiten": 2}}


@pytest.mark.parametrize("optim", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm"])
def test_five_and_five_steps_are_ten(tmp_path: Path, mode: str, optim: dict[str, object]) -> None:
    def run(steps: int) -> entp.Run:
        return small_run(mode=mode, steps=steps, optim=optim)

    entp.train(run(10), tmp_path / "whole", device="cpu", quiet=True)
    entp.train(run(5), tmp_path / "parts", device="cpu", quiet=True)
    entp.train(run(10), tmp_path / "parts", device="cpu", resume=True, quiet=True)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    losses = [[r["loss"] for r in read_metrics(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    for name in "ab":
        entp.train(small_run(), tmp_path / name, device="cpu", quiet=True)
    entp.train(small_run(seed=1), tmp_path / "c", device="cpu", quiet=True)
    assert equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not equal(weights(tmp_path / "a"), weights(tmp_path / "c"))


def one_step(clip: float = 0.0, **train: object) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step in float64."""
    run = small_run(train=train, optim={"clip": clip})
    torch.manual_seed(0)
    model = entp.Transformer(run.model).double()
    state = State(model, make_optimizers(model, run.optim))
    batch = run.task.batch(0, "train", 0, run.batch_size)
    loss, _, _ = train_step(run, state, batch, torch.device("cpu"), World())
    return float(loss), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("budget", [1, 30, 100])
def test_chunks_add_up_to_the_same_gradient(budget: int) -> None:
    loss, grads = one_step()
    chunked_loss, chunked = one_step(token_budget=budget)
    assert chunked_loss == pytest.approx(loss, rel=1e-6)  # losses are added up in float32
    assert grads.keys() == chunked.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(chunked[name], grad, rtol=1e-6, atol=1e-9, msg=name)


def test_gradients_are_clipped_to_the_largest_norm_or_not_at_all() -> None:
    def norm(clip: float) -> float:
        return math.sqrt(sum(float(g.square().sum()) for g in one_step(clip)[1].values()))

    whole = norm(0.0)
    assert whole > 0.1
    assert norm(2 * whole) == pytest.approx(whole, rel=1e-9)
    assert norm(whole / 2) == pytest.approx(whole / 2, rel=1e-4)


def test_reference_and_packed_train_alike() -> None:
    _, packed = one_step(impl="packed")
    _, reference = one_step(impl="reference")
    for name, grad in reference.items():
        torch.testing.assert_close(packed[name], grad, rtol=1e-6, atol=1e-9, msg=name)


def test_loss_is_the_mean_over_targets_and_learns(tmp_path: Path) -> None:
    """A fresh model knows nothing: the first loss is log(vocab). Sixty steps teach it the
    frequencies at least."""
    run = small_run(steps=60, train={"eval_every": 60})
    result = entp.train(run, tmp_path / "run", device="cpu", quiet=True)
    losses = [r["loss"] for r in read_metrics(tmp_path / "run") if r["kind"] == "train"]
    assert losses[0] == pytest.approx(math.log(10), abs=0.05)
    assert result.metrics["loss"] < losses[0] - 0.2


def test_golden_losses(tmp_path: Path) -> None:
    """The first losses of a fixed run: a change here means that training changed."""
    entp.train(small_run(steps=5), tmp_path / "run", device="cpu", quiet=True)
    losses = [r["loss"] for r in read_metrics(tmp_path / "run") if r["kind"] == "train"]
    assert losses == pytest.approx(GOLDEN, rel=1e-4)


def test_evaluation_counts_by_hand(tmp_path: Path) -> None:
    run = small_run()
    entp.train(run, tmp_path / "run", device="cpu", quiet=True)
    model = entp.load(tmp_path / "run")
    values = evaluate(model, run, split="test", batches=3)
    right, asked, whole = 0, 0, 0
    for step in range(3):
        batch = TASK.batch(run.seed, "test", step, run.batch_size)
        with torch.no_grad():
            guess = model(torch.from_numpy(batch.x), impl="reference").argmax(-1).numpy()
        wanted = batch.y != IGNORE
        hits = (guess == batch.y) | ~wanted
        right, asked, whole = (
            right + int((hits & wanted).sum()),
            asked + int(wanted.sum()),
            whole + int(np.all(hits, 1).sum()),
        )
    assert values["token_accuracy"] == pytest.approx(right / asked)
    assert values["exact_match"] == pytest.approx(whole / 24)
    assert values["n"] == 24


def test_best_checkpoint_is_the_best_evaluation(tmp_path: Path) -> None:
    run = small_run(steps=30, train={"target_metric": "loss"})
    result = entp.train(run, tmp_path / "run", device="cpu", quiet=True)
    evaluations = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "eval"]
    best = min(evaluations, key=lambda r: r["loss"])
    assert result.best["step"] == best["step"]
    assert evaluate(entp.load(tmp_path / "run"), run)["loss"] == pytest.approx(
        best["loss"], rel=1e-6
    )


def test_what_is_better_and_what_is_good_enough() -> None:
    """Ties in accuracy go to the lower loss, and what is just as good does not replace what is
    there."""
    first = {"loss": 0.5, "exact_match": 0.75}
    by_accuracy, by_loss = (
        small_run(train={"target_metric": m, "target": 0.5}) for m in ("exact_match", "loss")
    )
    for run in (by_accuracy, by_loss):
        assert _is_better(run, first, {})
        assert not _is_better(run, first, first)
        assert _is_better(run, {**first, "loss": 0.4}, first)
        assert not _is_better(run, {**first, "loss": 0.6}, first)
    assert _is_better(by_accuracy, {"loss": 0.6, "exact_match": 0.8}, first)
    assert not _is_better(by_loss, {"loss": 0.6, "exact_match": 0.8}, first)
    assert [reached(by_loss, {"loss": v}) for v in (0.4, 0.5, 0.6)] == [True, True, False]
    assert [reached(by_accuracy, {"exact_match": v}) for v in (0.4, 0.5, 0.6)] == [
        False,
        True,
        True,
    ]


SPREAD: dict[str, dict[str, Any]] = {
    "all along": {"batch": 2},
    "first": {"start": StartConfig(steps=6, batch_size=2)},
    "late": {"optim": {"late_batch": 2, "late_at": 4}},
}


@pytest.mark.parametrize("changes", SPREAD.values(), ids=SPREAD.keys())
def test_every_process_has_a_sequence_in_every_step(changes: dict[str, Any]) -> None:
    _check(small_run(**changes), World(0, 2))
    with pytest.raises(InputError, match="batch 2 is smaller than the 3 processes"):
        _check(small_run(**changes), World(0, 3))


@dataclass(frozen=True)
class Stopping(Count3):
    """Count3 that asks the process to stop at training step 6."""

    name: ClassVar[str] = "stopping"

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        if split == "train" and step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(seed, split, step, size)


def test_a_run_that_is_told_to_stop_writes_what_it_has_and_measures_nothing_more(
    tmp_path: Path,
) -> None:
    rare = {"log_every": 10**6, "eval_every": 1, "checkpoint_every": 10**6}
    run = small_run(task=Stopping(4, 10, 10), steps=10**4, train=rare)
    result = entp.train(run, tmp_path / "run", device="cpu", quiet=True)
    assert (result.stopped_by, result.step < 10**4) == (signal.SIGTERM, True)
    rows = read_metrics(tmp_path / "run")
    (line,) = (row for row in rows if row["kind"] == "train")
    assert (line["step"], line["seconds"]) == (result.step, round(result.seconds, 3))
    assert [row["step"] for row in rows if row["kind"] == "eval"] == list(range(1, result.step))
    assert (
        checkpoint.read_trainer(checkpoint.find(tmp_path / "run", "last"))["seconds"]
        == result.seconds
        > 0
    )


def test_a_second_interrupt_does_not_wait_for_the_step(capfd: pytest.CaptureFixture[str]) -> None:
    """One that comes at once is the first: `timeout` and terminals may send theirs to a process and
    to its group."""
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert signals.caught == signal.SIGTERM
        assert capfd.readouterr().err.count("interrupt again to stop at once") == 1
        time.sleep(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_last_step_is_logged_measured_and_saved_whatever_the_intervals(tmp_path: Path) -> None:
    rare = {"log_every": 5, "eval_every": 100, "checkpoint_every": 100}
    entp.train(small_run(steps=7, train=rare), tmp_path / "run", device="cpu", quiet=True)
    assert [(r["kind"], r["step"]) for r in read_metrics(tmp_path / "run")] == [
        ("train", 5),
        ("train", 7),
        ("eval", 7),
    ]
    assert checkpoint.find(tmp_path / "run", "last").name == "step-00000007"


def test_training_stops_at_the_target(tmp_path: Path) -> None:
    run = small_run(steps=100, train={"target_metric": "loss", "target": 10.0})
    result = entp.train(run, tmp_path / "run", device="cpu", quiet=True)
    assert (result.step, result.reason) == (5, "loss reached 10")


@dataclass(frozen=True)
class Rotten(Task):
    """Sums of vectors; from training step 7 on the data are broken."""

    name: ClassVar[str] = "rotten"
    loss: ClassVar[str] = "squared_error"  # type: ignore[assignment]

    def model_needs(self) -> dict[str, Any]:
        return {"input_dim": 2, "outputs": 1, "context_length": 4}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        x = self.rng(seed, split, step).standard_normal((size, 4, 2), dtype=np.float32)
        bad = split == "train" and step >= 7
        return Batch(x * np.float32(np.nan) if bad else x, x.sum(axis=(2,)))


def test_training_stops_when_its_time_is_over_and_goes_on_with_more(tmp_path: Path) -> None:
    run = small_run(steps=10**6, train={"max_seconds": 1.0, "eval_every": 10**5})
    result = entp.train(run, tmp_path / "run", device="cpu", quiet=True)
    assert result.reason == "1 seconds are over"
    assert 1 <= result.seconds < 30
    assert 1 <= result.step < 10**6
    assert result.metrics["n"] == 16  # measured at the end, as any run
    again = entp.train(run, tmp_path / "run", device="cpu", quiet=True, resume=True)
    assert (again.step, again.reason) == (result.step, "1 seconds are over")  # nothing left to do
    longer = replace(run, train=replace(run.train, max_seconds=result.seconds + 0.5))
    more = entp.train(longer, tmp_path / "run", device="cpu", quiet=True, resume=True)
    assert more.step > result.step
    assert result.seconds + 0.5 <= more.seconds < 60


def test_a_rate_that_follows_the_clock(tmp_path: Path) -> None:
    run = small_run(
        steps=10**6,
        optim={"decay": "seconds", "warmup": 1},
        train={"max_seconds": 3.0, "log_every": 1},
    )
    start = time.perf_counter()
    result = entp.train(run, tmp_path / "run", device="cpu", quiet=True)
    assert result.seconds < time.perf_counter() - start  # no moment counts twice
    rows = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    rates = [row["lr"] for row in rows][1:]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0]
    assert rows[-1]["seconds"] >= 3
    for before, row in pairwise(rows):  # a step's rate is that of the time at which it began
        expected = learning_rate(run.optim, row["step"] - 1, before["seconds"] / 3)
        assert row["lr"] == pytest.approx(
            expected, abs=3e-6
        )  # seconds are written with three digits


def test_accuracy_by_length_adds_up_to_token_accuracy(tmp_path: Path) -> None:
    run = small_run(steps=40, optim={"max_lr": 1e-2})
    entp.train(run, tmp_path / "run", device="cpu", quiet=True)
    model = entp.load(tmp_path / "run")
    found = accuracy_by_length(model, run, some_batches(run, "test", 3))
    assert list(found) == list(range(4, 10))  # targets after 4 to 9 integers
    assert sum(found.values()) / len(found) == pytest.approx(
        evaluate(model, run, split="test", batches=3)["token_accuracy"]
    )


@torch.no_grad()
def always_zero(model: Transformer) -> None:
    """Weights whose answer is always 0."""
    for p in model.parameters():
        p.zero_()
    model.tokens.weight[0] = 1.0
    model.norm.bias.fill_(1.0)


@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm"])
def test_generated_right_is_what_generation_gives(mode: str, tmp_path: Path) -> None:
    """A task that the weights solve, and one that they do not; token by token through generate."""
    run = small_run(mode=mode)
    torch.manual_seed(0)
    model = Transformer(run.model)
    right, tried = generated_right(model, run, some_batches(run, "test", 2))
    assert (right, tried) == (0, 16)
    always_zero(model)  # right where every rule-made integer is 0
    zeros = sum(int((batch.y[:, 3:] == 0).all(1).sum()) for batch in some_batches(run, "test", 40))
    assert generated_right(model, run, some_batches(run, "test", 40)) == (zeros, 320)


@dataclass(frozen=True)
class Partial(Count3):
    """Count3 that asks for the first two rule-made integers only."""

    name: ClassVar[str] = "partial"

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = super().batch(seed, split, step, size)
        batch.y[:, self.prompt_length + 1 :] = IGNORE
        return batch


def test_what_is_not_asked_for_may_be_anything() -> None:
    run = small_run(task=Partial(4, 10, 10))
    model = Transformer(run.model)
    always_zero(model)
    zeros = sum(int((batch.y[:, 3:5] == 0).all(1).sum()) for batch in some_batches(run, "test", 20))
    assert zeros > sum(
        int((batch.x[:, 4:] == 0).all(1).sum()) for batch in some_batches(run, "test", 20)
    )
    assert generated_right(model, run, some_batches(run, "test", 20)) == (zeros, 160)


def test_fresh_sequences_are_each_runs_own() -> None:
    """Whole batches, at least as many as asked for, of a seed that is no run's, and another for
    each run."""
    for seed in (0, 1, 7):
        run = small_run(seed=seed)
        found = list(fresh_batches(run, 17))
        assert len(found) == 3
        for step, batch in enumerate(found):
            assert np.array_equal(batch.x, TASK.batch(2**32 - 1 - seed, "test", step, 8).x)


@pytest.mark.parametrize(
    "task",
    [Match3(length=8, modulus=4), Addition(train_examples=50)],
    ids=["other targets", "other places"],
)
def test_what_cannot_be_continued_is_a_sentence(task: Task) -> None:
    run = Run(task, model_for(task, "small", layers=1, heads=1, width=8))
    with pytest.raises(InputError, match=f"{task.name} has nothing to continue"):
        generated_right(Transformer(run.model), run, some_batches(run, "test", 1))


@pytest.mark.parametrize(
    "rarely", [{}, {"log_every": 100}, {"log_every": 100, "eval_every": 100}], ids=str
)
def test_a_loss_that_is_not_finite_stops_and_overwrites_nothing(
    rarely: dict[str, int], tmp_path: Path
) -> None:
    """Whether a line, an evaluation or a checkpoint is the first to come after it."""
    task = Rotten()
    model = model_for(task, "small", layers=2, heads=2, width=16)
    entp.train(
        small_run(task=task, model=model, steps=5), tmp_path / "good", device="cpu", quiet=True
    )
    with pytest.raises(
        TrainingStopped, match=r"not finite at step 8 \(batch: seed 0, split train, step 7\)"
    ):
        entp.train(
            small_run(task=task, model=model, steps=20, train=rarely),
            tmp_path / "run",
            device="cpu",
            quiet=True,
        )
    assert [p.name for p in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-00000005"]
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "good"))


def test_the_best_weights_outlive_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    """Weights are written with checkpoints, not with evaluations; those of the last evaluation
    before the bad step are kept."""
    task = Rotten()
    model = model_for(task, "small", layers=2, heads=2, width=16)
    every = {"eval_every": 2, "checkpoint_every": 1000, "target_metric": "loss"}
    run = small_run(task=task, model=model, steps=20, train=every)
    with pytest.raises(TrainingStopped):
        entp.train(run, tmp_path / "run", device="cpu", quiet=True)
    evaluations = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "eval"]
    best = min(evaluations, key=lambda r: r["loss"])
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == [
        f"best-{best['step']:08d}"
    ]
    assert evaluate(entp.load(tmp_path / "run"), run)["loss"] == pytest.approx(
        best["loss"], rel=1e-6
    )  # not those of later


def test_a_used_folder_is_not_overwritten(tmp_path: Path) -> None:
    entp.train(small_run(steps=5), tmp_path / "run", device="cpu", quiet=True)
    with pytest.raises(InputError, match="already holds a run"):
        entp.train(small_run(steps=5), tmp_path / "run", device="cpu", quiet=True)
    with pytest.raises(InputError, match="batch was 8 and is now 4"):
        entp.train(
            small_run(steps=5, batch_size=4), tmp_path / "run", device="cpu", resume=True, quiet=True
        )
    with pytest.raises(InputError, match="no run to resume"):
        entp.train(small_run(), tmp_path / "other", device="cpu", resume=True, quiet=True)


def test_resume_drops_measurements_after_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    entp.train(small_run(steps=5), out, device="cpu", quiet=True)
    with open(out / "metrics.jsonl", "a") as file:
        file.write(
            json.dumps(
                {
                    "kind": "train",
                    "step": 6,
                    "loss": 1.0,
                    "lr": 1.0,
                    "grad_norm": 1.0,
                    "seconds": 1.0,
                }
            )
        )
        file.write('\n{"kind": "tra')
    entp.train(small_run(steps=10), out, device="cpu", resume=True, quiet=True)
    steps = [r["step"] for r in read_metrics(out) if r["kind"] == "train"]
    assert steps == list(range(1, 11))


def test_run_folder_says_where_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entp.train(small_run(steps=5), tmp_path / "run", device="cpu", quiet=True)
    made = json.loads((tmp_path / "run/environment.json").read_text())
    assert made["torch"] == torch.__version__
    assert {"commit", "date", "device", "python", "entp", "threads"} <= made.keys()
    for times, commit in ((1, "a copy"), (2, "another")):
        monkeypatch.setenv("ENTP_COMMIT", commit)  # for source without git
        entp.train(
            small_run(steps=5 + times), tmp_path / "run", device="cpu", resume=True, quiet=True
        )
        again = json.loads((tmp_path / "run/environment.json").read_text())
        assert {**again, "resumed": None} == {**made, "resumed": None}
        assert len(again["resumed"]) == times
    assert [place["commit"] for place in again["resumed"]] == ["a copy", "another"]


def test_tensorboard_mirror_holds_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    entp.train(
        small_run(steps=5, train={"mirror": "tensorboard"}),
        tmp_path / "run",
        device="cpu",
        quiet=True,
    )
    events = accumulator.EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    mirrored = [e.value for e in events.Scalars("train/loss")]
    written = [r["loss"] for r in read_metrics(tmp_path / "run") if r["kind"] == "train"]
    assert mirrored == pytest.approx(written, rel=1e-6)


def test_wandb_offline_and_trackio_take_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are installed: real trackers writing to disk, without network."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv(
        "TRACKIO_DIR", str(tmp_path / "trackio-files")
    )  # read when trackio is imported
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    for name in ("wandb", "trackio"):
        entp.train(
            small_run(steps=5, train={"mirror": name}), tmp_path / name, device="cpu", quiet=True
        )
    assert list((tmp_path / "wandb").glob("wandb/offline-run-*"))
    assert list((tmp_path / "trackio-files").iterdir())


def test_a_mirror_that_is_not_installed_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "trackio", None
    )  # Python's own way to say that a module cannot be imported
    with pytest.raises(InputError, match=r"pip install 'entp\[trackio\]'"):
        entp.train(
            small_run(train={"mirror": "trackio"}), tmp_path / "run", device="cpu", quiet=True
        )


def test_sequences_of_different_lengths_train(tmp_path: Path) -> None:
    task = Addition(digits=1, train_examples=50)
    run = small_run(task=task, model=model_for(task, "small", layers=2, heads=2, width=16))
    result = entp.train(run, tmp_path / "run", device="cpu", quiet=True)
    assert math.isfinite(result.metrics["loss"])


@pytest.mark.slow
def test_compiled_blocks_train_alike(tmp_path: Path) -> None:
    for name, compiled in (("plain", False), ("compiled", True)):
        run = small_run(steps=3, train={"compile": compiled, "eval_every": 3})
        entp.train(run, tmp_path / name, device="cpu", quiet=True)
    plain, compiled_losses = (
        [r["loss"] for r in read_metrics(tmp_path / n)] for n in ("plain", "compiled")
    )
    assert compiled_losses == pytest.approx(plain, rel=1e-4)


GOLDEN = [2.337969, 2.297724, 2.260552, 2.236977, 2.224859]


def test_losses_are_watched_over_any_number_of_steps() -> None:
    """More steps between two lines than the watch keeps at a time, checks in between, and a loss
    that goes bad."""
    watch = LossWatch(small_run(train={"log_every": 5000}), torch.device("cpu"))
    for step in range(2345):
        watch.note(torch.tensor(float(step)), step)
        if step == 1500:
            watch.check()
    assert watch.mean() == 2344 / 2
    watch.note(torch.tensor(3.0), 2345)
    assert watch.mean() == 3.0
    for step in range(2346, 2400):
        watch.note(torch.tensor(float("inf") if step in (2390, 2395) else 1.0), step)
    with pytest.raises(TrainingStopped, match="not finite at step 2391 "):
        watch.check()
