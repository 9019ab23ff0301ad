"""Several models in one step learn what each learns alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import new_stepper, small_run

from entp.bench.shapes import RandomTokens
from entp.bench.stacked import Stack, StackedRows
from entp.config import Mode, OptimConfig, Run, model_for
from entp.engine.layout import pack
from entp.errors import InputError
from entp.tasks.base import Batch
from entp.training.inputs import make_inputs, step_arrays

CPU = torch.device("cpu")
SEEDS = [3, 4, 5]
EVERYWHERE = RandomTokens(7, 11)
MODES: list[Mode] = ["entp", "decoder"]


def run_of(mode: Mode, every: bool, **optim: Any) -> Run:
    """Three small layers; a target at every token, or after a prompt of four."""
    run = small_run(mode=mode, batch_size=3)
    task = EVERYWHERE if every else run.task
    model = model_for(task, "small", layers=3, heads=2, width=16)
    options = {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 0, "decay_steps": 40, **optim}
    return replace(run, task=task, model=model, optim=OptimConfig(**options))


def batches_of(run: Run, step: int) -> list[Batch]:
    return [run.task.batch(seed, "train", step, run.batch_size) for seed in SEEDS]


def alone(run: Run, seed: int) -> Any:
    """The steps of training, in float64."""
    stepper = new_stepper(replace(run, seed=seed))
    stepper.state.model.double()
    return stepper


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_each_model_alone(mode: Mode, every: bool, kernels: bool) -> None:
    from entp.training.gradients import gradients

    run = run_of(mode, every)
    stack = Stack(run, SEEDS, CPU, dtype=torch.float64, kernels=kernels)
    batches = batches_of(run, 0)
    stack._lay_out(batches)
    x, y = (torch.from_numpy(np.stack([getattr(b, n) for b in batches])) for n in ("x", "y"))
    total = stack.losses(x, y)
    found = stack.weights.views(*torch.autograd.grad(total, stack.weights.parameters))
    losses = []
    for number, (seed, batch) in enumerate(zip(SEEDS, batches, strict=True)):
        one = alone(run, seed)
        model, how = one.state.model, one.how[mode]
        arrays = step_arrays(batch, 0, [], one.world)
        loss, sums = gradients(model, make_inputs(arrays, batch, how, model, CPU), how)
        losses.append(float(loss))
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name][number], sums[p], rtol=1e-9, atol=1e-12)
    assert float(total.detach()) == pytest.approx(sum(losses), rel=1e-6)  # a loss alone is float32


@pytest.mark.parametrize("grad_clip", [0.1, 0.0])
@pytest.mark.parametrize("mode", MODES)
def test_steps_are_those_of_each_model_alone(mode: Mode, grad_clip: float) -> None:
    """AdamW, decay of matrices, clipping of each model by itself, and the learning rate."""
    run = run_of(mode, True, grad_clip=grad_clip)
    stack = Stack(run, SEEDS, CPU, dtype=torch.float64)
    steppers = [alone(run, seed) for seed in SEEDS]
    for step in range(4):
        batches = batches_of(run, step)
        loss = stack(batches)
        own = [float(one(b).loss) for one, b in zip(steppers, batches, strict=True)]
        assert float(loss) == pytest.approx(sum(own) / len(own), rel=1e-6)
        for one in steppers:
            one.state.step += 1
    found = stack.weights()
    for number, one in enumerate(steppers):
        for name, p in one.state.model.named_parameters():
            torch.testing.assert_close(found[name][number], p, rtol=1e-9, atol=1e-11)


def test_rows_of_models_stand_one_after_the_other() -> None:
    mask = torch.tensor([[True, False, True], [False, True, True]])
    one = pack(mask, CPU)
    rows = StackedRows(one, 2)
    assert (rows.rows, rows.batch, rows.longest) == (2 * one.rows, 4, 3)
    assert rows.groups == ((1, 2), (2, 2), (3, 4))
    lengths = (rows.ends - rows.starts).tolist()
    assert lengths == [1, 1, 2, 2, 3, 3, 3, 3]  # one launch for equal ones
    assert rows.starts.tolist()[:2] == [0, one.rows]
    assert (rows.by_model.ends - rows.by_model.starts).tolist() == [1, 2, 3, 3] * 2
    second = slice(one.rows, None)
    assert torch.equal(rows.row_index[second], one.row_index + 6)
    ends = (rows.last_slot >= 0).nonzero()[:, 0]
    assert torch.equal(ends, torch.cat([one.last_row, one.last_row + one.rows]))
    assert rows.last_slot[ends].tolist() == list(range(8))


def test_batches_must_have_the_same_targets() -> None:
    run = run_of("decoder", True)
    stack = Stack(run, SEEDS, CPU)
    stack(batches_of(run, 0))
    other = replace(batches_of(run, 1)[0])
    other.y[0, 0] = -100
    with pytest.raises(InputError, match="targets at the same places"):
        stack([replace(other), *batches_of(run, 1)[1:]])
    padded = replace(other, lengths=np.full(3, 7))
    with pytest.raises(InputError, match="no padding"):
        stack([padded])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"norm": "rms"}, "model.norm is rms: models that are stacked must have layer"),
        ({"position_embedding": "rotary"}, "model.position_embedding is rotary"),
        ({"layers": 1}, "model.layers is 1"),
    ],
)
def test_models_of_another_kind_are_refused(change: dict[str, Any], told: str) -> None:
    run = run_of("entp", True)
    with pytest.raises(InputError, match=told):
        Stack(replace(run, model=replace(run.model, **change)), SEEDS, CPU)
    with pytest.raises(InputError, match=r"optim\.name is muon"):
        Stack(run_of("entp", True, name="muon"), SEEDS, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_captured_steps_are_those_of_the_plain_operations(mode: Mode) -> None:
    run, device = run_of(mode, True), torch.device("cuda:0")
    fast, plain = Stack(run, SEEDS, device), Stack(run, SEEDS, device, kernels=False)
    plain.run = replace(run, train=replace(run.train, cuda_graph=False))
    one, other = (gradient_of(stack, batches_of(run, 0), device) for stack in (fast, plain))
    assert (one - other).norm() < 0.03 * other.norm()  # products of bf16
    for step in range(8):
        batches = batches_of(run, step)
        assert float(fast(batches)) == pytest.approx(float(plain(batches)), rel=2e-2)
    assert fast.captured is not None
    assert plain.captured is None


def gradient_of(stack: Stack, batches: list[Batch], device: torch.device) -> torch.Tensor:
    """By all weights; of AdamW's steps every weight is as long, however small its gradient."""
    stack._lay_out(batches)
    x, y = (torch.from_numpy(np.stack([getattr(b, n) for b in batches])) for n in ("x", "y"))
    total = stack.losses(x.to(device), y.to(device))
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, stack.weights.parameters)])
