"""Gradients of chosen predictions: their expectation is the gradient of all, and a run with them
continues as any other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import FLAGS, TASK, small_run
from small_runs import entp as command
from torch import Tensor

import entp
from entp.config import OptimConfig, Run, StartConfig, TrainConfig, model_for
from entp.errors import InputError
from entp.tasks.base import IGNORE, SPLITS, Batch, Split, Task
from entp.tasks.counting import Count3
from entp.training import checkpoint, selection, step
from entp.training.distributed import World
from entp.training.evaluate import loss_rows
from entp.training.loggers import read_metrics
from entp.training.step import State, Stepper, train_step
from entp.training.techniques.curriculum import draw_prefixes
from entp.training.techniques.importance_sampling import (
    Prices,
    Selection,
    chances,
    check_take,
    draw,
    errors,
    places_of,
    renewed,
    starts,
)
from entp.training.trainer import new_state

CPU = torch.device("cpu")


def some_errors(sequences: int, places: int, seed: int) -> Tensor:
    """Errors as they are late in training: most of them small."""
    return (
        torch.rand(sequences, places, generator=torch.Generator().manual_seed(seed)).double() ** 6
    )


def trained(run: Run, steps: int = 30) -> State:
    """A model that has learned a little, in float64, so that its errors differ."""
    state = new_state(run, CPU)
    state.model.double()
    for number in range(steps):
        train_step(run, state, run.task.batch(1, "train", number, run.batch_size), CPU, World())
    return state


def chosen_here(
    taken: tuple[int, ...], run: Run, tried: tuple[int, ...] = (8,) * 6, as_decoder: bool = False
) -> Selection:
    places = places_of(run.task.batch(0, "train", 0, run.batch_size), run.task)
    ones = torch.ones(len(places))
    return Selection(places, run.batch_size, ones, ones.clone(), tried, taken, as_decoder)


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 99), st.data())
def test_chances(sequences: int, places: int, seed: int, data: Any) -> None:
    """They add up to the numbers taken, none is above 1, and among those below 1 they are in
    proportion to the errors."""

    def numbers(*most: int) -> Tensor:
        return torch.tensor([data.draw(st.integers(1, m)) for m in most])

    tried = numbers(*[sequences] * places)
    taken = numbers(*tried.tolist())
    wanted = torch.arange(sequences)[:, None] < tried
    found = torch.where(wanted, some_errors(sequences, places, seed), 0.0)
    chance = chances(found, tried, taken)
    assert chance.max() <= 1
    assert torch.equal(chance > 0, wanted)
    assert torch.allclose(chance.sum(0), taken.double(), rtol=1e-9)
    raised = found + selection.FLOOR * found.sum(0) / tried
    for n in range(places):
        below = (chance[:, n] < 1) & wanted[:, n]
        ratio = chance[below, n] / raised[below, n]
        assert ratio.numel() == 0 or float(ratio.max() / ratio.min()) == pytest.approx(1, rel=1e-6)
        sure = wanted[:, n] & ~below
        assert (
            not sure.any() or ratio.numel() == 0 or raised[sure, n].min() * ratio.max() >= 1 - 1e-6
        )


@pytest.mark.parametrize(
    ("as_decoder", "least"),
    [(False, 1 / 11), (True, 1 / 2)],
    ids=["own errors", "a decoder's errors"],
)
def test_no_chance_is_next_to_0(as_decoder: bool, least: float) -> None:
    """A prediction without an error counts by at most 11 times what it would if chances were equal,
    or by twice."""
    kept = chosen_here((2,) * 6, small_run(), as_decoder=as_decoder)
    found = torch.zeros(8, 6)
    found[:4] = 1.0
    chance = chances(found, torch.full((6,), 8), torch.full((6,), 2), kept.floor)
    assert torch.allclose(chance[4:], torch.tensor(least * 2 / 8).double())


def test_chances_without_errors_are_equal() -> None:
    chance = chances(torch.zeros(4, 2), torch.tensor([4, 3]), torch.tensor([1, 2]))
    assert torch.allclose(chance, torch.tensor([[1 / 4, 2 / 3]] * 3 + [[1 / 4, 0]]).double())


def test_drawn_by_their_chances_and_none_twice() -> None:
    """The share of all starts at which a prediction is taken is its chance, to the width of the
    grid of starts."""
    tried, taken, grid = torch.tensor([8, 4, 7]), (3, 1, 6), 2000
    found = torch.where(torch.arange(8)[:, None] < tried, some_errors(8, 3, 0), 0.0)
    chance = chances(found, tried, torch.tensor(taken))
    drawn = chosen_here(taken, small_run(task=TASK))
    share = torch.zeros(8, 3)
    for start in (np.arange(grid) + 0.5) / grid:
        which = draw(chance, tried, drawn.place, drawn.turn, torch.full((3,), float(start)))
        assert len({*zip(which.tolist(), drawn.place.tolist(), strict=True)}) == len(which) == 10
        share[which, drawn.place] += 1 / grid
    assert (share - chance).abs().max() < 2 / grid


def test_the_last_one_is_drawn_where_chances_add_up_to_a_little_less() -> None:
    tenths = torch.full((10, 1), 0.1, dtype=torch.float64)
    assert float(tenths.cumsum(0)[-1]) < 1
    start, first = torch.tensor([np.nextafter(1.0, 0.0)]), torch.zeros(1, dtype=torch.long)
    assert draw(tenths, torch.tensor([10]), first, first, start).tolist() == [9]


class Sums(Task):
    """A task of numbers, for its loss."""

    loss: ClassVar[Literal["cross_entropy", "squared_error"]] = "squared_error"


@pytest.mark.parametrize("task", [TASK, Sums()], ids=["tokens", "numbers"])
def test_errors_are_the_sizes_of_the_losss_gradients(task: Task) -> None:
    """Up to a constant."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(20, 10 if task is TASK else 1, generator=generator, requires_grad=True)
    targets = torch.randint(0, 10, (20,), generator=generator)
    (gradient,) = torch.autograd.grad(loss_rows(task, outputs, targets).sum(), outputs)
    ratio = errors(task, outputs.detach(), targets) / gradient.norm(dim=1)
    assert torch.allclose(ratio, ratio[:1], rtol=1e-5)


@pytest.mark.parametrize("as_decoder", [False, True], ids=["own errors", "a decoder's errors"])
@pytest.mark.parametrize("budget", [None, 40])
def test_the_expected_gradient_is_that_of_all(budget: int | None, as_decoder: bool) -> None:
    """Exactly: what is drawn changes at finitely many starts, and between them the gradients are
    averaged by the distance.

    Whichever errors it is drawn by. The loss that is reported is that of all where all were tried,
    else it is on average.
    """
    run = small_run(optim={"clip": 0.0}, train={"precision": "fp32", "token_budget": budget})
    state, batch = trained(run), run.task.batch(0, "train", 0, run.batch_size)
    whole, wanted = step._gradients(run, state.model, step._inputs(run, state, batch, CPU, World()))
    state.selection = chosen_here((1, 2, 3, 1, 4, 5), run, as_decoder=as_decoder)
    inputs = step._inputs(run, state, batch, CPU, World())
    by = inputs.chosen
    assert by is not None
    assert len(by.take_parts) == (1 if budget is None else 4)
    found, losses = step._errors(run, state.model, inputs, by.try_parts, as_decoder)
    assert as_decoder != (float(losses.sum()) == pytest.approx(float(whole), rel=1e-6))
    ends = chances(
        found[:, list(state.selection.places)], by.tried, by.taken, state.selection.floor
    ).cumsum(0)
    cuts = torch.cat([torch.zeros(1), ends.flatten() % 1, torch.ones(1)]).double().unique()
    mean: dict[Tensor, Tensor] = {}
    spread, mean_loss = 0.0, 0.0
    for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        by.start.fill_((low + high) / 2)
        total, gradients = step._gradients(run, state.model, inputs)
        assert as_decoder or float(total) == pytest.approx(float(whole), rel=1e-6)
        mean_loss += (high - low) * float(total)
        for p, g in gradients.items():
            if g is not None:
                mean[p] = mean.get(p, torch.zeros_like(p)) + (high - low) * g
        spread = max(
            spread,
            max(float((g - wanted[p]).norm()) for p, g in gradients.items() if g is not None),
        )
    size = max(float(g.norm()) for g in wanted.values() if g is not None)
    assert mean_loss == pytest.approx(float(whole), rel=1e-5)
    assert spread > 0.1 * size  # single draws differ from it
    for p, g in wanted.items():
        if g is not None:
            assert float((mean[p] - g).norm()) < 1e-5 * size  # errors are kept in float32


def test_those_tried_stand_for_all() -> None:
    """If every sequence comes first once, the mean is the gradient, and the loss, of the whole
    batch; all tried are taken."""
    run = small_run(optim={"clip": 0.0}, train={"precision": "fp32"})
    state, batch = trained(run), run.task.batch(0, "train", 0, run.batch_size)
    whole, wanted = step._gradients(run, state.model, step._inputs(run, state, batch, CPU, World()))
    state.selection = chosen_here((1, 2, 3, 4, 5, 8), run, tried=(1, 2, 3, 4, 5, 8))
    losses, mean = [], {p: torch.zeros_like(p) for p, g in wanted.items() if g is not None}
    for by in range(8):
        rolled = Batch(np.roll(batch.x, by, 0), np.roll(batch.y, by, 0))
        total, gradients = step._gradients(
            run, state.model, step._inputs(run, state, rolled, CPU, World())
        )
        losses.append(float(total))
        for p in mean:
            mean[p] += gradients[p] / 8
    assert np.mean(losses) == pytest.approx(float(whole), rel=1e-6)
    assert max(losses) > 1.001 * min(losses)
    for p, g in mean.items():
        assert (g - wanted[p]).norm() < 1e-6 * max(1.0, float(wanted[p].norm()))


def test_errors_of_a_decoder_are_those_of_its_mode() -> None:
    run = small_run(train={"precision": "fp32"})
    state, batch = trained(run), run.task.batch(0, "train", 0, run.batch_size)
    for p in state.model.parameters():
        p.data *= 8  # so that it matters what is seen
    inputs = step._inputs(run, state, batch, CPU, World())
    at = torch.from_numpy(batch.y != IGNORE)
    found, losses = step._errors(run, state.model, inputs, [at], as_decoder=True)
    outputs, targets = state.model(inputs.x, "decoder", at=at).detach(), inputs.y[at]
    miss = outputs.softmax(-1) - torch.nn.functional.one_hot(targets, outputs.shape[-1])
    assert (found[at] - miss.norm(dim=1)).abs().max() < 1e-6
    loss = torch.nn.functional.cross_entropy(outputs, targets)
    assert float(losses.sum()) == pytest.approx(float(loss), rel=1e-6)
    assert float((found - step._errors(run, state.model, inputs, [at])[0]).abs().max()) > 0.01


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 99), st.data())
def test_predictions_shared_out(batch: int, places: int, seed: int, data: Any) -> None:
    """As many as asked for, at least one at each place, and no other place deserves the last one
    much more."""
    take = data.draw(st.integers(places, places * batch))
    prices = prices_of(some_errors(batch, places, seed), tuple(range(3, 3 + places)))
    tried, taken = prices.shared_out(take)
    assert (tried == batch).all()
    assert taken.sum() == take
    assert (taken >= 1).all()
    assert (taken <= batch).all()
    wish = prices.mean / np.sqrt(prices.length)
    for more, less in itertools.permutations(range(places), 2):
        if taken[less] > 1 and taken[more] < batch:
            assert wish[more] / (taken[more] + 1) <= 1.0001 * wish[less] / (taken[less] - 1)


def test_means_follow_the_errors_of_those_tried() -> None:
    """By a hundredth of each batch; what was not tried does not count."""
    kept = chosen_here((1,) * 6, small_run(), tried=(8, 8, 4, 4, 2, 1))
    tried, found = torch.tensor(kept.tried), torch.full((8, 6), 3.0)
    kept.note(torch.where(torch.arange(8)[:, None] < tried, found, 0.0), tried)
    assert torch.allclose(kept.mean, torch.tensor(0.99 + 0.01 * 3))
    assert torch.allclose(kept.square, torch.tensor(0.99 + 0.01 * 9))
    again = Selection.restore(kept.save(), CPU)
    assert torch.equal(again.mean, kept.mean)
    assert torch.equal(again.square, kept.square)


def test_without_errors_every_place_has_its_share() -> None:
    assert prices_of(torch.zeros(8, 3).double(), (3, 3, 3)).shared_out(12)[1].tolist() == [4, 4, 4]


def test_counts_by_a_decoders_errors_are_kept_while_they_are_good_enough() -> None:
    places, found = (3, 4, 5), torch.tensor([[0.1, 0.2, 0.4]]).expand(64, 3)
    first = renewed(None, found, places, 64, take=30)
    assert first is not None
    assert first.as_decoder
    assert first.tried == (64, 64, 64)
    assert first.taken[0] < first.taken[1] < first.taken[2]
    assert renewed(first, None, places, 64, take=30) is first
    for errors_there, kept in (
        (0.26, True),
        (0.28, False),
    ):  # other numbers would be better by 2 %, by 5 %
        first.mean[1] = errors_there
        assert (renewed(first, None, places, 64, take=30) is first) == kept
    first.mean[0] = 1.0
    second = renewed(first, None, places, 64, take=30)
    assert second is not None
    assert second.mean is first.mean
    assert second.taken[0] > 2 * first.taken[0]
    assert sum(second.taken) == 30


@pytest.mark.parametrize("as_decoder", [False, True], ids=["own errors", "a decoder's errors"])
def test_kernels_give_the_same_gradients_of_the_same_choice(as_decoder: bool) -> None:
    """As rows of one prefix each, which is what the kernels see of a choice."""
    found = []
    for impl in ("packed", "triton"):
        run = small_run(train={"precision": "fp32", "impl": impl})
        state = trained(small_run(), 3)
        state.selection = chosen_here((1, 2, 3, 1, 4, 5), run, as_decoder=as_decoder)
        inputs = step._inputs(run, state, run.task.batch(0, "train", 0, run.batch_size), CPU, World())
        loss, gradients = step._gradients(run, state.model, inputs)
        found.append([loss, *(g for g in gradients.values() if g is not None)])
    assert len(found[0]) == len(found[1]) > 10
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() < 1e-6 * want.norm() + 1e-12


@dataclass(frozen=True)
class Early(Count3):
    """Count3 that asks for nothing after the last two integers, or at another place from some
    training step on."""

    name: ClassVar[str] = "early"
    moves_at: int = 10**9

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = super().batch(seed, split, step, size)
        batch.y[:, -2:] = IGNORE
        if split == "train" and step >= self.moves_at:
            batch.y[:, self.prompt_length] = IGNORE
        return batch


@pytest.mark.parametrize("task", [TASK, Early(4, 10, 10)], ids=["to the end", "not to the end"])
def test_all_taken_is_the_plain_step(task: Count3) -> None:
    run = small_run(task=task, train={"precision": "fp32"})
    batch = run.task.batch(0, "train", 0, run.batch_size)
    plain, state = trained(run), trained(run)
    numbers = (run.batch_size,) * len(places_of(batch, task))
    state.selection = chosen_here(numbers, run, tried=numbers)
    want, want_norm, _ = train_step(run, plain, batch, CPU, World())
    got, got_norm, _ = train_step(run, state, batch, CPU, World())
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    assert float(got_norm) == pytest.approx(float(want_norm), rel=1e-9)
    for p, q in zip(plain.model.parameters(), state.model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-9)


def test_the_variance_falls_with_larger_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And choosing by errors is better than choosing as many at random, for a model that knows half
    of the sequences."""
    run = small_run(optim={"clip": 0.0}, train={"precision": "fp32"})
    state, batch = trained(run), run.task.batch(0, "train", 0, run.batch_size)
    for _ in range(200):
        train_step(run, state, Batch(batch.x[:4], batch.y[:4]), CPU, World())
    _, wanted = step._gradients(run, state.model, step._inputs(run, state, batch, CPU, World()))

    def variance(count: int) -> float:
        state.selection = chosen_here((count,) * 6, run)
        inputs = step._inputs(run, state, batch, CPU, World())
        assert inputs.chosen is not None
        out = 0.0
        for number in range(40):
            inputs.chosen.start.copy_(starts(run, number, 6))
            _, found = step._gradients(run, state.model, inputs)
            out += sum(
                float((g - wanted[p]).square().sum()) for p, g in found.items() if g is not None
            )
        return out

    by_error = [variance(count) for count in (1, 3, 6)]
    assert by_error[0] > by_error[1] > by_error[2]
    monkeypatch.setattr(selection, "FLOOR", 1e6)  # all chances alike
    assert variance(3) > 1.2 * by_error[1]


def prices_of(found: Tensor, places: tuple[int, ...]) -> Prices:
    return Prices(
        np.array(places) + 1.0, found.mean(0).numpy(), found.square().mean(0).numpy(), len(found)
    )


@settings(max_examples=20)
@given(st.integers(1, 64), st.integers(1, 8), st.integers(0, 99))
def test_the_cheapest_numbers(batch: int, places: int, seed: int) -> None:
    """Possible ones, and moving any of them by a quarter makes them hardly cheaper."""
    prices = prices_of(some_errors(batch, places, seed), tuple(range(3, 3 + places)))
    tried, taken = prices.cheapest()
    assert (taken >= 1).all()
    assert (taken <= tried).all()
    assert (tried <= batch).all()
    best = prices.of(tried, taken)
    for place in range(places):
        for factor in (0.75, 1.25):
            more, others = tried.astype(float), taken.astype(float)
            others[place] = np.clip(others[place] * factor, 1, tried[place])
            more[place] = np.clip(more[place] * factor, -(-batch // 16), batch)
            assert prices.of(tried, others) > 0.97 * best
            if more[place] >= taken[place]:
                assert prices.of(more, taken) > 0.97 * best


def test_price() -> None:
    """All: a third more than the plain step, and the 1/4 more variance that is reckoned where
    taking more is no choice."""
    assert prices_of(torch.ones(8, 2), (3, 4)).of(
        np.array([8, 8]), np.array([8, 8])
    ) == pytest.approx(4 / 3 * 1.25**2)
    tenth = torch.zeros(60, 2)
    tenth[:6] = 1.0
    assert prices_of(tenth, (3, 4)).of(np.array([60, 60]), np.array([6, 6])) == pytest.approx(
        (1 / 3 + 1 / 10) * 1.25**2
    )
    for taken, variance in (
        (12, 17 / 16),
        (3, 2.0),
    ):  # twice as many as carry the errors, and half as many
        price = prices_of(tenth, (3, 4)).of(np.array([60, 60]), np.array([taken, taken]))
        assert price == pytest.approx((1 / 3 + taken / 60) * variance**2)
    half = prices_of(tenth, (3, 3)).of(np.array([60, 30]), np.array([6, 3]))
    assert half == pytest.approx((1 / 3 * 3 / 4 + 9 / 120) * ((1.25 + 2 * 1.25) / 2) ** 2)
    tried, taken = prices_of(torch.zeros(32, 3), (0, 1, 2)).cheapest()
    assert (tried.tolist(), taken.tolist()) == ([2, 2, 2], [1, 1, 1])


def test_more_are_tried_and_taken_where_errors_are_frequent() -> None:
    found = torch.zeros(640, 2)
    found[:6, 0], found[:96, 1] = 1.0, 1.0
    tried, taken = prices_of(found, (15, 15)).cheapest()
    assert tried[0] < 0.5 * tried[1]
    assert tried[1] == 640
    assert taken[1] > 3 * taken[0]


def test_it_begins_when_it_pays_and_keeps_counts_that_are_good_enough() -> None:
    """Equal errors do not pay. What paid is kept until other counts are clearly better."""
    places = (3, 4, 5)
    assert renewed(None, torch.ones(8, 3), places, 8) is None
    rare = torch.zeros(64, 3)
    rare[:6] = 1.0
    first = renewed(None, rare, places, 64)
    assert first is not None
    assert renewed(first, None, places, 64) is first
    first.mean[2] *= 4  # four times as many errors
    first.square[2] *= 4
    second = renewed(first, None, places, 64)
    assert second is not None
    assert second is not first
    assert second.mean is first.mean  # a recorded step goes on writing into it
    assert second.taken[2] / second.taken[1] > 1.5 * first.taken[2] / first.taken[1]
    second.square.copy_(second.mean**2)
    assert renewed(second, None, places, 64) is None


def test_it_begins_where_a_tenth_of_the_price_is_saved() -> None:
    for wrong, pays in ((4, True), (12, True), (16, True), (20, False), (32, False), (60, False)):
        found = torch.zeros(64, 3)
        found[:wrong] = 1.0
        prices = prices_of(found.double(), (3, 4, 5))
        assert (prices.of(*prices.cheapest()) <= 0.9) == pays
        assert (renewed(None, found, (3, 4, 5), 64) is not None) == pays


def selecting_run(**changes: Any) -> Run:
    return small_run(optim={"select": True, **changes.pop("optim", {})}, steps=12, **changes)


def taking_run(**changes: Any) -> Run:
    return small_run(optim={"take": 20, **changes.pop("optim", {})}, steps=12, **changes)


KINDS = pytest.mark.parametrize("choosing_run", [selecting_run, taking_run])


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection that begins at once, with half of what it would take, and is renewed every 4 steps."""
    monkeypatch.setattr(step, "RENEW", 4)
    monkeypatch.setattr(selection, "PAYS_BELOW", 100.0)
    cheapest = Prices.cheapest
    monkeypatch.setattr(
        Prices, "cheapest", lambda self: tuple(-(-numbers // 2) for numbers in cheapest(self))
    )


@KINDS
@pytest.mark.usefixtures("early")
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    choosing_run: Callable[..., Run], tmp_path: Path
) -> None:
    whole = entp.train(choosing_run(), tmp_path / "whole", device="cpu", quiet=True)
    entp.train(
        choosing_run(train={"max_seconds": 1e-9}), tmp_path / "parts", device="cpu", quiet=True
    )
    parts = entp.train(choosing_run(), tmp_path / "parts", device="cpu", quiet=True, resume=True)
    assert parts.step == whole.step == 12
    a, b = (entp.load(tmp_path / name, "last").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    plain = entp.train(small_run(steps=12), tmp_path / "plain", device="cpu", quiet=True)
    assert plain.metrics != whole.metrics


@pytest.mark.usefixtures("early")
def test_the_choice_is_drawn_anew_in_every_step() -> None:
    """By random numbers that no batch is made of, nor prefixes drawn by."""
    run = selecting_run()
    others = [TASK.rng(run.seed, split, 3).random(6) for split in SPLITS]
    assert not any(np.array_equal(starts(run, 3, 6).numpy(), other) for other in others)
    batch = TASK.batch(0, "train", 3, 64)
    for where in (
        *(TASK.rng(run.seed, split, 3).random(64) for split in SPLITS),
        starts(run, 3, 64).numpy(),
    ):
        assert not np.array_equal(draw_prefixes(run, 3, batch, 1.0).prefix, 4 + np.floor(6 * where))
    assert not torch.equal(starts(run, 3, 6), starts(run, 4, 6))
    assert torch.equal(starts(run, 3, 6), starts(run, 3, 6))
    assert not torch.equal(starts(run, 3, 6), starts(selecting_run(seed=1), 3, 6))


def test_it_learns_as_the_plain_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 36 sequences, all of which it knows in the end; choosing begins on the way and saves more
    than half of the tokens."""
    monkeypatch.setattr(step, "RENEW", 50)
    task = Count3(prompt_length=2, length=6, num_values=6)
    losses = {}
    for select in (False, True):
        run = Run(
            task,
            model_for(task, "small", layers=2, heads=2, width=32),
            steps=400,
            batch_size=32,
            optim=OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=20, decay_steps=400, select=select),
            train=TrainConfig(eval_every=100, checkpoint_every=100),
        )
        out = tmp_path / str(select)
        result = entp.train(run, out, device="cpu", quiet=True)
        losses[select] = result.metrics["loss"]
        assert result.metrics["exact_match"] == 1.0
        saved = checkpoint.read_trainer(checkpoint.newest(out))
        assert ("selection" in saved) == select
    kept = Selection.restore(saved["selection"], CPU)
    assert np.array(kept.taken) @ np.arange(2, 6) < 0.5 * 32 * sum(range(2, 6))
    assert losses[True] < 2 * losses[False] + 1e-3


def test_taking_some_after_a_start_learns_what_all_teach(tmp_path: Path) -> None:
    """A decoder first; then, of 128 sequences a step, the gradients of as many predictions as 8
    sequences have."""
    task = Count3(prompt_length=2, length=6, num_values=6)
    run = Run(
        task,
        model_for(task, "small", layers=2, heads=2, width=32),
        steps=500,
        batch_size=128,
        optim=OptimConfig(lr=2e-3, min_lr=2e-4, warmup_steps=20, decay_steps=250, take=8 * 4),
        train=TrainConfig(eval_every=250, eval_batches=1, checkpoint_every=250),
        start=StartConfig(steps=250, mode="random-prefix", batch_size=32, lr=1e-2),
    )
    result = entp.train(run, tmp_path, device="cpu", quiet=True)
    assert result.metrics["exact_match"] == 1.0
    first, last = (row["loss"] for row in read_metrics(tmp_path) if row["kind"] == "eval")
    assert last < 0.2 * first
    saved = checkpoint.read_trainer(checkpoint.newest(tmp_path))["selection"]
    kept = Selection.restore(saved, CPU)
    assert kept.as_decoder
    assert sum(kept.taken) == 32


def test_one_at_each_place_or_all_may_be_taken() -> None:
    for take in (6, 48):
        check_take(take, 8, tuple(range(3, 9)))
    for take in (5, 49):
        with pytest.raises(InputError, match=f"optim.take is {take}: allowed are 6, .* to 48"):
            check_take(take, 8, tuple(range(3, 9)))


def test_only_where_it_makes_sense(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"optim\.take is for mode entp"):
        small_run(mode="decoder", optim={"take": 20})
    for optim in ({"take": -1}, {"take": 20, "select": True}):
        with pytest.raises(InputError, match=r"without optim\.select, or 0"):
            small_run(optim=optim)
    for take, allowed in ((5, "6, one for each place"), (49, "to 48, all of a batch")):
        done = command(
            "train",
            "count3",
            *FLAGS,
            "--batch_size=8",
            f"--optim.take={take}",
            "--out=few",
            cwd=tmp_path,
        )
        assert done.returncode == 2
        assert allowed in done.stderr
        assert not (tmp_path / "few").exists()
    for batch, late in ((8, 3), (3, 8)):
        fewer = small_run(
            batch=batch, steps=9, optim={"take": 20, "late_batch": late, "late_at": 4}
        )
        with pytest.raises(InputError, match="to 18, all of a batch"):
            entp.train(fewer, tmp_path / "fewer", device="cpu", quiet=True)
    with pytest.raises(InputError, match=r"optim\.select is for mode entp"):
        small_run(mode="decoder", optim={"select": True})
    done = command("train", "count3", *FLAGS, "--mode=decoder", "--optim.select", cwd=tmp_path)
    assert done.returncode == 2
    assert "optim.select is for mode entp" in done.stderr
    for choosing in ("--optim.select", "--optim.take=100"):
        done = command("train", "addition", "--steps=1", choosing, "--out=sums", cwd=tmp_path)
        assert done.returncode == 2
        assert "optim.select and optim.take need predictions at the same places" in done.stderr
        assert "and addition does not have them" in done.stderr
    assert not (tmp_path / "sums").exists()
    batch = TASK.batch(0, "train", 0, 3)
    y = batch.y.copy()
    y[0, 5] = IGNORE
    for other in (Batch(batch.x, y), Batch(batch.x, batch.y, np.array([9, 9, 9]))):
        with pytest.raises(InputError, match="the same places of every sequence"):
            places_of(other, TASK)


@KINDS
@pytest.mark.usefixtures("early")
def test_a_choice_begins_with_the_errors_it_is_made_by_and_follows_them(
    choosing_run: Callable[..., Run],
) -> None:
    run = choosing_run(train={"precision": "fp32"})
    state, batch = (
        trained(small_run(train={"precision": "fp32"})),
        run.task.batch(0, "train", 0, run.batch_size),
    )
    for p in state.model.parameters():
        p.data *= 8  # so that it matters what is seen
    at = torch.from_numpy(batch.y != IGNORE)
    inputs = step._inputs(run, state, batch, CPU, World())
    by_decoder, own = (
        step._errors(run, state.model, inputs, [at], kind)[0].mean(0)[at[0]]
        for kind in (True, False)
    )
    assert not torch.allclose(by_decoder, own, atol=1e-3)
    step._prepare(run, state, batch, CPU, World())
    assert state.selection is not None
    assert torch.allclose(state.selection.mean, by_decoder if run.optim.take else own, atol=1e-6)
    before = state.selection.mean.clone()
    train_step(run, replace(state, step=1), run.task.batch(0, "train", 1, run.batch_size), CPU, World())
    assert not torch.equal(state.selection.mean, before)
    assert torch.allclose(state.selection.mean, before, rtol=0.2)


@KINDS
@pytest.mark.parametrize("moves_at", [2, 4], ids=["between", "where the choice is renewed"])
@pytest.mark.usefixtures("early")
def test_places_that_move_are_a_sentence(
    choosing_run: Callable[..., Run], moves_at: int, tmp_path: Path
) -> None:
    run = choosing_run(task=Early(4, 10, 10, moves_at))
    with pytest.raises(InputError, match="the same places of every sequence"):
        entp.train(run, tmp_path / "run", device="cpu", quiet=True)


@pytest.mark.gpu
@KINDS
@pytest.mark.usefixtures("early")
def test_recorded_steps_choose_as_plain_ones_do(
    choosing_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are decided in steps 0 and 8: there is time to record a step with either."""
    monkeypatch.setattr(step, "RENEW", 8)
    found = []
    for graph in (True, False):
        run = choosing_run(train={"precision": "fp32", "graph": graph})
        state = new_state(run, torch.device("cuda"))
        stepper = Stepper(run, state, torch.device("cuda"), World())
        stepper.warm_up()
        values = []
        for number in range(16):
            loss, norm, _ = stepper(run.task.batch(0, "train", number, run.batch_size))
            values.append((float(loss), float(norm)))
            state.step += 1
        assert bool(stepper.graphs) == graph
        assert state.selection is not None
        before = state.selection.mean.clone()
        stepper.warm_up()  # as a run that goes on from here does
        assert torch.equal(state.selection.mean, before)
        found.append((np.array(values), [p.detach().clone() for p in state.model.parameters()]))
    (a, weights), (b, others) = found
    assert a == pytest.approx(b, rel=1e-4)
    assert all(
        torch.allclose(p, q, rtol=0, atol=1e-4) for p, q in zip(weights, others, strict=True)
    )
