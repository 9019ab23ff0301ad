"""The trained models that come with entp do on new sequences what their files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import entp
from entp import pretrained
from entp.stats import wilson
from entp.tasks.counting import Count3
from entp.training.checkpoint import load_run
from entp.training.evaluate import evaluate

MEGABYTES = 2**20


def made(name: str) -> dict:
    return json.loads((pretrained.HERE / name / "made.json").read_text())


def test_there_is_one_of_each_kind() -> None:
    modes = {load_run(Path(name)).mode for name in pretrained.names()}
    assert modes == {"entp", "decoder"}


@pytest.mark.parametrize("name", pretrained.names())
def test_it_is_small_and_says_how_it_was_made(name: str) -> None:
    assert sum(f.stat().st_size for f in (pretrained.HERE / name).iterdir()) <= 3 * MEGABYTES
    told = made(name)
    assert told["parameters"] == sum(p.numel() for p in entp.load(name).parameters())
    assert told["training"]["environment"]["commit"]
    assert told["training"]["seconds"] > 0


@pytest.mark.parametrize("name", pretrained.names())
def test_what_it_is_tested_on_was_not_trained_on(name: str) -> None:
    """There are a hundred times as many sequences as training can have read: fresh ones are new
    ones."""
    run = load_run(Path(name))
    assert isinstance(run.task, Count3)
    assert run.task.values**run.task.prompt_length > 100 * run.sequences_by(run.steps)


@pytest.mark.parametrize("name", pretrained.names())
def test_it_does_what_it_says(name: str) -> None:
    """512 sequences of another seed: the share of right ones fits to that of the 10,000 it was
    measured on."""
    run = load_run(Path(name))
    found = evaluate(entp.load(name), run, split="test", batches=512 // run.batch_size, seed=12345)
    low, high = wilson(round(found["exact_match"] * found["n"]), found["n"])
    told_low, told_high = made(name)["fresh"]["exact_match_interval"]
    assert found["n"] == 512
    assert low <= told_high
    assert high >= told_low
