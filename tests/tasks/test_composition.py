"""Composition against a loop that takes one step after the other out of the sequence itself."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import entp
from entp.cli.main import main
from entp.config import OptimConfig, Run, TrainConfig, model_for
from entp.config.json import run_from_json, run_to_json
from entp.errors import InputError
from entp.tasks.base import IGNORE, SPLITS
from entp.tasks.composition import Compose
from entp.tasks.metrics import Predicted, Totals
from entp.training.evaluate import evaluate_baseline

ORDERS = ("first-to-last", "last-to-first")
sizes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 6), st.sampled_from(ORDERS))


def steps(task: Compose, x: list[int]) -> list[int]:
    """The value after each step: tables cut out of the sequence, then start and choices read."""
    block = task.choices * task.size
    tables = [x[b * block : (b + 1) * block] for b in range(task.tables)]
    if task.order == "last-to-first":
        tables.reverse()
    value, *choices = x[task.tables * block :]
    values = []
    for table, choice in zip(tables, choices, strict=True):
        value = table[choice * task.size + value]
        values.append(value)
    return values


@given(sizes, st.integers(0, 99))
def test_answers_take_one_step_after_the_other(of: Any, seed: int) -> None:
    task = Compose(*of)
    batch = task.batch(seed, "train", 3, 4)
    needs, rows = task.model_needs(), task.tables * task.choices * task.size
    assert batch.x.shape == batch.y.shape == (4, needs["context_length"])
    assert needs == {
        "vocab": max(task.choices, task.size),
        "context_length": rows + 1 + task.tables,
    }
    for x, y in zip(batch.x.tolist(), batch.y.tolist(), strict=True):
        assert y[: rows + 1] == [IGNORE] * (rows + 1)
        assert y[rows + 1 :] == steps(task, x)
        for at in range(0, rows, task.size):
            assert sorted(x[at : at + task.size]) == list(range(task.size))
        assert x[rows] < task.size
        assert max(x[rows + 1 :]) < task.choices


def test_docstrings_example_is_right() -> None:
    task = Compose(2, 2, 2)
    x = [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1]
    tables, choices = np.array(x[:8]).reshape(1, 2, 2, 2), np.array([[0, 1]])
    batch = task.lay_out(tables, np.array([[1]]), choices)
    assert (batch.x[0].tolist(), batch.targets.tolist()) == (x, [1, 1])


def test_order_moves_tables_and_nothing_else() -> None:
    first, last = (Compose(3, 2, 4, order).batch(1, "test", 0, 8) for order in ORDERS)
    block = 8
    turned = np.concatenate([first.x[:, b * block : (b + 1) * block] for b in (2, 1, 0)], axis=1)
    assert np.array_equal(last.x[:, : 3 * block], turned)
    assert np.array_equal(last.x[:, 3 * block :], first.x[:, 3 * block :])
    assert np.array_equal(last.y, first.y)


def test_all_sequences_are_equally_likely() -> None:
    task = Compose(1, 2, 2)
    found, counts = np.unique(task.batch(0, "train", 0, 16_000).x, axis=0, return_counts=True)
    assert len(found) == 2**2 * 2 * 2
    assert (np.abs(counts / 16_000 - 1 / 16) < 5 * np.sqrt(1 / 16 / 16_000)).all()


def test_batches_are_pure_and_splits_differ() -> None:
    task = Compose(2, 2, 4)
    again = Compose(2, 2, 4).batch(5, "valid", 7, 16)
    task.batch(5, "valid", 8, 3)
    assert np.array_equal(task.batch(5, "valid", 7, 16).x, again.x)
    rows = {row.tobytes() for split in SPLITS for row in Compose().batch(0, split, 0, 64).x}
    rows |= {row.tobytes() for row in Compose().batch(0, "train", 1, 64).x}
    assert len(rows) == 4 * 64


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tables": 0}, r"task\.tables 0 and task\.choices 4 must be at least 1"),
        ({"choices": 0}, r"task\.choices 0 must be at least 1"),
        ({"size": 1}, r"task\.size 1 at least 2"),
        ({"order": "none"}, r"unknown task\.order 'none': allowed are first-to-last, last-to-fir"),
        ({"tables": 2.5}, r"task\.tables is 2\.5: it must be a whole number"),
    ],
)
def test_compose_refuses(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Compose(**fields)


@pytest.mark.parametrize("task", [Compose(1, 2, 2), Compose(2, 1, 3)])
def test_caveat_is_given_once_sequences_repeat(task: Compose) -> None:
    """There are as many as permutations, starts and choices together."""
    permutations = len(list(itertools.permutations(range(task.size))))
    there = permutations ** (task.tables * task.choices) * task.size * task.choices**task.tables
    assert task.caveats(there) == []
    (caveat,) = task.caveats(there + 1)
    assert f"only {there:,} different sequences of {task.tables} tables of" in caveat


@pytest.mark.parametrize("order", ORDERS)
def test_baselines(order: Any) -> None:
    """One step is right after one, both are right as often as a guess after more."""
    task = Compose(3, 2, 4, order)
    batches = [task.batch(0, "test", n, 500) for n in range(2)]
    totals = evaluate_baseline(task, "one step", batches)
    by_steps = totals.sliced("token_accuracy", "steps")
    assert by_steps["1"] == 1.0
    assert all(abs(by_steps[k] - 1 / 4) < 0.06 for k in ("2", "3"))
    guess = evaluate_baseline(task, "guess", batches)
    assert abs(guess.value("token_accuracy") - 1 / 4) < 0.04
    assert guess.value("loss") == pytest.approx(np.log(4))


def test_token_accuracy_is_sliced_by_steps() -> None:
    task = Compose(3, 2, 4)
    batch = task.batch(0, "test", 0, 10)
    answer = batch.y.copy()
    answer[:4, -1] = 4  # the third answer of four sequences is wrong
    got = Predicted(answer[batch.target_mask], np.zeros(30))
    totals = Totals.of(task.metrics, batch, task.measure(batch, got))
    assert totals.sliced("token_accuracy", "steps") == {"1": 1.0, "2": 1.0, "3": 0.6}
    assert totals.value("exact_match") == 0.6


def test_prefix_is_tables_and_start() -> None:
    task = Compose(2, 2, 2)
    batch = task.batch(0, "train", 0, 1)
    assert (task.prefix, int(batch.position.min())) == (9, 9)


def test_run_of_compose_survives_json() -> None:
    task = Compose(2, 2, 3, "last-to-first")
    run = Run(task, model_for(task, "small"), "prefix-lm")
    assert run_from_json(run_to_json(run)) == run


@pytest.mark.parametrize("mode", ["decoder", "prefix-lm"])
def test_command_trains_and_measures_by_steps(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--task.tables=2", "--task.choices=2", "--task.size=3"]
    model = ["--layers=1", "--heads=1", "--width=8"]
    out = str(tmp_path / "run")
    run = ["--mode", mode, "--bs=8", "--steps=2", f"--out={out}"]
    assert main(["train", "compose", *sizes, *model, *run]) == 0
    capsys.readouterr()
    assert main(["evaluate", out, "--batches=1", "--by=steps", "--baselines", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert list(values["by"]["steps"]["token_accuracy"]) == ["1", "2"]
    assert values["baseline one step"]["by"]["steps"]["token_accuracy"]["1"] == 1.0


def test_training_learns_one_step(tmp_path: Path) -> None:
    """A permutation of three values is followed for a start that comes after it."""
    task = Compose(1, 1, 3)
    run = Run(
        task,
        model_for(task, "small", layers=2, heads=2, width=32),
        "entp",
        steps=240,
        batch_size=32,
        optim=OptimConfig(name="muon", lr=1e-2, min_lr=1e-3, warmup_steps=5, decay_steps=400),
        train=TrainConfig(eval_every=240, eval_batches=1, checkpoint_every=240),
    )
    assert entp.train(run, tmp_path, device="cpu", quiet=True).metrics["loss"] < 0.5 * np.log(3)
