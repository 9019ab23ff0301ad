"""When steps are captured anew, and what captured ones read, without a GPU: a stand-in for a graph
computes its step from the arrays that a graph would be given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import new_stepper
from tiny_runs import tiny_run
from torch import Tensor

from entp.config import BatchScheduleConfig, CurriculumConfig, EmaConfig, ImportanceConfig, Run
from entp.training import cuda_graph
from entp.training.cuda_graph import EAGER_STEPS, NOBODY, Stepper
from entp.training.forward import Forward
from entp.training.inputs import Inputs
from entp.training.techniques import importance_sampling

ALL: dict[str, Any] = {
    "ema": EmaConfig(3),
    "importance": ImportanceConfig(12, "decoder"),
    "batch_schedule": BatchScheduleConfig(14, 4),
    "curriculum": CurriculumConfig(9, "random-prefix"),
}


class Captured:
    """The step whose inputs it is given: it reads the arrays that were there, whatever is given."""

    def __init__(self, stepper: Stepper, how: Forward, inputs: Inputs, _: object) -> None:
        self.stepper, self.how, self.inputs = stepper, how, inputs
        assert inputs.tables  # made before capture, which cannot make them

    def replay(self, arrays: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        assert set(arrays) == set(self.inputs.arrays)
        for name, tensor in self.inputs.arrays.items():
            assert arrays[name].shape == tensor.shape
            tensor.copy_(arrays[name])
        loss, norm, _ = self.stepper._update(self.how, self.inputs, NOBODY)
        return loss, norm


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steppers that capture on a CPU."""
    monkeypatch.setattr(cuda_graph, "_Captured", Captured)
    monkeypatch.setattr(importance_sampling, "RENEW", 20)
    monkeypatch.setattr(importance_sampling, "HARDLY_BETTER", 0.0)  # always other numbers

    def eager(stepper: Stepper, ready: Any, stop: Any) -> Any:
        return stepper._update(ready.how, stepper._inputs(*ready), stop)

    monkeypatch.setattr(Stepper, "_eager", eager)
    monkeypatch.setattr(Stepper, "_forget_another_model", lambda stepper: None)
    monkeypatch.setattr(Stepper, "_can_capture", lambda stepper, how: True)


def losses(run: Run, captured: bool) -> Iterator[tuple[float, int]]:
    """The loss of each step, and how many graphs there are after it."""
    stepper = new_stepper(run)
    stepper.stream = object() if captured else None  # type: ignore[assignment]
    for step in range(run.steps):
        size = stepper.plan.batch_size(step)
        loss = stepper(run.task.batch(run.seed, "train", step, size)).loss
        stepper.state.step += 1
        yield float(loss), len(stepper.graphs)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("name", ["none", "importance", "curriculum", "all"])
def test_captured_steps_are_the_eager_ones(name: str) -> None:
    """Captured after a few of the same shapes, and anew where mode, batch size or selection
    change."""
    techniques = {"none": {}, "all": ALL}.get(name) or {n: c for n, c in ALL.items() if n == name}
    run = tiny_run(steps=24, train={"precision": "fp32"}, **techniques)
    eager = [loss for loss, _ in losses(run, captured=False)]
    found = [*losses(run, captured=True)]
    assert [loss for loss, _ in found] == eager
    anew = {"curriculum": [9], "importance": [20], "all": [9, 14, 20]}
    waits = {step + n for step in [0, *anew.get(name, [])] for n in range(EAGER_STEPS)}
    assert [bool(number) for _, number in found] == [step not in waits for step in range(24)]


@pytest.mark.usefixtures("graphs")
def test_captured_step_of_another_batch_size_is_another_graph() -> None:
    run = tiny_run(steps=24, batch_schedule=ALL["batch_schedule"])
    assert [number for _, number in losses(run, captured=True)][-1] == 2


@pytest.mark.usefixtures("graphs")
def test_captured_step_keeps_the_average_and_the_errors_it_began_with() -> None:
    """In place, as a graph writes into them."""
    run = tiny_run(steps=12, ema=ALL["ema"], importance=ALL["importance"])
    stepper = new_stepper(run)
    stepper.stream = object()  # type: ignore[assignment]
    importance, ema = stepper.state.techniques
    kept: list[Any] = []
    for step in range(run.steps):
        stepper(run.task.batch(0, "train", step, 8))
        stepper.state.step += 1
        now = [importance.selection.mean, *ema.measured().parameters()]  # type: ignore[attr-defined]
        kept = kept or now
        assert all(a is b for a, b in zip(kept, now, strict=True))
    assert stepper.graphs
    assert torch.isfinite(kept[0]).all()


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("extra", ["position_ids", "loss_weights"])
def test_batches_with_other_arrays_are_captured_for_themselves(extra: str) -> None:
    """Every other batch has position ids, or weights of its targets: two graphs, right losses."""
    run = tiny_run()
    losses = []
    for capture in (True, False):
        stepper = new_stepper(run)
        stepper.stream = object() if capture else None  # type: ignore[assignment]
        found = []
        for step in range(2 * EAGER_STEPS + 6):
            batch = run.task.batch(run.seed, "train", step, run.batch_size)
            if step % 2:
                own = np.arange(batch.y.size).reshape(batch.y.shape) % batch.y.shape[1]
                batch = replace(batch, **{extra: own[:, ::-1].copy()})
            found.append(float(stepper(batch).loss))
            stepper.state.step += 1
        losses.append(found)
        assert len(stepper.graphs) == (2 if capture else 0)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
