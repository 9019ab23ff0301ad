"""Runs that another recipe has recorded: that of the recipe whose run folders ours are too, where
its record lies beside ours. Runs are found by their configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from entp.errors import InputError
from entp.experiments.collect import Kept, match_runs, own_splits
from entp.experiments.recipe import ArmRun
from entp.experiments.testing import is_complete
from entp.results.schema import RunRecord, RunTest, measured
from entp.results.store import read_record


def read_sibling(
    path: Path, recipe: str, arms: Sequence[ArmRun], metrics: set[str], quiet: bool = True
) -> Kept:
    """The runs of these arms in the record of a recipe that have all that ours asks for; none where
    the file is no record of that recipe."""
    try:
        record = read_record(path)
        found = match_runs(record, list(arms), path, quiet=True) if record.recipe == recipe else {}
    except InputError as error:
        if not quiet:
            print(f"{path} is passed over: {error}", file=sys.stderr)
        return {}
    return {
        arm.hash: run.model_copy(update={"test": own_splits(run.test, arm.splits)})
        for arm in arms
        if (run := found.get(arm.hash)) is not None and serves(run, arm, metrics)
    }


def serves(run: RunRecord, arm: ArmRun, metrics: set[str]) -> bool:
    """Whether a recorded run is trained and has been tested as its arm here asks for."""
    test = run.test
    if not run.done or test is None or arm.test_on is not None or arm.run.monitor not in run.best:
        return False  # a recipe that tests on another task records no validation
    return is_complete(test, arm) and _is_long_enough(test, arm) and measured(run) <= metrics


def _is_long_enough(test: RunTest, arm: ArmRun) -> bool:
    """Whether it was tested on as many sequences."""
    generated = 0 if test.generated is None else test.generated.sequences
    pairs = ((test.totals.sequences, arm.test_sequences), (generated, arm.generated_sequences))
    return all(_batches(there, arm) >= _needed(wanted, arm) for there, wanted in pairs)


def _batches(sequences: int, arm: ArmRun) -> int:
    return -(-sequences // arm.run.batch_size)


def _needed(sequences: int, arm: ArmRun) -> int:
    """Batches that so many sequences take, or all that there are."""
    count = _batches(sequences, arm)
    try:
        there = arm.run.task.split_batches("test", arm.run.batch_size)
    except InputError:  # its data is not here
        there = None
    return count if there is None else min(count, there)
