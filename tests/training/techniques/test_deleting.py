"""A technique is one file and one line: without it all else trains, and a new one trains with the
rest."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import new_stepper
from tiny_runs import tiny_run
from torch import Tensor

import entp
from entp.config import (
    TECHNIQUE_CONFIGS,
    BatchScheduleConfig,
    CurriculumConfig,
    EmaConfig,
    ImportanceConfig,
    RandomTargetsConfig,
    Run,
)
from entp.errors import InputError
from entp.tasks.base import Batch
from entp.training.distributed import World
from entp.training.forward import Forward
from entp.training.gradients import gradients
from entp.training.inputs import make_inputs, step_arrays
from entp.training.plan import Plan
from entp.training.techniques import TECHNIQUES
from entp.training.techniques.base import Technique, make_techniques

CPU = torch.device("cpu")
CONFIGS: dict[str, Any] = {
    "ema": EmaConfig(3),
    "importance": ImportanceConfig(9, "decoder"),
    "batch_schedule": BatchScheduleConfig(1, 4),
    "curriculum": CurriculumConfig(1, "random-prefix"),
    "random_targets": RandomTargetsConfig(2),
}
TOGETHER = {
    f"without {name}": {n: config for n, config in CONFIGS.items() if n != name}
    for name in ("importance", "random_targets")
}
"""These two exclude each other."""


def short_run(**changes: Any) -> Run:
    """Two steps of three sequences."""
    train = {"eval_batches": 1, **changes.pop("train", {})}
    run = {"steps": 2, "batch_size": 3, "optim": {"warmup_steps": 0}, "train": train}
    return tiny_run(**{**run, **changes})


def train_and_resume(run: Run, out: Path) -> dict[str, Tensor]:
    """The weights after a step and another."""
    for steps in (1, 2):
        now = replace(run, steps=steps)
        result = entp.train(now, out, device="cpu", quiet=True, resume=steps > 1)
        assert result.step == steps
    return entp.load(out, "last").state_dict()


class Deleted(MetaPathFinder):
    """A module that cannot be found."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self.name:
            raise ImportError(f"no module named {fullname}")
        return None


@pytest.fixture(params=[*TECHNIQUES])
def deleted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a technique whose file and line are gone, for all that training imports."""
    name: str = request.param
    room = sys.modules["entp.training"]
    before = {n: m for n, m in sys.modules.items() if n.startswith("entp.training.")}
    for one in before:  # whoever has imported it would still have it
        del sys.modules[one]
        monkeypatch.delattr(room, one.split(".")[2], raising=False)
    finder = Deleted(TECHNIQUES[name].partition(":")[0])
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    del importlib.import_module("entp.training.techniques").TECHNIQUES[name]
    yield name
    for one in [n for n in sys.modules if n.startswith("entp.training.")]:
        del sys.modules[one]
        vars(room).pop(one.split(".")[2], None)  # monkeypatch puts back what was there
    sys.modules.update(before)


def test_deleted_technique_leaves_the_others_training(deleted: str, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="no module named"):
        importlib.import_module(TECHNIQUES[deleted].partition(":")[0])
    train_and_resume(short_run(), tmp_path / "plain")
    for name, config in CONFIGS.items():
        if name != deleted:
            train_and_resume(short_run(**{name: config}), tmp_path / name)


def test_run_that_asks_for_a_deleted_technique_is_refused(deleted: str, tmp_path: Path) -> None:
    run = short_run(**{deleted: CONFIGS[deleted]})
    with pytest.raises(InputError, match=f"the run asks for {deleted}, which this version of entp"):
        entp.train(run, tmp_path / "run", device="cpu", quiet=True)
    assert not (tmp_path / "run").exists()


def test_every_line_is_a_field_of_a_run_and_a_file() -> None:
    names = {f.name for f in fields(Run)}
    assert set(TECHNIQUES) == set(TECHNIQUE_CONFIGS) == set(CONFIGS)
    assert set(TECHNIQUES) <= names
    paths = [path.partition(":") for path in TECHNIQUES.values()]
    assert len({module for module, _, _ in paths}) == len(paths)
    for module, _, cls in paths:
        assert issubclass(getattr(importlib.import_module(module), cls), Technique)


def test_techniques_act_in_the_order_of_their_lines() -> None:
    for configs in TOGETHER.values():
        found = make_techniques(short_run(**configs))
        assert [technique.name for technique in found] == [n for n in TECHNIQUES if n in configs]
    assert make_techniques(short_run()) == []


# A new one: some sequences of a batch carry the loss


@dataclass(frozen=True)
class SequenceDropoutConfig:
    """Gradients of each sequence with a probability, drawn anew in every step."""

    keep: float


@dataclass(frozen=True)
class LaterRun(Run):
    """A run with one more field."""

    sequence_dropout: SequenceDropoutConfig | None = None


class SequenceDropout(Technique):
    """Each sequence is kept with probability `keep`, and then has weight 1 / keep."""

    def __init__(self, run: Run) -> None:
        assert isinstance(run, LaterRun)
        assert run.sequence_dropout is not None
        self.keep, self.seed = run.sequence_dropout.keep, run.seed

    def arrays(self, step: int, batch: Batch, world: World) -> dict[str, Tensor]:
        rng = np.random.default_rng((self.seed, step))
        kept = rng.random(len(batch.y)) < self.keep
        weights = np.broadcast_to(kept[:, None] / self.keep, batch.y.shape).astype(np.float32)
        return {"weights": torch.from_numpy(weights)[world.rank :: world.size]}


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequence dropout: one line for what carries it out, and one for its options."""
    monkeypatch.setitem(TECHNIQUES, "sequence_dropout", f"{__name__}:SequenceDropout")
    monkeypatch.setitem(TECHNIQUE_CONFIGS, "sequence_dropout", SequenceDropoutConfig)


def later_run(keep: float | None, **changes: Any) -> Run:
    run = short_run(**changes)
    now = {f.name: getattr(run, f.name) for f in fields(run)}
    config = None if keep is None else SequenceDropoutConfig(keep)
    return LaterRun(**now, sequence_dropout=config)


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("techniques", [{}, *TOGETHER.values()], ids=["alone", *TOGETHER])
def test_added_technique_trains_and_resumes(
    techniques: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entp.config.json.Run", LaterRun)  # what config.json is read as
    parts = train_and_resume(later_run(0.5, **techniques), tmp_path / "parts")
    for keep in (0.5, None):
        out = tmp_path / str(keep)
        entp.train(later_run(keep, **techniques), out, device="cpu", quiet=True)
        whole = entp.load(out, "last").state_dict()
        same = all(torch.equal(whole[name], parts[name]) for name in whole)
        assert same == (keep == 0.5)


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "with weights of the task"])
def test_added_technique_has_an_unbiased_gradient(weighted: bool) -> None:
    """Over many draws the mean is the gradient of all targets, within five standard errors."""
    run = later_run(0.5, train={"precision": "fp32"})
    model = new_stepper(run).state.model
    batch = run.task.batch(0, "train", 0, run.batch_size)
    if weighted:
        weights = np.random.default_rng(0).random(batch.y.shape) * 3
        batch = replace(batch, loss_weights=weights)
    how, techniques = Forward.of(run), Plan(run).techniques

    def gradient(step: int, techniques: list[Technique]) -> Tensor:
        arrays = step_arrays(batch, step, techniques, World())
        inputs = make_inputs(arrays, batch, how, model, CPU)
        _, found = gradients(model, inputs, how, techniques)
        return torch.cat([g.flatten() for g in found.values() if g is not None])

    wanted = gradient(0, [])
    draws = torch.stack([gradient(step, techniques) for step in range(100)])
    assert draws.std(0).norm() > 0.1 * wanted.norm()
    error = draws.std(0) / np.sqrt(len(draws))
    assert ((draws.mean(0) - wanted).abs() < 5 * error + 1e-7).all()


@pytest.mark.usefixtures("added")
def test_added_technique_keeping_all_sequences_changes_nothing() -> None:
    found = []
    for keep in (1.0, None):
        run = later_run(keep, train={"precision": "fp32"})
        loss, norm, _ = new_stepper(run)(run.task.batch(0, "train", 0, run.batch_size))
        found.append((float(loss), float(norm)))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_measured_model_is_a_techniques_own_or_the_trained_one() -> None:
    state = new_stepper(short_run(**TOGETHER["without importance"])).state
    assert state.measured is state.techniques[-1].measured()
    plain = new_stepper(short_run(importance=CONFIGS["importance"])).state
    assert plain.measured is plain.model
