"""Sampled targets: the expected gradient is that of all, and a run with them continues as any
other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import TASK, new_stepper, small_run
from tiny_runs import TINY, tiny_run
from torch import Tensor

import entp
from entp.config import (
    BatchScheduleConfig,
    CurriculumConfig,
    ImportanceConfig,
    ModelConfig,
    OptimConfig,
    Run,
    TrainConfig,
    model_for,
)
from entp.errors import InputError
from entp.tasks.addition import Addition
from entp.tasks.base import IGNORE, SPLITS, Batch, Split
from entp.tasks.counting import Count3
from entp.training import checkpoint
from entp.training.cuda_graph import Stepper
from entp.training.distributed import World
from entp.training.forward import Forward
from entp.training.gradients import gradients
from entp.training.inputs import Inputs, make_inputs, step_arrays
from entp.training.loggers import read_metrics
from entp.training.state import State
from entp.training.techniques import importance_sampling
from entp.training.techniques.base import Coming
from entp.training.techniques.curriculum import draw_prefixes
from entp.training.techniques.importance_sampling import (
    ImportanceSampling,
    Prices,
    Selection,
    check_samples,
    draw,
    errors,
    probabilities,
    renewed,
    score,
    starts,
    target_positions,
)

CPU = torch.device("cpu")
FP32 = {"precision": "fp32"}
PROPOSALS = pytest.mark.parametrize("as_decoder", [False, True], ids=["entp", "decoder"])
Gradients = dict[Tensor, Tensor | None]


def some_errors(sequences: int, positions: int, seed: int) -> Tensor:
    """Errors as they are late in training: most of them small."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(sequences, positions, generator=generator).double() ** 6


def some_batch(run: Run) -> Batch:
    return run.task.batch(0, "train", 0, run.batch_size)


@cache
def trained_weights(task: Count3, model: ModelConfig) -> dict[str, Tensor]:
    """Of a model that has learned a little, so that its errors differ."""
    run = small_run(task=task, model=model, train=FP32)
    stepper = new_stepper(run)
    for number in range(20):
        stepper(run.task.batch(1, "train", number, run.batch_size))
        stepper.state.step += 1
    return stepper.state.model.state_dict()


def trained(run: Run) -> State:
    """These weights in float64, before the first step."""
    assert isinstance(run.task, Count3)
    state = new_stepper(run).state
    state.model.load_state_dict(trained_weights(run.task, run.model))
    state.model.double()
    return state


def some_selection(
    sampled: tuple[int, ...],
    run: Run,
    scored: tuple[int, ...] | None = None,
    as_decoder: bool = False,
) -> Selection:
    """scored: all, unless given."""
    positions, size = target_positions(some_batch(run), run.task.name), run.batch_size
    scored = (size,) * len(positions) if scored is None else scored
    ones = torch.ones(len(positions))
    return Selection(positions, size, ones, ones.clone(), scored, sampled, as_decoder)


def sampling(run: Run, state: State, batch: Batch, selection: Selection) -> ImportanceSampling:
    """The technique with this selection, ready for a step on the batch."""
    technique = ImportanceSampling(replace(run, importance=ImportanceConfig()))
    technique.selection = selection
    technique.prepare(state, Coming(1, batch, Forward.of(run), CPU))
    return technique


def inputs_of(
    run: Run, state: State, batch: Batch, technique: ImportanceSampling | None = None
) -> Inputs:
    arrays = step_arrays(batch, 1, [technique] if technique else [], World())
    return make_inputs(arrays, batch, Forward.of(run), state.model, CPU)


def gradients_of(
    run: Run, state: State, inputs: Inputs, technique: ImportanceSampling | None = None
) -> tuple[float, Gradients]:
    techniques = [technique] if technique else []
    loss, found = gradients(state.model, inputs, Forward.of(run), techniques)
    return float(loss), found


# Probabilities and draws


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 99), st.data())
def test_probabilities_are_proportional_to_errors_and_add_up(
    sequences: int, positions: int, seed: int, data: Any
) -> None:
    """To the numbers sampled; none is above 1, and those below 1 are in proportion."""

    def numbers(*most: int) -> Tensor:
        return torch.tensor([data.draw(st.integers(1, m)) for m in most])

    scored = numbers(*[sequences] * positions)
    sampled = numbers(*scored.tolist())
    mask = torch.arange(sequences)[:, None] < scored
    found = torch.where(mask, some_errors(sequences, positions, seed), 0.0)
    probability = probabilities(found, scored, sampled)
    assert probability.max() <= 1
    assert torch.equal(probability > 0, mask)
    assert torch.allclose(probability.sum(0), sampled.double(), rtol=1e-9)
    raised = found + importance_sampling.FLOOR * found.sum(0) / scored
    for n in range(positions):
        below = (probability[:, n] < 1) & mask[:, n]
        ratio = probability[below, n] / raised[below, n]
        if ratio.numel() == 0:
            continue
        assert float(ratio.max() / ratio.min()) == pytest.approx(1, rel=1e-6)
        sure = mask[:, n] & ~below
        assert not sure.any() or raised[sure, n].min() * ratio.max() >= 1 - 1e-6


@pytest.mark.parametrize(("as_decoder", "least"), [(False, 1 / 11), (True, 1 / 2)])
def test_probabilities_have_a_floor(as_decoder: bool, least: float) -> None:
    """A prediction without an error weighs at most 11 times as much as with equal probabilities, or
    twice as much."""
    selection = some_selection((2,) * 6, small_run(), as_decoder=as_decoder)
    found = torch.zeros(8, 6)
    found[:4] = 1.0
    eight, two = torch.full((6,), 8), torch.full((6,), 2)
    probability = probabilities(found, eight, two, selection.floor)
    assert torch.allclose(probability[4:], torch.tensor(least * 2 / 8).double())


def test_probabilities_without_errors_are_equal() -> None:
    probability = probabilities(torch.zeros(4, 2), torch.tensor([4, 3]), torch.tensor([1, 2]))
    assert torch.allclose(probability, torch.tensor([[1 / 4, 2 / 3]] * 3 + [[1 / 4, 0]]).double())


def test_draw_is_systematic_sampling() -> None:
    """None is drawn twice, and the fraction of all starts at which one is drawn is its
    probability, to the width of the grid of starts."""
    scored, sampled, grid = torch.tensor([8, 4, 7]), (3, 1, 6), 1000
    found = torch.where(torch.arange(8)[:, None] < scored, some_errors(8, 3, 0), 0.0)
    probability = probabilities(found, scored, torch.tensor(sampled))
    by = some_selection(sampled, small_run())
    fraction = torch.zeros(8, 3)
    for start in (np.arange(grid) + 0.5) / grid:
        which = draw(probability, scored, by.position, by.turn, torch.full((3,), float(start)))
        drawn = {*zip(which.tolist(), by.position.tolist(), strict=True)}
        assert len(drawn) == len(which) == 10
        fraction[which, by.position] += 1 / grid
    assert (fraction - probability).abs().max() < 2 / grid


def test_draw_gives_the_last_one_where_probabilities_add_up_to_a_little_less() -> None:
    tenths = torch.full((10, 1), 0.1, dtype=torch.float64)
    assert float(tenths.cumsum(0)[-1]) < 1
    start, first = torch.tensor([np.nextafter(1.0, 0.0)]), torch.zeros(1, dtype=torch.long)
    assert draw(tenths, torch.tensor([10]), first, first, start).tolist() == [9]


def test_starts_belong_to_seed_and_step_alone() -> None:
    """And to no split's stream, nor to the one that prefixes are drawn by."""
    assert torch.equal(starts(0, 3, 6), starts(0, 3, 6))
    assert not torch.equal(starts(0, 3, 6), starts(0, 4, 6))
    assert not torch.equal(starts(0, 3, 6), starts(1, 3, 6))
    streams = [TASK.rng(0, split, 3).random(64) for split in SPLITS]  # type: ignore[arg-type]
    assert not any(np.array_equal(starts(0, 3, 64).numpy(), stream) for stream in streams)
    prefix = draw_prefixes(0, 3, TASK.batch(0, "train", 3, 64), 1.0).prefix
    for where in (*streams, starts(0, 3, 64).numpy()):
        assert not np.array_equal(prefix, 4 + np.floor(6 * where))


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_errors_are_the_sizes_of_the_losss_gradients(loss: str) -> None:
    """Up to a constant."""
    generator = torch.Generator().manual_seed(0)
    outputs = 1 if loss == "squared_error" else 10
    values = torch.randn(20, outputs, generator=generator, requires_grad=True)
    targets = torch.randint(0, 10, (20,), generator=generator)
    how = replace(Forward.of(small_run()), loss=loss)
    (gradient,) = torch.autograd.grad(how.loss_rows(values, targets).sum(), values)
    ratio = errors(loss, values.detach(), targets) / gradient.norm(dim=1)
    assert torch.allclose(ratio, ratio[:1], rtol=1e-5)


# The expected gradient


def weighted(batch: Batch) -> Batch:
    """With weights of targets and positions of tokens."""
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.tile(np.arange(batch.x.shape[1]), (len(batch.x), 1)), axis=1)
    return replace(batch, loss_weights=rng.random(batch.y.shape) * 3, position_ids=ids)


@PROPOSALS
@pytest.mark.parametrize(
    ("budget", "change"),
    [(None, None), (15, None), (None, weighted)],
    ids=["whole", "chunks", "weights and positions"],
)
def test_expected_gradient_is_that_of_all(
    budget: int | None, change: Callable[[Batch], Batch] | None, as_decoder: bool
) -> None:
    """Exactly: what is drawn changes at finitely many starts, and between them the gradients are
    averaged by the distance.

    The loss that is reported is that of all where all were scored by ENTP, else it is on average.
    """
    run = tiny_run(batch_size=4, optim={"grad_clip": 0.0}, train={**FP32, "token_budget": budget})
    state, batch = trained(run), some_batch(run)
    batch = change(batch) if change else batch
    whole, wanted = gradients_of(run, state, inputs_of(run, state, batch))
    selection = some_selection((1, 2, 3, 3), run, as_decoder=as_decoder)
    technique = sampling(run, state, batch, selection)
    inputs, by = inputs_of(run, state, batch, technique), technique.by
    assert by is not None
    assert len(by.sampled_chunks) == (1 if budget is None else 3)
    found, _ = score(state.model, Forward.of(run), inputs, by.scored_chunks, as_decoder)
    at = found[:, list(selection.positions)]
    ends = probabilities(at, by.scored, by.sampled, selection.floor).cumsum(0)
    mean: dict[Tensor, Tensor] = {}
    spread, mean_loss = 0.0, 0.0
    for middle, width in intervals(ends):
        inputs.arrays["importance"].fill_(middle)
        total, sampled = gradients_of(run, state, inputs, technique)
        assert as_decoder or total == pytest.approx(whole, rel=1e-6)
        mean_loss += width * total
        for p, g in present(sampled):
            mean[p] = mean.get(p, torch.zeros_like(p)) + width * g
        spread = max(spread, distance(sampled, wanted))
    size = max(float(g.norm()) for _, g in present(wanted))
    assert mean_loss == pytest.approx(whole, rel=1e-5)
    assert spread > 0.1 * size  # single draws differ from it
    for p, g in present(wanted):
        assert float((mean[p] - g).norm()) < 1e-5 * size  # errors are kept in float32


def intervals(ends: Tensor) -> Iterator[tuple[float, float]]:
    """The middles and widths of the starts between which the same is drawn."""
    cuts = torch.cat([torch.zeros(1), ends.flatten() % 1, torch.ones(1)]).double().unique()
    for low, high in itertools.pairwise(cuts.tolist()):
        yield (low + high) / 2, high - low


def present(found: Gradients) -> list[tuple[Tensor, Tensor]]:
    return [(p, g) for p, g in found.items() if g is not None]


def distance(found: Gradients, wanted: Gradients) -> float:
    """The largest distance of a parameter's gradients."""
    others = dict(present(wanted))
    return max(float((g - others[p]).norm()) for p, g in present(found))


def test_scored_sequences_stand_for_all() -> None:
    """If every sequence comes first once, the mean is the gradient, and the loss, of the whole
    batch; all that are scored are sampled."""
    run = tiny_run(optim={"grad_clip": 0.0}, train=FP32)
    state, batch = trained(run), some_batch(run)
    whole, wanted = gradients_of(run, state, inputs_of(run, state, batch))
    some = (1, 3, 5, 8)
    technique = sampling(run, state, batch, some_selection(some, run, scored=some))
    losses, mean = [], {p: torch.zeros_like(p) for p, _ in present(wanted)}
    for by in range(8):
        rolled = Batch(np.roll(batch.x, by, 0), np.roll(batch.y, by, 0))
        total, found = gradients_of(run, state, inputs_of(run, state, rolled, technique), technique)
        losses.append(total)
        for p, g in present(found):
            mean[p] += g / 8
    assert np.mean(losses) == pytest.approx(whole, rel=1e-6)
    assert max(losses) > 1.001 * min(losses)
    for p, g in present(wanted):
        assert (mean[p] - g).norm() < 1e-6 * max(1.0, float(g.norm()))


@dataclass(frozen=True)
class Early(Count3):
    """Count3 without targets after the last two integers, and whose targets move at some training
    step."""

    name: ClassVar[str] = "early"
    moves_at: int = 10**9

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = super().batch(seed, split, step, size)
        batch.y[:, -2:] = IGNORE
        if split == "train" and step >= self.moves_at:
            batch.y[:, self.prompt_length] = IGNORE
        return batch


@pytest.mark.parametrize("task", [TINY, Early(2, 6, 6)], ids=["to the end", "not to the end"])
def test_sampling_all_is_the_plain_step(task: Count3) -> None:
    run = tiny_run(task=task, train=FP32)
    batch, states = some_batch(run), [trained(run), trained(run)]
    all_of_them = (run.batch_size,) * len(target_positions(batch, task.name))
    selection = some_selection(all_of_them, run, scored=all_of_them)
    states[1].techniques = [sampling(run, states[1], batch, selection)]
    found = []
    for state in states:
        state.step = 1
        stepper = new_stepper(run)
        stepper.state = state
        found.append(stepper(batch))
    (want, want_norm, _), (got, got_norm, _) = found
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    assert float(got_norm) == pytest.approx(float(want_norm), rel=1e-9)
    for p, q in zip(*(state.model.parameters() for state in states), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-9)


def test_variance_falls_with_more_samples_and_with_errors_to_go_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a model that knows half of the sequences."""
    run = tiny_run(optim={"lr": 1e-2, "grad_clip": 0.0, "warmup_steps": 0}, train=FP32)
    stepper, batch = new_stepper(run), some_batch(run)
    state = stepper.state
    state.model.double()
    for _ in range(70):
        stepper(Batch(batch.x[:4], batch.y[:4]))
    _, wanted = gradients_of(run, state, inputs_of(run, state, batch))

    def variance(count: int) -> float:
        technique = sampling(run, state, batch, some_selection((count,) * 4, run))
        inputs, out = inputs_of(run, state, batch, technique), 0.0
        for number in range(15):
            inputs.arrays["importance"].copy_(starts(0, number, 4))
            _, found = gradients_of(run, state, inputs, technique)
            others = dict(present(wanted))
            out += sum(float((g - others[p]).square().sum()) for p, g in present(found))
        return out

    by_error = [variance(count) for count in (1, 3, 6)]
    assert by_error[0] > by_error[1] > by_error[2]
    monkeypatch.setattr(importance_sampling, "FLOOR", 1e6)  # all probabilities alike
    assert variance(6) > 1.2 * by_error[2]


@PROPOSALS
def test_kernels_give_the_same_gradients(as_decoder: bool) -> None:
    """Of rows of one prefix each, which is what the kernels see of a selection."""
    found = []
    for impl in ("packed", "triton"):
        model = model_for(TINY, "small", layers=1, heads=2, width=8)
        run = tiny_run(model=model, batch_size=2, train={**FP32, "impl": impl})
        state, batch = new_stepper(run).state, some_batch(run)
        state.model.double()
        selection = some_selection((1, 2, 1, 1), run, as_decoder=as_decoder)
        technique = sampling(run, state, batch, selection)
        inputs = inputs_of(run, state, batch, technique)
        loss, got = gradients_of(run, state, inputs, technique)
        found.append([torch.tensor(loss), *(g for _, g in present(got))])
    assert len(found[0]) == len(found[1]) > 10
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 1e-6 * other.norm() + 1e-12


def test_decoders_errors_are_those_of_its_mode() -> None:
    run = small_run(train=FP32)
    state, batch = trained(run), some_batch(run)
    for p in state.model.parameters():
        p.data *= 8  # so that it matters what is seen
    inputs, how = inputs_of(run, state, batch), Forward.of(run)
    at = torch.from_numpy(batch.target_mask)
    found, losses = score(state.model, how, inputs, [at], as_decoder=True)
    outputs = state.model(inputs["x"], "decoder", at=at).detach()
    targets = inputs["y"][at]
    miss = outputs.softmax(-1) - torch.nn.functional.one_hot(targets, outputs.shape[-1])
    assert (found[at] - miss.norm(dim=1)).abs().max() < 1e-6
    loss = torch.nn.functional.cross_entropy(outputs, targets)
    assert float(losses.sum()) == pytest.approx(float(loss), rel=1e-6)
    own, _ = score(state.model, how, inputs, [at])
    assert float((found - own).abs().max()) > 0.01


# Numbers of scored and sampled predictions


def prices_of(found: Tensor, positions: tuple[int, ...]) -> Prices:
    mean, square = found.mean(0).numpy(), found.square().mean(0).numpy()
    return Prices(np.array(positions) + 1.0, mean, square, len(found))


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 99), st.data())
def test_samples_are_shared_out_by_errors(batch: int, positions: int, seed: int, data: Any) -> None:
    """As many as asked for, at least one at each position, and no other position deserves the last
    one much more."""
    samples = data.draw(st.integers(positions, positions * batch))
    prices = prices_of(some_errors(batch, positions, seed), tuple(range(3, 3 + positions)))
    scored, sampled = prices.shared_out(samples)
    assert (scored == batch).all()
    assert sampled.sum() == samples
    assert (sampled >= 1).all()
    assert (sampled <= batch).all()
    wish = prices.mean / np.sqrt(prices.length)
    for more, less in itertools.permutations(range(positions), 2):
        if sampled[less] > 1 and sampled[more] < batch:
            assert wish[more] / (sampled[more] + 1) <= 1.0001 * wish[less] / (sampled[less] - 1)


def test_samples_are_shared_out_equally_without_errors() -> None:
    assert prices_of(torch.zeros(8, 3).double(), (3, 3, 3)).shared_out(12)[1].tolist() == [4, 4, 4]


@settings(max_examples=10)
@given(st.integers(1, 64), st.integers(1, 8), st.integers(0, 99))
def test_cheapest_numbers_cannot_be_moved_to_cheaper_ones(
    batch: int, positions: int, seed: int
) -> None:
    """By a quarter, and by more than 3 % of the price."""
    prices = prices_of(some_errors(batch, positions, seed), tuple(range(3, 3 + positions)))
    scored, sampled = prices.cheapest()
    assert (sampled >= 1).all()
    assert (sampled <= scored).all()
    assert (scored <= batch).all()
    best = prices.of(scored, sampled)
    for position in range(positions):
        for factor in (0.75, 1.25):
            more, others = scored.astype(float), sampled.astype(float)
            others[position] = np.clip(others[position] * factor, 1, scored[position])
            more[position] = np.clip(more[position] * factor, -(-batch // 16), batch)
            assert prices.of(scored, others) > 0.97 * best
            if more[position] >= sampled[position]:
                assert prices.of(more, sampled) > 0.97 * best


def test_price_is_cost_times_squared_variance() -> None:
    """All: a third more than the plain step, and the 1/4 more variance that is reckoned where
    sampling more is no choice."""

    def price(found: Tensor, scored: list[int], sampled: list[int]) -> float:
        return prices_of(found, (3, 3)).of(np.array(scored), np.array(sampled))

    assert price(torch.ones(8, 2), [8, 8], [8, 8]) == pytest.approx(4 / 3 * 1.25**2)
    tenth = torch.zeros(60, 2)
    tenth[:6] = 1.0
    assert price(tenth, [60, 60], [6, 6]) == pytest.approx((1 / 3 + 1 / 10) * 1.25**2)
    twice, half = (1 / 3 + 12 / 60) * (17 / 16) ** 2, (1 / 3 + 3 / 60) * 2.0**2
    assert price(tenth, [60, 60], [12, 12]) == pytest.approx(twice)
    assert price(tenth, [60, 60], [3, 3]) == pytest.approx(half)
    fewer = (1 / 3 * 3 / 4 + 9 / 120) * ((1.25 + 2 * 1.25) / 2) ** 2
    assert price(tenth, [60, 30], [6, 3]) == pytest.approx(fewer)


def test_cheapest_numbers_without_errors_are_the_least() -> None:
    scored, sampled = prices_of(torch.zeros(32, 3), (0, 1, 2)).cheapest()
    assert (scored.tolist(), sampled.tolist()) == ([2, 2, 2], [1, 1, 1])


def test_cheapest_numbers_are_larger_where_errors_are_frequent() -> None:
    found = torch.zeros(640, 2)
    found[:6, 0], found[:96, 1] = 1.0, 1.0
    scored, sampled = prices_of(found, (15, 15)).cheapest()
    assert scored[0] < 0.5 * scored[1]
    assert scored[1] == 640
    assert sampled[1] > 3 * sampled[0]


def test_selection_begins_when_it_pays_and_keeps_numbers_that_are_good_enough() -> None:
    """Equal errors do not pay. What paid is kept until other numbers are clearly better."""
    positions = (3, 4, 5)
    assert renewed(None, torch.ones(8, 3), positions, 8) is None
    rare = torch.zeros(64, 3)
    rare[:6] = 1.0
    first = renewed(None, rare, positions, 64)
    assert first is not None
    assert renewed(first, None, positions, 64) is first
    first.mean[2] *= 4  # four times as many errors
    first.square[2] *= 4
    second = renewed(first, None, positions, 64)
    assert second is not None
    assert second is not first
    assert second.mean is first.mean  # a captured step goes on writing into it
    assert second.sampled[2] / second.sampled[1] > 1.5 * first.sampled[2] / first.sampled[1]
    second.square.copy_(second.mean**2)
    assert renewed(second, None, positions, 64) is None


@pytest.mark.parametrize(
    ("wrong", "pays"), [(4, True), (12, True), (16, True), (20, False), (32, False), (60, False)]
)
def test_selection_begins_where_a_tenth_of_the_price_is_saved(wrong: int, pays: bool) -> None:
    found = torch.zeros(64, 3)
    found[:wrong] = 1.0
    prices = prices_of(found.double(), (3, 4, 5))
    assert (prices.of(*prices.cheapest()) <= 0.9) == pays
    assert (renewed(None, found, (3, 4, 5), 64) is not None) == pays


def test_selection_by_a_decoder_is_kept_while_it_is_good_enough() -> None:
    positions, found = (3, 4, 5), torch.tensor([[0.1, 0.2, 0.4]]).expand(64, 3)
    first = renewed(None, found, positions, 64, take=30)
    assert first is not None
    assert first.as_decoder
    assert first.scored == (64, 64, 64)
    assert first.sampled[0] < first.sampled[1] < first.sampled[2]
    assert renewed(first, None, positions, 64, take=30) is first
    for there, kept in ((0.26, True), (0.28, False)):  # others would be better by 2 %, by 5 %
        first.mean[1] = there
        assert (renewed(first, None, positions, 64, take=30) is first) == kept
    first.mean[0] = 1.0
    second = renewed(first, None, positions, 64, take=30)
    assert second is not None
    assert second.mean is first.mean
    assert second.sampled[0] > 2 * first.sampled[0]
    assert sum(second.sampled) == 30


def test_means_follow_the_errors_that_were_scored() -> None:
    """By a hundredth of each batch; what was not scored does not count."""
    kept = some_selection((1,) * 6, small_run(), scored=(8, 8, 4, 4, 2, 1))
    scored, found = torch.tensor(kept.scored), torch.full((8, 6), 3.0)
    kept.update(torch.where(torch.arange(8)[:, None] < scored, found, 0.0), scored)
    assert torch.allclose(kept.mean, torch.tensor(0.99 + 0.01 * 3))
    assert torch.allclose(kept.square, torch.tensor(0.99 + 0.01 * 9))


@PROPOSALS
def test_selection_is_restored_from_this_version_and_the_last(as_decoder: bool) -> None:
    kept = some_selection((1, 2, 3, 4, 5, 6), small_run(), as_decoder=as_decoder)
    kept.mean.mul_(0.3)
    saved = kept.save()
    old = {"positions": "places", "scored": "tried", "sampled": "taken"}
    for data in (saved, {old.get(name, name): value for name, value in saved.items()}):
        again = Selection.restore(data, CPU)
        assert again.save().keys() == saved.keys()
        for name, value in again.save().items():
            same = torch.equal(value, saved[name]) if name in ("mean", "square") else None
            assert value == saved[name] if same is None else same


# Runs


def entp_run(**changes: Any) -> Run:
    return tiny_run(importance=ImportanceConfig(), **{"steps": 12, **changes})


def decoder_run(**changes: Any) -> Run:
    return tiny_run(importance=ImportanceConfig(16, "decoder"), **{"steps": 12, **changes})


KINDS = pytest.mark.parametrize("run_of", [entp_run, decoder_run])


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling that begins at once, with half of what would pay, decided anew every 4 steps."""
    monkeypatch.setattr(importance_sampling, "RENEW", 4)
    monkeypatch.setattr(importance_sampling, "PAYS_BELOW", 100.0)
    cheapest = Prices.cheapest

    def half(self: Prices) -> tuple[np.ndarray, ...]:
        return tuple(-(-numbers // 2) for numbers in cheapest(self))

    monkeypatch.setattr(Prices, "cheapest", half)


def importance_of(stepper: Stepper) -> ImportanceSampling:
    (technique,) = stepper.state.techniques
    assert isinstance(technique, ImportanceSampling)
    return technique


@KINDS
@pytest.mark.usefixtures("early")
def test_stopped_run_continues_bit_for_bit(run_of: Callable[..., Run], tmp_path: Path) -> None:
    whole = entp.train(run_of(), tmp_path / "whole", device="cpu", quiet=True)
    for steps in (5, 12):  # between two decisions
        again = run_of(steps=steps)
        entp.train(again, tmp_path / "parts", device="cpu", quiet=True, resume=steps > 5)
    a, b = (entp.load(tmp_path / name, "last").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    plain = entp.train(tiny_run(steps=12), tmp_path / "plain", device="cpu", quiet=True)
    assert plain.metrics != whole.metrics


@KINDS
@pytest.mark.usefixtures("early")
def test_selection_begins_with_the_errors_it_goes_by_and_follows_them(
    run_of: Callable[..., Run],
) -> None:
    plain = small_run(train=FP32)
    run = run_of(task=plain.task, model=plain.model, train=FP32)
    stepper, batch = new_stepper(run), some_batch(run)
    state, technique = stepper.state, importance_of(stepper)
    state.model.load_state_dict(trained(plain).model.state_dict())
    for p in state.model.parameters():
        p.data *= 8  # so that it matters what is seen
    at, inputs = torch.from_numpy(batch.target_mask), inputs_of(run, state, batch)
    by_decoder, own = (
        score(state.model, Forward.of(run), inputs, [at], kind)[0].mean(0)[at[0]]
        for kind in (True, False)
    )
    assert not torch.allclose(by_decoder, own, atol=1e-3)
    stepper.prepare(batch)
    assert technique.selection is not None
    wanted = by_decoder if technique.samples else own
    assert torch.allclose(technique.selection.mean, wanted, atol=1e-6)
    before, state.step = technique.selection.mean.clone(), 1
    stepper(run.task.batch(0, "train", 1, run.batch_size))
    assert not torch.equal(technique.selection.mean, before)
    assert torch.allclose(technique.selection.mean, before, rtol=0.2)


@KINDS
@pytest.mark.usefixtures("early")
def test_version_changes_with_the_selection_and_the_mode(run_of: Callable[..., Run]) -> None:
    """Graphs are captured anew when it does, and only then."""
    run = run_of(curriculum=CurriculumConfig(4))
    stepper = new_stepper(run)
    technique = stepper.state.techniques[1]
    versions = []
    for number in range(8):
        stepper(run.task.batch(0, "train", number, run.batch_size))
        versions.append(technique.version)
        stepper.state.step += 1
    assert versions[:4] == [None] * 4
    assert versions[4] is not None
    assert all(version is versions[4] for version in versions[4:])
    technique.selection = replace(technique.selection)  # type: ignore[attr-defined]
    stepper.prepare(some_batch(run))
    assert technique.version is not versions[4]


def test_sampling_begins_once_most_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 36 sequences, all of which it knows in the end, with less than half of the tokens."""
    monkeypatch.setattr(importance_sampling, "RENEW", 20)
    run = Run(
        TINY,
        model_for(TINY, "small", layers=2, heads=2, width=32),
        steps=120,
        batch_size=32,
        optim=OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=10, decay_steps=120),
        train=TrainConfig(eval_every=120, checkpoint_every=20),
        importance=ImportanceConfig(),
    )
    entp.train(replace(run, steps=40), tmp_path, device="cpu", quiet=True)
    assert saved_selection(tmp_path) is None
    result = entp.train(run, tmp_path, device="cpu", quiet=True, resume=True)
    assert result.metrics["exact_match"] == 1.0
    kept = saved_selection(tmp_path)
    assert kept is not None
    assert np.array(kept.sampled) @ np.arange(2, 6) < 0.5 * 32 * sum(range(2, 6))


def saved_selection(out: Path) -> Selection | None:
    saved = checkpoint.read_trainer(checkpoint.find(out, "last"))["techniques"].get("importance")
    return None if saved is None else Selection.restore(saved, CPU)


def test_samples_after_a_curriculum_learn_what_all_teach(tmp_path: Path) -> None:
    """A decoder first; then, of 64 sequences a step, the gradients of as many targets as 8
    sequences have."""
    run = Run(
        TINY,
        model_for(TINY, "small", layers=2, heads=2, width=32),
        steps=160,
        batch_size=64,
        optim=OptimConfig(lr=5e-3, min_lr=5e-4, warmup_steps=10, decay_steps=80),
        train=TrainConfig(eval_every=80, eval_batches=1, checkpoint_every=80),
        importance=ImportanceConfig(8 * 4, "decoder"),
        curriculum=CurriculumConfig(80, "random-prefix", batch_size=32, lr=1e-2),
    )
    entp.train(run, tmp_path, device="cpu", quiet=True)
    first, last = (row["loss"] for row in read_metrics(tmp_path) if row["kind"] == "eval")
    assert last < 0.3 * first
    kept = saved_selection(tmp_path)
    assert kept is not None
    assert kept.as_decoder
    assert sum(kept.sampled) == 32


# What is refused


def test_samples_are_from_one_at_each_position_to_all() -> None:
    for samples in (6, 48):
        check_samples(samples, 8, tuple(range(3, 9)))
    for samples in (5, 49):
        says = rf"importance\.samples is {samples}: allowed are 6, .* to 48, all of a batch"
        with pytest.raises(InputError, match=says):
            check_samples(samples, 8, tuple(range(3, 9)))


def refused(run: Run, out: Path, says: str) -> None:
    with pytest.raises(InputError, match=says):
        entp.train(run, out, device="cpu", quiet=True)
    assert not out.exists()


def test_too_few_or_too_many_samples_are_refused(tmp_path: Path) -> None:
    for samples in (5, 49):
        run = small_run(importance=ImportanceConfig(samples, "decoder"))
        refused(run, tmp_path / "run", "allowed are 6, one for each target position, to 48")


@pytest.mark.parametrize(("size", "later"), [(8, 3), (3, 8)])
def test_more_samples_than_a_batch_of_the_schedule_has_are_refused(
    size: int, later: int, tmp_path: Path
) -> None:
    run = decoder_run(batch_size=size, batch_schedule=BatchScheduleConfig(4, later))
    refused(run, tmp_path / "run", "to 12, all of a batch")


@pytest.mark.parametrize("steps", [5, 12])
def test_samples_may_be_more_than_a_batch_of_another_mode_has(steps: int, tmp_path: Path) -> None:
    """Those of a curriculum are not sampled from, wherever the run ends."""
    run = decoder_run(steps=steps, curriculum=CurriculumConfig(6, batch_size=2))
    assert entp.train(run, tmp_path / "run", device="cpu", quiet=True).step == steps


@pytest.mark.parametrize("importance", [ImportanceConfig(), ImportanceConfig(100, "decoder")])
def test_tasks_whose_targets_are_not_at_the_same_positions_are_refused(
    importance: ImportanceConfig, tmp_path: Path
) -> None:
    task = Addition()
    run = Run(task, model_for(task, "small"), steps=1, importance=importance)
    refused(run, tmp_path / "run", "the same positions of every sequence.* and addition does not")
    batch = TASK.batch(0, "train", 0, 3)
    y = batch.y.copy()
    y[0, 5] = IGNORE
    for other in (Batch(batch.x, y), Batch(batch.x, batch.y, np.array([9, 9, 9]))):
        with pytest.raises(InputError, match="the same positions of every sequence"):
            target_positions(other, "count3")
    nothing = Batch(batch.x, np.full_like(batch.y, IGNORE))
    with pytest.raises(InputError, match="no sequence of this batch of count3 has a target"):
        target_positions(nothing, "count3")


def test_several_processes_are_refused() -> None:
    technique = ImportanceSampling(entp_run())
    with pytest.raises(InputError, match="importance is for one process"):
        technique.check(entp_run(), some_batch(entp_run()), World(0, 2))


@KINDS
@pytest.mark.parametrize("moves_at", [2, 4], ids=["between", "where numbers are decided anew"])
@pytest.mark.usefixtures("early")
def test_targets_that_move_are_refused(
    run_of: Callable[..., Run], moves_at: int, tmp_path: Path
) -> None:
    run = run_of(task=Early(2, 6, 6, moves_at))
    with pytest.raises(InputError, match="the same positions of every sequence"):
        entp.train(run, tmp_path / "run", device="cpu", quiet=True)


@pytest.mark.gpu
@KINDS
@pytest.mark.usefixtures("early")
def test_captured_steps_sample_as_eager_ones_do(
    run_of: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are decided in steps 0 and 8: there is time to capture a step with either."""
    monkeypatch.setattr(importance_sampling, "RENEW", 8)
    found, small = [], {"task": TASK, "model": small_run().model}
    for graph in (True, False):
        run = run_of(**small, steps=16, train={**FP32, "cuda_graph": graph})
        stepper = new_stepper(run, "cuda")
        technique = importance_of(stepper)
        stepper.warm_up(run.task, run.seed, run.steps)
        values = []
        for number in range(16):
            loss, norm, _ = stepper(run.task.batch(0, "train", number, run.batch_size))
            values.append((float(loss), float(norm)))
            stepper.state.step += 1
        assert bool(stepper.graphs) == graph
        assert technique.selection is not None
        before = technique.selection.mean.clone()
        stepper.warm_up(run.task, run.seed, run.steps + 1)  # as a run that continues from here
        assert torch.equal(technique.selection.mean, before)
        weights = [p.detach().clone() for p in stepper.state.model.parameters()]
        found.append((np.array(values), weights))
    (a, weights), (b, others) = found
    assert a == pytest.approx(b, rel=1e-4)
    for p, q in zip(weights, others, strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-4)
