"""First steps in another mode: a decoder's or ones with random prefixes, then the run's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import new_stepper, small_run
from tiny_runs import tiny_run

import entp
from entp.config import (
    CurriculumConfig,
    EmaConfig,
    ImportanceConfig,
    OptimConfig,
    Run,
    TrainConfig,
    model_for,
)
from entp.errors import InputError
from entp.tasks.base import IGNORE, Batch
from entp.tasks.counting import Count3
from entp.training import checkpoint
from entp.training.distributed import World
from entp.training.evaluate import evaluate, split_batches
from entp.training.forward import Forward
from entp.training.gradients import gradients
from entp.training.inputs import make_inputs, step_arrays
from entp.training.loggers import read_metrics
from entp.training.plan import Plan
from entp.training.techniques import importance_sampling
from entp.training.techniques.curriculum import Curriculum, draw_prefixes

CPU = torch.device("cpu")
FIRST = CurriculumConfig(6, batch_size=12, lr=5e-3)
RANDOM = CurriculumConfig(6, "random-prefix")
CONSTANT = {"lr": 3e-3, "min_lr": 3e-3, "warmup_steps": 0}


def first_run(curriculum: CurriculumConfig = FIRST, **changes: Any) -> Run:
    """Ten steps: six of a decoder, with 12 sequences each, then four of ENTP, with 8."""
    return tiny_run(curriculum=curriculum, **changes)


def trained(run: Run, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    entp.train(run, out, device="cpu", quiet=True, **options)
    return entp.load(out, "last").state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


# The schedule


def test_learning_rate_decays_to_the_runs_own_and_goes_on() -> None:
    optim = {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2, "decay_steps": 4, "schedule": "linear"}
    plan = Plan(first_run(optim=optim))
    rates = [plan.learning_rate(step, 0.0) for step in range(12)]
    assert rates[:6] == pytest.approx([2.5e-3, 5e-3, 5e-3, 4e-3, 3e-3, 2e-3])  # to 1e-3 at step 6
    assert rates[6:] == pytest.approx([1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4, 1e-4])


def test_mode_and_batch_size_change_at_its_end() -> None:
    plan = Plan(first_run())
    assert [plan.mode(step) for step in (0, 5, 6, 9)] == ["decoder", "decoder", "entp", "entp"]
    assert [plan.batch_size(step) for step in (0, 5, 6, 9)] == [12, 12, 8, 8]
    assert list(plan.segments(0, 10)) == [range(6), range(6, 10)]


def test_learning_rate_and_batch_size_are_the_runs_unless_given() -> None:
    plan = Plan(first_run(CurriculumConfig(6)))
    assert [plan.batch_size(step) for step in (0, 9)] == [8, 8]
    given = Plan(first_run(CurriculumConfig(6, lr=3e-3)))
    rates = [[p.learning_rate(step, 0.0) for step in range(12)] for p in (plan, given)]
    assert rates[0] == rates[1]
    assert rates[0][3:6] == pytest.approx([3e-3] * 3)


@pytest.mark.parametrize("muon", [False, True], ids=["adamw", "preconditioned muon"])
def test_curriculum_is_a_decoder_and_then_its_fork(muon: bool, tmp_path: Path) -> None:
    optim = {**CONSTANT, **({"name": "muon", "precondition_every": 2} if muon else {})}
    whole = trained(first_run(CurriculumConfig(6), optim=optim), tmp_path / "whole")
    decoder = tiny_run(mode="decoder", steps=6, optim=optim)
    first = trained(decoder, tmp_path / "decoder")
    stopped = first_run(CurriculumConfig(6), optim=optim, steps=6)
    assert same(first, trained(stopped, tmp_path / "stopped"))
    fork = trained(tiny_run(optim=optim), tmp_path / "fork", fork=tmp_path / "decoder")
    assert same(whole, fork)
    longer = trained(replace(decoder, steps=10), tmp_path / "decoder", resume=True)
    assert not same(whole, longer)


def test_run_begins_with_the_averaged_weights(tmp_path: Path) -> None:
    run = first_run(ema=EmaConfig(3))
    trained(replace(run, steps=6), tmp_path)
    folder = checkpoint.find(tmp_path, "last")
    average = checkpoint.read_trainer(folder)["techniques"]["ema"]["weights"]
    stepper = new_stepper(run)
    stepper.state.restore(folder)
    assert not same(average, stepper.state.model.state_dict())
    stepper.prepare(run.task.batch(0, "train", 6, 8))
    assert same(average, stepper.state.model.state_dict())


RESUMED = {
    "decoder": first_run(ema=EmaConfig(3)),
    "random prefixes": first_run(replace(RANDOM, batch_size=12)),
}


@pytest.mark.parametrize("run", RESUMED.values(), ids=RESUMED)
def test_stopped_run_continues_bit_for_bit(run: Run, tmp_path: Path) -> None:
    """Stopped before, at and after the end of the curriculum."""
    whole = trained(run, tmp_path / "whole")
    for steps in (4, 6, 7, 10):
        parts = trained(replace(run, steps=steps), tmp_path / "parts", resume=steps > 4)
    assert same(whole, parts)


def test_random_prefixes_train_other_weights_than_a_decoder(tmp_path: Path) -> None:
    found = [trained(first_run(c), tmp_path / c.mode) for c in (RANDOM, CurriculumConfig(6))]
    assert not same(*found)


def test_targets_are_sampled_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance_sampling, "PAYS_BELOW", 100.0)
    monkeypatch.setattr(importance_sampling, "RENEW", 4)
    trained(first_run(importance=ImportanceConfig()), tmp_path)
    states = [
        checkpoint.read_trainer(tmp_path / f"checkpoints/step-{step:08d}")["techniques"]
        for step in (5, 10)
    ]
    assert "importance" not in states[0]
    assert states[1]["importance"]["batch"] == 8


def test_evaluations_measure_the_runs_own_mode(tmp_path: Path) -> None:
    run = first_run(steps=5)
    trained(run, tmp_path / "run")
    optim = {"lr": 5e-3, "min_lr": 3e-3, "decay_steps": 6}
    decoder = tiny_run(mode="decoder", steps=5, batch_size=12, optim=optim)
    trained(decoder, tmp_path / "decoder")
    rows, others = (read_metrics(tmp_path / name) for name in ("run", "decoder"))
    losses = [[r["loss"] for r in some if r["kind"] == "train"] for some in (rows, others)]
    assert losses[0] == losses[1]
    batches = split_batches(run.task, "valid", 2, 8, run.seed)
    model = entp.load(tmp_path / "run", "last")
    totals = evaluate(model, run.task, batches, Forward.of(run))
    assert [r["loss"] for r in rows if r["kind"] == "eval"] == [pytest.approx(totals.value("loss"))]


# Random prefixes


def test_prefix_ends_at_every_target_alike() -> None:
    batch = tiny_run().task.batch(0, "train", 0, 4000)
    mask = batch.target_mask
    prefix, weights = draw_prefixes(0, 7, batch, 1.0)
    ends, counts = np.unique(prefix.numpy() - 1, return_counts=True)
    assert ends.tolist() == np.flatnonzero(mask[0]).tolist()
    assert (np.abs(counts / 4000 - 1 / len(ends)) < 5 * np.sqrt(1 / len(ends) / 4000)).all()
    counted = weights.numpy() > 0
    after = np.arange(mask.shape[1]) >= prefix.numpy()[:, None] - 1
    assert np.array_equal(counted, mask & after)
    assert len(np.unique(weights[counted])) == 1
    assert float(weights.sum()) == pytest.approx(mask.sum(), rel=1e-4)


def test_prefixes_belong_to_seed_and_step_alone() -> None:
    batch = tiny_run().task.batch(0, "train", 0, 100)
    one, again, later, other = (
        draw_prefixes(seed, step, batch, 1.0).prefix
        for seed, step in ((0, 7), (0, 7), (0, 8), (1, 7))
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, later)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("probability", [0.0, 0.4, 1.0])
def test_uniform_lengths_weigh_every_length_alike(probability: float) -> None:
    """Over many sequences; without the option the first of n weighs 1 - p + p / n of the last."""
    batch = tiny_run().task.batch(0, "train", 0, 20_000)
    mask = batch.target_mask
    n = int(mask[0].sum())
    (prefix, uniform), (same_prefix, plain) = (
        draw_prefixes(0, 7, batch, probability, uniform_lengths=u) for u in (True, False)
    )
    assert torch.equal(prefix, same_prefix)
    assert torch.equal(uniform > 0, plain > 0)
    assert float(uniform.sum()) == pytest.approx(mask.sum(), rel=1e-4)
    means, before = (w.numpy()[mask].reshape(-1, n).mean(0) for w in (uniform, plain))
    assert means == pytest.approx(np.ones(n), abs=0.05)
    assert before[0] / before[-1] == pytest.approx(1 - probability + probability / n, rel=0.05)


def test_uniform_lengths_weigh_sequences_of_any_number_of_targets() -> None:
    batch = tiny_run().task.batch(0, "train", 0, 20_000)
    y = batch.y.copy()
    y[:10_000, -1] = IGNORE
    y[0] = IGNORE  # without any
    batch = Batch(batch.x, y)
    weights = draw_prefixes(0, 7, batch, 1.0, uniform_lengths=True).weights.numpy()
    assert weights[0].sum() == 0
    for half in (slice(1, 10_000), slice(10_000, None)):
        mask = batch.target_mask[half]
        means = weights[half].sum(0)[mask.any(0)] / mask.sum(0).max()
        assert means == pytest.approx(np.ones(len(means)), abs=0.07)
    nothing = Batch(batch.x, np.full_like(y, IGNORE))
    assert not draw_prefixes(0, 7, nothing, 1.0, uniform_lengths=True).weights.any()


def test_probability_of_a_prefix_rises_to_one() -> None:
    technique = Curriculum(first_run(RANDOM))
    found = [technique.probability(step) for step in (0, 2, 3, 4, 5)]
    assert found == pytest.approx([0, 0, 0, 1 / 3, 2 / 3])


def test_prefixes_may_be_there_from_the_first_step_on() -> None:
    run = small_run(mode="entp", curriculum=CurriculumConfig(6, "random-prefix", prefixes="always"))
    assert [Curriculum(run).probability(step) for step in (0, 3, 5)] == [1.0, 1.0, 1.0]
    with pytest.raises(InputError, match=r"prefixes always is for .*random-prefix, not decoder"):
        CurriculumConfig(6, "decoder", prefixes="always")


def test_probability_is_that_of_a_sequence() -> None:
    batch = tiny_run().task.batch(0, "train", 0, 4000)
    prefix, weights = draw_prefixes(0, 0, batch, 0.0)
    assert torch.equal(prefix, torch.ones_like(prefix))
    assert np.array_equal(weights.numpy(), batch.target_mask.astype(np.float32))
    half = draw_prefixes(0, 0, batch, 0.5).prefix
    assert float((half > 1).float().mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("curriculum", [FIRST, RANDOM, CurriculumConfig(6, "prefix-lm")])
def test_arrays_are_drawn_for_random_prefixes_only(curriculum: CurriculumConfig) -> None:
    run = first_run(curriculum)
    technique, batch = Curriculum(run), run.task.batch(0, "train", 5, 8)
    random = curriculum is RANDOM
    assert set(technique.arrays(5, batch, World())) == ({"prefix", "weights"} if random else set())
    assert technique.arrays(6, batch, World()) == {}


def gradients_at(run: Run, step: int, world: World) -> tuple[Any, float, list[torch.Tensor]]:
    """The model, and the loss and gradients of a step of its run."""
    stepper = new_stepper(run)
    state, batch = stepper.state, run.task.batch(0, "train", step, 8)
    how = Forward.of(run, stepper.plan.mode(step))
    arrays = step_arrays(batch, step, state.techniques, world)
    inputs = make_inputs(arrays, batch, how, state.model, CPU)
    loss, found = gradients(state.model, inputs, how, state.techniques)
    return state.model, float(loss), [g for g in found.values() if g is not None]


@pytest.mark.parametrize("uniform", [False, True], ids=["plain", "uniform lengths"])
def test_step_with_random_prefixes_is_that_of_a_loop_over_sequences(uniform: bool) -> None:
    """And the first prediction after each prefix is ENTP's."""
    run = first_run(replace(RANDOM, uniform_lengths=uniform), train={"precision": "fp32"})
    model, loss, found = gradients_at(run, 5, World())
    batch = run.task.batch(0, "train", 5, 8)
    prefix = draw_prefixes(0, 5, batch, 2 / 3).prefix.tolist()
    assert len({*prefix}) > 2
    losses, weights = [], []
    for tokens, targets, m in zip(batch.x, batch.y, prefix, strict=True):
        x = torch.from_numpy(tokens)[None]
        logits = model(x, "prefix-lm", prefix=m)[0]
        asked = [t for t in range(len(targets)) if targets[t] != IGNORE]
        for t in asked:
            if t < m - 1:
                continue
            drawn = 1 / 3 + 2 / 3 * (asked.index(t) + 1) / len(asked)  # how likely it counts
            weights.append(1 / drawn if uniform else 1.0)
            target = torch.tensor(targets[t])
            losses.append(torch.nn.functional.cross_entropy(logits[t], target))
        assert torch.allclose(logits[m - 1], model(x, "entp")[0, m - 1], atol=1e-5)
    mean = (torch.stack(losses) * torch.tensor(weights)).sum() / sum(weights)
    wanted = torch.autograd.grad(mean, list(model.parameters()))
    assert loss == pytest.approx(float(mean.detach()), rel=1e-5)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_processes_draw_the_same_prefixes_and_share_them() -> None:
    run = first_run(RANDOM, train={"precision": "fp32"})
    _, loss, whole = gradients_at(run, 5, World())
    parts = [gradients_at(run, 5, World(rank, 3)) for rank in range(3)]
    assert sum(share for _, share, _ in parts) == pytest.approx(loss, rel=1e-5)
    for want, *shares in zip(whole, *(found for *_, found in parts), strict=True):
        torch.testing.assert_close(sum(shares), want, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["decoder", "prefix-lm", "random-prefix"])
def test_captured_steps_change_with_the_mode(mode: Any) -> None:
    task = Count3(prompt_length=4, length=24, num_values=24)
    optim = OptimConfig("muon", 2e-3, 2e-4, warmup_steps=3, decay_steps=30, precondition_every=5)
    run = Run(
        task,
        model_for(task, "small"),
        steps=32,
        batch_size=8,
        optim=optim,
        train=TrainConfig(precision="fp32"),
        ema=EmaConfig(4),
        curriculum=CurriculumConfig(16, mode, 16),
    )
    losses, graphs = [], []
    for graph in (True, False):
        now = replace(run, train=replace(run.train, cuda_graph=graph))
        stepper = new_stepper(now, "cuda")
        stepper.warm_up(task, run.seed, run.steps)
        for number in range(32):
            batch = task.batch(0, "train", number, stepper.plan.batch_size(number))
            losses.append(float(stepper(batch).loss))
            graphs.append(len(stepper.graphs))
            stepper.state.step += 1
    assert graphs[15] == graphs[31] == 1
    assert graphs[16] == 0
    assert losses[:32] == pytest.approx(losses[32:], rel=1e-4)
