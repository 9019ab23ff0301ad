"""`entp demo`: ENTP and a decoder of the same size, trained live on a CPU in a few minutes.

The task is addition of two-digit numbers, first digit of the sum first, from 2000 of the 10,000
sums, scored on others. Chosen by trying: with the sum reversed (last digit first) the two did
equally well at this scale. docs/LOG.md has the numbers, and how far seeds differ.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from entp.cli.parse import parse
from entp.config import MODES, Mode, OptimConfig, Run, TrainConfig, model_for
from entp.tasks.addition import Addition
from entp.tasks.base import Task
from entp.tasks.counting import Count3, count3_next
from entp.tasks.metrics import Totals
from entp.terminal import format_table

SIDES: dict[str, Mode] = {"ENTP": "entp", "decoder": "decoder"}
TEST_BATCHES = 32


@dataclass(frozen=True)
class DemoOptions:
    """Train ENTP and a decoder on a CPU and compare them."""

    out: Path = Path("demo")
    """Folder for the two runs and the figure."""
    steps: int = 1500
    """Optimizer steps of each."""
    seed: int = 0
    """Seed of both."""


def demo_command(args: list[str]) -> int:
    """demo: ENTP and a decoder compared, live"""
    options = parse(DemoOptions, args, "entp demo")
    demo(options.out, options.seed, options.steps)
    return 0


@dataclass(frozen=True)
class Side:
    """What one of the two models did."""

    label: str
    run: Run
    model: Any
    test: Totals
    seconds: float
    flops: float
    curve: list[tuple[int, float]]
    """Step and exact match of every evaluation."""


def demo_run(mode: Mode, seed: int = 0, steps: int = 1500) -> Run:
    """The demo's run in one mode; both modes get the same data, size and schedule."""
    task = Addition(digits=2, train_examples=2000, reversed=False)
    warmup = min(100, steps // 4)
    every = max(1, steps // 12)
    return Run(
        task=task,
        model=model_for(task, "small", layers=2, heads=2, width=64),
        mode=mode,
        steps=steps,
        batch_size=64,
        seed=seed,
        optim=OptimConfig(lr=2e-3, min_lr=2e-4, warmup_steps=warmup, decay_steps=steps),
        train=TrainConfig(eval_every=every, eval_batches=8, checkpoint_every=steps),
    )


def demo(out: Path, seed: int = 0, steps: int = 1500) -> dict[str, Any]:
    """The numbers that are printed: two models are trained, compared, drawn, and generate."""
    started = time.perf_counter()
    print(patterns())
    print(f"\n{by_hand(seed)}")
    from entp.pretrained import names

    if names():
        print(f"\n{shipped(seed)}")
    sides = [
        _train_side(label, demo_run(mode, seed, steps), out / label.lower())
        for label, mode in SIDES.items()
    ]
    print(f"\n{comparison(sides)}\n\n{examples(sides, seed)}")
    from entp.report.patterns import draw_demo

    figure = out / "demo.png"
    if draw_demo(sides, figure):
        print(f"\nfigure: {figure}")
    print(
        f"done in {time.perf_counter() - started:.0f} s; one seed each, so read the intervals, not "
        "only the means"
    )
    return {
        side.label: {**side.test.values(), "seconds": side.seconds, "flops": side.flops}
        for side in sides
    }


def patterns() -> str:
    """What each mode's attention sees, in characters."""
    from entp.engine import masks

    about = {
        "decoder": "decoder: each token sees the tokens before it",
        "prefix-lm": "prefix-lm: the first tokens see each other, the rest is causal",
        "entp": "entp: each prediction starts from scratch and sees everything so far "
        "(the last three predictions are shown)",
    }
    in_order = sorted(MODES, key=list(about).index)
    return "\n\n".join(f"{about[mode]}\n{masks.draw(mode, 6, 3)}" for mode in in_order)


def by_hand(seed: int, sequences: int = 128) -> str:
    """Count3 by weights that nobody trained: what full attention is good for, before anything is
    learned."""
    from entp.theory.compiled import answers, count3

    model = count3(64, ratio=4)
    x = Count3().rng(seed, "test", 0).integers(0, 64, (sequences, 64))
    right = [int((answers(model, x, mode) == count3_next(x)).sum()) for mode in ("entp", "decoder")]
    size = f"{model.config.layers} layers, width {model.config.width}"
    return (
        f"Count3 of 64 integers by weights set by hand ({size}): {right[0]} of {sequences} right "
        f"as an encoder, {right[1]} under a causal mask (entp theory compiled)"
    )


def shipped(seed: int, sequences: int = 256) -> str:
    """The trained models that come with entp, on test sequences of this seed."""
    from entp.pretrained import names
    from entp.training.checkpoint import load, load_run

    rows = []
    for name in names():
        run = load_run(name)
        size = min(sequences, run.batch_size)
        found = _tested(load(name), run, -(-sequences // size), size, seed)
        model = f"{run.model.layers} layers, width {run.model.width}"
        accuracy = f"{found.value('token_accuracy'):.1%}"
        rows.append([name, run.mode, model, _settings(run.task), accuracy, *_exact_match(found)])
    head = ["pretrained", "mode", "size", "task", "token accuracy", "exact match", "95% interval"]
    return f"{format_table(head, rows)}\n{found.sequences} test sequences each"


def comparison(sides: list[Side]) -> str:
    """A table of the two models."""
    first = sides[0]
    model = first.run.model
    rows = [
        [
            side.label,
            *_exact_match(side.test),
            f"{side.test.value('token_accuracy'):.1%}",
            f"{side.seconds:.0f}",
            f"{side.flops / 1e9:.0f}",
        ]
        for side in sides
    ]
    title = (
        f"{first.run.task.about}: {model.layers} layers, width {model.width}, "
        f"{first.test.sequences} sums not trained on"
    )
    head = ["", "sums right", "95% interval", "digits right", "training s", "training GFLOP"]
    return f"{title}\n{format_table(head, rows)}"


def examples(sides: list[Side], seed: int, count: int = 5) -> str:
    """The same test prompts continued by both."""
    task: Any = sides[0].run.task
    prompts = task.prompts(seed + 1, count)
    columns = [_generated(side, prompts) for side in sides]
    rows = []
    for prompt, *answers in zip(prompts, *columns, strict=True):
        text = task.to_text(prompt)
        a, b = (int(part) for part in text.strip("$=").split("+"))
        right = task.line(a, b)[len(text) : -1]
        told = [f"{got} {'right' if got == right else 'wrong'}" for got in answers]
        rows.append([text.strip("$"), right, *told])
    return f"generated\n{format_table(['prompt', 'sum', *(s.label for s in sides)], rows)}"


def _generated(side: Side, prompts: list[list[int]]) -> list[str]:
    """The answer that a model generates after each prompt."""
    from entp.engine.generation.generate import generate

    task = side.run.task
    new = task.model_needs()["context_length"] - max(map(len, prompts))
    outputs = generate(side.model, prompts, new, side.run.mode, stop=task.stop)
    pairs = zip(prompts, outputs, strict=True)
    return [task.to_text(tokens[len(prompt) :]).rstrip("$") for prompt, tokens in pairs]


def _settings(task: Task) -> str:
    """A task with its settings, on a line."""
    return f"{task.name} ({', '.join(f'{f.name} {getattr(task, f.name)}' for f in fields(task))})"


def _exact_match(totals: Totals) -> list[str]:
    """Exact match and its interval, as cells of a table."""
    low, high = totals.interval("exact_match") or (0.0, 1.0)
    return [f"{totals.value('exact_match'):.1%}", f"{low:.1%}..{high:.1%}"]


def _tested(model: Any, run: Run, batches: int, batch_size: int, seed: int) -> Totals:
    """The metrics of a run on test sequences of this seed."""
    from entp.training.evaluate import evaluate, split_batches
    from entp.training.forward import Forward

    some = split_batches(run.task, "test", batches, batch_size, seed)
    return evaluate(model, run.task, some, Forward.of(run))


def _train_side(label: str, run: Run, folder: Path) -> Side:
    """A model, trained or continued where it was stopped, and its test."""
    from entp.training.checkpoint import load
    from entp.training.loggers import read_metrics
    from entp.training.trainer import train

    before = (folder / "config.json").exists()
    where = f", continued in {folder}" if before else ""
    print(f"\ntraining {label}: {run.steps} steps of {run.batch_size} sums{where}", flush=True)
    result = train(run, folder, device="cpu", resume=before)
    if result.stopped_by is not None:
        told = f"stopped at step {result.step}: the same command goes on from there."
        print(told, file=sys.stderr)
        raise KeyboardInterrupt
    model = load(folder)
    test = _tested(model, run, TEST_BATCHES, run.batch_size, run.seed + 1)
    rows = [row for row in read_metrics(folder) if row["kind"] == "eval"]
    curve = [(row["step"], row["exact_match"]) for row in rows]
    return Side(label, run, model, test, result.seconds, run.steps * _step_flops(run), curve)


def _step_flops(run: Run) -> int:
    """FLOPs of one training step, counted while it is done."""
    import torch

    from entp.bench.measure import count_flops
    from entp.bench.step import make_step

    return count_flops(make_step(run, torch.device("cpu")))
