"""Steps in another mode that come first: a decoder's, then ENTP's, with the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import FLAGS, small_run
from small_runs import entp as command

import entp
from entp.config import OptimConfig, Run, StartConfig, TrainConfig, model_for
from entp.errors import InputError
from entp.tasks.base import IGNORE
from entp.tasks.counting import Count3, Match3
from entp.training import checkpoint, selection, step
from entp.training.distributed import World
from entp.training.evaluate import evaluate
from entp.training.loggers import read_metrics
from entp.training.step import Stepper, rate_of
from entp.training.techniques.curriculum import draw_prefixes
from entp.training.trainer import _batches, new_state

CPU = torch.device("cpu")
FIRST = StartConfig(steps=6, batch_size=12, lr=5e-3)
CONSTANT = {"max_lr": 3e-3, "min_lr": 3e-3, "warmup": 0}


def started(**changes: Any) -> Run:
    """Ten steps: six of a decoder, with 12 sequences each, then four of ENTP, with 8."""
    return small_run(start=changes.pop("start", FIRST), **changes)


def trained(run: Run, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    entp.train(run, out, device="cpu", quiet=True, **options)
    return entp.load(out, "last").state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("since", [0, 3, 6, 8])
def test_every_step_gets_its_batch(since: int) -> None:
    run = started()
    found = list(_batches(run, since, CPU))
    assert [len(batch.x) for batch in found] == [
        12 if number < 6 else 8 for number in range(since, 10)
    ]
    for number, batch in enumerate(found, since):
        assert np.array_equal(batch.x, run.task.batch(run.seed, "train", number, len(batch.x)).x)


def test_the_rate_falls_to_that_of_the_run_and_goes_on() -> None:
    run = started(
        optim={"max_lr": 1e-3, "min_lr": 1e-4, "warmup": 2, "decay_steps": 4, "shape": "linear"}
    )
    state = new_state(run, CPU)
    rates = []
    for state.step in range(12):
        rates.append(rate_of(run, state))
    assert rates[:6] == pytest.approx([2.5e-3, 5e-3, 5e-3, 4e-3, 3e-3, 2e-3])  # to 1e-3 at step 6
    assert rates[6:] == pytest.approx([1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4, 1e-4])


def test_the_same_rate_and_batch_if_nothing_else_is_said() -> None:
    run = started(start=StartConfig(steps=6))
    assert (run.at(5).mode, run.at(5).batch, run.at(5).optim.lr) == ("decoder", 8, 3e-3)
    assert run.at(6) is run
    assert started(start=StartConfig(steps=6, lr=3e-3)).at(5).optim == run.at(5).optim
    assert small_run().at(0) == small_run()


@pytest.mark.parametrize(
    "changes", [{}, {"name": "muon", "whiten": 2}], ids=["adamw", "whitened muon"]
)
def test_it_is_a_decoder_and_then_its_fork(changes: dict[str, Any], tmp_path: Path) -> None:
    optim = {**CONSTANT, **changes}
    whole = trained(started(optim=optim, start=StartConfig(steps=6)), tmp_path / "whole")
    first = trained(small_run(mode="decoder", steps=6, optim=optim), tmp_path / "decoder")
    stopped = trained(
        started(optim=optim, start=StartConfig(steps=6), steps=6), tmp_path / "stopped"
    )
    assert same(first, stopped)
    assert same(
        whole, trained(small_run(optim=optim), tmp_path / "fork", fork=tmp_path / "decoder")
    )
    assert not same(
        whole, trained(small_run(mode="decoder", optim=optim), tmp_path / "decoder to the end")
    )


def test_it_ends_with_the_mean_of_its_weights(tmp_path: Path) -> None:
    run = started(optim={"average": 3})
    trained(replace(run, steps=6), tmp_path / "run")
    mean = checkpoint.read_trainer(tmp_path / "run/checkpoints/step-00000006")["mean"]
    assert not same(mean, entp.load(tmp_path / "run", "last").state_dict())
    state = new_state(run, CPU)
    state.restore(tmp_path / "run/checkpoints/step-00000006")
    step._prepare(run, state, run.task.batch(0, "train", 6, 8), CPU, World())
    assert same(mean, state.model.state_dict())


@pytest.mark.parametrize("average", [0, 3])
@pytest.mark.parametrize("stops", [(5,), (6,), (7,), (3, 8)])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    tmp_path: Path, stops: tuple[int, ...], average: int
) -> None:
    run = started(optim={"average": average})
    whole = trained(run, tmp_path / "whole")
    for n, steps in enumerate((*stops, 10)):
        parts = trained(replace(run, steps=steps), tmp_path / "parts", resume=n > 0)
    assert same(whole, parts)


def test_predictions_are_chosen_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "PAYS_BELOW", 100.0)
    monkeypatch.setattr(step, "RENEW", 4)
    trained(started(optim={"select": True}), tmp_path / "run")
    assert "selection" not in checkpoint.read_trainer(tmp_path / "run/checkpoints/step-00000005")
    assert (
        checkpoint.read_trainer(tmp_path / "run/checkpoints/step-00000010")["selection"]["batch"]
        == 8
    )


def test_evaluations_measure_the_runs_own_mode(tmp_path: Path) -> None:
    trained(started(steps=5), tmp_path / "run")
    optim = {"max_lr": 5e-3, "min_lr": 3e-3, "decay_steps": 6}
    trained(small_run(mode="decoder", steps=5, batch_size=12, optim=optim), tmp_path / "decoder")
    run, decoder = (read_metrics(tmp_path / name) for name in ("run", "decoder"))
    losses = [[r["loss"] for r in rows if r["kind"] == "train"] for rows in (run, decoder)]
    assert losses[0] == losses[1]
    loss = evaluate(entp.load(tmp_path / "run", "last"), small_run(), split="valid", batches=2)[
        "loss"
    ]
    assert [r["loss"] for r in run if r["kind"] == "eval"] == [pytest.approx(loss)]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"start": {"steps": -1}}, r"start\.steps is -1: it must not be negative"),
    "mode without steps": (
        {"start": {"mode": "prefix-lm"}},
        r"start\.steps is 0, but other options of start are given",
    ),
    "no steps": (
        {"start": {"batch": 4}},
        r"start\.steps is 0, but other options of start are given",
    ),
    "mode": (
        {"start": {"steps": 9, "mode": "encoder"}},
        r"unknown start\.mode 'encoder': allowed are entp, decoder, prefix, prefixes",
    ),
    "warm-up": ({"start": {"steps": 3}}, r"start\.steps 3 must be above optim\.warmup 3"),
    "even": (
        {"start": {"steps": 9, "even": True}},
        r"start\.even is for start\.mode prefixes, not decoder",
    ),
    "rates": (
        {"start": {"steps": 9, "max_lr": 1e-5}},
        r"optim\.lr 0\.003 is above start\.max_lr 1e-05",
    ),
    "clock": (
        {"start": {"steps": 9}, "optim": {"decay": "seconds"}, "train": {"max_seconds": 3.0}},
        r"start\.steps needs optim\.decay steps",
    ),
}


@pytest.mark.parametrize(("changes", "says"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        small_run(**{**changes, "start": StartConfig(**changes["start"])})


def test_a_prefix_first_needs_one() -> None:
    with pytest.raises(
        InputError, match="mode prefix needs a task with a prefix, and match3 has none"
    ):
        Run(Match3(), model_for(Match3()), start=StartConfig(steps=600, mode="prefix-lm"))


def test_on_the_command_line(tmp_path: Path) -> None:
    options = [
        *FLAGS,
        "--steps=8",
        "--batch_size=4",
        "--optim.warmup_steps=1",
        "--start.steps=5",
        "--start.batch_size=6",
        "--out=run",
    ]
    done = command("train", "count3", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "count3 decoder, then entp: step 8/8" in done.stderr
    assert checkpoint.load_run(tmp_path / "run").start == StartConfig(steps=5, batch_size=6)
    done = command("train", "count3", "--resume", "--out=run", "--steps=9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert entp.training.trainer.checkpoint.newest(tmp_path / "run").name == "step-00000009"  # type: ignore[union-attr]
    done = command("train", "count3", *FLAGS, "--start.batch_size=6", cwd=tmp_path)
    assert done.returncode == 2
    assert "start.steps is 0, but other options of start are given" in done.stderr


def test_drawn_prefixes_end_at_every_prediction_alike() -> None:
    run = small_run()
    batch = run.task.batch(0, "train", 0, 4000)
    asked = batch.y != IGNORE
    prefix, weights = draw_prefixes(run, 7, batch, 1.0)
    numbers, counts = np.unique(prefix.numpy() - 1, return_counts=True)
    assert numbers.tolist() == np.flatnonzero(asked[0]).tolist()
    assert (np.abs(counts / 4000 - 1 / len(numbers)) < 5 * np.sqrt(1 / len(numbers) / 4000)).all()
    counted = weights.numpy() > 0
    assert np.array_equal(
        counted, asked & (np.arange(asked.shape[1]) >= prefix.numpy()[:, None] - 1)
    )
    assert len(np.unique(weights[counted])) == 1
    assert float(weights.sum()) == pytest.approx(asked.sum(), rel=1e-4)
    again, other = draw_prefixes(run, 7, batch, 1.0), draw_prefixes(run, 8, batch, 1.0)
    assert torch.equal(again.prefix, prefix)
    assert not torch.equal(other.prefix, prefix)


@pytest.mark.parametrize("chance", [0.0, 0.4, 1.0])
def test_every_length_counts_alike_if_asked_for(chance: float) -> None:
    """Summed over many sequences; without the option the first of them counts 1 - chance + chance /
    n of the last."""
    run = started(start=StartConfig(steps=6, mode="random-prefix", even=True))
    plain = replace(run, start=replace(run.start, even=False))
    batch = run.task.batch(0, "train", 0, 20_000)
    asked = batch.y != IGNORE
    n = int(asked[0].sum())
    (prefix, weights), (same_prefix, uneven) = (
        draw_prefixes(r, 7, batch, chance) for r in (run, plain)
    )
    assert torch.equal(prefix, same_prefix)
    assert torch.equal(weights > 0, uneven > 0)
    assert float(weights.sum()) == pytest.approx(asked.sum(), rel=1e-4)
    share, before = (w.numpy()[asked].reshape(-1, n).mean(0) for w in (weights, uneven))
    assert share == pytest.approx(np.ones(n), abs=0.05)
    assert before[0] / before[-1] == pytest.approx(1 - chance + chance / n, rel=0.05)


def test_sequences_of_different_lengths_count_alike_too() -> None:
    run = started(start=StartConfig(steps=6, mode="random-prefix", even=True))
    batch = run.task.batch(0, "train", 0, 20_000)
    batch.y[:10_000, -1] = IGNORE
    batch.y[0] = IGNORE  # nothing is asked of this one
    _, weights = draw_prefixes(run, 7, batch, 1.0)
    asked = batch.y != IGNORE
    assert float(weights[0].sum()) == 0
    for half in (slice(1, 10_000), slice(10_000, None)):
        share = weights.numpy()[half].sum(0)[asked[half].any(0)] / asked[half].sum(0).max()
        assert share == pytest.approx(np.ones(len(share)), abs=0.07)
    batch.y[:] = IGNORE
    assert not draw_prefixes(run, 7, batch, 1.0).weights.any()


def test_the_chance_of_a_prefix_rises_to_one() -> None:
    run = started(start=StartConfig(steps=6, mode="random-prefix"))
    assert [run.prefix_chance(n) for n in (0, 2, 3, 4, 5, 6, 9)] == pytest.approx(
        [0, 0, 0, 1 / 3, 2 / 3, None, None]
    )
    assert started().prefix_chance(3) is None
    batch = run.task.batch(0, "train", 0, 4000)
    prefix, weights = draw_prefixes(run, 0, batch, 0.0)
    assert torch.equal(prefix, torch.ones_like(prefix))
    assert np.array_equal(weights.numpy(), (batch.y != IGNORE).astype(np.float32))
    half = draw_prefixes(run, 0, batch, 0.5).prefix
    assert float((half > 1).float().mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("even", [False, True])
def test_a_step_with_drawn_prefixes_is_that_of_a_loop_over_sequences(even: bool) -> None:
    run = started(
        start=StartConfig(steps=6, mode="random-prefix", even=even), train={"precision": "fp32"}
    )
    state = new_state(run, CPU)
    state.step = 5
    batch = run.task.batch(0, "train", 5, 8)
    prefix, _ = draw_prefixes(run, 5, batch, 2 / 3)
    losses, counts, first = [], [], []
    for number, (tokens, targets) in enumerate(zip(batch.x, batch.y, strict=True)):
        x, m = torch.from_numpy(tokens)[None], int(prefix[number])
        logits = state.model(x, "prefix-lm", prefix=m)[0]
        asked = [t for t in range(len(targets)) if targets[t] != IGNORE]
        rows = [t for t in asked if t >= m - 1]
        counts += [
            1 / (1 / 3 + 2 / 3 * (asked.index(t) + 1) / len(asked)) if even else 1.0 for t in rows
        ]
        losses += [
            torch.nn.functional.cross_entropy(logits[t], torch.tensor(targets[t])) for t in rows
        ]
        first.append((logits[m - 1], state.model(x, "entp")[0, m - 1]))
    mean = (torch.stack(losses) * torch.tensor(counts)).sum() / sum(counts)
    want = torch.autograd.grad(mean, list(state.model.parameters()))
    inputs = step._inputs(run, state, batch, CPU, World())
    loss, gradients = step._gradients(run.at(5), state.model, inputs)
    assert float(loss) == pytest.approx(float(mean.detach()), rel=1e-5)
    for p, g in zip(state.model.parameters(), want, strict=True):
        torch.testing.assert_close(gradients[p], g, rtol=1e-4, atol=1e-6)
    for m, (ours, entps) in zip(prefix, first, strict=True):
        assert torch.allclose(ours, entps, atol=1e-5), (
            f"the first prediction after {m} tokens is ENTP's"
        )


def test_processes_draw_the_same_prefixes_and_share_them() -> None:
    run = started(start=StartConfig(steps=6, mode="random-prefix"), train={"precision": "fp32"})
    state = new_state(run, CPU)
    state.step, batch = 5, run.task.batch(0, "train", 5, 8)

    def gradients(rank: int, size: int) -> tuple[float, list[torch.Tensor]]:
        inputs = step._inputs(run, state, batch, CPU, World(rank, size))
        loss, found = step._gradients(run.at(5), state.model, inputs)
        return float(loss), [g for g in found.values() if g is not None]

    loss, whole = gradients(0, 1)
    parts = [gradients(rank, 3) for rank in range(3)]
    assert sum(share for share, _ in parts) == pytest.approx(loss, rel=1e-5)
    for want, *shares in zip(whole, *(found for _, found in parts), strict=True):
        torch.testing.assert_close(sum(shares), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stops", [(5,), (6,), (3, 8)])
def test_drawn_prefixes_go_on_bit_for_bit(tmp_path: Path, stops: tuple[int, ...]) -> None:
    run = started(start=StartConfig(steps=6, mode="random-prefix", batch_size=12))
    whole = trained(run, tmp_path / "whole")
    for n, steps in enumerate((*stops, 10)):
        parts = trained(replace(run, steps=steps), tmp_path / "parts", resume=n > 0)
    assert same(whole, parts)
    assert not same(
        whole, trained(started(start=StartConfig(steps=6, batch_size=12)), tmp_path / "decoder")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["decoder", "prefix-lm", "prefixes"])
def test_recorded_steps_change_with_the_mode(mode: Any) -> None:
    task = Count3(prompt_length=4, length=24, num_values=24)
    optim = OptimConfig("muon", 2e-3, 2e-4, warmup_steps=3, decay_steps=30, precondition_every=5, average=4)
    run = Run(
        task,
        model_for(task, "small"),
        steps=32,
        batch_size=8,
        optim=optim,
        start=StartConfig(16, mode, 16),
    )
    run = replace(run, train=TrainConfig(precision="fp32"))
    losses, graphs = [], []
    for graph in (True, False):
        state = new_state(run, torch.device("cuda"))
        now = replace(run, train=replace(run.train, cuda_graph=graph))
        stepper = Stepper(now, state, torch.device("cuda"), World())
        stepper.warm_up()
        for number in range(32):
            batch = task.batch(0, "train", number, run.batch_at(number))
            losses.append(float(stepper(batch)[0]))
            graphs.append(len(stepper.graphs))
            state.step += 1
    assert graphs[15] == graphs[31] == 1
    assert graphs[16] == 0
    assert losses[:32] == pytest.approx(losses[32:], rel=1e-4)
