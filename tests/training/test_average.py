"""The running mean of the weights: what is measured and kept as best, while training goes on from
the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small_run

import entp
from entp.config import OptimConfig, Run
from entp.errors import InputError
from entp.training import checkpoint
from entp.training.distributed import World
from entp.training.evaluate import evaluate
from entp.training.loggers import read_metrics
from entp.training.step import Stepper, train_step
from entp.training.trainer import new_state


def averaging_run(**changes: Any) -> Run:
    return small_run(optim={"average": 4, **changes.pop("optim", {})}, **changes)


def test_it_is_the_mean_of_the_weights_after_each_step() -> None:
    run = averaging_run()
    state = new_state(run, torch.device("cpu"))
    assert state.mean is not None
    model, mean = state.model.double(), state.mean.double()
    want = [p.detach().clone() for p in model.parameters()]
    for step in range(7):
        train_step(
            run, state, run.task.batch(0, "train", step, run.batch_size), torch.device("cpu"), World()
        )
        want = [m + (p.detach() - m) / 4 for m, p in zip(want, model.parameters(), strict=True)]
        state.step += 1
    for m, p, w in zip(mean.parameters(), model.parameters(), want, strict=True):
        assert torch.allclose(m, w, rtol=0, atol=1e-14)
        assert not torch.equal(m, p)
        assert m.grad is None


def test_training_is_the_same_and_the_mean_is_what_is_measured_and_kept(tmp_path: Path) -> None:
    plain = entp.train(small_run(), tmp_path / "plain", device="cpu", quiet=True)
    run = averaging_run()
    result = entp.train(run, tmp_path / "mean", device="cpu", quiet=True)
    losses = [
        [r["loss"] for r in read_metrics(tmp_path / name) if r["kind"] == "train"]
        for name in ("plain", "mean")
    ]
    assert losses[0] == losses[1]
    weights, others = (
        entp.load(tmp_path / name, "last").state_dict() for name in ("plain", "mean")
    )
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    saved = checkpoint.read_trainer(checkpoint.newest(tmp_path / "mean"))["mean"]
    kept = entp.load(tmp_path / "mean", "best")
    assert result.best["step"] == 10
    assert all(torch.equal(saved[name], tensor) for name, tensor in kept.state_dict().items())
    assert not torch.equal(saved["tokens.weight"], weights["tokens.weight"])
    measured = evaluate(kept, run, device="cpu")
    assert measured["loss"] == pytest.approx(result.metrics["loss"])
    assert measured["loss"] != pytest.approx(plain.metrics["loss"], rel=1e-6)


def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    entp.train(averaging_run(), tmp_path / "whole", device="cpu", quiet=True)
    for steps in (5, 10):
        entp.train(
            averaging_run(steps=steps),
            tmp_path / "parts",
            device="cpu",
            quiet=True,
            resume=steps > 5,
        )
    for which in ("last", "best"):
        a, b = (entp.load(tmp_path / name, which).state_dict() for name in ("whole", "parts"))
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_number_of_steps() -> None:
    with pytest.raises(
        InputError, match=r"optim\.average is -1: it must be a number of steps, or 0"
    ):
        OptimConfig(average=-1)


@pytest.mark.gpu
def test_recorded_steps_average_as_plain_ones_do() -> None:
    found = []
    for graph in (True, False):
        run = averaging_run(train={"precision": "fp32", "graph": graph})
        state = new_state(run, torch.device("cuda"))
        stepper = Stepper(run, state, torch.device("cuda"), World())
        for number in range(9):
            stepper(run.task.batch(0, "train", number, run.batch_size))
            state.step += 1
        assert bool(stepper.graphs) == graph
        found.append([p.detach().clone() for p in state.mean.parameters()])
    assert all(torch.allclose(p, q, rtol=0, atol=1e-5) for p, q in zip(*found, strict=True))
