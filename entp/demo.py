"""`entp demo`: ENTP and a decoder of the same size side by side, trained live on a CPU in a few minutes.

The task is addition of two-digit numbers, first digit of the sum first, from 2000 of the 10,000 sums, scored on others.
Chosen by trying: with the sum reversed (last digit first) the two did equally well at this scale. docs/LOG.md has the
numbers, and how far seeds differ.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from entp import attention
from entp.bench.measure import count_flops
from entp.config import MODES, Mode, OptimConfig, Run, TrainConfig, model_for
from entp.engine.generate import generate
from entp.figures import save_figure
from entp.intervals import wilson
from entp.model import Transformer
from entp.pretrained import names
from entp.table import format_table
from entp.tasks.addition import Addition
from entp.tasks.base import Task
from entp.tasks.counting import Count3, count3_next
from entp.theory.compiled import answers, count3
from entp.training.checkpoint import load, load_run
from entp.training.distributed import World
from entp.training.evaluation import evaluate, fresh_batches
from entp.training.export import measured
from entp.training.metrics import read_metrics
from entp.training.optim import make_optimizers
from entp.training.step import State, train_step
from entp.training.trainer import train

SIDES: dict[str, Mode] = {"ENTP": "entp", "decoder": "decoder"}
TEST_BATCHES = 32


@dataclass(frozen=True)
class Side:
    """What one of the two models did."""

    label: str
    run: Run
    model: Transformer
    test: dict[str, float]
    seconds: float
    flops: float
    curve: list[tuple[int, float]]


def demo_run(mode: Mode, seed: int = 0, steps: int = 1500) -> Run:
    """The demo's run in one mode; both modes get the same data, size and schedule."""
    task = Addition(digits=2, examples=2000, reversed=False)
    return Run(
        task=task,
        model=model_for(task, "small", layers=2, heads=2, width=64),
        mode=mode,
        steps=steps,
        batch=64,
        seed=seed,
        optim=OptimConfig(max_lr=2e-3, min_lr=2e-4, warmup=min(100, steps // 4), decay_steps=steps),
        train=TrainConfig(eval_every=max(1, steps // 12), eval_batches=8, checkpoint_every=steps),
    )


def demo(out: Path, seed: int = 0, steps: int = 1500) -> dict[str, Any]:
    """Draw, train, compare, generate, and save one picture. Returns the numbers that were printed."""
    started = time.perf_counter()
    print(patterns())
    print("\n" + by_hand(seed))
    if names():
        print("\n" + shipped(seed))
    sides = [_train_side(label, demo_run(mode, seed, steps), out / label.lower()) for label, mode in SIDES.items()]
    print("\n" + comparison(sides))
    print("\n" + examples(sides, seed))
    picture = out / "demo.png"
    if draw(sides, picture):
        print(f"\npicture: {picture}")
    print(f"done in {time.perf_counter() - started:.0f} s; one seed each, so read the intervals, not only the means")
    return {side.label: {**side.test, "seconds": side.seconds, "flops": side.flops} for side in sides}


def patterns() -> str:
    """What each mode's attention sees, drawn."""
    about = {
        "decoder": "decoder: each token sees the tokens before it",
        "prefix": "prefix: the first tokens see each other, the rest is causal",
        "entp": "entp: each prediction starts afresh and sees everything so far (the last three predictions are shown)",
    }
    return "\n\n".join(f"{about[mode]}\n{attention.draw(mode, 6, 3)}" for mode in sorted(MODES, key=list(about).index))


def by_hand(seed: int, sequences: int = 128) -> str:
    """Count3 by weights that nobody trained: what full attention is good for, before anything is learned."""
    model = count3(64, ratio=4)
    x = Count3().rng(seed, "test", 0).integers(0, 64, (sequences, 64))
    right = [int((answers(model, x, mode) == count3_next(x)).sum()) for mode in ("entp", "decoder")]
    return (
        f"Count3 of 64 integers by weights set by hand ({model.config.layers} layers, width {model.config.width}): "
        f"{right[0]} of {sequences} right as an encoder, {right[1]} under a causal mask (entp theory compiled)"
    )


def shipped(seed: int, sequences: int = 256) -> str:
    """The trained models that come with entp, on sequences made now."""
    rows = []
    for name in names():
        model, run = load(name), load_run(name)
        fresh = replace(run, seed=seed, batch=min(sequences, run.batch))
        found = measured(model, fresh, fresh_batches(fresh, sequences), "cpu")
        low, high = found["sequence_accuracy_interval"]
        size = f"{run.model.layers} layers, width {run.model.width}"
        share = f"{found['sequence_accuracy']:.1%} ({low:.1%}..{high:.1%})"
        rows.append([name, run.mode, size, _settings(run.task), f"{found['token_accuracy']:.1%}", share])
    head = ["trained before", "mode", "size", "task", "integers right", f"whole sequences right, of {found['n']}"]
    return format_table(head, rows)


def comparison(sides: list[Side]) -> str:
    """The two models side by side."""
    task = sides[0].run.task
    rows = []
    for side in sides:
        n = int(side.test["n"])
        low, high = wilson(round(side.test["sequence_accuracy"] * n), n)
        rows.append(
            [
                side.label,
                f"{side.test['sequence_accuracy']:.1%}",
                f"{low:.1%}..{high:.1%}",
                f"{side.test['token_accuracy']:.1%}",
                f"{side.seconds:.0f}",
                f"{side.flops / 1e9:.0f}",
            ]
        )
    model = sides[0].run.model
    title = f"{task.about}: {model.layers} layers, width {model.width}, {int(sides[0].test['n'])} sums not trained on"
    head = ["", "sums right", "95% interval", "digits right", "training s", "training GFLOP"]
    return f"{title}\n{format_table(head, rows)}"


def examples(sides: list[Side], seed: int, count: int = 5) -> str:
    """The same fresh prompts continued by both."""
    task = sides[0].run.task
    prompts = task.prompts(seed + 1, count)
    columns = [
        generate(s.model, prompts, task.model_needs()["positions"] - max(map(len, prompts)), s.run.mode, stop=task.stop)
        for s in sides
    ]
    rows = []
    for i, prompt in enumerate(prompts):
        text = task.to_text(prompt)
        a, b = (int(part) for part in text.strip("$=").split("+"))
        want = task.line(a, b)[len(text) : -1]  # type: ignore[attr-defined]
        answers = [task.to_text(column[i][len(prompt) :]).rstrip("$") for column in columns]
        rows.append([text.strip("$"), want, *(f"{got} {'right' if got == want else 'wrong'}" for got in answers)])
    return f"generated\n{format_table(['prompt', 'sum', *(s.label for s in sides)], rows)}"


def draw(sides: list[Side], path: Path) -> bool:
    """One picture: what each mode sees, accuracy against steps, and what it cost. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install 'entp[plot]' to draw one.")
        return False
    figure: Any = Figure(figsize=(11, 3.8), layout="constrained")
    seen, learned, cost = figure.subfigures(1, 3, width_ratios=(1.1, 1.9, 1))
    _draw_patterns(seen)
    curves = learned.subplots()
    for side in sides:
        curves.plot(*zip(*side.curve, strict=True), marker=".", label=side.label)
    curves.set(
        xlabel="optimizer steps", ylabel="held-out sums right (fraction)", ylim=(0, 1), title="learning two-digit addition"
    )
    curves.legend()
    bars = cost.subplots()
    bars.bar([s.label for s in sides], [s.flops / 1e9 for s in sides], color=["C0", "C1"])
    bars.set(ylabel="training GFLOP", title="what it cost")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, dpi=110)
    return True


def _draw_patterns(figure: Any, time: int = 6) -> None:
    """Three squares per mode: what is seen when the last three tokens are predicted."""
    panels = figure.subplots(2, 3)
    for row, mode in zip(panels, ("entp", "decoder"), strict=True):
        for panel, n in zip(row, range(time - 2, time + 1), strict=True):
            mask = torch.ones(1, n, n, dtype=torch.bool) if mode == "entp" else attention.visible("decoder", n)
            square = torch.zeros(time, time)
            square[:n, :n] = 0.15 + 0.85 * mask[0]
            panel.imshow(square.numpy(), cmap="Blues" if mode == "entp" else "Oranges", vmin=0, vmax=1.4)
            panel.set(xticks=[], yticks=[])
        row[1].set_title("ENTP: each prediction from scratch" if mode == "entp" else "decoder: causal mask", fontsize=8)
    figure.supxlabel("keys", fontsize=8)
    figure.supylabel("queries", fontsize=8)


def _settings(task: Task) -> str:
    """A task with its settings, on a line."""
    return f"{task.name} ({', '.join(f'{f.name} {getattr(task, f.name)}' for f in fields(task))})"


def _train_side(label: str, run: Run, folder: Path) -> Side:
    """Train one model, or go on where it was stopped, and test its best weights."""
    before = (folder / "config.json").exists()
    print(
        f"\ntraining {label}: {run.steps} steps of {run.batch} sums{f', continued in {folder}' if before else ''}", flush=True
    )
    result = train(run, folder, device="cpu", resume=before)
    if result.stopped_by is not None:
        print(f"stopped at step {result.step}: the same command goes on from there.", file=sys.stderr)
        raise KeyboardInterrupt
    model = load(folder)
    test = evaluate(model, replace(run, seed=run.seed + 1), split="test", batches=TEST_BATCHES)
    curve = [(row["step"], row["sequence_accuracy"]) for row in read_metrics(folder) if row["kind"] == "eval"]
    return Side(label, run, model, test, result.seconds, run.steps * _step_flops(run), curve)


def _step_flops(run: Run) -> int:
    """FLOPs of one training step, counted while it is done."""
    model = Transformer(run.model)
    state = State(model, make_optimizers(model, run.optim))
    batch = run.task.batch(run.seed, "train", 0, run.batch)
    return count_flops(lambda: train_step(run, state, batch, torch.device("cpu"), World()))
