"""The learning rate of each step."""

from __future__ import annotations

import pytest
from small_runs import small_run

from entp.config import OptimConfig
from entp.training.plan import Plan
from entp.training.schedule import learning_rate


def test_schedule_is_the_papers() -> None:
    config = OptimConfig()  # 5e-4 to 5e-5, cosine over 100k steps, warm-up 500
    assert learning_rate(config, 0) == pytest.approx(5e-4 / 500)
    assert learning_rate(config, 499) == pytest.approx(5e-4)
    assert learning_rate(config, 500) == pytest.approx(5e-4)
    half = 500 + (100_000 - 500) // 2
    assert learning_rate(config, half) == pytest.approx((5e-4 + 5e-5) / 2)
    assert learning_rate(config, 100_000) == pytest.approx(5e-5)
    assert learning_rate(config, 150_000) == pytest.approx(5e-5)


def test_schedule_decays_after_the_warm_up() -> None:
    config = OptimConfig(warmup_steps=5, decay_steps=50)
    rates = [learning_rate(config, s) for s in range(60)]
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)


def test_schedule_may_be_linear() -> None:
    config = OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=10, decay_steps=110, schedule="linear")
    assert [learning_rate(config, s) for s in (10, 35, 60, 110, 500)] == pytest.approx(
        [1e-3, 7.75e-4, 5.5e-4, 1e-4, 1e-4]
    )
    by_clock = OptimConfig(
        lr=1e-3, min_lr=1e-4, warmup_steps=10, decay_by="seconds", schedule="linear"
    )
    assert [learning_rate(by_clock, 50, spent) for spent in (0.0, 0.5, 1.0, 1.2)] == pytest.approx(
        [1e-3, 5.5e-4, 1e-4, 1e-4]
    )


def test_schedule_by_the_clock_ends_with_the_time() -> None:
    """After the warm-up, which is in steps."""
    optim = {"lr": 1e-3, "min_lr": 1e-4, "decay_by": "seconds", "schedule": "linear"}
    plan = Plan(small_run(optim={**optim, "warmup_steps": 3}, train={"max_seconds": 20.0}))
    assert plan.learning_rate(0, 20.0) == pytest.approx(1e-3 / 3)
    rates = [plan.learning_rate(5, seconds) for seconds in (0.0, 10.0, 20.0, 30.0)]
    assert rates == pytest.approx([1e-3, 5.5e-4, 1e-4, 1e-4])


def test_schedule_after_others_begins_without_a_warm_up() -> None:
    config = OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=10, decay_steps=100, schedule="linear")
    rates = [learning_rate(config, step, first=50) for step in (50, 100, 150)]
    assert rates == pytest.approx([1e-3, 5.5e-4, 1e-4])
