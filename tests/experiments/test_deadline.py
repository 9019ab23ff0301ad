"""Which run begins next where the time is limited."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_records import small_recipe
from small_runs import small_run

from entp.errors import TrainingStopped
from entp.experiments import deadline
from entp.experiments.deadline import AROUND, CAUTION, SAVING, Deadline
from entp.experiments.recipe import Arm
from entp.experiments.reproduce import Chosen, plan
from entp.experiments.running import Resources, in_order
from entp.experiments.workers import Ending


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(deadline, "time", found)
    return found


def begin_all(choose: Deadline, waiting: list[int], jobs: int, busy: int = 0) -> list[int]:
    """The runs that begin now."""
    begun = []
    while waiting and busy + len(begun) < jobs:
        number = choose(waiting, busy + len(begun))
        if number < 0:
            break
        waiting.remove(number)
        begun.append(number)
    return begun


def test_without_a_limit_runs_begin_in_their_order(clock: Clock) -> None:
    choose = Deadline([1e6, 1.0, 1e9], None)
    assert begin_all(choose, [0, 1, 2], 3) == [0, 1, 2]


def test_runs_that_end_in_time_begin_before_longer_ones(clock: Clock) -> None:
    choose = Deadline([500.0, 90.0, 400.0, 20.0], clock.now + 150 + SAVING)
    waiting = [0, 1, 2, 3]
    assert begin_all(choose, waiting, 1) == [1]
    clock.now += 90 + AROUND
    choose.ended(Ending(1))
    assert begin_all(choose, waiting, 1) == [3]
    clock.now += 20 + AROUND
    choose.ended(Ending(3))
    assert begin_all(choose, waiting, 1) == [0]  # for what it gets done


def test_no_more_begin_at_a_time_than_end_in_time(clock: Clock) -> None:
    """Eight that share a GPU would all be nearly done at the end."""
    choose = Deadline([50.0] * 8, clock.now + (AROUND + 4 * 50) * CAUTION + SAVING)
    waiting = list(range(8))
    assert begin_all(choose, waiting, 8) == [0, 1, 2, 3]
    clock.now += 200
    choose.ended(Ending(0))
    assert begin_all(choose, waiting, 8, busy=3) == []


def test_what_ended_corrects_the_estimates(clock: Clock) -> None:
    """A machine that is ten times as slow as the estimates."""
    choose = Deadline([10.0, 30.0, 15.0, 5.0], clock.now + 600)
    waiting = [0, 1, 2, 3]
    assert begin_all(choose, waiting, 1) == [0]
    clock.now += 10 * (10 + AROUND)
    choose.ended(Ending(0))
    assert begin_all(choose, waiting, 1) == [3]


def test_runs_beside_each_other_slow_each_other_down(clock: Clock) -> None:
    """Two that took twice their time beside each other took what was expected."""
    choose = Deadline([50.0, 50.0, 100.0], clock.now + 270 + SAVING)
    waiting = [0, 1, 2]
    assert begin_all(choose, waiting, 2) == [0, 1]
    clock.now += 100 + AROUND
    choose.ended(Ending(0))
    choose.ended(Ending(1))
    assert [took / expected for took, expected in choose.took] == [1.0, 1.0]
    assert begin_all(choose, waiting, 2) == [2]


def test_runs_that_only_had_to_be_tested_spoil_no_estimate(clock: Clock) -> None:
    choose = Deadline([0.0, 0.0, 60.0, 60.0], clock.now + 300)
    waiting = [0, 1, 2, 3]
    assert begin_all(choose, waiting, 2) == [0, 1]
    clock.now += 20
    choose.ended(Ending(0))
    choose.ended(Ending(1))
    assert begin_all(choose, waiting, 2) == [2, 3]


def test_a_run_that_failed_at_once_is_no_fast_one(clock: Clock) -> None:
    choose = Deadline([100.0] * 4, clock.now + 250)
    waiting = [0, 1, 2, 3]
    assert begin_all(choose, waiting, 4) == [0]
    clock.now += 1
    choose.ended(Ending(0, error=TrainingStopped("it failed")))
    assert not choose.took
    assert begin_all(choose, waiting, 4) == [1]


def test_where_the_time_is_limited_those_named_first_begin_first(tmp_path: Path) -> None:
    """Otherwise the longest do, if there are several at a time."""
    run = small_run(mode="decoder")
    runs = [replace(run, steps=n, batch_size=8 + at) for at, n in enumerate((100, 4, 150))]
    recipe = small_recipe(arms=[Arm(one, number=at) for at, one in enumerate(runs)])
    items = plan(recipe, tmp_path, Chosen("cpu")).items
    assert len(items) == 3

    def begun(**changes: Any) -> list[int]:
        resources = Resources("cpu", **{"concurrent": 2, "max_minutes": None, **changes})
        return [item.arm.run.steps for item in in_order(items, resources)]

    assert begun() == [150, 100, 4]
    assert begun(end=1e9) == begun(concurrent=1) == [100, 4, 150]
