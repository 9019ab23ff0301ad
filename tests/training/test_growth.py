"""Models that are trained with fewer blocks at first: the others wait as identities and join in later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import TASK, small_run

import entp
from entp.config import Run, model_for
from entp.errors import InputError
from entp.training.distributed import World
from entp.training.metrics import read_metrics
from entp.training.optim import make_optimizers
from entp.training.step import State, Stepper, train_step

FOUR = model_for(TASK, "small", layers=4, heads=2, width=16)
CPU = torch.device("cpu")


def growing_run(**changes: Any) -> Run:
    """Four blocks, of which the first and the last are trained for six steps, and all for four."""
    optim = {"grow_from": 2, "grow_at": 6, **changes.pop("optim", {})}
    return small_run(model=FOUR, optim=optim, **changes)


def grown(run: Run) -> entp.Transformer:
    torch.manual_seed(run.seed)
    model = entp.Transformer(run.model)
    model.put_to_sleep(run.optim.grow_from or run.model.layers)
    return model


@pytest.mark.parametrize("position", ["learned", "none", "given"])
@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_sleeping_model_is_the_shallow_one(layers: int, mode: str, position: str) -> None:
    torch.manual_seed(0)
    model = entp.Transformer(entp.ModelConfig(vocab=9, positions=7, layers=4, heads=2, width=8, position=position)).double()
    x = torch.randint(9, (3, 7))
    prefix = 3 if mode == "prefix" else None
    awake = model(x, mode, prefix=prefix)
    model.put_to_sleep(layers)
    shallow = model.shallow(layers)
    assert len(shallow.blocks) == layers
    wanted = model(x, mode, prefix=prefix)
    assert not torch.allclose(wanted, awake)
    assert torch.allclose(shallow(x, mode, prefix=prefix), wanted, rtol=0, atol=1e-12)


def test_the_shallow_model_has_no_weights_of_its_own() -> None:
    model = entp.Transformer(FOUR)
    state = torch.random.get_rng_state()
    shallow = model.shallow(3)
    assert torch.equal(torch.random.get_rng_state(), state)  # nothing was drawn
    own = {id(p): name for name, p in model.named_parameters()}
    shared = {own[id(p)] for p in shallow.parameters()}
    assert shared == {name for name in own.values() if not name.startswith("blocks.2.")}


def test_a_shallow_step_has_the_gradients_of_the_whole_model() -> None:
    """By every weight that is awake; the others get none, and are left alone."""
    run = growing_run(optim={"clip": 0.0})
    batch = run.task.batch(0, "train", 0, run.batch)
    model = grown(run).double()
    asleep = {n: p.detach().clone() for n, p in model.named_parameters() if n.startswith(("blocks.1.", "blocks.2."))}
    whole = grown(run).double()
    plain = small_run(model=FOUR, optim={"clip": 0.0})
    train_step(plain, State(whole, []), batch, CPU, World())
    train_step(run, State(model, make_optimizers(model, run.optim)), batch, CPU, World())
    wanted = {n: p.grad for n, p in whole.named_parameters() if n not in asleep}
    for name, p in model.named_parameters():
        if name in asleep:
            assert p.grad is None
            assert torch.equal(p, asleep[name])
        elif wanted[name] is not None:
            assert torch.allclose(p.grad, wanted[name], rtol=1e-9, atol=1e-15), name


@pytest.mark.parametrize("optim", [{}, {"name": "muon", "whiten": 2}], ids=["adamw", "whitened muon"])
def test_waiting_blocks_join_in_and_a_resumed_run_does_the_same(optim: dict[str, object], tmp_path: Path) -> None:
    """Stopped while they wait, and after they woke up: bit for bit the run that was never stopped."""

    def run(steps: int) -> Run:
        return growing_run(steps=steps, optim=optim, train={"checkpoint_every": 1})

    entp.train(run(10), tmp_path / "whole", device="cpu", quiet=True)
    for steps in (4, 8, 10):
        entp.train(run(steps), tmp_path / "parts", device="cpu", resume=steps > 4, quiet=True)
    whole, parts = (entp.load(tmp_path / name, "last").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    losses = [[r["loss"] for r in read_metrics(tmp_path / name) if r["kind"] == "train"] for name in ("whole", "parts")]
    assert losses[0] == losses[1]
    start = grown(run(10)).state_dict()
    asleep = [name for name in start if name.startswith(("blocks.1.", "blocks.2."))]
    entp.train(run(6), tmp_path / "asleep", device="cpu", quiet=True)
    six = entp.load(tmp_path / "asleep", "last").state_dict()
    assert all(torch.equal(six[name], start[name]) for name in asleep)
    assert not torch.equal(six["blocks.0.fc.weight"], start["blocks.0.fc.weight"])
    for name in asleep:
        if name.endswith("weight") and "norm" not in name:
            assert not torch.equal(whole[name], start[name]), name


def test_a_target_counts_when_all_blocks_are_trained(tmp_path: Path) -> None:
    run = growing_run(train={"target": 0.0, "eval_every": 2})  # which every model reaches
    result = entp.train(run, tmp_path / "run", device="cpu", quiet=True)
    assert result.step == 6
    assert result.reason == "sequence_accuracy reached 0"


def test_the_best_weights_are_of_all_blocks(tmp_path: Path) -> None:
    """However good the shallow model was: here the rate wrecks the weights as soon as all are trained."""
    run = growing_run(optim={"max_lr": 3.0, "min_lr": 0.0, "warmup": 1000, "decay_steps": 2000}, train={"eval_every": 2})
    result = entp.train(run, tmp_path / "run", device="cpu", quiet=True)
    assert result.best["step"] >= 6


@pytest.mark.parametrize(
    ("optim", "told"),
    [
        ({"grow_from": 2}, r"optim.grow_from is 2 and optim.grow_at 0: give both"),
        ({"grow_at": 2}, r"optim.grow_from is None and optim.grow_at 2: give both"),
        ({"grow_from": 0, "grow_at": 2}, r"each at least 1"),
        ({"grow_from": 4, "grow_at": 2}, r"optim.grow_from 4 must be below model.layers 4"),
    ],
)
def test_settings_that_make_no_sense(optim: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        small_run(model=FOUR, optim=optim)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "plain"])
def test_steps_are_recorded_again_when_blocks_join_in(graph: bool) -> None:
    """A graph of the shallow step, then one of the whole: the losses of plain steps on a CPU."""
    run = growing_run(train={"precision": "fp32", "graph": graph})
    losses = []
    for device in ("cuda", "cpu"):
        model = grown(run).to(device)
        state = State(model, make_optimizers(model, run.optim))
        stepper = Stepper(run, state, torch.device(device), World())
        found, graphs = [], []
        for step in range(12):
            found.append(float(stepper(run.task.batch(0, "train", step, run.batch))[0]))
            state.step += 1
            graphs.append(len(stepper.graphs))
        if device == "cuda" and graph:
            assert graphs == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
