"""The test of a finished run: its best checkpoint on sequences that nothing else uses, and whatever
else the recipe asks for, written to test.json in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from entp.experiments.collect import read_test, write_test
from entp.experiments.orders import variance_over_orders
from entp.experiments.recipe import ArmRun
from entp.results.bootstrap import Scored, bootstrap
from entp.results.schema import PERMUTED, Bootstrap, RunTest, TotalsData
from entp.tasks.base import Batch, Split, Task
from entp.tasks.metrics import Predicted, Score
from entp.training.checkpoint import find, load
from entp.training.evaluate import (
    TEST_SEED,
    evaluate,
    evaluate_generated,
    split_batches,
    untouched_batches,
)
from entp.training.forward import Forward
from entp.training.signals import StopSignals


def measure_best(arm: ArmRun, folder: Path, device: torch.device, concurrent: int | None) -> None:
    """Write test.json: the best checkpoint on test sequences and on further splits, and the last
    one if the recipe asks for it."""
    run, best, before = arm.run, find(folder), read_test(folder, arm.run, arm.test_name)
    last = find(folder, "last") if arm.test_last else None
    how, model = Forward.of(run), load(best, device=device)

    def totals(model: Any, split: Split = "test") -> TotalsData:
        some = batches_of(arm, split)
        return TotalsData.of(evaluate(model, arm.test_task, some, how, device=device))

    other_stream = before is not None and bool(before.note)
    if before is None or before.checkpoint != best.name or other_stream:
        generated = None
        if arm.generated_sequences:
            some = batches_of(arm, "test", True)
            generated = TotalsData.of(evaluate_generated(model, run.task, some, how, device=device))
        before = RunTest(
            checkpoint=best.name,
            concurrent_runs=concurrent,
            totals=totals(model),
            generated=generated,
        )
    if last is not None and before.last_checkpoint != last.name:
        later = totals(load(last, device=device))
        before = before.model_copy(update={"last": later, "last_checkpoint": last.name})
    splits = dict(before.splits)
    splits |= {split: totals(model, split) for split in arm.test_splits if split not in splits}
    if arm.test_orders and PERMUTED not in splits:
        splits[PERMUTED] = _permuted(arm, model, how, device)
    resampled = before.bootstrap
    if arm.bootstrap and resampled is None:
        resampled = _bootstrap(arm, model, how, device)
    found = before.model_copy(update={"splits": splits, "bootstrap": resampled})
    write_test(folder, found, arm.test_name)


def batches_of(arm: ArmRun, split: Split, generated: bool = False) -> Iterator[Batch]:
    """The test sequences of a run, or those of a further split, which nothing else uses."""
    run, sequences = arm.run, arm.generated_sequences if generated else arm.test_sequences
    if arm.test_on is not None:
        return split_batches(arm.test_on, split, None, run.batch_size, run.seed)
    if split == "test":
        return untouched_batches(run.task, sequences, run.batch_size, run.seed)
    count = -(-sequences // run.batch_size)
    seed = (TEST_SEED + run.seed) % 2**32
    return split_batches(run.task, split, count, run.batch_size, seed)


def _permuted(arm: ArmRun, model: Any, how: Forward, device: torch.device) -> TotalsData:
    """The variance of the answers over orders of the examples."""
    task, seed, some = arm.run.task, arm.run.seed, batches_of(arm, "test")
    found = variance_over_orders(model, task, some, how, arm.test_orders, seed=seed, device=device)
    return TotalsData.of(found)


def _bootstrap(arm: ArmRun, model: Any, how: Forward, device: torch.device) -> Bootstrap:
    """Intervals of the test by resampling its sequences."""
    scored, some = _Scores(arm.test_task), batches_of(arm, "test")
    evaluate(model, scored, some, how, device=device)  # type: ignore[arg-type]
    return bootstrap(arm.test_task.metrics, scored.all)


class _Scores:
    """A task that keeps every score, for what needs more than their sums."""

    def __init__(self, task: Task) -> None:
        self.task, self.name, self.metrics = task, task.name, task.metrics
        self.all: list[Scored] = []

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        found = self.task.measure(batch, got)
        self.all.append(Scored(batch, found))
        return found


def is_measured(arm: ArmRun, folder: Path) -> bool:
    """Whether test.json is there for these checkpoints, with everything that the recipe asks
    for."""
    test = read_test(folder, arm.run, arm.test_name)
    if test is None:
        return False
    last = find(folder, "last") if arm.test_last else None
    return _is_of(test, find(folder), last) and is_complete(test, arm)


class _Interrupted(BaseException):
    """A signal came; no error, so that nobody takes it for one."""


@contextmanager
def stopping_at_signals() -> Iterator[StopSignals]:
    """SIGINT and SIGTERM end what is inside at once, and only that; they are in `caught`."""

    def interrupt() -> None:
        raise _Interrupted

    signals = StopSignals(interrupt)
    with suppress(_Interrupted), signals:
        yield signals


def _is_of(test: RunTest, best: Path, last: Path | None) -> bool:
    """Whether a test is of this checkpoint, and of the last one where that is to be tested."""
    return test.checkpoint == best.name and (last is None or test.last_checkpoint == last.name)


def is_complete(test: RunTest, arm: ArmRun) -> bool:
    """Whether a test has everything that its recipe asks for."""
    return (
        all(split in test.splits for split in arm.splits)
        and (test.bootstrap is not None or not arm.bootstrap)
        and (test.last is not None or not arm.test_last)
    )
