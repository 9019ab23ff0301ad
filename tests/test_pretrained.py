"""The trained models that come with entp do on new sequences what their files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import entp
from entp import pretrained
from entp.config.json import run_to_json
from entp.files import json_bytes, verify_folder
from entp.tasks.counting import Count3
from entp.training.checkpoint import load_run
from entp.training.evaluate import evaluate, split_batches
from entp.training.forward import Forward
from entp.training.plan import Plan

MEGABYTES = 2**20


def read(name: str, file: str = "made.json") -> dict[str, Any]:
    return json.loads((pretrained.HERE / name / file).read_text())


def test_pretrained_models_are_one_of_each_mode() -> None:
    modes = {load_run(Path(name)).mode for name in pretrained.names()}
    assert modes == {"entp", "decoder"}


@pytest.mark.parametrize("name", pretrained.names())
def test_pretrained_model_is_small_and_says_how_it_was_made(name: str) -> None:
    folder = pretrained.HERE / name
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 3 * MEGABYTES
    verify_folder(folder, ("model.safetensors", "config.json", "made.json"))
    told = read(name)
    assert told["parameters"] == sum(p.numel() for p in entp.load(name).parameters())
    assert told["training"]["environment"]["commit"]
    assert told["training"]["seconds"] > 0


def is_part(one: Any, whole: Any) -> bool:
    """Whether every value of one stands in the other under the same names, which may have more."""
    if isinstance(one, dict) and isinstance(whole, dict):
        return all(name in whole and is_part(one[name], whole[name]) for name in one)
    return bool(one == whole)


@pytest.mark.parametrize("name", pretrained.names())
def test_pretrained_files_have_todays_names(name: str) -> None:
    run, told = load_run(Path(name)), read(name)
    assert is_part(read(name, "config.json"), run_to_json(run))
    assert set(told) == {"checkpoint", "parameters", "training", "test", "measured"}
    assert {"exact_match", "exact_match_interval", "token_accuracy", "loss", "n"} <= set(
        told["test"]
    )
    assert (pretrained.HERE / name / "made.json").read_bytes() == json_bytes(told)


@pytest.mark.parametrize("name", pretrained.names())
def test_pretrained_weights_come_from_steps_in_their_mode(name: str) -> None:
    """And not from a curriculum's."""
    run, step = load_run(Path(name)), read(name)["training"]["step"]
    assert Plan(run).mode(step - 1) == run.mode
    assert step <= run.steps


@pytest.mark.parametrize("name", pretrained.names())
def test_pretrained_model_cannot_have_read_its_test(name: str) -> None:
    """There are a hundred times as many sequences as training can have read."""
    run = load_run(Path(name))
    assert isinstance(run.task, Count3)
    read_in_training = Plan(run).sequences_by(run.steps)
    assert run.task.num_values**run.task.prompt_length > 100 * read_in_training


@pytest.mark.parametrize("name", pretrained.names())
def test_pretrained_model_does_what_it_says(name: str) -> None:
    """256 sequences of another seed: their exact match fits to that of the 10,000 measured."""
    run = load_run(Path(name))
    batches = split_batches(run.task, "test", 1, 256, 12345)
    found = evaluate(entp.load(name), run.task, batches, Forward.of(run))
    assert found.sequences == 256
    interval = found.interval("exact_match")
    assert interval is not None
    low, high = read(name)["test"]["exact_match_interval"]
    assert interval[0] <= high
    assert interval[1] >= low
