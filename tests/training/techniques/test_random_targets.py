"""A few targets of each sequence carry the loss: unbiased, drawn from seed and step, in shapes that
repeat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_captured_steps
import torch
from small_runs import new_stepper
from tiny_runs import TINY, tiny_run
from torch import Tensor

import entp
from entp.config import (
    BatchScheduleConfig,
    CurriculumConfig,
    EmaConfig,
    ImportanceConfig,
    OptimConfig,
    RandomTargetsConfig,
    Run,
    TrainConfig,
    model_for,
)
from entp.errors import InputError
from entp.model import Transformer
from entp.tasks.base import IGNORE, Batch
from entp.tasks.counting import Count3
from entp.training import cuda_graph
from entp.training.cuda_graph import EAGER_STEPS, MOST_GRAPHS
from entp.training.distributed import World
from entp.training.evaluate import evaluate, split_batches
from entp.training.forward import Forward
from entp.training.gradients import gradients
from entp.training.inputs import Inputs, make_inputs, step_arrays
from entp.training.loggers import read_metrics
from entp.training.techniques import random_targets
from entp.training.techniques.random_targets import (
    Drawn,
    RandomTargets,
    draw_positions,
    draw_targets,
    spread,
)

CPU = torch.device("cpu")
MODES: list[Any] = ["entp", "decoder", "refresh-3", "prefix-lm"]
graphs = test_captured_steps.graphs


def random_run(count: int = 2, **changes: Any) -> Run:
    """Four targets in each of eight sequences, of which two carry the loss."""
    return tiny_run(random_targets=RandomTargetsConfig(count), **changes)


def technique(count: int, seed: int = 0) -> RandomTargets:
    return RandomTargets(random_run(count, seed=seed))


def batch_of(size: int, step: int = 0) -> Batch:
    return TINY.batch(0, "train", step, size)


def rows(batch: Batch, order: list[int]) -> Batch:
    """The batch with its sequences in this order."""
    arrays = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{n: v[order] for n, v in arrays.items() if v is not None})


def ragged(size: int = 3) -> Batch:
    """Padded sequences with four, three, one, four, ... targets."""
    batch = batch_of(size)
    end = batch.y.shape[1]
    lengths = np.array([end, end - 1, end - 3] * size)[:size]
    y = np.where(np.arange(end) < lengths[:, None], batch.y, IGNORE)
    return replace(batch, y=y, lengths=lengths)


def everything(batch: Batch) -> Batch:
    """The batch with weights of its targets and position ids."""
    rng = np.random.default_rng(0)
    ids = np.tile(np.arange(batch.y.shape[1])[::-1], (len(batch.y), 1))
    return replace(batch, loss_weights=rng.random(batch.y.shape) * 3, position_ids=ids.copy())


# Which targets are drawn


def random_masks() -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
    """Targets, how many of a row to draw, and offsets, at random."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        targets = rng.random((rng.integers(1, 9), 12)) < rng.random()
        offset = rng.integers(targets.sum(1).clip(1))
        yield targets, int(rng.integers(1, 14)), offset


def test_spread_draws_the_targets_of_its_formula() -> None:
    for targets, count, offset in random_masks():
        mask, size = spread(targets, count, offset), len(targets)
        for r in range(size):
            positions = np.flatnonzero(targets[r])
            n, k = len(positions), min(count, len(positions))
            wanted = [
                positions[((j * size + r) * n + int(offset[r])) // (size * k)] for j in range(k)
            ]
            assert np.flatnonzero(mask[r]).tolist() == wanted
            assert len(set(wanted)) == k


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 9])
def test_every_target_is_drawn_with_probability_k_over_n(size: int, count: int) -> None:
    """Exactly, over all places in the order and all offsets, whatever the number of targets."""
    for n in range(1, 7):
        targets = np.ones((size, n), bool)
        draws = [spread(targets, count, np.full(size, d)) for d in range(n)]
        assert (np.sum(draws, axis=(0, 1)) == size * min(count, n)).all()


@pytest.mark.parametrize(("size", "count", "n"), [(8, 2, 4), (64, 8, 40), (64, 1, 40), (5, 3, 7)])
def test_every_position_is_drawn_equally_often_in_a_batch(size: int, count: int, n: int) -> None:
    positions = np.zeros(2 * n, bool)
    positions[::2] = True
    for offset in range(n):
        drawn = draw_positions(positions, size, count, offset)
        often = drawn.mask.sum(0)
        assert (drawn.mask.sum(1) == count).all()
        assert not often[~positions].any()
        assert set(often[positions]) <= {size * count // n, -(-size * count // n)}
        assert drawn.weights.sum(0)[positions] == pytest.approx(size)
        if size * count % n == 0:
            assert drawn.weights[drawn.mask] == pytest.approx(n / count)


def test_targets_of_a_sequence_lie_apart() -> None:
    """8 of 40 targets are 5 apart, up to one."""
    mask = draw_positions(np.ones(40, bool), 64, 8, 0).mask
    gaps = np.diff([np.flatnonzero(row) for row in mask], axis=1)
    assert gaps.min() >= 4
    assert gaps.max() <= 6


# The gradient is that of all targets


def inputs_of(batch: Batch, drawn: Drawn | None, how: Forward, model: Any) -> Inputs:
    """A step over these targets of the rows as they stand."""
    arrays = step_arrays(batch, 0, [], World())
    if drawn is not None:
        arrays["y"] = torch.from_numpy(np.where(drawn.mask, batch.y, IGNORE))
        own = arrays.get("weights", torch.ones(()))
        arrays["weights"] = torch.from_numpy(drawn.weights) * own
    return make_inputs(arrays, batch, how, model, CPU)


def flat_gradient(model: Any, inputs: Inputs, how: Forward) -> Tensor:
    """The loss and the gradient, one after the other."""
    loss, found = gradients(model, inputs, how)
    parts = [loss, *(g for g in found.values() if g is not None)]
    return torch.cat([part.flatten() for part in parts])


def exact_model(run: Run) -> Any:
    torch.manual_seed(0)
    return Transformer(run.model).double()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("extras", "count"), [(False, 3), (True, 2)])
def test_mean_over_all_orders_is_the_exact_gradient(mode: Any, extras: bool, count: int) -> None:
    """For every offset: 3 x 2 or 3 x 3 draws of 4 positions, which cannot be equally often."""
    run = random_run(count, mode=mode, train={"precision": "fp32"})
    how, model, batch = Forward.of(run), exact_model(run), batch_of(3)
    if extras:
        batch = everything(batch)
    exact = flat_gradient(model, inputs_of(batch, None, how, model), how)
    for offset in range(4):
        drawn = draw_positions(batch.target_mask[0], 3, count, offset)
        found = [
            flat_gradient(model, inputs_of(rows(batch, [*order]), drawn, how, model), how)
            for order in permutations(range(3))
        ]
        assert (found[0] - exact).norm() > 0.01 * exact.norm()
        torch.testing.assert_close(torch.stack(found).mean(0), exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "with weights and positions"])
def test_mean_over_all_draws_of_padded_sequences_is_the_exact_gradient(
    mode: Any, extras: bool
) -> None:
    """4, 3 and 1 targets, of which 2, 2 and 1 are drawn: all orders, all offsets of each."""
    run = random_run(mode=mode, train={"precision": "fp32"})
    how, model, batch = Forward.of(run), exact_model(run), ragged()
    if extras:
        batch = everything(batch)
    exact = flat_gradient(model, inputs_of(batch, None, how, model), how)
    found = []
    for order in permutations(range(3)):
        now = rows(batch, [*order])
        for d in range(12):  # 0, 1, ... of each row equally often
            drawn = draw_targets(now.target_mask, 2, d % now.target_mask.sum(1))
            found.append(flat_gradient(model, inputs_of(now, drawn, how, model), how))
    torch.testing.assert_close(torch.stack(found).mean(0), exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", ["decoder"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_mean_over_steps_is_the_exact_gradient(mode: Any, padded: bool) -> None:
    """What a run draws, within five standard errors."""
    run = random_run(mode=mode, train={"precision": "fp32"})
    how, model, one = Forward.of(run), exact_model(run), technique(2)
    batch = everything(ragged(7) if padded else batch_of(7))
    exact = flat_gradient(model, inputs_of(batch, None, how, model), how)
    draws = []
    for step in range(100):
        inputs = make_inputs(step_arrays(batch, step, [one], World()), batch, how, model, CPU)
        draws.append(flat_gradient(model, inputs, how))
    found = torch.stack(draws)
    assert found.std(0).norm() > 0.05 * exact.norm()
    error = found.std(0) / np.sqrt(len(found))
    assert ((found.mean(0) - exact).abs() < 5 * error + 1e-9).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_step_is_that_of_a_loop_over_the_drawn_targets(mode: Any, padded: bool) -> None:
    run = random_run(mode=mode, train={"precision": "fp32"})
    how, model, one = Forward.of(run), exact_model(run), technique(2)
    batch = ragged(8) if padded else batch_of(8)
    arrays = step_arrays(batch, 3, [one], World())
    inputs = make_inputs(arrays, batch, how, model, CPU)
    found = flat_gradient(model, inputs, how)
    loss = torch.zeros((), dtype=torch.float64)
    prefix = run.task.prefix if mode == "prefix-lm" else None
    for x, y, weights in zip(arrays["x"], arrays["y"], arrays["weights"], strict=True):
        for t in (y != IGNORE).nonzero()[:, 0].tolist():
            logits = model(x[None, : t + 1], mode, prefix=prefix)[0, t]
            loss = loss + weights[t] * torch.nn.functional.cross_entropy(logits, y[t])
    loss = loss / batch.target_mask.sum()
    wanted = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    torch.testing.assert_close(
        found, torch.cat([part.flatten() for part in wanted]), rtol=1e-9, atol=1e-11
    )


def test_only_drawn_prefixes_are_computed() -> None:
    how, model, batch = Forward.of(random_run()), exact_model(random_run()), batch_of(8)
    arrays = step_arrays(batch, 0, [technique(2)], World())
    chunks = make_inputs(arrays, batch, how, model, CPU).chunks
    assert sum(int(chunk.sum()) for chunk in chunks) == 16
    assert batch.target_mask.sum() == 32


@pytest.mark.parametrize("mode", MODES)
def test_as_many_as_there_are_is_the_exact_step(mode: Any) -> None:
    for count in (4, 100):
        steps = []
        for one in (RandomTargetsConfig(count), None):
            run = tiny_run(mode=mode, random_targets=one)
            stepper = new_stepper(run)
            loss, norm, _ = stepper(run.task.batch(0, "train", 0, run.batch_size))
            steps.append([loss, norm, *stepper.state.model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


def test_padded_sequences_that_keep_all_targets_have_weights_of_one() -> None:
    """They have them, so that no captured step draws among a cover's other targets."""
    batch = ragged()
    arrays = step_arrays(batch, 0, [technique(4)], World())
    assert np.array_equal(arrays["y"].numpy(), batch.y)
    assert np.array_equal(arrays["weights"].numpy(), batch.target_mask.astype(float))


def test_processes_share_a_draw() -> None:
    how = Forward.of(random_run())
    for batch in (everything(batch_of(7)), everything(ragged(7))):
        model, parts = exact_model(random_run()), []
        for rank, size in ((0, 1), (0, 3), (1, 3), (2, 3)):
            arrays = step_arrays(batch, 5, [technique(2)], World(rank, size))
            inputs = make_inputs(arrays, batch, how, model, CPU)
            parts.append(flat_gradient(model, inputs, how))
        torch.testing.assert_close(sum(parts[1:]), parts[0], rtol=1e-10, atol=1e-12)


# Drawn from seed and step


def drawn_arrays(seed: int, step: int, batch: Batch, count: int = 2) -> dict[str, Tensor]:
    return step_arrays(batch, step, [technique(count, seed)], World())


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_draw_belongs_to_seed_and_step_alone(padded: bool) -> None:
    batch = ragged(8) if padded else batch_of(8)
    used = technique(2)
    for step in range(7):
        step_arrays(batch, step, [used], World())
    one = step_arrays(batch, 7, [used], World())
    again, later, other = (drawn_arrays(*at, batch) for at in ((0, 7), (0, 8), (1, 7)))
    assert one.keys() == again.keys()
    assert all(torch.equal(one[name], again[name]) for name in one)
    for two in (later, other):
        assert not torch.equal(one["x"], two["x"])


def test_sequences_keep_what_belongs_to_them() -> None:
    """Every array of a batch is put into the same order, vectors too."""
    size, time = 6, 5
    number = np.arange(size)
    x = np.zeros((size, time, 3))
    x[:, :, 0] = number[:, None]
    y = np.tile(number[:, None] + 0.5, (1, time))
    lengths = number % 3 + 3
    y[np.arange(time) >= lengths[:, None]] = IGNORE
    ids = np.tile(number[:, None], (1, time))
    batch = Batch(x, y, lengths, ids, loss_weights=ids + 1.0, note=number)
    moved = technique(2).arrange(0, batch)
    assert moved.note is not None
    assert sorted(moved.note) == number.tolist()
    assert moved.note.tolist() != number.tolist()
    for name in ("x", "y", "lengths", "position_ids", "loss_weights"):
        assert np.array_equal(getattr(moved, name), getattr(batch, name)[moved.note])
    y = technique(2).arrays(0, moved, World())["y"].numpy()
    assert y.dtype == np.float32
    assert ((y != IGNORE).sum(1) == 2).all()
    assert np.array_equal(y[y != IGNORE], np.repeat(moved.note + 0.5, 2).astype(np.float32))


def test_rows_keep_their_targets_and_sequences_change() -> None:
    """For RENEW steps; then other positions are drawn once more than the rest."""
    one, batch = technique(3), batch_of(6)
    first = one.draw(0, batch)
    assert first is one.draw(random_targets.RENEW - 1, batch)
    periods = [one.draw(random_targets.RENEW * n, batch) for n in range(20)]
    assert {p.mask.tobytes() for p in periods if p} == {
        draw_positions(batch.target_mask[0], 6, 3, d).mask.tobytes() for d in (0, 2)
    }
    seen = {tuple(map(tuple, one.arrange(step, batch).x.tolist())) for step in range(10)}
    assert len(seen) == 10


def test_rows_that_are_always_the_same_are_one_object() -> None:
    """Where every position can be drawn equally often, nothing is captured anew."""
    one, batch = technique(2), batch_of(8)
    assert len({id(one.draw(random_targets.RENEW * n, batch)) for n in range(5)}) == 1


def test_fewer_draws_than_positions_are_drawn_in_every_step() -> None:
    """Two of four positions in a batch: with the same ones in every step the others were lost."""
    one, batch = technique(1), batch_of(2)
    masks = [one.draw(step, batch) for step in range(200)]
    assert all(drawn is not None and (drawn.mask.sum(1) == 1).all() for drawn in masks)
    often = np.mean([drawn.mask for drawn in masks if drawn], axis=(0, 1))[batch.target_mask[0]]
    assert (np.abs(often - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 400)).all()
    assert all((drawn.weights[drawn.mask] == 4).all() for drawn in masks if drawn)


# Training


TOGETHER: dict[str, Any] = {
    "entp": {},
    "decoder": {"mode": "decoder"},
    "prefix-lm": {"mode": "prefix-lm"},
    "ema and batch schedule": {"ema": EmaConfig(3), "batch_schedule": BatchScheduleConfig(4, 5)},
    "after a decoder": {"curriculum": CurriculumConfig(4)},
    "after random prefixes": {
        "curriculum": CurriculumConfig(6, "random-prefix", 9),
        "ema": EmaConfig(3),
    },
}


@pytest.mark.parametrize("changes", TOGETHER.values(), ids=TOGETHER)
def test_stopped_run_continues_bit_for_bit(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of a period, and at a change of mode or batch size."""
    monkeypatch.setattr(random_targets, "RENEW", 3)
    run, plain = random_run(3, batch_size=6, **changes), tiny_run(batch_size=6, **changes)
    found = {}
    for name, one in (("whole", run), ("plain", plain)):
        entp.train(one, tmp_path / name, device="cpu", quiet=True)
        found[name] = entp.load(tmp_path / name, "last").state_dict()
    for steps in (4, 5, 10):
        now = replace(run, steps=steps)
        entp.train(now, tmp_path / "parts", device="cpu", quiet=True, resume=steps > 4)
    parts = entp.load(tmp_path / "parts", "last").state_dict()
    assert all(torch.equal(found["whole"][name], parts[name]) for name in parts)
    assert not all(torch.equal(found["plain"][name], parts[name]) for name in parts)


def test_evaluations_measure_all_targets(tmp_path: Path) -> None:
    run = random_run(1, steps=5)
    entp.train(run, tmp_path, device="cpu", quiet=True)
    batches = split_batches(run.task, "valid", 2, 8, run.seed)
    totals = evaluate(entp.load(tmp_path, "last"), run.task, batches, Forward.of(run))
    assert totals.all["loss"].w == 2 * 8 * 4
    (row,) = [r for r in read_metrics(tmp_path) if r["kind"] == "eval"]
    assert row["loss"] == pytest.approx(totals.value("loss"))


def test_importance_and_random_targets_are_refused_together() -> None:
    with pytest.raises(InputError, match=r"importance and random_targets both choose .* leave one"):
        random_run(importance=ImportanceConfig())


@pytest.mark.parametrize("count", [0, -3])
def test_count_below_one_is_refused(count: int) -> None:
    with pytest.raises(InputError, match=rf"random_targets\.count is {count}: .* at least 1"):
        RandomTargetsConfig(count)


# Captured steps


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("mode", MODES)
def test_captured_steps_are_the_eager_ones(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured anew when other positions are drawn once more, and when the mode changes."""
    monkeypatch.setattr(random_targets, "RENEW", 8)
    changes = {"curriculum": CurriculumConfig(12)} if mode == "entp" else {}
    run = random_run(3, mode=mode, steps=24, batch_size=6, train={"precision": "fp32"}, **changes)
    one = RandomTargets(run)
    drawn = [one.draw(step, batch_of(6)) for step in range(24)]
    anew = {n for n in range(24) if n == 0 or drawn[n] is not drawn[n - 1]}
    assert len(anew) > 1
    if changes:
        anew.add(12)
    waits = {step + n for step in anew for n in range(EAGER_STEPS)}
    eager = [loss for loss, _ in test_captured_steps.losses(run, captured=False)]
    found = [*test_captured_steps.losses(run, captured=True)]
    assert [loss for loss, _ in found] == eager
    assert [bool(number) for _, number in found] == [step not in waits for step in range(24)]


@pytest.mark.usefixtures("graphs")
def test_steps_whose_targets_change_are_not_captured() -> None:
    run = random_run(1, steps=12, batch_size=3)
    found = [*test_captured_steps.losses(run, captured=True)]
    assert [number for _, number in found] == [0] * 12
    assert [loss for loss, _ in found] == [
        loss for loss, _ in test_captured_steps.losses(run, captured=False)
    ]


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("idle", [10, 1000], ids=["unused graphs go", "used ones stay"])
def test_longer_sequences_take_the_place_of_graphs_long_unused(
    idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph, "IDLE_STEPS", idle)
    lengths = [size for size in range(3, 3 + MOST_GRAPHS + 2) for _ in range(EAGER_STEPS + 6)]
    stepper, reference = new_stepper(tiny_run()), new_stepper(tiny_run())
    stepper.stream = object()  # type: ignore[assignment]
    captured = []
    for size in lengths:  # batches of 3, 4, ... sequences
        batch = batch_of(size, stepper.state.step)
        losses = [float(one(batch).loss) for one in (stepper, reference)]
        assert losses[0] == losses[1]
        captured.append(any(key[1][0] == size for key in stepper.graphs))  # type: ignore[index]
        for one in (stepper, reference):
            one.state.step += 1
    assert len(stepper.graphs) == MOST_GRAPHS
    last = captured[-(EAGER_STEPS + 6) :]
    assert last == [False] * EAGER_STEPS + [idle == 10] * 6


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_captured_steps_on_a_gpu_are_the_eager_ones(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_targets, "RENEW", 12)
    task = Count3(prompt_length=4, length=24, num_values=24)
    run = Run(
        task,
        model_for(task, "small"),
        mode,
        steps=36,
        batch_size=9,
        optim=OptimConfig("adamw", 1e-3, 1e-4, warmup_steps=3, decay_steps=36),
        train=TrainConfig(precision="fp32"),
        ema=EmaConfig(4),
        random_targets=RandomTargetsConfig(6),
    )
    losses, graphs = [], []
    for graph in (True, False):
        now = replace(run, train=replace(run.train, cuda_graph=graph))
        stepper = new_stepper(now, "cuda")
        stepper.warm_up(task, run.seed, run.steps)
        for number in range(run.steps):
            losses.append(float(stepper(task.batch(0, "train", number, run.batch_size)).loss))
            graphs.append(len(stepper.graphs))
            stepper.state.step += 1
    assert graphs[11] == graphs[35] == 1
    assert graphs[36:] == [0] * 36
    assert losses[:36] == pytest.approx(losses[36:], rel=1e-4)
