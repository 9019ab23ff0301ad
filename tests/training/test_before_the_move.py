"""Run folders from before the move of November 2026: they load, continue, and can be made again.

fixtures/before_the_move/run was trained with muon, preconditioners, an average of the weights,
targets sampled by a decoder, a curriculum and a late batch size; `select` with targets sampled by
ENTP.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from entp.config import (
    BatchScheduleConfig,
    CurriculumConfig,
    EmaConfig,
    ImportanceConfig,
    OptimConfig,
    Run,
    TrainConfig,
    model_for,
)
from entp.config.json import run_to_json
from entp.model import Transformer
from entp.tasks.counting import Count3
from entp.training.checkpoint import find, load, load_run, read_trainer
from entp.training.evaluate import evaluate, split_batches
from entp.training.forward import Forward
from entp.training.loggers import read_metrics
from entp.training.muon import Muon
from entp.training.plan import Plan
from entp.training.state import new_state
from entp.training.techniques.ema import Ema
from entp.training.techniques.importance_sampling import ImportanceSampling
from entp.training.trainer import train

FIXTURES = Path(__file__).parents[1] / "fixtures/before_the_move"
TASK = Count3(prompt_length=4, length=10, num_values=10)
MODEL = model_for(TASK, "small", layers=1, heads=2, width=8)
EVERY: dict[str, Any] = {"eval_every": 3, "checkpoint_every": 6, "log_every": 3}
RUNS = {
    "run": Run(
        TASK,
        MODEL,
        "entp",
        steps=12,
        batch_size=8,
        seed=3,
        optim=OptimConfig(
            "muon",
            lr=1e-3,
            min_lr=1e-4,
            warmup_steps=2,
            decay_steps=12,
            schedule="linear",
            precondition_every=3,
        ),
        train=TrainConfig(**EVERY, eval_batches=2, monitor="exact_match", stop_at=2.0),
        ema=EmaConfig(steps=4),
        importance=ImportanceConfig(24, "decoder"),
        batch_schedule=BatchScheduleConfig(step=9, batch_size=16),
        curriculum=CurriculumConfig(5, "random-prefix", 16, 2e-3, uniform_lengths=True),
    ),
    "select": Run(
        TASK,
        MODEL,
        "entp",
        steps=12,
        batch_size=8,
        seed=3,
        optim=OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=2, decay_steps=12),
        train=TrainConfig(**EVERY, cuda_graph=False),
        importance=ImportanceConfig(),
    ),
}
both = pytest.mark.parametrize("name", RUNS)


@pytest.fixture(scope="module", params=RUNS)
def made_again(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A fixture's run from scratch, four steps longer, with a checkpoint where the fixture ends."""
    name = request.param
    out = tmp_path_factory.mktemp("runs") / name
    train(replace(load_run(FIXTURES / name), steps=16), out, device="cpu", quiet=True)
    return name, out


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Copies of the folders, to be continued."""
    for name in RUNS:
        shutil.copytree(FIXTURES / name, tmp_path / name)
    return tmp_path


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)


def values_of(row: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in row.items() if k not in ("kind", "step", "seconds")}


def assert_rows_close(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    places = [[(row["kind"], row["step"]) for row in rows] for rows in (found, wanted)]
    assert places[0] == places[1]
    for row, other in zip(found, wanted, strict=True):
        assert values_of(row) == pytest.approx(values_of(other), rel=1e-4)


@both
def test_old_config_is_read_under_todays_names(name: str) -> None:
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    assert raw["batch"] == 8  # it is an old one
    assert load_run(FIXTURES / name) == load_run(FIXTURES / name, "last") == RUNS[name]
    assert run_to_json(load_run(FIXTURES / name)) != raw


@both
def test_old_metrics_are_read_under_todays_names(name: str) -> None:
    rows = read_metrics(FIXTURES / name)
    assert b"sequence_accuracy" in (FIXTURES / name / "metrics.jsonl").read_bytes()
    measured = [row for row in rows if row["kind"] == "eval"]
    assert [row["step"] for row in measured] == [3, 6, 9, 12]
    assert all({"exact_match", "token_accuracy", "loss", "n"} <= row.keys() for row in measured)
    assert not any("sequence_accuracy" in row for row in rows)


def test_run_from_scratch_ends_where_the_old_one_did(made_again: tuple[str, Path]) -> None:
    name, out = made_again
    step = "checkpoints/step-00000012"
    found, wanted = (load_file(f / step / "model.safetensors") for f in (out, FIXTURES / name))
    assert_close(found, wanted)
    rows = [row for row in read_metrics(out) if row["step"] <= 12]
    assert_rows_close(rows, read_metrics(FIXTURES / name))


def test_resumed_run_ends_where_one_from_scratch_does(
    made_again: tuple[str, Path], copied: Path
) -> None:
    """All state counts: moments, preconditioners, average and the sampled targets' numbers."""
    name, whole = made_again
    out = copied / name
    longer = replace(load_run(out), steps=16)
    result = train(longer, out, device="cpu", quiet=True, resume=True)
    assert (result.step, result.reason) == (16, "all steps done")
    for checkpoint in ("last", "best"):
        found, wanted = (load(f, checkpoint).state_dict() for f in (out, whole))
        assert_close(found, wanted)
    assert_rows_close(read_metrics(out), read_metrics(whole))
    assert json.loads((out / "config.json").read_text()) == run_to_json(longer)


@both
def test_finished_run_is_not_trained_again(name: str, copied: Path) -> None:
    out = copied / name
    before = {p: p.read_bytes() for p in (out / "checkpoints").rglob("*") if p.is_file()}
    rows = read_metrics(out)
    result = train(load_run(out), out, device="cpu", quiet=True, resume=True)
    assert (result.step, result.reason) == (12, "all steps done")
    assert {p: p.read_bytes() for p in (out / "checkpoints").rglob("*") if p.is_file()} == before
    assert read_metrics(out) == rows
    assert result.metrics == values_of(rows[-1])
    assert result.best == {**values_of(rows[-1]), "step": 12}


@both
def test_best_weights_are_what_was_measured(name: str) -> None:
    assert find(FIXTURES / name).name == "best-00000012"
    run = load_run(FIXTURES / name)
    batches = split_batches(run.task, "valid", run.train.eval_batches, run.batch_size, run.seed)
    found = evaluate(load(FIXTURES / name), run.task, batches, Forward.of(run)).values()
    assert found == pytest.approx(values_of(read_metrics(FIXTURES / name)[-1]), rel=1e-5)


def test_old_trainer_state_is_restored() -> None:
    folder = FIXTURES / "run/checkpoints/step-00000012"
    saved, run = read_trainer(folder), RUNS["run"]
    assert {"mean", "selection"} <= saved.keys()  # it is an old one
    plan = Plan(run)
    state = new_state(Transformer(run.model), run.optim, plan.techniques)
    state.restore(folder)
    assert (state.step, state.seconds) == (12, saved["seconds"])
    assert state.best["exact_match"] == saved["best"]["sequence_accuracy"]
    assert state.best["step"] == 12
    (ema,) = (t for t in plan.techniques if isinstance(t, Ema))
    assert_close(ema.average.state_dict(), saved["mean"])
    (sampling,) = (t for t in plan.techniques if isinstance(t, ImportanceSampling))
    selection, was = sampling.selection, saved["selection"]
    assert selection is not None
    assert (selection.positions, selection.batch) == (was["places"], was["batch"])
    assert (selection.scored, selection.sampled) == (was["tried"], was["taken"])
    assert selection.as_decoder
    assert torch.equal(selection.mean, was["mean"])
    assert torch.equal(selection.square, was["square"])
    (muon,) = (o for o in state.optimizers if isinstance(o, Muon))
    states = (saved["optimizers"][1]["state"].values(), muon.state.values())
    old, new = (
        [tensors[key] for tensors in state if key in tensors]
        for key, state in zip(("whitener", "preconditioner"), states, strict=True)
    )
    assert len(old) == len(new) > 0
    assert all(map(torch.equal, old, new))


def test_old_run_can_be_forked(tmp_path: Path) -> None:
    run = replace(RUNS["run"], steps=13)
    result = train(run, tmp_path, device="cpu", quiet=True, fork=FIXTURES / "run")
    assert result.step == result.best["step"] == 13
    assert [row["step"] for row in read_metrics(tmp_path)] == [3, 6, 9, 12, 13, 13]
