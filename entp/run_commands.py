"""Commands about a trained run: `entp evaluate | generate | export`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from entp.config import Run
from entp.options import EvaluateOptions, ExportOptions, GenerateOptions
from entp.parsing import name_of, named_task, parse
from entp.tasks.base import IGNORE, Task, read_prompt


def evaluate_command(args: list[str]) -> int:
    """evaluate RUN: measure a trained run on fresh sequences"""
    folder = name_of(args, "run folder", [], "evaluate")
    options = parse(EvaluateOptions, args[1:], f"entp evaluate {folder}")
    model, run, device = _open_run(folder, options.which, options.device, options.task)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, impl=options.impl))
    from entp.intervals import wilson
    from entp.table import format_table
    from entp.training.evaluation import accuracy_by_length, evaluate, generated_right, some_batches

    asked = (run, options.split, options.batches, options.seed)
    values = evaluate(model, run, split=options.split, batches=options.batches, seed=options.seed, device=device)
    more: dict[str, Any] = {}
    if options.by_length:
        more["by_length"] = accuracy_by_length(model, run, some_batches(*asked), device)
    if options.by_generation:
        values["generated_right"] = generated_right(model, run, some_batches(*asked), device)[0] / values["n"]
    if options.json:
        print(json.dumps({"run": folder, "split": options.split, **values, **more}))
        return 0
    n, rows = int(values.pop("n")), []
    for name, value in values.items():
        low, high = wilson(round(value * n), n) if name in ("sequence_accuracy", "generated_right") else (None, None)
        rows.append([name, f"{value:.4f}", "" if low is None else f"{low:.4f}..{high:.4f}"])
    print(f"{run.task.name}, mode {run.mode}, {n} sequences of {options.split}")
    print(format_table(["metric", "value", "95% interval"], rows))
    if more:
        print(format_table(["tokens read", "right"], [[str(k), f"{v:.4f}"] for k, v in more["by_length"].items()]))
    return 0


def generate_command(args: list[str]) -> int:
    """generate RUN: continue prompts"""
    folder = name_of(args, "run folder", [], "generate")
    options = parse(GenerateOptions, args[1:], f"entp generate {folder}")
    model, run, _ = _open_run(folder, options.which, options.device, options.task)
    from entp.engine.generate import generate

    task = run.task
    prompts = [read_prompt(task, text) for text in options.prompt] or task.prompts(options.seed, 3)
    new = options.max_new_tokens
    if new is None:
        new = max(1, _answer_end(task) - max(map(len, prompts)))
    outputs = generate(
        model,
        prompts,
        new,
        options.mode or run.mode,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=task.stop,
    )
    for tokens in outputs:
        print(task.to_text(tokens))
    return 0


def _answer_end(task: Task) -> int:
    """How many tokens a sequence of the task has up to the last one asked for, which need not be read."""
    asked = task.batch(0, "test", 0, 8).y != IGNORE
    return int(asked.any(0).nonzero()[0].max(initial=0)) + 2


def export_command(args: list[str]) -> int:
    """export RUN: save a trained model as a small folder"""
    folder = name_of(args, "run folder", [], "export")
    options = parse(ExportOptions, args[1:], f"entp export {folder}")
    if options.task is not None:
        named_task(options.task)
    from entp.training.distributed import World, pick_device
    from entp.training.export import export

    where = pick_device(options.device, World())
    made = export(Path(folder), options.out, which=options.which, dtype=options.dtype, fresh=options.fresh, device=where)
    size = (options.out / "model.safetensors").stat().st_size
    found = "  ".join(f"{name} {value:.4g}" for name, value in made["fresh"].items() if isinstance(value, float))
    print(f"{options.out}: {made['weights']}, {size / 1e6:.2f} MB. On {made['fresh']['n']} fresh sequences: {found}")
    return 0


def _open_run(folder: str, which: Literal["best", "last"], device: str, task: str | None) -> tuple[Any, Run, Any]:
    """Model, run and device of a run folder."""
    if task is not None:
        named_task(task)
    from entp.training.checkpoint import load, load_run
    from entp.training.distributed import World, pick_device

    where = pick_device(device, World())
    run = load_run(folder, which)
    return load(folder, which, where), run, where
