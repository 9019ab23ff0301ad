"""Padded batches in one shape: their loss and gradients stay, and steps on them are captured."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import random_model
from small_runs import new_stepper, small_run
from torch import Tensor

from entp.config import (
    BatchScheduleConfig,
    CurriculumConfig,
    EmaConfig,
    RandomTargetsConfig,
    Run,
    model_for,
)
from entp.engine.choice import Choice
from entp.model import Transformer
from entp.tasks.addition import Addition
from entp.tasks.base import IGNORE, Batch, Split, Task
from entp.training import cuda_graph
from entp.training.cover import (
    MOST_MISSES,
    Cover,
    joinable,
    joined,
    prefix_rows,
    ranks,
    widened,
    without_lengths,
)
from entp.training.cuda_graph import EAGER_STEPS, LOOK_AHEAD, MOST_COVER, NOBODY, Stepper
from entp.training.distributed import World
from entp.training.drawn import drawn
from entp.training.forward import Forward
from entp.training.gradients import gradients
from entp.training.inputs import Inputs, make_inputs, step_arrays
from entp.training.prefix_rows import PrefixRows, reads_rows
from entp.training.techniques.base import Technique

CPU = torch.device("cpu")
VOCAB = 11


def ragged(
    seed: int, size: int = 6, longest: int = 9, last: int = 3, dim: int | None = None
) -> Batch:
    """Rows of random lengths, with targets after each of the last tokens, and position ids and
    weights that are all different."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest + 1, size)
    shape = (size, int(lengths.max()))
    at = np.arange(shape[1])
    real = (at < lengths[:, None]) & (at >= lengths[:, None] - last)
    ids = np.sort(rng.integers(0, 30, shape), axis=1)
    weights = 3 * rng.random(shape) * (rng.random(shape) > 0.2)
    x: Any = rng.integers(0, VOCAB, shape)
    y: Any = np.where(real, rng.integers(0, VOCAB, shape), IGNORE)
    if dim is not None:
        x = rng.normal(size=(*shape, dim))
        x[at >= lengths[:, None]] = np.nan  # nothing may read it
        y = np.where(real, rng.normal(size=shape), IGNORE)
    return Batch(x, y, lengths, ids, weights)


@dataclass(frozen=True)
class Ragged(Task):
    """Sequences of 2 to `longest` tokens; targets after the last four of each."""

    name: ClassVar[str] = "ragged"
    longest: int = 9
    extras: bool = True
    """Whether there are position ids and loss weights."""
    steps_to_longest: int = 0
    """The steps in which sequences grow to their full length."""

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": VOCAB, "context_length": 30}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        longest = self.longest
        if step < self.steps_to_longest:
            longest = 4
        batch = ragged(1000 * seed + step, size, longest, last=4)
        return batch if self.extras else replace(batch, position_ids=None, loss_weights=None)


def ragged_run(task: Task | None = None, **changes: Any) -> Run:
    task = task or Ragged()
    model = model_for(task, "small", layers=2, heads=2, width=16)
    return small_run(task=task, model=model, **changes)


# Exact


def step_gradient(model: Transformer, batch: Batch, how: Forward) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradient of a training step."""
    inputs = make_inputs(step_arrays(batch, 0, [], World()), batch, how, model, CPU)
    inputs.arrays["x"] = inputs["x"].double() if inputs["x"].is_floating_point() else inputs["x"]
    loss, found = gradients(model, inputs, how)
    return loss, [torch.zeros_like(p) if g is None else g for p, g in found.items()]


def how_for(mode: str, loss: str = "cross_entropy", budget: int | None = None) -> Forward:
    return Forward(mode, None, loss, "auto", budget, "fp32")


def covered_by(batch: Batch, *others: Batch) -> Batch:
    """The batch in a cover that holds the others too."""
    cover = Cover()
    for one in (batch, *others):
        cover.grow(one)
    found = cover(batch)
    assert found is not None
    return found


EXTRAS: dict[str, dict[str, Any]] = {
    "all": {},
    "no position ids": {"position_ids": None},
    "no weights": {"loss_weights": None},
    "neither": {"position_ids": None, "loss_weights": None},
}


@pytest.mark.parametrize("mode", ["entp", "decoder", "refresh-3"])
@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS.keys())
@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
def test_covered_batch_has_the_loss_and_gradients_of_the_batch(
    mode: str, extras: dict[str, Any], positions: str
) -> None:
    model = random_model(position_embedding=positions)
    batch = replace(ragged(0), **extras)
    wide = covered_by(batch, ragged(1, longest=14), ragged(2, last=6))
    assert wide.lengths is None
    assert wide.y.shape[1] > batch.y.shape[1]
    assert wide.target_mask.sum() > 1.5 * batch.target_mask.sum()
    loss, wanted = step_gradient(model, batch, how_for(mode))
    for budget in (None, 40):
        same, found = step_gradient(model, wide, how_for(mode, budget=budget))
        assert float(same) == pytest.approx(float(loss), rel=1e-12)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert any(g.abs().max() > 1e-3 for g in wanted)


@pytest.mark.parametrize("mode", ["entp", "decoder", "refresh-3"])
def test_covered_vectors_have_the_loss_and_gradients_of_the_batch(mode: str) -> None:
    """Numbers to be predicted from vectors, whose padding is not a number."""
    model = random_model(input_dim=3, outputs=1)
    batch, how = ragged(0, dim=3), how_for(mode, "squared_error")
    wide = covered_by(batch, ragged(1, longest=14, dim=3))
    assert np.isfinite(wide.x).all()
    assert wide.y.dtype == np.float32
    (loss, wanted), (same, found) = (step_gradient(model, one, how) for one in (batch, wide))
    assert float(same) == pytest.approx(float(loss), rel=1e-12)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_targets_of_weight_zero_change_no_gradient_if_all_weights_are_zero() -> None:
    batch = ragged(0)
    nothing = replace(batch, loss_weights=np.zeros(batch.y.shape))
    loss, found = step_gradient(random_model(), covered_by(nothing), how_for("entp"))
    assert loss == 0
    assert all(not g.any() for g in found)


# The cover itself


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6))
def test_cover_gives_all_batches_one_shape_and_the_same_targets(seeds: list[int]) -> None:
    batches = [ragged(seed, longest=4 + seed % 9, last=1 + seed % 5) for seed in seeds]
    cover = Cover()
    for batch in batches:
        cover.grow(batch)
    assert not any(cover.grow(batch) for batch in batches)
    wide = [cover(batch) for batch in batches]
    for batch, one in zip(batches, wide, strict=True):
        assert one is not None
        assert one.x.shape == (6, cover.width)
        assert np.array_equal(one.target_mask, cover.mask)
        assert cover.rows == prefix_rows(one)
        own = in_order(widened(batch, cover.width))
        assert own.lengths is not None
        assert own.loss_weights is not None
        assert np.array_equal(one.y[own.target_mask], own.y[own.target_mask])
        assert np.array_equal(one.loss_weights, np.where(own.target_mask, own.loss_weights, 0))
        real = np.arange(cover.width) < own.lengths[:, None]
        assert np.array_equal(one.x, np.where(real, own.x, 0))
        assert one.weight_sum == pytest.approx(batch.weight_sum)


def in_order(batch: Batch) -> Batch:
    """The batch with its rows in the order of a cover's."""
    order = ranks(batch.target_mask)
    arrays = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    return Batch(**{name: a[order] for name, a in arrays.items() if a is not None})


def test_cover_grows_and_never_shrinks() -> None:
    cover, long, short = Cover(), ragged(0, longest=12, last=1), ragged(1, longest=4)
    assert cover.grow(short)
    width = cover.width
    assert cover.grow(long)
    assert cover.width == long.y.shape[1] > width
    assert not cover.grow(short)
    mask = cover.mask.copy()
    assert not mask.all()
    assert cover.grow(ragged(0, longest=12, last=12))  # more targets, the same width
    assert (cover.mask & mask).sum() == mask.sum() < cover.mask.sum()
    assert cover.width == mask.shape[1]


def test_cover_waits_for_many_misses_before_it_grows() -> None:
    cover, wide = Cover(), [ragged(seed, longest=12) for seed in range(MOST_MISSES)]
    cover.grow(ragged(0, longest=5))
    before = cover.width
    assert not any(cover.miss(batch) for batch in wide[:-1])
    assert cover.width == before
    assert cover.miss(wide[-1])
    assert all(cover.holds(batch) for batch in wide)
    assert not cover.miss(ragged(0, longest=20))  # counted anew


def test_rows_of_like_lengths_share_a_place_in_the_cover() -> None:
    """Those in the middle of a batch hardly differ: their targets are not those of all rows."""
    task, cover = Addition(digits=10, train_examples=1000, sampling="lengths"), Cover()
    batches = [task.batch(0, "train", step, 64) for step in range(LOOK_AHEAD)]
    for batch in batches:
        cover.grow(batch)
    every = np.tile(cover.mask.any(0), (64, 1))
    assert 2 * cover.rows < int(np.arange(1, cover.width + 1) @ every.sum(0))
    later = [task.batch(0, "train", step, 64) for step in range(1000, 1200)]
    assert sum(cover.holds(batch) for batch in later) > 0.95 * len(later)


def test_cost_of_a_cover_is_in_rows_of_its_mode() -> None:
    batch = Batch(np.zeros((2, 4)), np.array([[IGNORE, 1, 1, IGNORE], [IGNORE] * 3 + [1]]))
    cover = Cover()
    cover.grow(batch)
    assert prefix_rows(batch) == 2 + 3 + 4
    assert cover.cost(batch, "entp") == pytest.approx(2 * (2 + 3 + 4) / 9)  # both are neighbours
    assert cover.cost(batch, "decoder") == 1
    cover.grow(widened(batch, 8))
    assert cover.cost(batch, "decoder") == 2
    assert cover.cost(batch, "entp") == 2  # a column without targets costs nothing


@given(
    seed=st.integers(0, 10**6),
    last=st.integers(1, 3),
    positions=st.sampled_from(["learned", "rotary", "sinusoidal", "relative", "none"]),
)
def test_rows_of_prefixes_have_the_loss_and_gradients_of_the_batch(
    seed: int, last: int, positions: str
) -> None:
    """By the model's own forward pass in mode prefix-lm, whatever its positions are."""
    model = random_model(seed, vocab=VOCAB, context_length=30, position_embedding=positions)
    batch, shape = ragged(seed, last=last), PrefixRows()
    for other in (batch, ragged(seed + 1, last=last), ragged(seed + 2, longest=14, last=last)):
        shape.grow(other)
    alone = shape(batch)
    assert alone is not None
    assert alone.x.shape == (shape.count, shape.width)
    loss, gradient = step_gradient(model, batch, how_for("entp"))
    other, found = step_gradient(model, alone, how_for("prefix-lm"))
    assert torch.allclose(loss, other, rtol=1e-6)
    for one, two in zip(gradient, found, strict=True):
        assert torch.allclose(one, two, rtol=1e-6, atol=1e-9)


def test_rows_of_prefixes_of_vectors_and_plain_positions() -> None:
    batch, shape = replace(ragged(3, dim=2), position_ids=None, loss_weights=None), PrefixRows()
    shape.grow(batch)
    shape.grow(ragged(4, size=9, longest=12))
    alone = shape(batch)
    assert alone is not None
    assert not np.isnan(alone.x).any()
    used = len(batch.row)
    assert used < shape.count
    for m, (row, end) in enumerate(zip(batch.row, batch.position, strict=True)):
        order = [end, *range(end)]
        assert np.array_equal(alone.x[m, : end + 1], batch.x[row, order])
        assert alone.position_ids is not None
        assert alone.position_ids[m, : end + 1].tolist() == order
    assert alone.target_mask.sum() == shape.count == alone.target_mask[:, 0].sum()
    assert alone.loss_weights is not None
    assert alone.loss_weights[:, 0].tolist() == [1.0] * used + [0.0] * (shape.count - used)
    outside = replace(batch, y=np.zeros(batch.y.shape))
    shape.grow(outside)
    assert shape(outside) is None


@pytest.mark.parametrize("digits", [2, 3])
def test_sums_are_covered_at_a_low_cost(digits: int) -> None:
    """Lines of addition, the padded batches that are trained on most."""
    task, cover = Addition(digits=digits, train_examples=1000), Cover()
    batches = [task.batch(0, "train", step, 64) for step in range(30)]
    for batch in batches:
        cover.grow(batch)
    for mode in ("entp", "decoder"):
        assert max(cover.cost(batch, mode) for batch in batches) < MOST_COVER / 1.5


def test_batch_with_targets_in_its_padding_is_not_covered() -> None:
    """There the model's outputs are 0, whatever its weights."""
    batch = ragged(0)
    assert batch.lengths is not None
    shorter = replace(batch, lengths=np.maximum(1, batch.lengths - 1))
    cover = Cover()
    cover.grow(shorter)
    assert cover(shorter) is None
    assert without_lengths(shorter) is shorter


def test_padding_without_lengths_is_valid_whatever_it_was() -> None:
    batch = ragged(0)
    assert batch.position_ids is not None
    assert batch.lengths is not None
    past = np.arange(batch.y.shape[1]) >= batch.lengths[:, None]
    bad = replace(
        batch, x=np.where(past, 10**6, batch.x), position_ids=np.where(past, -7, batch.position_ids)
    )
    plain = without_lengths(bad)
    assert plain.lengths is None
    assert plain.position_ids is not None
    assert not plain.x[past].any()
    assert not plain.position_ids[past].any()
    assert np.array_equal(plain.x[~past], batch.x[~past])
    assert without_lengths(plain) is plain


def test_joined_batches_are_one_after_the_other() -> None:
    one, two = ragged(0, longest=5), ragged(1, size=4, longest=9)
    one, two = (replace(batch, note=10 * np.arange(len(batch.x))) for batch in (one, two))
    both = joined([one, two])
    assert both.x.shape == (10, two.x.shape[1])
    for name in ("targets", "lengths", "note"):
        found = [getattr(batch, name) for batch in (one, two)]
        assert np.array_equal(getattr(both, name), np.concatenate(found))
    for name in ("x", "position_ids", "loss_weights"):
        assert np.array_equal(getattr(both, name)[:6, : one.x.shape[1]], getattr(one, name))
        assert np.array_equal(getattr(both, name)[6:], getattr(two, name))
    assert joined([one]) is one


def test_batches_are_joined_only_if_they_have_the_same_arrays() -> None:
    one, other = ragged(0), ragged(1, longest=14)
    assert joinable(one, other)
    for name in ("position_ids", "lengths", "loss_weights"):
        assert not joinable(one, replace(other, **{name: None}))
    assert not joinable(one, replace(other, note=np.arange(6)))
    bare, wide = replace(one, lengths=None), replace(other, lengths=None)
    assert joinable(bare, bare)
    assert not joinable(bare, wide)  # nothing says where the shorter rows end
    assert not joinable(ragged(0, dim=2), ragged(0, dim=3))
    assert not joinable(ragged(0, dim=2), one)


# Steps


class Captured:
    """A stand-in for a graph: computes its step from the arrays that a graph would be given."""

    def __init__(self, stepper: Stepper, how: Forward, inputs: Inputs, _: object) -> None:
        self.stepper, self.how, self.inputs = stepper, how, inputs

    def replay(self, arrays: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        assert set(arrays) == set(self.inputs.arrays)
        for name, tensor in self.inputs.arrays.items():
            assert arrays[name].shape == tensor.shape
            tensor.copy_(arrays[name])
        loss, norm, _ = self.stepper._update(self.how, self.inputs, NOBODY)
        return loss, norm


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steppers that capture on a CPU, where they would on CUDA."""

    def eager(stepper: Stepper, ready: Any, stop: Any) -> Any:
        return stepper._update(ready.how, stepper._inputs(*ready), stop)

    monkeypatch.setattr(cuda_graph, "_Captured", Captured)
    monkeypatch.setattr(Stepper, "_eager", eager)
    monkeypatch.setattr(cuda_graph, "choose", lambda *_: Choice("triton", "as on CUDA"))


def capturing(run: Run) -> Stepper:
    stepper = new_stepper(run)
    stepper.stream = object()  # type: ignore[assignment]
    return stepper


def go(stepper: Stepper, run: Run, steps: int) -> list[tuple[float, int]]:
    """The loss of each step, and how many graphs there are after it."""
    found = []
    for _ in range(steps):
        step = stepper.state.step
        batch = run.task.batch(run.seed, "train", step, stepper.plan.batch_size(step))
        found.append((float(stepper(batch).loss), len(stepper.graphs)))
        stepper.state.step += 1
    return found


def assert_as_plain_steps(run: Run, found: list[tuple[float, int]]) -> None:
    plain = go(new_stepper(run), run, len(found))
    losses = [loss for loss, _ in found]
    assert losses == pytest.approx([loss for loss, _ in plain], rel=1e-4)
    assert not any(number for _, number in plain)


def warm(stepper: Stepper, run: Run) -> None:
    """What warming up does for covers."""
    stepper._forget_another_model()
    for part in stepper.plan.segments(0, run.steps):
        stepper._first_step(run.task, run.seed, part, stepper.how[stepper.plan.mode(part[0])])


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("extras", [True, False], ids=["ids and weights", "tokens"])
@pytest.mark.parametrize("mode", ["entp", "decoder", "refresh-3"])
def test_padded_steps_are_captured_and_follow_plain_ones(mode: str, extras: bool) -> None:
    run = ragged_run(Ragged(extras=extras), mode=mode, steps=20)
    stepper = capturing(run)
    warm(stepper, run)
    found = go(stepper, run, 20)
    assert [number for _, number in found] == [0] * EAGER_STEPS + [1] * (20 - EAGER_STEPS)
    assert_as_plain_steps(run, found)


@pytest.mark.usefixtures("graphs")
def test_warm_up_reads_the_batches_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are looked at, and no further than the steps of one size."""
    run = ragged_run(Ragged(steps_to_longest=30), steps=200)
    stepper = capturing(run)
    warm(stepper, run)
    batches = [run.task.batch(0, "train", step, 8) for step in range(LOOK_AHEAD)]
    assert stepper.covers[8].width == max(b.y.shape[1] for b in batches) > 4
    monkeypatch.setattr(cuda_graph, "LOOK_AHEAD", 10)
    stepper = capturing(run)
    warm(stepper, run)
    assert stepper.covers[8].width == 4


@pytest.mark.usefixtures("graphs")
def test_graphs_of_an_outgrown_cover_are_dropped() -> None:
    """Once many batches did not fit, which ran as they are; the step is captured anew, after twice
    as many eager steps."""
    run = ragged_run(Ragged(steps_to_longest=20), steps=90)
    stepper = capturing(run)
    found = go(stepper, run, 90)
    numbers = [number for _, number in found]
    assert numbers[19] == 1
    dropped = numbers.index(0, 20)
    assert dropped >= 20 + MOST_MISSES - 1
    assert stepper.outgrown["Cover", 8] >= 1
    assert numbers.index(1, dropped) >= dropped + 2 * EAGER_STEPS
    assert numbers[-1] == 1
    assert_as_plain_steps(run, found)


@dataclass(frozen=True)
class Spread(Ragged):
    """One target a sequence, after 1 to 30 tokens: covering all columns costs many times that."""

    name: ClassVar[str] = "spread"

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        return ragged(1000 * seed + step, size, longest=30, last=1)


def warmed(run: Run) -> Stepper:
    stepper = capturing(run)
    warm(stepper, run)
    return stepper


@pytest.mark.usefixtures("graphs")
def test_batches_that_cost_too_much_covered_are_captured_by_prefix() -> None:
    run = ragged_run(Spread(), steps=40)
    stepper = warmed(run)
    batch = run.task.batch(0, "train", 0, 8)
    assert stepper.covers[8].cost(batch, "entp") > MOST_COVER
    assert stepper.prefix_rows[8].cost(batch, "entp") < MOST_COVER
    found = go(stepper, run, 20)
    assert [number for _, number in found] == [0] * EAGER_STEPS + [1] * (20 - EAGER_STEPS)
    assert_as_plain_steps(run, found)
    decoder = ragged_run(Spread(), mode="decoder", steps=40)
    stepper = warmed(decoder)
    assert go(stepper, decoder, 30)[-1][1] == 1  # there only the width counts
    assert not stepper.prefix_rows


@pytest.mark.usefixtures("graphs")
def test_batches_that_cost_too_much_in_each_shape_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = ragged_run(Spread(), steps=40)
    monkeypatch.setattr(cuda_graph, "MOST_ROWS", 100)
    found = go(warmed(run), run, 10)
    assert not any(number for _, number in found)
    assert found == go(new_stepper(run), run, 10)


class ByPlace(Transformer):
    """Its own forward pass tells tokens by their places, whatever their position ids are."""

    def encode(self, x: Tensor, position_ids: Tensor | None = None, **mask: Any) -> Tensor:
        return super().encode(x, None, **mask)


class WithoutMasks(Transformer):
    """Its own forward pass takes no masks."""

    def encode(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().encode(x, position_ids)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("kind", [ByPlace, WithoutMasks])
def test_models_that_do_not_read_rows_run_as_they_are(
    kind: type[Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ragged_run(Spread(extras=False), steps=40)
    stepper = warmed(run)
    stepper.state.model.__class__ = kind
    monkeypatch.setattr(Stepper, "_can_capture", lambda stepper, how: True)
    stepper.in_rows = None
    assert stepper.covers[8].cost(run.task.batch(0, "train", 0, 8), "entp") > MOST_COVER
    assert stepper._ready(stepper.how["entp"], run.task.batch(0, "train", 0, 8)) is None
    assert stepper.in_rows is False


def test_models_are_compared_with_gradients_on_prefixes_that_can_tell() -> None:
    """Attention that adds nothing hides in outputs that places were taken for positions."""
    model = random_model(vocab=VOCAB, context_length=30, position_embedding="rotary")
    model.__class__ = ByPlace
    batch = replace(ragged(0, longest=8), position_ids=None)
    assert reads_rows(model, how_for("entp"), batch, CPU) is False
    with torch.no_grad():
        for block in model.blocks:
            block.proj.weight.zero_()
    assert reads_rows(model, how_for("entp"), batch, CPU) is False
    model.__class__ = Transformer
    assert reads_rows(model, how_for("entp"), batch, CPU) is True
    first = replace(batch, y=np.where(np.arange(batch.y.shape[1]) == 0, batch.x, IGNORE))
    assert reads_rows(model, how_for("entp"), first, CPU) is None


@dataclass(frozen=True)
class SometimesEmpty(Spread):
    """Every third batch has no target at all."""

    name: ClassVar[str] = "sometimes-empty"

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = super().batch(seed, split, step, size)
        return replace(batch, y=np.full(batch.y.shape, IGNORE)) if step % 3 == 2 else batch


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("mode", ["entp", "decoder", "refresh-3"])
def test_batches_without_targets_run_as_they_are(mode: str, size: int) -> None:
    """Gradients that are not there are not 0: momentum and decay would go on."""
    run = ragged_run(SometimesEmpty(extras=False), mode=mode, steps=30, batch_size=size)
    found = go(warmed(run), run, 24)
    assert found[-1][1] >= 1
    assert_as_plain_steps(run, found)


@pytest.mark.usefixtures("graphs")
def test_rows_of_prefixes_stay_within_the_token_budget() -> None:
    run = ragged_run(Spread(), steps=40, train={"token_budget": 60})
    stepper = warmed(run)
    assert stepper.prefix_rows[8].rows <= 60
    found = go(stepper, run, 10)
    assert not any(number for _, number in found)
    shape, wide = PrefixRows(most=40), ragged(0, longest=20, last=1)
    shape.grow(wide)
    assert not shape.holds(wide)
    shape.grow(ragged(1, size=3, longest=5, last=1))
    assert 0 < shape.rows <= 40


@pytest.mark.usefixtures("graphs")
def test_prompts_that_come_and_go_have_graphs_of_their_own() -> None:
    run = ragged_run(Prompted(extras=False), mode="prefix-lm", steps=60)
    stepper, plain = warmed(run), new_stepper(run)
    for one in (stepper, plain):
        one.how["prefix-lm"] = replace(one.how["prefix-lm"], prefix_length=1)
    losses: dict[Stepper, list[float]] = {stepper: [], plain: []}
    for step in range(30):
        batch = run.task.batch(run.seed, "train", step, 8)
        if step % 2:
            batch = replace(batch, prefix_lengths=None)
        for one, found in losses.items():
            found.append(float(one(batch).loss))
            one.state.step += 1
    assert len(stepper.graphs) == 2
    assert losses[stepper] == pytest.approx(losses[plain], rel=1e-4)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("mode", ["entp", "decoder", "refresh-3"])
@pytest.mark.parametrize("count", [1, 3])
def test_padded_steps_with_random_targets_are_captured(mode: str, count: int) -> None:
    """Their draws are part of the batch; each step has others."""
    few = RandomTargetsConfig(count)
    run = ragged_run(Ragged(extras=False), mode=mode, steps=40, random_targets=few)
    found = go(warmed(run), run, 20)
    assert found[-1][1] == 1
    assert_as_plain_steps(run, found)


@pytest.mark.usefixtures("graphs")
def test_padded_draws_of_weighted_targets_run_as_they_are() -> None:
    few = RandomTargetsConfig(2)
    run = ragged_run(Ragged(extras=True), mode="decoder", steps=40, random_targets=few)
    found = go(warmed(run), run, 8)
    assert not any(number for _, number in found)
    assert_as_plain_steps(run, found)


@dataclass(frozen=True)
class Prompted(Ragged):
    """Each sequence has a prompt of its own."""

    name: ClassVar[str] = "prompted"
    beyond: int = 0
    """Tokens of padding in a prompt."""

    @property
    def has_prefix(self) -> bool:
        return True

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = super().batch(seed, split, step, size)
        assert batch.lengths is not None
        first = np.maximum(1, batch.lengths // 2)
        if self.beyond:
            first = batch.lengths + self.beyond
        return replace(batch, prefix_lengths=first)


@pytest.mark.usefixtures("graphs")
def test_padded_steps_with_prompts_are_captured_unless_prompts_are_padded() -> None:
    run = ragged_run(Prompted(), mode="prefix-lm", steps=40)
    found = go(warmed(run), run, 20)
    assert found[-1][1] == 1
    assert_as_plain_steps(run, found)
    decoder = ragged_run(Prompted(), mode="decoder", steps=40)
    assert go(warmed(decoder), decoder, 20) != found
    padded = ragged_run(Prompted(beyond=1), mode="prefix-lm", steps=40)
    assert not go(warmed(padded), padded, 8)[-1][1]


class ReadsTargets(Technique):
    """Hands the targets to the step."""

    def arrays(self, step: int, batch: Batch, world: World) -> dict[str, Tensor]:
        return {"own": torch.from_numpy(batch.y)}


class Chooses(Technique):
    """Decides which predictions carry the loss."""

    def choose(self, model: Any, how: Forward, inputs: Inputs) -> Inputs:
        return inputs


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("technique", [ReadsTargets, Chooses])
def test_techniques_that_read_targets_get_them_as_they_are(technique: type[Technique]) -> None:
    run = ragged_run(steps=40)
    stepper = capturing(run)
    stepper.state.techniques.append(technique(run))
    assert not any(number for _, number in go(stepper, run, EAGER_STEPS + 3))
    assert not stepper.covers


@pytest.mark.usefixtures("graphs")
def test_padded_steps_are_captured_with_an_average_and_after_a_curriculum() -> None:
    """Not in mode random-prefix, which reads the targets and where padding counts."""
    run = ragged_run(steps=24, ema=EmaConfig(3), curriculum=CurriculumConfig(8, "random-prefix"))
    stepper = capturing(run)
    warm(stepper, run)
    found = go(stepper, run, 24)
    assert not any(number for _, number in found[: 8 + EAGER_STEPS])
    assert found[-1][1] == 1
    assert_as_plain_steps(run, found)


@pytest.mark.usefixtures("graphs")
def test_padding_is_covered_in_one_process_and_with_graphs_only() -> None:
    run = ragged_run()
    batch = run.task.batch(0, "train", 0, 8)
    prefix = replace(Forward.of(run), mode="prefix-lm", prefix_length=2)
    for stepper, how, can in (
        (new_stepper(run), Forward.of(run), True),
        (new_stepper(run, world=World(0, 2)), Forward.of(run), False),
        (new_stepper(ragged_run(train={"cuda_graph": False})), Forward.of(run), False),
        (new_stepper(run), prefix, True),
    ):
        stepper._forget_another_model()
        assert stepper._can_capture(how) == can
        short = int(batch.lengths.min()) < 2
        assert (drawn(batch, how, 0, []) is None) == (how is prefix and short)


@pytest.mark.usefixtures("graphs")
def test_padded_batches_of_two_sizes_have_covers_of_their_own() -> None:
    run = ragged_run(steps=30, batch_schedule=BatchScheduleConfig(12, 12))
    stepper = capturing(run)
    warm(stepper, run)
    found = go(stepper, run, 30)
    assert set(stepper.covers) == {8, 12}
    assert found[-1][1] == 2
    assert_as_plain_steps(run, found)


def test_batch_without_padding_needs_no_cover() -> None:
    plain = small_run()
    stepper = capturing(plain)
    stepper.model = None
    first = stepper._first_step(plain.task, 0, range(5), Forward.of(plain)).batch
    assert np.array_equal(first.y, plain.task.batch(0, "train", 0, 8).y)
    assert not stepper.covers
