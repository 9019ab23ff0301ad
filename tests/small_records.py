"""Records of results made by hand, and a recipe that trains in a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from small_runs import small_run

from entp.config import Run
from entp.experiments.recipe import Arm, Figure, PaperValue, Recipe
from entp.results.schema import (
    VERSION,
    ArmRecord,
    Environment,
    MetricSpec,
    Point,
    Record,
    RunRecord,
    RunTest,
    SplitBest,
    TotalsData,
)
from entp.tasks.metrics import EXACT_MATCH, LOSS, TOKEN_ACCURACY, Sums

METRICS = [MetricSpec.of(metric) for metric in (EXACT_MATCH, TOKEN_ACCURACY, LOSS)]
WHERE = Environment(device="somewhere", torch="2.0", commit="0123456789", date="2026-01-01T00")


def counted(right: int, n: int) -> list[Any]:
    """Sums of so many right sequences."""
    return Sums(n, right, n, right, right, n).to_json()


def run_test(right: int, n: int = 100, concurrent: int | None = 1, **more: Any) -> RunTest:
    """A test in which so many of n sequences were right; token accuracy by length 1 and 2."""
    bins = {"1": counted(right, n), "2": counted(right // 2, n)}
    totals = TotalsData(
        sequences=n,
        all={
            "exact_match": counted(right, n),
            "token_accuracy": Sums(n, 1.5 * right, 2 * n, None, None, None).to_json(),
            "loss": Sums(n, float(n), 2 * n, None, None, None).to_json(),
        },
        slices={"token_accuracy": {"length": bins}},
    )
    return RunTest(checkpoint="best-1", concurrent_runs=concurrent, totals=totals, **more)


def sliced_totals(right: int, bins: dict[str, int], n: int = 100, by: str = "digits") -> TotalsData:
    """So many of n sequences right, and so many of n in each bin of exact match by `by`."""
    cells = {key: counted(value, n) for key, value in bins.items()}
    return TotalsData(
        sequences=n,
        all={"exact_match": counted(right, n)},
        slices={"exact_match": {by: cells}},
    )


DIGITS = [replace(METRICS[0], slices=("digits",)), *METRICS[1:]]
"""METRICS with exact match by digits."""


def sourced_run(
    seed: int = 0,
    *,
    test: dict[str, int],
    last: dict[str, int] | None = None,
    best: dict[str, int] | None = None,
    evaluations: int = 7,
) -> RunRecord:
    """A run with exact match by digits at its best checkpoint, at the last, and of the best
    evaluations on the test itself; the whole is the first bin."""

    def totals(bins: dict[str, int]) -> TotalsData:
        return sliced_totals(next(iter(bins.values())), bins)

    tested = RunTest(checkpoint="best-1", concurrent_runs=1, totals=totals(test))
    if last is not None:
        tested = tested.model_copy(update={"last": totals(last), "last_checkpoint": "step-2"})
    found = {}
    if best is not None:
        found["test"] = SplitBest(evaluations=evaluations, totals=totals(best))
    return run_record(seed, test=tested, best_of_splits=found)


def run_record(seed: int = 0, right: int | None = 50, **changes: Any) -> RunRecord:
    """A finished run of 10 steps, tested unless `right` is None."""
    values = {"exact_match": 0.5, "token_accuracy": 0.75, "loss": 0.25}
    fields: dict[str, Any] = {
        "seed": seed,
        "status": "done",
        "best": values,
        "test": None if right is None else run_test(right),
        "n": 64,
        "steps": 10,
        "sequences": 80,
        "seconds": 12.0,
        "curve": [
            Point(step=5, seconds=6.0, sequences=40, values={**values, "loss": 1.0}),
            Point(step=10, seconds=12.0, sequences=80, values=values),
        ],
        "config_hash": "0123456789",
        "config": {"task": {"name": "count3"}, "mode": "entp", "batch_size": 8},
        "environment": WHERE,
    }
    return RunRecord(**{**fields, **changes})


def arm_record(*rights: int | None, runs: Sequence[RunRecord] = (), **factors: Any) -> ArmRecord:
    """An arm with a run for each number of right sequences of 100, or with these runs."""
    made = list(runs) or [run_record(seed, right) for seed, right in enumerate(rights)]
    return ArmRecord(factors=factors, seeds=[run.seed for run in made] or [0], runs=made)


def make_record(arms: dict[str, ArmRecord], **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "schema_version": VERSION,
        "recipe": "mine",
        "title": "A figure",
        "question": "Who learns?",
        "command": "entp reproduce mine",
        "metrics": METRICS,
        "figures": [Figure("curves")],
        "arms": arms,
    }
    return Record(**{**fields, **changes})


def tiny(run: Run) -> Run:
    """Fewer steps."""
    return replace(run, steps=4)


def small_recipe(**changes: Any) -> Recipe:
    """Count3 of 10 integers: ENTP with two seeds, and a decoder; six steps each."""
    run = small_run(steps=6, train={"eval_every": 3, "checkpoint_every": 3, "log_every": 2})
    fields: dict[str, Any] = {
        "name": "small",
        "title": "A small figure",
        "question": "Does it run?",
        "arms": [
            Arm(run, (0, 1), {"exact_match": PaperValue(0.991, "Table 1")}, mode="ENTP"),
            Arm(replace(run, mode="decoder"), mode="decoder"),
        ],
        "tiny_run": tiny,
        "test_sequences": 16,
        "generated_sequences": 8,
        "not_run": {"BERT": "needs weights"},
    }
    return Recipe(**{**fields, **changes})
