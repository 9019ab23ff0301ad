"""More sequences per step late in training, and AdamW in place of Muon."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import FLAGS, small_run
from small_runs import entp as command

import entp
from entp.config import OptimConfig, Run
from entp.errors import InputError
from entp.tasks.base import IGNORE
from entp.training import checkpoint, selection, step
from entp.training.distributed import World
from entp.training.evaluation import forward, loss_sum
from entp.training.optim import learning_rate
from entp.training.step import Stepper, train_step
from entp.training.trainer import _batches, new_state

CPU = torch.device("cpu")


def late_run(**changes: Any) -> Run:
    """Ten steps: six of 8 sequences, four of 12."""
    return small_run(optim={"late_batch": 12, "late_at": 6, **changes.pop("optim", {})}, **changes)


@pytest.mark.parametrize("start", [0, 3, 6, 8])
def test_every_step_gets_its_batch(start: int) -> None:
    run = late_run()
    found = list(_batches(run, start, CPU))
    assert len(found) == 10 - start
    for number, batch in enumerate(found, start):
        assert run.batch_at(number) == (8 if number < 6 else 12)
        want = run.task.batch(run.seed, "train", number, run.batch_at(number))
        assert np.array_equal(batch.x, want.x)
        assert np.array_equal(batch.y, want.y)


@pytest.mark.parametrize("late_at", [10, 50])
def test_later_than_the_last_step_is_never(late_at: int) -> None:
    assert {len(batch.x) for batch in _batches(late_run(optim={"late_at": late_at}), 0, CPU)} == {8}


@pytest.mark.parametrize("stops", [(5,), (6,), (7,), (3, 8)])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path, stops: tuple[int, ...]) -> None:
    entp.train(late_run(), tmp_path / "whole", device="cpu", quiet=True)
    for n, steps in enumerate((*stops, 10)):
        entp.train(late_run(steps=steps), tmp_path / "parts", device="cpu", quiet=True, resume=n > 0)
    a, b = (entp.load(tmp_path / name, "last").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_what_is_chosen_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "PAYS_BELOW", 100.0)
    monkeypatch.setattr(step, "RENEW", 4)
    entp.train(late_run(optim={"select": True}), tmp_path / "run", device="cpu", quiet=True)
    assert checkpoint.read_trainer(tmp_path / "run/checkpoints/step-00000005")["selection"]["batch"] == 8
    saved = checkpoint.read_trainer(tmp_path / "run/checkpoints/step-00000010")["selection"]
    assert saved["batch"] == 12
    assert max(saved["tried"]) <= 12


@pytest.mark.parametrize(("at", "batch", "adamw"), [(0, 12, 0), (6, 0, 0), (6, -1, 0), (-1, 12, 0), (0, 0, 0.5), (6, 0, -0.5)])
def test_when_and_what_or_none(at: int, batch: int, adamw: float) -> None:
    told = rf"optim\.late_at is {at}, optim\.late_batch {batch} and optim\.late_adamw {adamw:g}: give a step"
    with pytest.raises(InputError, match=told):
        OptimConfig("muon", late_at=at, late_batch=batch, late_adamw=adamw)


def test_adamw_does_not_take_over_from_itself() -> None:
    with pytest.raises(InputError, match=r"optim\.late_adamw is 0\.5 with optim\.name adamw: it takes over from muon"):
        OptimConfig(late_at=6, late_adamw=0.5)


def test_on_the_command_line(tmp_path: Path) -> None:
    done = command("train", "count3", *FLAGS, "--optim.late-batch=12", cwd=tmp_path)
    assert done.returncode == 2
    assert "optim.late_at is 0, optim.late_batch 12 and optim.late_adamw 0: give a step" in done.stderr


# AdamW in place of Muon


def switching_run(**changes: Any) -> Run:
    """Ten steps: six of Muon, four of AdamW."""
    optim = {"name": "muon", "late_adamw": 0.5, "late_at": 6, "warmup": 3, "decay_steps": 10, **changes.pop("optim", {})}
    return small_run(optim=optim, **changes)


def test_its_rate_is_a_share_after_a_warm_up_of_its_own() -> None:
    switching, plain = switching_run().optim, switching_run(optim={"late_adamw": 0.0, "late_at": 0}).optim
    shares = [learning_rate(switching, n) / learning_rate(plain, n) for n in range(12)]
    assert shares == pytest.approx([1, 1, 1, 1, 1, 1, 0.5 / 3, 1 / 3, 0.5, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("average", [0, 4])
def test_from_there_on_it_is_adamw_from_the_mean(average: int) -> None:
    """Against torch's AdamW by hand: new moments for the blocks' matrices, old ones for the rest."""
    run = switching_run(optim={"average": average})
    state = new_state(run, CPU)
    for number in range(6):
        train_step(run, state, run.task.batch(0, "train", number, run.batch), CPU, World())
        state.step += 1
    model = copy.deepcopy(state.mean or state.model)
    optim = run.optim
    blocks = [p for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2]
    taken = {id(p) for p in blocks}
    rest = [p for p in model.parameters() if id(p) not in taken]
    old = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(optim.beta1, optim.beta2),
    )
    old.load_state_dict(copy.deepcopy(state.optimizers[0].state_dict()))
    new = torch.optim.AdamW(blocks, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay)
    for number in range(6, 10):
        batch = run.task.batch(0, "train", number, run.batch)
        train_step(run, state, batch, CPU, World())
        state.step += 1
        model.zero_grad()
        outputs = forward(model, run, torch.from_numpy(batch.x), torch.from_numpy(batch.y != IGNORE), None)
        targets = torch.from_numpy(batch.y)[torch.from_numpy(batch.y != IGNORE)]
        (loss_sum(run.task, outputs, targets) / len(targets)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        for optimizer in (old, new):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(optim, number)
            optimizer.step()
    for got, want in zip(state.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stops", [(5,), (6,), (7,), (3, 8)])
def test_a_run_that_was_stopped_near_the_change_goes_on_bit_for_bit(tmp_path: Path, stops: tuple[int, ...]) -> None:
    optim = {"average": 4, "whiten": 2}
    entp.train(switching_run(optim=optim), tmp_path / "whole", device="cpu", quiet=True)
    for n, steps in enumerate((*stops, 10)):
        entp.train(switching_run(steps=steps, optim=optim), tmp_path / "parts", device="cpu", quiet=True, resume=n > 0)
    a, b = (entp.load(tmp_path / name, "last").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.gpu
def test_recorded_steps_change_hands_too() -> None:
    """Recorded anew at the change: the same weights as eager steps give, but for rounding."""
    run = switching_run(steps=24, optim={"late_at": 12, "average": 4, "decay_steps": 24})
    found = []
    for graph in (True, False):
        one = replace(run, train=replace(run.train, graph=graph, impl="triton"))
        state = new_state(one, torch.device("cuda"))
        step_by_step = Stepper(one, state, torch.device("cuda"), World())
        held = []
        for number in range(24):
            step_by_step(one.task.batch(0, "train", number, one.batch))
            state.step += 1
            held.append(len(step_by_step.graphs))
        assert (held[8], held[12], held[23]) == ((1, 0, 1) if graph else (0, 0, 0))
        found.append([p.detach().clone() for p in state.model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=2e-5)
