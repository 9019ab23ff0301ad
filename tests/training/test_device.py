"""Every model, task and technique computes on the device of its weights: seen on torch's meta
device, where a tensor made on the CPU by mistake, or a value that is read, is an error."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from host_watch import HostCopies, to_meta
from small_runs import new_stepper, small_run

from entp.config import CurriculumConfig, EmaConfig, RandomTargetsConfig, Run, model_for
from entp.tasks.addition import Addition
from entp.tasks.base import Task
from entp.tasks.composition import Compose
from entp.tasks.in_context import InContext
from entp.tasks.path_star import PathStar
from entp.tasks.pointers import Chase
from entp.training.cuda_graph import Ready
from entp.training.gradients import gradients
from entp.training.prefix_rows import PrefixRows

TASKS: dict[str, Task] = {
    "windows": Addition(digits=1, train_examples=50, layout="windows"),
    "padded": Addition(digits=2, train_examples=50),
    "abacus": Addition(digits=2, train_examples=50, positions="abacus", operands="reversed"),
    "vectors": InContext(dim=3, points=5, curriculum_steps=0),
    "chase": Chase(nodes=4, hops=2),
    "compose": Compose(tables=2, choices=2, size=3),
    "path-star": PathStar(arms=2, length=3, nodes=6),
}
MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"position_embedding": "rotary"},
    "relative": {"position_embedding": "relative"},
    "sinusoidal": {"position_embedding": "sinusoidal"},
    "none": {"position_embedding": "none"},
    "given": {"position_embedding": "given"},
    "post": {"norm_placement": "post", "activation": "gelu-exact"},
    "shared heads": {"kv_heads": 1, "heads": 2, "activation": "swiglu", "norm": "rms"},
    "looped": {"loops": 2, "layers": 2},
    "causal first": {"causal_layers": 1, "layers": 3},
}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "random targets": {"random_targets": RandomTargetsConfig(2)},
    "average": {"ema": EmaConfig(5)},
    "random prefix": {"curriculum": CurriculumConfig(5, "random-prefix", uniform_lengths=True)},
    "decoder first": {"curriculum": CurriculumConfig(5, "decoder")},
}


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the meta device has not."""

    def autocast(device: str, *args: Any, **options: Any) -> Any:
        return contextlib.nullcontext() if device == "meta" else real(device, *args, **options)

    def is_enabled(device: str) -> bool:
        return device != "meta" and really_enabled(device)

    real, really_enabled = torch.autocast, torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", is_enabled)
    monkeypatch.setattr(torch, "autocast", autocast)


def step_on_meta(run: Run, alone: bool = False) -> list[str]:
    """What the second step of a run copies from the host, on the meta device; a padded batch in the
    shape that it would be captured in, or with each prefix in a row."""
    stepper = new_stepper(run)
    stepper._can_capture = lambda how: True  # type: ignore[method-assign]
    state, batch = stepper.state, run.task.batch(0, "train", 0, run.batch_size)
    how = stepper.prepare(batch)
    ready = stepper._first_step(run.task, 0, range(4), how)
    if alone:
        shape = PrefixRows(most=10**9)
        shape.grow(batch)
        rows = shape(batch)
        assert rows is not None
        ready = Ready(replace(how, mode="prefix-lm"), rows, "PrefixRows", ())
    how, inputs = ready.how, stepper._inputs(*ready)
    assert inputs.get("lengths") is None
    state.model.to("meta")
    inputs.arrays = to_meta(inputs.arrays)
    gradients(state.model, inputs, how, state.techniques)  # makes tables
    with HostCopies() as copies:
        loss, found = gradients(state.model, inputs, how, state.techniques)
    assert loss.is_meta
    assert all(g is None or g.is_meta for g in found.values())
    return copies.found


@pytest.mark.parametrize("mode", ["entp", "decoder", "refresh-3"])
@pytest.mark.parametrize("name", TASKS)
def test_tasks(name: str, mode: Any) -> None:
    task = TASKS[name]
    sizes = {"layers": 2, "heads": 2, "width": 16}
    model = model_for(task, "small", **sizes)
    assert not step_on_meta(small_run(task=task, model=model, mode=mode))


@pytest.mark.parametrize("name", TASKS)
def test_tasks_with_each_prefix_in_a_row(name: str) -> None:
    task = TASKS[name]
    model = model_for(task, "small", layers=2, heads=2, width=16)
    assert not step_on_meta(small_run(task=task, model=model), alone=True)


@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm", "refresh-3"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, mode: Any) -> None:
    run = small_run(mode=mode)
    run = replace(run, model=replace(run.model, **MODELS[name]))
    assert not step_on_meta(run)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_techniques(name: str) -> None:
    assert not step_on_meta(small_run(**TECHNIQUES[name]))
