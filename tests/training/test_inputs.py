"""What a batch carries beside tokens and targets: position ids, loss weights and notes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import TASK, new_stepper, small_run
from torch import Tensor

from entp.config import Run, model_for
from entp.errors import InputError
from entp.model import Transformer
from entp.tasks.base import IGNORE, Batch, Split
from entp.tasks.counting import Count3
from entp.tasks.metrics import Metric, Predicted, Score, exact_match
from entp.training.distributed import World
from entp.training.evaluate import evaluate, evaluate_generated
from entp.training.forward import Forward
from entp.training.gradients import gradients
from entp.training.inputs import make_inputs, step_arrays
from entp.training.techniques.base import Technique
from entp.training.trainer import train

CPU = torch.device("cpu")
MODES = ("entp", "decoder", "prefix-lm")


def by_hand(model: Transformer, batch: Batch, run: Run) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted mean of the targets' losses, and its gradient."""
    at = torch.from_numpy(batch.target_mask)
    ids = None if batch.position_ids is None else torch.from_numpy(batch.position_ids)
    prefix = run.task.prefix if run.mode == "prefix-lm" else None
    x = torch.from_numpy(batch.x)
    logits = model(x, run.mode, impl="reference", position_ids=ids, prefix=prefix)[at]
    losses = F.cross_entropy(logits, torch.from_numpy(batch.targets), reduction="none")
    weights = torch.ones_like(losses)
    if batch.loss_weights is not None:
        weights = torch.from_numpy(batch.loss_weights)[at].to(losses.dtype)
    loss = (losses * weights).sum() / weights.sum()
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return loss.detach(), {k: g for k, g in zip(named, found, strict=True) if g is not None}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-8, msg=name)


def step_gradient(run: Run, batch: Batch) -> tuple[float, dict[str, Tensor], Transformer]:
    """Loss and gradient of a training step in float64, and the model before it."""
    stepper = new_stepper(run)
    model = stepper.state.model.double()
    before = Transformer(run.model).double()
    before.load_state_dict(model.state_dict())
    loss = stepper(batch).loss
    named = model.named_parameters()
    return float(loss), {k: p.grad for k, p in named if p.grad is not None}, before


def weighted_batch(seed: int = 0) -> Batch:
    """Weights of another size for each target, some 0, and some where there is no target."""
    batch = TASK.batch(seed, "train", 0, 8)
    rng = np.random.default_rng(seed)
    loss_weights = 3 * rng.random(batch.y.shape) * (rng.random(batch.y.shape) > 0.2)
    return replace(batch, loss_weights=loss_weights)


@pytest.mark.parametrize("budget", [None, 30], ids=["whole", "chunks"])
@pytest.mark.parametrize("mode", MODES)
def test_loss_weights_weigh_the_gradient(mode: str, budget: int | None) -> None:
    run = small_run(mode=mode, train={"token_budget": budget}, optim={"grad_clip": 0.0})
    batch = weighted_batch()
    loss, found, model = step_gradient(run, batch)
    wanted_loss, wanted = by_hand(model, batch, run)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    assert_close(found, wanted)
    plain_loss, _ = by_hand(model, replace(batch, loss_weights=None), run)
    assert loss != pytest.approx(float(plain_loss), rel=1e-3)


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_the_processes_add_up(weighted: bool) -> None:
    """Also where their parts have different numbers of targets, and weights of different sums."""
    run = small_run(train={"token_budget": 30})
    batch = weighted_batch() if weighted else TASK.batch(0, "train", 0, 8)
    batch.y[::3, 5:] = IGNORE
    batch = replace(batch)
    torch.manual_seed(0)
    model, how = Transformer(run.model).double(), Forward.of(run)
    total, sums = 0.0, {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for rank in range(2):
        arrays = step_arrays(batch, 0, [], World(rank, 2))
        assert len(arrays["x"]) == 4
        inputs = make_inputs(arrays, batch, how, model, CPU)
        loss, found = gradients(model, inputs, how)
        total += float(loss)
        for name, p in model.named_parameters():
            part = found[p]
            sums[name] += 0 if part is None else part
    wanted_loss, wanted = by_hand(model, batch, run)
    assert total == pytest.approx(float(wanted_loss), rel=1e-6)
    assert_close(sums, wanted)


def test_weights_that_are_all_one_change_nothing() -> None:
    run = small_run(optim={"grad_clip": 0.0})
    plain = TASK.batch(0, "train", 0, 8)
    ones = replace(plain, loss_weights=np.full(plain.y.shape, 7.0))
    (loss, wanted, _), (weighted_loss, found, _) = (step_gradient(run, b) for b in (plain, ones))
    assert weighted_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, wanted)


def test_batch_whose_weights_are_all_zero_has_no_gradient() -> None:
    plain = TASK.batch(0, "train", 0, 8)
    nothing = replace(plain, loss_weights=np.zeros(plain.y.shape))
    loss, found, _ = step_gradient(small_run(), nothing)
    assert loss == 0
    assert all(not g.any() for g in found.values())


class Doubling(Technique):
    """Doubles the weight of the last sequence, and hands something of its own to the step."""

    def arrays(self, step: int, batch: Batch, world: World) -> dict[str, Tensor]:
        weights = torch.ones(batch.y.shape)
        weights[-1] = 2.0
        mine = weights[world.rank :: world.size]
        return {"weights": mine, "own": torch.full((2,), float(step))}


@pytest.mark.parametrize("world", [World(), World(0, 2), World(1, 2)], ids=str)
def test_technique_weights_multiply_those_of_the_batch(world: World) -> None:
    technique = Doubling(small_run())
    batch = weighted_batch()
    plain = step_arrays(batch, 5, [], world)
    found = step_arrays(batch, 5, [technique], world)
    assert set(found) == {"x", "y", "weights", "own"}
    last = (torch.arange(8)[world.rank :: world.size] == 7)[:, None]
    assert torch.equal(found["weights"], torch.where(last, 2.0, 1.0) * plain["weights"])
    assert found["own"].tolist() == [5.0, 5.0]
    alone = step_arrays(replace(batch, loss_weights=None), 5, [technique], world)
    assert torch.equal(alone["weights"], torch.where(last, 2.0, 1.0).expand(-1, 9))


@dataclass(frozen=True)
class Shifted(Count3):
    """Count3 whose positions begin at 0 to 3, by the first token."""

    name: ClassVar[str] = "shifted"

    def model_needs(self) -> dict[str, Any]:
        return {**super().model_needs(), "context_length": self.length + 3}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = super().batch(seed, split, step, size)
        return replace(batch, position_ids=self.position_ids(batch.x))

    def position_ids(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[:, :1] % 4 + np.arange(tokens.shape[1])


def shifted_run(mode: str, task: Count3 | None = None) -> Run:
    task = task or Shifted(prompt_length=4, length=10, num_values=10)
    model = model_for(task, "small", layers=2, heads=2, width=16)
    return small_run(mode=mode, task=task, model=model, optim={"grad_clip": 0.0})


@pytest.fixture(scope="module", params=MODES)
def positioned(request: pytest.FixtureRequest) -> tuple[Run, Transformer, list[Batch]]:
    """A run with position ids, a model whose positions matter, and batches."""
    run = shifted_run(request.param)
    torch.manual_seed(1)
    model = Transformer(run.model).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return run, model, [run.task.batch(3, "test", step, 8) for step in range(3)]


@pytest.mark.parametrize("mode", MODES)
def test_position_ids_reach_the_model_in_training(mode: str) -> None:
    run = shifted_run(mode)
    batch = run.task.batch(0, "train", 0, 8)
    loss, found, model = step_gradient(run, batch)
    wanted_loss, wanted = by_hand(model, batch, run)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    assert_close(found, wanted)
    _, others = by_hand(model, replace(batch, position_ids=None), run)
    assert not torch.allclose(wanted["positions"], others["positions"], atol=1e-6)


def answers(batch: Batch, model: Transformer, run: Run) -> np.ndarray:
    """The model's answers at every position, straight from its logits."""
    assert batch.position_ids is not None
    ids, x = torch.from_numpy(batch.position_ids), torch.from_numpy(batch.x)
    prefix = run.task.prefix if run.mode == "prefix-lm" else None
    with torch.no_grad():
        return model(x, run.mode, position_ids=ids, prefix=prefix).argmax(-1).numpy()


def test_position_ids_reach_the_model_in_evaluation(
    positioned: tuple[Run, Transformer, list[Batch]],
) -> None:
    run, model, batches = positioned
    found = evaluate(model, run.task, batches, Forward.of(run))
    losses = [float(by_hand(model, batch, run)[0]) for batch in batches]
    assert found.value("loss") == pytest.approx(float(np.mean(losses)), rel=1e-5)
    right = [answers(b, model, run)[b.target_mask] == b.targets for b in batches]
    assert found.value("token_accuracy") == pytest.approx(float(np.mean(right)))
    plain = [replace(batch, position_ids=None) for batch in batches]
    others = evaluate(model, run.task, plain, Forward.of(run))
    assert others.value("loss") != pytest.approx(found.value("loss"), rel=1e-4)


def by_itself(model: Transformer, run: Run, batch: Batch, shifted: bool) -> Batch:
    """The batch continued by the model, with one forward pass for each token after the prompt."""
    tokens = torch.from_numpy(batch.x[:, :4])
    prefix = 4 if run.mode == "prefix-lm" else None
    for _ in range(6):
        ids = run.task.position_ids(tokens.numpy()) if shifted else None
        where = None if ids is None else torch.from_numpy(ids)
        with torch.no_grad():
            logits = model(tokens, run.mode, position_ids=where, prefix=prefix)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    y = np.where(batch.target_mask, tokens.numpy()[:, 1:], IGNORE)
    return replace(batch, x=tokens.numpy()[:, :-1], y=y)


def test_position_ids_reach_the_model_in_generation(
    positioned: tuple[Run, Transformer, list[Batch]],
) -> None:
    """Targets are what the model itself generates: with the same positions, all are right."""
    run, model, batches = positioned
    found = {}
    for shifted in (True, False):
        own = [by_itself(model, run, batch, shifted) for batch in batches]
        totals = evaluate_generated(model, run.task, own, Forward.of(run))
        assert totals.sequences == 24
        found[shifted] = totals.value("exact_match")
    assert found[True] == 1 > found[False]


@dataclass(frozen=True)
class Speechless(Shifted):
    """Shifted that does not say where generated tokens are."""

    name: ClassVar[str] = "speechless"

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = Count3.batch(self, seed, split, step, size)
        return replace(batch, position_ids=Shifted.position_ids(self, batch.x))

    def position_ids(self, tokens: np.ndarray) -> np.ndarray | None:  # type: ignore[override]
        return None


def test_generation_without_position_ids_is_refused() -> None:
    run = shifted_run("entp", Speechless(4, 10, 10))
    batches = [run.task.batch(0, "test", 0, 4)]
    with pytest.raises(InputError, match="speechless has position ids and does not say"):
        evaluate_generated(Transformer(run.model), run.task, batches, Forward.of(run))


@dataclass(frozen=True)
class Noted(Count3):
    """Count3 with a note of each sequence's first token, by which exact match is sliced."""

    name: ClassVar[str] = "noted"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (Metric("exact_match", "sequence", slices=("first",)),)

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        batch = super().batch(seed, split, step, size)
        return replace(batch, note=batch.x[:, 0])

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        assert batch.note is not None
        return {"exact_match": exact_match(batch, got, {"first": batch.note})}


def test_notes_reach_the_metrics_and_stay_with_their_sequences(tmp_path: Path) -> None:
    task = Noted(4, 10, 10)
    run = small_run(task=task, steps=1)
    result = train(run, tmp_path, device="cpu", quiet=True)
    assert set(result.metrics) == {"exact_match", "n"}
    batch = task.batch(0, "test", 0, 64)
    perfect = Predicted(np.where(batch.x[batch.row, 0] < 5, batch.targets, -1), None)
    score = task.measure(batch, perfect)["exact_match"]
    assert score is not None
    assert np.array_equal(score.value, batch.x[:, 0] < 5)
    part = batch.part(1, 3)
    assert part.note is not None
    assert np.array_equal(part.note, part.x[:, 0])
    torch.manual_seed(0)
    model = Transformer(run.model)
    found = evaluate(model, task, [batch], Forward.of(run)).slices["exact_match"]["first"]
    assert {int(k): sums.n for k, sums in found.items()} == {
        int(k): int((batch.x[:, 0] == k).sum()) for k in np.unique(batch.x[:, 0])
    }
