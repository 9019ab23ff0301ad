"""Which evaluation is the best, and when a run has enough of them."""

from __future__ import annotations

from typing import Any

import pytest
from small_runs import TASK, small_run

from entp.tasks.metrics import EXACT_MATCH, LOSS
from entp.training.stopping import is_better, monitored, stop_reason


def test_is_better_follows_the_metric_and_breaks_ties_by_the_last() -> None:
    """What is just as good does not replace what is there."""
    first = {"loss": 0.5, "exact_match": 0.75}
    for monitor in (EXACT_MATCH, LOSS):
        assert is_better(TASK, monitor, first, {})
        assert not is_better(TASK, monitor, first, first)
        assert is_better(TASK, monitor, {**first, "loss": 0.4}, first)
        assert not is_better(TASK, monitor, {**first, "loss": 0.6}, first)
    other = {"loss": 0.6, "exact_match": 0.8}
    assert is_better(TASK, EXACT_MATCH, other, first)
    assert not is_better(TASK, LOSS, other, first)
    accuracy = {"exact_match": 0.75}  # where the last metric is not measured
    assert not is_better(TASK, EXACT_MATCH, accuracy, first)
    assert not is_better(TASK, EXACT_MATCH, accuracy, accuracy)


def test_monitored_metric_is_the_tasks_first_unless_named() -> None:
    assert monitored(small_run()).name == "exact_match"
    assert monitored(small_run(train={"monitor": "loss"})).name == "loss"


def stops_after(name: str, values: list[float], **train: Any) -> int | None:
    """How many of these evaluations it takes to stop; None if it goes on."""
    run = small_run(train={"monitor": name, **train})
    rows = [{name: value, "step": n} for n, value in enumerate(values)]
    counts = [n for n in range(len(rows) + 1) if stop_reason(run, rows[:n])]
    assert counts == list(range(counts[0], len(rows) + 1)) if counts else True  # it stays so
    return counts[0] if counts else None


def test_goal_is_reached_by_what_is_at_least_as_good() -> None:
    for values, after in (([0.4], None), ([0.4, 0.5], 2), ([0.6, 0.1], 1)):
        assert stops_after("exact_match", values, stop_at=0.5) == after
    for values, after in (([0.6], None), ([0.6, 0.5], 2), ([0.4, 0.9], 1)):
        assert stops_after("loss", values, stop_at=0.5) == after
    assert stops_after("exact_match", [1.0]) is None
    run = small_run(train={"stop_at": 0.5})
    assert stop_reason(run, [{"loss": 0.1}]) == ""  # not measured
    assert stop_reason(run, [{"exact_match": 0.5}]) == "exact_match reached 0.5"
    assert stop_reason(run, [{"exact_match": 0.5}], had=True) == "exact_match had reached 0.5"


@pytest.mark.parametrize(
    ("values", "patience", "after"),
    [
        ([3.0, 2.0, 1.0, 0.5], 1, None),
        ([3.0, 3.0], 1, 2),  # as good is not better
        ([3.0, 4.0, 2.0, 2.5, 2.2, 9.0], 3, 6),
        ([3.0, 4.0, 2.9, 4.0, 2.8, 4.0], 2, None),
        ([1.0, 2.0, 1.5, 1.2], 2, 3),  # better than the last is not better than the best
        ([1.0], 1, None),
    ],
)
def test_patience_counts_evaluations_in_a_row(
    values: list[float], patience: int, after: int | None
) -> None:
    assert stops_after("loss", values, patience=patience) == after
    assert stops_after("exact_match", [-v for v in values], patience=patience) == after


def test_patience_may_begin_at_a_value() -> None:
    """Evaluations before the loss is at most 1.1 do not count; later ones do, wherever it goes."""
    values = [2.0, 2.1, 2.2, 2.3, 1.1, 1.2, 1.3, 1.4]
    assert stops_after("loss", values, patience=2) == 3
    assert stops_after("loss", values, patience=2, patience_from=1.1) == 7
    assert stops_after("loss", values, patience=2, patience_from=1.0) is None
    higher = [0.2, 0.1, 0.1, 0.5, 0.4, 0.3]
    assert stops_after("exact_match", higher, patience=2, patience_from=0.5) == 6


def test_reason_tells_how_long_it_waited() -> None:
    rows = [{"loss": 1.0}, {"loss": 2.0}, {"loss": 2.0}]
    one, two = (small_run(train={"monitor": "loss", "patience": n}) for n in (1, 2))
    assert stop_reason(one, rows) == "1 evaluation brought no better loss"
    assert stop_reason(two, rows, had=True) == ("2 evaluations in a row had brought no better loss")
