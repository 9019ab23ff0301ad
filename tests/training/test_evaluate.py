"""Metrics of a model, of generated answers and of baselines, and the streams that they are of."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from small_runs import TASK, new_stepper, small_run

from entp.config import Mode, OptimConfig, Run, model_for
from entp.errors import InputError
from entp.model import Transformer
from entp.tasks.addition import Addition
from entp.tasks.base import IGNORE, Baseline, Batch, Split, Task
from entp.tasks.counting import Count3, Match3
from entp.tasks.metrics import Predicted
from entp.training import evaluate as evaluate_module
from entp.training.evaluate import (
    AT_ONCE,
    TEST_SEED,
    check_targets,
    evaluate,
    evaluate_baseline,
    evaluate_generated,
    first_batch,
    split_batches,
    untouched_batches,
)
from entp.training.forward import Forward


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Random weights of `small_run()`'s model, large enough for different answers."""
    torch.manual_seed(0)
    found = Transformer(small_run().model).eval()
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(5)
    return found


def some(count: int, split: Split = "test") -> list[Batch]:
    return list(split_batches(TASK, split, count, 8, 0))


def test_evaluation_counts_as_by_hand(model: Transformer) -> None:
    """Over more batches than are measured at a time."""
    batches = some(AT_ONCE + 2)
    found = evaluate(model, TASK, iter(batches), Forward.of(small_run()))
    right, whole, losses = [], [], []
    for batch in batches:
        with torch.no_grad():
            logits = model(torch.from_numpy(batch.x), impl="reference")
        y = torch.from_numpy(batch.y)
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()))
        hits = (logits.argmax(-1) == y)[:, 3:].numpy()  # the first target comes after 4 tokens
        right.append(hits)
        whole.append(hits.all(1))
    values = found.values()
    assert values["token_accuracy"] == pytest.approx(np.mean(right))
    assert values["exact_match"] == pytest.approx(np.mean(whole))
    assert values["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert values["n"] == 8 * (AT_ONCE + 2)
    by_length = found.sliced("token_accuracy", "length")
    assert by_length == pytest.approx(
        {str(4 + n): share for n, share in enumerate(np.concatenate(right).mean(0))}
    )


def ragged(seed: int, size: int, longest: int) -> Batch:
    """Sequences of 4 to `longest` tokens with a target after each from the third on, and position
    ids of their own."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, longest + 1, size)
    x, y = rng.integers(0, 10, (2, size, int(lengths.max())))
    at = np.arange(x.shape[1])
    y[(at < 2) | (at >= lengths[:, None])] = IGNORE
    return Batch(x, y, lengths, np.sort(rng.integers(0, 10, x.shape), axis=1))


def unlike(kind: str) -> list[Batch]:
    """Batches that can be joined only in part: of other sizes, widths or arrays."""
    if kind == "equal":
        return some(7)
    if kind == "padded":
        return [ragged(n, 3 + n, 5 + n % 4) for n in range(7)]
    if kind == "other widths":
        return [Batch(b.x[:, : 6 + n // 3], b.y[:, : 6 + n // 3]) for n, b in enumerate(some(7))]
    if kind == "targets in the padding":
        cut = [ragged(n, 8, 8) for n in range(4)]
        return [replace(b, lengths=np.maximum(1, b.lengths - n)) for n, b in enumerate(cut)]  # type: ignore[operator]
    return [*some(3), *(ragged(n, 8, 8) for n in range(3)), *some(2, "valid")]


@pytest.mark.parametrize(
    "kind", ["equal", "padded", "other widths", "targets in the padding", "mixed"]
)
@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm", "refresh-3"])
def test_joined_batches_have_the_values_of_single_ones(
    mode: str, kind: str, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fewer forward passes, whatever limits how many are joined."""
    how, passes = Forward.of(small_run(mode=mode)), []
    forward = Forward.__call__

    def counted(self: Forward, model: Any, x: Any, at: Any, **more: Any) -> Any:
        passes[-1].append(tuple(x.shape))
        return forward(self, model, x, at, **more)

    monkeypatch.setattr(Forward, "__call__", counted)

    def measured(batches: list[Batch]) -> dict[str, Any]:
        passes.append([])
        return evaluate(model, TASK, iter(batches), how).to_json()

    batches = unlike(kind)
    found = measured(batches)
    monkeypatch.setattr(evaluate_module, "MOST_OUTPUTS", 500)  # 50 targets at a time
    few = measured(batches)
    monkeypatch.setattr(evaluate_module, "BUSY", 0)
    single = measured(batches)
    assert len(passes[2]) == len(batches) >= len(passes[1]) > len(passes[0])
    assert len(passes[0]) == {"other widths": 3, "mixed": 3}.get(kind, 1)
    for other in (found, few):
        assert other["sequences"] == single["sequences"]
        for metric, sums in single["all"].items():
            assert other["all"][metric] == pytest.approx(sums, rel=1e-5)
        for key, bins in single["slices"]["token_accuracy"]["length"].items():
            assert other["slices"]["token_accuracy"]["length"][key] == pytest.approx(bins)


def test_joined_batches_keep_a_device_busy_and_no_more(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mode entp by rows of prefixes, else by tokens."""
    batches = some(8)
    rows = {"entp": 8 * sum(range(4, 10)), "decoder": 8 * 9}
    for mode, own in rows.items():
        how = Forward.of(small_run(mode=mode))
        monkeypatch.setattr(evaluate_module, "BUSY", 3 * own * model.width * 2)
        groups = list(evaluate_module._groups(model, how, iter(batches), torch.device("cpu")))
        assert [len(group) for group in groups] == [3, 3, 2]
    monkeypatch.setattr(evaluate_module, "BUSY", 2**40)
    monkeypatch.setattr(evaluate_module, "default_token_budget", lambda *_: 2 * rows["decoder"])
    groups = list(evaluate_module._groups(model, how, iter(batches), torch.device("cpu")))
    assert [len(group) for group in groups] == [2, 2, 2, 2]


def test_batches_are_asked_for_as_they_are_needed(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long stream only a few forward passes wait to be measured."""
    monkeypatch.setattr(evaluate_module, "BUSY", 0)
    made, ahead = 0, []

    def stream() -> Iterator[Batch]:
        nonlocal made
        for batch in some(4 * AT_ONCE):
            made += 1
            yield batch

    measure = Count3.measure

    def watched(task: Count3, batch: Batch, got: Predicted) -> Any:
        ahead.append(made - len(ahead))
        return measure(task, batch, got)

    monkeypatch.setattr(Count3, "measure", watched)
    evaluate(model, TASK, stream(), Forward.of(small_run()))
    assert len(ahead) == 4 * AT_ONCE
    assert max(ahead) <= AT_ONCE + 1


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm", "refresh-3"])
@pytest.mark.parametrize("kind", ["equal", "padded", "mixed"])
def test_values_on_a_gpu_are_those_on_a_cpu(mode: str, kind: str, model: Transformer) -> None:
    how, batches = Forward.of(small_run(mode=mode, train={"precision": "fp32"})), unlike(kind)
    found = evaluate(copy.deepcopy(model).cuda(), TASK, batches, how, device="cuda").values()
    assert found == pytest.approx(evaluate(model, TASK, batches, how).values(), rel=1e-3)


def test_evaluation_leaves_no_gradients(model: Transformer) -> None:
    evaluate(model, TASK, some(1), Forward.of(small_run()))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@torch.no_grad()
def always_zero(run: Run) -> Transformer:
    """Weights whose answer is always 0."""
    model = Transformer(run.model)
    for p in model.parameters():
        p.zero_()
    assert model.tokens is not None
    model.tokens.weight[0] = 1.0
    model.norm.bias.fill_(1.0)  # type: ignore[operator]
    return model


@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm", "refresh-3"])
def test_generated_answers_are_measured(mode: str) -> None:
    """Of random weights, and of weights whose answer is always 0."""
    run = small_run(mode=mode)
    torch.manual_seed(0)
    nothing = evaluate_generated(Transformer(run.model), TASK, some(2), Forward.of(run))
    assert nothing.values() == {
        "exact_match": 0,
        "token_accuracy": pytest.approx(0.1, abs=0.2),
        "n": 16,
    }
    right = [(batch.y[:, 3:] == 0) for batch in some(10)]
    found = evaluate_generated(always_zero(run), TASK, some(10), Forward.of(run))
    assert found.value("token_accuracy") == pytest.approx(np.mean(right))
    assert "loss" not in found.all


@dataclass(frozen=True)
class Partial(Count3):
    """Count3 with targets for the first two integers after the prompt only."""

    name: ClassVar[str] = "partial"

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = super().batch(seed, split, step, size)
        batch.y[:, self.prompt_length + 1 :] = IGNORE
        return batch


def test_generated_tokens_without_a_target_may_be_anything() -> None:
    run = small_run(task=Partial(4, 10, 10))
    batches = list(split_batches(run.task, "test", 8, 8, 0))
    zeros = sum(int((batch.y[:, 3:5] == 0).all(1).sum()) for batch in batches)
    assert zeros > sum(int((batch.x[:, 4:] == 0).all(1).sum()) for batch in batches)
    found = evaluate_generated(always_zero(run), run.task, batches, Forward.of(run))
    assert found.value("exact_match") == zeros / 64


@pytest.mark.parametrize("most", [1, 50, 10**6])
def test_batches_generated_together_give_the_same(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sums, whose prompts have several lengths."""
    task = Addition(digits=2, train_examples=8)
    run = Run(task, model_for(task, "small", layers=2, heads=2, width=32), "decoder", batch_size=5)
    torch.manual_seed(0)
    model = Transformer(run.model)
    batches = list(split_batches(task, "train", 4, 5, 0))
    monkeypatch.setattr(evaluate_module, "default_token_budget", lambda *_: most)
    groups = list(evaluate_module._generation_groups(task, batches, most))
    assert len(groups) == {1: 4, 50: 4, 10**6: 1}[most]
    got = evaluate_generated(model, task, batches, Forward.of(run))
    want = [evaluate_generated(model, task, [batch], Forward.of(run)) for batch in batches]
    assert got.to_json() == sum(want[1:], want[0]).to_json()


def test_task_without_text_has_nothing_to_generate() -> None:
    task = Match3(length=8, modulus=4)
    run = Run(task, model_for(task, "small", layers=1, heads=1, width=8))
    batches = split_batches(task, "test", 1, 8, 0)
    with pytest.raises(InputError, match=f"{task.name} has nothing to generate"):
        evaluate_generated(Transformer(run.model), task, batches, Forward.of(run))


@pytest.mark.parametrize("mode", ["entp", "decoder", "refresh-3"])
def test_generated_answers_to_prompts_of_other_lengths(mode: Mode) -> None:
    """A sum whose answer is right under teacher forcing is right when generated, and only then."""
    task = Addition(digits=2, train_examples=8)
    model = model_for(task, "small", layers=2, heads=2, width=32)
    optim = OptimConfig(lr=5e-3, min_lr=5e-3, warmup_steps=0, weight_decay=0.0)
    run = Run(task, model, mode, steps=25, batch_size=8, optim=optim)
    stepper = new_stepper(run)
    batches = list(split_batches(task, "train", 25, 8, 0))
    for batch in batches:
        stepper(batch)
    assert len({int(n) for batch in batches for n in batch.target_mask.argmax(1)}) > 1
    trained = stepper.state.model
    forced = evaluate(trained, task, batches, Forward.of(run))
    generated = evaluate_generated(trained, task, batches, Forward.of(run))
    assert generated.all["exact_match"] == forced.all["exact_match"]
    assert 0 < generated.value("exact_match") < 1


def test_untouched_batches_are_of_a_seed_of_their_own() -> None:
    """Whole batches, at least as many sequences as asked for, others for each run."""
    for seed in (0, 1, 2**32 - 1):
        found = list(untouched_batches(TASK, 17, 8, seed))
        assert len(found) == 3
        for step, batch in enumerate(found):
            own = TASK.batch((TEST_SEED + seed) % 2**32, "test", step, 8)
            assert np.array_equal(batch.x, own.x)
    assert len(list(untouched_batches(TASK, 16, 8, 0))) == 2


def test_split_batches_are_the_tasks_first() -> None:
    for step, batch in enumerate(split_batches(TASK, "valid", 3, 5, 7)):
        assert np.array_equal(batch.x, TASK.batch(7, "valid", step, 5).x)
    with pytest.raises(InputError, match="batches is 0: at least 1"):
        list(split_batches(TASK, "valid", 0, 5, 7))


@dataclass(frozen=True)
class Silent(Count3):
    """Count3 without targets in every second sequence, and in all of the third batch."""

    name: ClassVar[str] = "silent"

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = super().batch(seed, split, step, size)
        batch.y[:: 1 if step == 2 else 2] = IGNORE
        return batch


@pytest.mark.parametrize("mode", ["entp", "decoder", "refresh-3"])
def test_sequences_without_targets_do_not_count(mode: str, model: Transformer) -> None:
    task, how = Silent(4, 10, 10), Forward.of(small_run(mode=mode))
    batches = list(split_batches(task, "valid", 3, 8, 0))
    found = evaluate(model, task, batches, how)
    assert found.sequences == 2 * 8 // 2
    halves = [Batch(b.x[1::2], b.y[1::2]) for b in batches[:2]]
    assert evaluate(model, task, halves, how).values() == pytest.approx(found.values())
    with pytest.raises(InputError, match="no sequence of these batches of silent has a target"):
        evaluate(model, task, batches[2:], how)


@dataclass(frozen=True)
class Guessed(Count3):
    """Count3 with two baselines."""

    name: ClassVar[str] = "guessed"

    def baselines(self) -> dict[str, Baseline]:
        return {
            "oracle": lambda batch: Predicted(batch.targets, None),
            "zero": lambda batch: Predicted(0 * batch.targets, None),
        }


def test_baseline_is_measured_as_a_model_is() -> None:
    task = Guessed(4, 10, 10)
    assert evaluate_baseline(task, "oracle", some(2)).values() == {
        "exact_match": 1,
        "token_accuracy": 1,
        "n": 16,
    }
    zeros = np.mean([batch.targets == 0 for batch in some(2)])
    assert evaluate_baseline(task, "zero", some(2)).value("token_accuracy") == pytest.approx(zeros)
    with pytest.raises(InputError, match=r"unknown baseline of guessed 'orakel'.* oracle"):
        evaluate_baseline(task, "orakel", some(2))


@dataclass(frozen=True)
class Numbers(Task):
    """Real numbers to be predicted from vectors."""

    name: ClassVar[str] = "numbers"
    loss: ClassVar[Literal["cross_entropy", "squared_error"]] = "squared_error"

    def model_needs(self) -> dict[str, Any]:
        return {"context_length": 6, "input_dim": 2, "outputs": 1}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        x = self.rng(seed, split, step).normal(size=(size, 6, 2))
        return Batch(x, x.sum(2))


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_squared_error_is_the_mean_over_targets(precision: Any, near: float) -> None:
    task = Numbers()
    run = Run(task, model_for(task, "small", layers=1, heads=1, width=8))
    run = replace(run, train=replace(run.train, precision=precision))
    torch.manual_seed(0)
    model = Transformer(run.model)
    batch = task.batch(0, "test", 0, 16)
    with torch.no_grad():
        error = model(torch.from_numpy(batch.x))[..., 0] - torch.from_numpy(batch.y)
    found = evaluate(model, task, [batch], Forward.of(run)).values()
    assert found == {"loss": pytest.approx(float(error.square().mean()), rel=near), "n": 16}


def test_targets_beyond_the_outputs_are_named() -> None:
    batch = TASK.batch(0, "train", 0, 8)
    largest = int(batch.targets.max())
    check_targets(TASK, batch, largest + 1)
    with pytest.raises(InputError, match=f"count3 has the target {largest}: targets are 0 to"):
        check_targets(TASK, batch, largest)
    negative = Batch(batch.x, np.where(batch.y == IGNORE, IGNORE, batch.y - 1))
    with pytest.raises(InputError, match="has the target -1"):
        check_targets(TASK, negative, 10)
    with pytest.raises(InputError, match="has the target"):
        check_targets(TASK, Batch(batch.x, batch.y + 0.5), 10)
    check_targets(Numbers(), Numbers().batch(0, "train", 0, 8), 1)


def faulty(make: Any) -> Any:
    """Count3 whose batches are what `make` makes of them."""

    class Faulty(Count3):
        def batch(self, *args: Any) -> Any:
            return make(super().batch(*args))

    return Faulty(prompt_length=5, length=8, num_values=8)


def test_batch_of_the_first_step_is_checked() -> None:
    drawn, rng = faulty(lambda batch: batch), np.random.default_rng(0)
    assert np.array_equal(first_batch(drawn, 3, 4).x, drawn.batch(3, "train", 0, 4).x)
    with pytest.raises(InputError, match=r"returned a tuple: it must be an entp\.tasks\.Batch"):
        first_batch(faulty(lambda batch: (batch.x, batch.y)), 0, 4)
    with pytest.raises(InputError, match="returned 3 sequences where 4 were asked for"):
        first_batch(faulty(lambda batch: Batch(batch.x[:3], batch.y[:3])), 0, 4)
    stateful = faulty(lambda batch: replace(batch, x=rng.integers(0, 8, batch.x.shape)))
    with pytest.raises(InputError, match="gave other values of x when it was asked for the same"):
        first_batch(stateful, 0, 4)
    short = np.array([7, 6, 7, 7])
    with pytest.raises(InputError, match="targets at padding: let y be -100"):
        first_batch(faulty(lambda batch: replace(batch, lengths=short)), 0, 4)


def test_inputs_that_are_not_numbers_are_themselves() -> None:
    first_batch(faulty(lambda b: Batch(np.full((*b.x.shape, 2), np.nan), b.y)), 0, 4)
