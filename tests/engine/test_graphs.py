"""Training steps by `Stepper`: on CUDA a captured graph does what the plain step does."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changes import CHANGES
from small_runs import new_stepper, small_run
from torch import Tensor

import entp
from entp.config import (
    BatchScheduleConfig,
    CurriculumConfig,
    EmaConfig,
    ImportanceConfig,
    Run,
    model_for,
)
from entp.engine import layout, refreshed
from entp.tasks.addition import Addition
from entp.tasks.base import IGNORE, Batch
from entp.training import cuda_graph
from entp.training.cuda_graph import EAGER_STEPS, MOST_GRAPHS, NOBODY, STEPS_AHEAD, Stepper
from entp.training.distributed import Stop
from entp.training.loggers import read_metrics
from entp.training.plan import Plan
from entp.training.state import State

STEPS = 12
FP32: dict[str, Any] = {"precision": "fp32"}
SCHEDULE = {"warmup_steps": 3, "decay_steps": STEPS}
"""From 1e-3 up to 3e-3 and down to 3e-4 again within the steps compared."""


def start(run: Run, device: str) -> tuple[State, Stepper]:
    stepper = new_stepper(run, device)
    return stepper.state, stepper


def batches(run: Run, count: int = STEPS) -> list[Batch]:
    plan = Plan(run)
    return [run.task.batch(run.seed, "train", step, plan.batch_size(step)) for step in range(count)]


def go(stepper: Stepper, data: list[Batch]) -> list[tuple[float, float]]:
    """Loss and gradient norm of a step on each batch."""
    found = []
    for batch in data:
        loss, norm, stop = stepper(batch)
        assert stop == NOBODY
        found.append((float(loss), float(norm)))
        stepper.state.step += 1
    return found


def weights(state: State) -> Tensor:
    """All parameters but biases of keys, whose gradient is rounding, which AdamW scales up."""
    parts = []
    for name, p in state.model.named_parameters():
        q_k_v = p.detach().chunk(3) if name.endswith("qkv.bias") else (p.detach(),)
        parts += [part.flatten() for n, part in enumerate(q_k_v) if n != 1]
    return torch.cat(parts)


def assert_same_training(run: Run, data: list[Batch], graphs: int, close: float = 1e-5) -> None:
    """Steps with `graphs` graphs and with none have the same losses, norms and final weights."""
    state, stepper = start(run, "cuda")
    before = weights(state).clone()
    plain, eager = start(changed(run, cuda_graph=False), "cuda")
    got, want = go(stepper, data), go(eager, data)
    assert len(stepper.graphs) == graphs
    assert not eager.graphs
    assert np.array(got) == pytest.approx(np.array(want), rel=close)
    moved = (weights(plain) - before).norm()
    assert (weights(state) - weights(plain)).norm() < 100 * close * moved
    assert moved > 0


def changed(run: Run, **train: Any) -> Run:
    return replace(run, train=replace(run.train, **train))


def with_other_mask(batch: Batch, first: int) -> Batch:
    """The same sequences, with targets from position `first` on only."""
    y = batch.y.copy()
    y[:, :first] = IGNORE
    return Batch(batch.x, y)


# On a CPU


@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm", "refresh-2"])
def test_step_finds_all_its_tables(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step is captured no table may be made, however many chunks it has."""
    run = small_run(mode=mode, train={"token_budget": 3})
    _, stepper = start(run, "cpu")
    batch = batches(run, 1)[0]
    how = stepper.prepare(batch)
    inputs = stepper._inputs(how, batch)
    chunks = {"entp": 48, "refresh-2": 24}.get(mode, 1)  # more than are kept in any case
    assert len(inputs.chunks) == chunks
    inputs.tables.extend(stepper._tables(how, inputs))
    made: list[object] = []
    for shared in (layout._packings, layout._positions, refreshed._layouts(2)):
        monkeypatch.setattr(
            shared, "make", lambda *args, make=shared.make: made.append(args) or make(*args)
        )
    stepper._update(how, inputs, NOBODY)
    assert not made
    inputs.tables.clear()
    gc.collect()
    stepper._update(how, inputs, NOBODY)
    assert bool(made) == (mode == "entp")  # the other has few layouts


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_wish_to_stop_is_passed_on(device: str) -> None:
    run = small_run(train=FP32)
    _, stepper = start(run, device)
    for batch in batches(run, EAGER_STEPS + 2):
        wishes = [Stop(), Stop(late=True), Stop(signal=True)]
        assert [stepper(batch, stop).stop for stop in wishes] == wishes


# On CUDA

RUNS: dict[str, dict[str, Any]] = {
    "entp": {"train": FP32},
    "entp in chunks": {"train": {**FP32, "token_budget": 120}},
    "entp in very many chunks": {"train": {**FP32, "token_budget": 10}},
    "entp in half precision": {"train": {"precision": "bf16"}},
    "entp by muon": {"train": FP32, "optim": {"name": "muon"}},
    "entp by preconditioned muon": {
        "train": FP32,
        "optim": {"name": "muon", "precondition_every": 4},
    },
    "decoder": {"mode": "decoder", "train": FP32},
    "prefix-lm": {"mode": "prefix-lm", "train": FP32},
    "refresh": {"mode": "refresh-3", "train": FP32},
    "refresh in chunks": {"mode": "refresh-3", "train": {**FP32, "token_budget": 40}},
    "ema": {"train": FP32, "ema": EmaConfig(3)},
}

TECHNIQUES: dict[str, tuple[dict[str, Any], int]] = {
    "decoder proposal": ({"importance": ImportanceConfig(16, "decoder")}, 1),
    "entp proposal": ({"importance": ImportanceConfig()}, 1),
    "batch schedule": ({"batch_schedule": BatchScheduleConfig(6, 12)}, 2),
    "random-prefix": ({"curriculum": CurriculumConfig(6, "random-prefix", 4, None, True)}, 1),
    "all": (
        {
            "curriculum": CurriculumConfig(6, "random-prefix"),
            "importance": ImportanceConfig(16, "decoder"),
            "ema": EmaConfig(3),
        },
        1,
    ),
}
"""Options of techniques, and the graphs that are left after 14 steps."""


@pytest.mark.gpu
@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS.keys())
def test_replays_follow_plain_steps(changes: dict[str, Any]) -> None:
    """Losses, norms and weights over 12 steps, 9 of them replayed, each with its own rate."""
    run = small_run(**{**changes, "optim": {**SCHEDULE, **changes.get("optim", {})}})
    half = run.train.precision == "bf16" or run.optim.name == "muon"  # which works in bf16 on CUDA
    assert_same_training(run, batches(run), graphs=1, close=1e-4 if half else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("changes", "graphs"), TECHNIQUES.values(), ids=TECHNIQUES.keys())
def test_replays_follow_plain_steps_with_techniques(changes: dict[str, Any], graphs: int) -> None:
    run = small_run(train=FP32, optim=SCHEDULE, **changes)
    assert_same_training(run, batches(run, 14), graphs=graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_position_ids_and_loss_weights_are_fed(mode: str) -> None:
    """Both differ from batch to batch, as the captured step must notice."""
    run, rng = small_run(mode=mode, train=FP32, optim=SCHEDULE), np.random.default_rng(0)
    data = []
    for batch in batches(run):
        ids = np.sort(rng.integers(0, 10, batch.x.shape), axis=1)
        weights = rng.random(batch.x.shape)
        data.append(Batch(batch.x, batch.y, position_ids=ids, loss_weights=weights))
    assert_same_training(run, data, graphs=1)


@pytest.mark.gpu
def test_a_graph_is_captured_after_a_few_steps() -> None:
    run = small_run()
    _, stepper = start(run, "cuda")
    counts = []
    for batch in batches(run, EAGER_STEPS + 2):
        go(stepper, [batch])
        counts.append(len(stepper.graphs))
    assert counts == [0] * EAGER_STEPS + [1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_another_mask_is_another_graph(mode: str) -> None:
    """Other targets, once: a plain step between replays. As often as the first: another graph."""
    run = small_run(mode=mode, train=FP32, optim=SCHEDULE)
    data = batches(run, EAGER_STEPS + 5)
    data[EAGER_STEPS + 2] = with_other_mask(data[EAGER_STEPS + 2], 6)
    assert_same_training(run, data, graphs=1)
    both = [batch for own in data for batch in (own, with_other_mask(own, 6))]
    assert_same_training(run, both, graphs=2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [{}, {"mode": "decoder"}, {"optim": {"name": "muon"}}],
    ids=["entp", "decoder", "muon"],
)
def test_the_host_is_ahead_and_each_step_has_its_own_batch(changes: dict[str, Any]) -> None:
    """The host does not wait for a busy device, and no batch is overwritten unread."""
    run = small_run(train=FP32, **{**changes, "optim": {**SCHEDULE, **changes.get("optim", {})}})
    found = []
    for busy in (False, True):
        state, stepper = start(run, "cuda")
        losses, waits = [], []
        for number, batch in enumerate(batches(run, EAGER_STEPS + 3 * STEPS_AHEAD)):
            if busy and number > EAGER_STEPS:
                torch.cuda._sleep(200_000_000)  # about 0.1 s
            begin = time.perf_counter()
            losses.append(stepper(batch)[0].clone())
            waits.append(time.perf_counter() - begin)
            state.step += 1
            if not busy:
                torch.cuda.synchronize()
        found.append(torch.stack(losses))
        if busy:
            ahead = waits[EAGER_STEPS + 1 : EAGER_STEPS + STEPS_AHEAD]
            assert max(ahead) < 0.05 < max(waits[EAGER_STEPS + STEPS_AHEAD :])
    assert torch.allclose(*found, rtol=1e-5)


@pytest.mark.gpu
def test_graphs_are_kept_for_a_few_shapes_only() -> None:
    """Each holds the memory of a step; what comes later runs as plain steps."""
    run = small_run(train=FP32)
    data = [
        b
        for first in range(3, 4 + MOST_GRAPHS)
        for b in (with_other_mask(b, first) for b in batches(run, EAGER_STEPS + 2))
    ]
    assert_same_training(run, data, graphs=MOST_GRAPHS)


@pytest.mark.gpu
def test_many_other_masks_between_replays() -> None:
    """A graph's tables must still be there when other masks have come and gone."""
    run = small_run(train=FP32, optim=SCHEDULE)
    others = []
    for number, batch in enumerate(batches(run, 40)):
        y = batch.y.copy()
        y[np.random.default_rng(number).random(y.shape) < 0.5] = IGNORE
        others.append(Batch(batch.x, y))
    data = batches(run, EAGER_STEPS + 5)
    assert_same_training(run, [*data[:-2], *others, *data[-2:]], graphs=1)


def padded(batch: Batch, seed: int, extras: bool = False) -> Batch:
    """The same sequences, cut at random lengths after the prompt."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, batch.x.shape[1] + 1, len(batch.x))
    lengths[0] = batch.x.shape[1] - seed % 2  # also batches of another width
    width = lengths.max()
    past = np.arange(width) >= lengths[:, None]
    y = np.where(past, IGNORE, batch.y[:, :width])
    found = Batch(batch.x[:, :width], y, lengths)
    if not extras:
        return found
    ids = np.sort(rng.integers(0, 10, y.shape), axis=1)
    return replace(found, position_ids=ids, loss_weights=rng.random(y.shape))


@pytest.mark.gpu
@pytest.mark.parametrize("extras", [False, True], ids=["tokens", "ids and weights"])
@pytest.mark.parametrize("mode", ["entp", "decoder", "refresh-3"])
def test_replays_of_padded_batches_follow_plain_steps(mode: str, extras: bool) -> None:
    run = small_run(mode=mode, train=FP32, optim=SCHEDULE)
    data = [padded(batch, seed, extras) for seed, batch in enumerate(batches(run, 20))]
    assert len({batch.x.shape for batch in data}) > 1
    assert_same_training(run, data, graphs=1, close=1e-4)  # eager ones do not run by kernels


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"optim": {"name": "muon"}}, {"ema": EmaConfig(3)}])
def test_padded_runs_are_captured_and_trained_as_eager_ones(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Sums of different lengths, from the first step to the last evaluation."""
    task = Addition(train_examples=500)
    model = model_for(task, "small", layers=2, heads=2, width=16)
    found = {}
    for name, graphs in (("graphs", True), ("eager", False)):
        train = {**FP32, "cuda_graph": graphs}
        run = small_run(task=task, model=model, steps=20, train=train, **changes)
        entp.train(run, tmp_path / name, device="cuda", quiet=True)
        found[name] = [r["loss"] for r in read_metrics(tmp_path / name)]
    assert len(found["graphs"]) == 24
    close = 2e-2 if "optim" in changes else 1e-3  # muon works in bf16 on CUDA
    assert found["graphs"] == pytest.approx(found["eager"], rel=close)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_warm_up_covers_padded_batches_ahead(mode: str) -> None:
    """A run of sums is captured after its eager steps, and its cover grows no more."""
    task = Addition(train_examples=500)
    model = model_for(task, "small", layers=2, heads=2, width=16)
    run = small_run(task=task, model=model, mode=mode, steps=60, batch_size=64)
    _, stepper = start(run, "cuda")
    stepper.warm_up(run.task, run.seed, run.steps)
    width = stepper.covers[64].width
    counts = []
    for batch in batches(run, 60):
        go(stepper, [batch])
        counts.append(len(stepper.graphs))
    assert counts == [0] * EAGER_STEPS + [1] * (60 - EAGER_STEPS)
    assert stepper.covers[64].width == width
    assert not any(stepper.outgrown.values())


@pytest.mark.gpu
def test_the_reference_runs_as_plain_steps() -> None:
    run = small_run(train={**FP32, "impl": "reference"})
    assert_same_training(run, batches(run, EAGER_STEPS + 3), graphs=0)


def few_targets(run: Run, steps: int) -> list[Batch]:
    """Padded sequences with one or two targets each, at any positions."""
    rng, found = np.random.default_rng(0), []
    for batch in batches(run, steps):
        mask = rng.random(batch.y.shape).argsort(1) < rng.integers(1, 3, (len(batch.y), 1))
        y = np.where(mask, batch.x, IGNORE)
        lengths = np.maximum(2, 1 + np.where(mask, np.arange(mask.shape[1]), 0).max(1))
        first = rng.integers(1, lengths + 1)
        found.append(Batch(batch.x, y, lengths, prefix_lengths=first))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm"])
def test_padded_steps_with_few_targets_are_captured(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mode entp with each prefix in a row."""
    monkeypatch.setattr(cuda_graph, "MOST_COVER", 4)
    run = small_run(mode=mode, train=FP32)
    data = few_targets(run, EAGER_STEPS + 9)
    _, stepper = start(run, "cuda")
    for batch in data:
        for shape in stepper._shapes(stepper.how[mode], len(batch.x)):
            shape.grow(batch)
    _, eager = start(changed(run, cuda_graph=False), "cuda")
    got, want = go(stepper, data), go(eager, data)
    assert [key[0] for key in stepper.graphs] == ["PrefixRows" if mode == "entp" else "Cover"]
    assert np.array(got) == pytest.approx(np.array(want), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_runs_capture_again_and_continue(optimizer: str, tmp_path: Path) -> None:
    """14 steps, and 7 and 7 after resuming: replays before and after the checkpoint."""

    def run(steps: int) -> Run:
        return small_run(
            steps=steps,
            optim={"name": optimizer},
            train={**FP32, "checkpoint_every": 7, "eval_every": 7},
        )

    entp.train(run(14), tmp_path / "whole", device="cuda", quiet=True)
    entp.train(run(7), tmp_path / "parts", device="cuda", quiet=True)
    entp.train(run(14), tmp_path / "parts", device="cuda", resume=True, quiet=True)
    whole, parts = (
        [r["loss"] for r in read_metrics(tmp_path / name)] for name in ("whole", "parts")
    )
    assert len(whole) == 16
    assert parts == pytest.approx(whole, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_from_a_gpu_continues_on_a_cpu_and_back(optimizer: str, tmp_path: Path) -> None:
    def run(steps: int) -> Run:
        return small_run(steps=steps, optim={"name": optimizer}, train=FP32)

    entp.train(run(15), tmp_path / "whole", device="cuda", quiet=True)
    for steps, device in ((5, "cuda"), (10, "cpu"), (15, "cuda")):
        entp.train(run(steps), tmp_path / "parts", device=device, resume=steps > 5, quiet=True)
    whole, parts = (
        [r["loss"] for r in read_metrics(tmp_path / name)] for name in ("whole", "parts")
    )
    close = 1e-4 if optimizer == "adamw" else 1e-2  # muon works in bf16 on CUDA
    assert parts == pytest.approx(whole, rel=close)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::entp.EngineWarning")
@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm", "refresh-3"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_changed_between_steps_is_trained_as_by_the_reference(name: str, mode: str) -> None:
    """Steps by graph, a change of the model, more steps: as plain reference steps."""
    run = small_run(mode=mode, train=FP32)
    data = batches(run, EAGER_STEPS + 3)
    found = []
    for settings in ({}, {"impl": "reference", "cuda_graph": False}):
        state, stepper = start(changed(run, **settings), "cuda")
        before = go(stepper, data)
        assert len(stepper.graphs) == (0 if settings else 1)
        torch.manual_seed(0)
        CHANGES[name].apply(state.model)
        state.model.to("cuda")
        found.append([*before, *go(stepper, data)])
    assert np.array(found[0]) == pytest.approx(np.array(found[1]), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["entp", "decoder"])
def test_weights_that_moved_are_captured_anew(mode: str) -> None:
    run = small_run(mode=mode, train=FP32)
    data = batches(run, EAGER_STEPS + 3)
    found = []
    for settings in ({}, {"cuda_graph": False}):
        state, stepper = start(changed(run, **settings), "cuda")
        before = go(stepper, data)
        for p in state.model.parameters():
            p.data = p.data * 1.1  # other memory
        found.append([*before, *go(stepper, data)])
    assert np.array(found[0]) == pytest.approx(np.array(found[1]), rel=1e-3)
