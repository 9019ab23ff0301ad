"""What is said before a long first step."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from small_runs import small_run

from entp.config import RandomTargetsConfig, Run, model_for
from entp.experiments import step_time
from entp.tasks.counting import Count3


def long_run() -> Run:
    task = Count3(length=128, prompt_length=16)
    return Run(task, model_for(task, "medium"), "entp", batch_size=64)


def test_a_long_step_is_told_with_a_cheaper_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "matrix_speed", lambda: 1e10)
    said = step_time.long_step(long_run(), "cpu")
    assert said is not None
    found = re.fullmatch(
        r"A step takes (\d+) s or more on this CPU \(by operations\)\. With "
        r"--random-targets\.count 8 --batch-size 16 that is (\d+) s\.",
        said,
    )
    assert found is not None, said
    seconds, cheaper = (int(text) for text in found.groups())
    cheap = replace(long_run(), batch_size=16, random_targets=RandomTargetsConfig(8))
    assert seconds == round(step_time.first_step(long_run()) / 1e10)
    assert cheaper == round(step_time.first_step(cheap) / 1e10)
    assert 30 * cheaper < seconds  # 8 of 112 targets, and a quarter of the sequences


def test_options_that_are_there_are_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "matrix_speed", lambda: 1e6)
    run = replace(long_run(), batch_size=16, random_targets=RandomTargetsConfig(8))
    said = step_time.long_step(run, "cpu")
    assert said is not None
    assert said.endswith("on this CPU (by operations).")
    decoder = step_time.long_step(replace(long_run(), mode="decoder"), "cpu")
    assert decoder is not None
    assert "With --batch-size 16 that is" in decoder


def test_a_short_step_or_a_gpu_needs_no_word() -> None:
    assert step_time.long_step(small_run(), "cpu") is None
    assert step_time.long_step(long_run(), "cuda") is None


def test_speed_is_that_of_a_computer() -> None:
    assert 1e8 < step_time.matrix_speed() < 1e15
