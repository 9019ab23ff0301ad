"""The moving average of the weights, which is measured and kept as best while training goes on from
the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import new_stepper, small_run
from tiny_runs import tiny_run

import entp
from entp.config import EmaConfig, Run
from entp.training import checkpoint
from entp.training.evaluate import evaluate, split_batches
from entp.training.forward import Forward
from entp.training.loggers import read_metrics


def ema_run(**changes: Any) -> Run:
    return tiny_run(ema=EmaConfig(4), **changes)


def test_average_follows_the_weights_after_each_step() -> None:
    run = ema_run()
    stepper = new_stepper(run)
    state = stepper.state
    model, average = state.model.double(), state.measured.double()
    assert average is not model
    want = [p.detach().clone() for p in model.parameters()]
    for step in range(7):
        stepper(run.task.batch(0, "train", step, run.batch_size))
        want = [m + (p.detach() - m) / 4 for m, p in zip(want, model.parameters(), strict=True)]
        state.step += 1
    for m, p, w in zip(average.parameters(), model.parameters(), want, strict=True):
        assert torch.allclose(m, w, rtol=0, atol=1e-14)
        assert not torch.equal(m, p)
        assert m.grad is None


def test_average_of_one_step_is_the_weights() -> None:
    run = tiny_run(ema=EmaConfig(1))
    stepper = new_stepper(run)
    stepper(run.task.batch(0, "train", 0, run.batch_size))
    measured, model = stepper.state.measured, stepper.state.model
    assert measured is not model
    for m, p in zip(measured.parameters(), model.parameters(), strict=True):
        assert torch.equal(m, p)


def test_training_is_the_same_and_the_average_is_measured_and_kept(tmp_path: Path) -> None:
    plain = entp.train(tiny_run(), tmp_path / "plain", device="cpu", quiet=True)
    run = ema_run()
    result = entp.train(run, tmp_path / "ema", device="cpu", quiet=True)
    losses = [
        [r["loss"] for r in read_metrics(tmp_path / name) if r["kind"] == "train"]
        for name in ("plain", "ema")
    ]
    assert losses[0] == losses[1]
    weights, others = (entp.load(tmp_path / n, "last").state_dict() for n in ("plain", "ema"))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    folder = checkpoint.find(tmp_path / "ema", "last")
    saved = checkpoint.read_trainer(folder)["techniques"]["ema"]["weights"]
    kept = entp.load(tmp_path / "ema", "best")
    assert result.best["step"] == 10
    assert all(torch.equal(saved[name], tensor) for name, tensor in kept.state_dict().items())
    assert not torch.equal(saved["tokens.weight"], weights["tokens.weight"])
    batches = split_batches(run.task, "valid", 2, run.batch_size, run.seed)
    loss = evaluate(kept, run.task, batches, Forward.of(run)).value("loss")
    assert loss == pytest.approx(result.metrics["loss"])
    assert loss != pytest.approx(plain.metrics["loss"], rel=1e-6)


def test_stopped_run_continues_bit_for_bit(tmp_path: Path) -> None:
    entp.train(ema_run(), tmp_path / "whole", device="cpu", quiet=True)
    for steps in (5, 10):
        again = ema_run(steps=steps)
        entp.train(again, tmp_path / "parts", device="cpu", quiet=True, resume=steps > 5)
    for which in ("last", "best"):
        a, b = (entp.load(tmp_path / name, which).state_dict() for name in ("whole", "parts"))
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_fork_continues_the_average_or_begins_one(tmp_path: Path) -> None:
    """Another number of steps continues it as well; without one it begins with the weights."""
    entp.train(ema_run(steps=5), tmp_path / "ema", device="cpu", quiet=True)
    entp.train(tiny_run(steps=5), tmp_path / "plain", device="cpu", quiet=True)
    found = {}
    for source in ("ema", "plain"):
        run = tiny_run(steps=6, ema=EmaConfig(2))
        out = tmp_path / f"fork of {source}"
        entp.train(run, out, device="cpu", quiet=True, fork=tmp_path / source)
        found[source] = entp.load(out, "best").state_dict()["tokens.weight"]
        last = entp.load(out, "last").state_dict()["tokens.weight"]
        before = entp.load(tmp_path / source, "last").state_dict()["tokens.weight"]
        if source == "ema":
            folder = checkpoint.find(tmp_path / source, "last")
            saved = checkpoint.read_trainer(folder)["techniques"]["ema"]
            before = saved["weights"]["tokens.weight"]
        assert torch.allclose(found[source], (before + last) / 2)
    assert not torch.equal(found["ema"], found["plain"])


@pytest.mark.gpu
def test_captured_steps_average_as_eager_ones_do() -> None:
    found = []
    for graph in (True, False):
        run = small_run(ema=EmaConfig(4), train={"precision": "fp32", "cuda_graph": graph})
        stepper = new_stepper(run, "cuda")
        for number in range(9):
            stepper(run.task.batch(0, "train", number, run.batch_size))
            stepper.state.step += 1
        assert bool(stepper.graphs) == graph
        found.append([p.detach().clone() for p in stepper.state.measured.parameters()])
    assert all(torch.allclose(p, q, rtol=0, atol=1e-5) for p, q in zip(*found, strict=True))
