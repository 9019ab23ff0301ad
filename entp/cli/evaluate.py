"""`entp evaluate RUN`: the metrics of a trained run, of generated answers, and of baselines."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from entp.cli.on import on_options, run_on, take_on
from entp.cli.parse import name_of, named_task, parse
from entp.config import Impl, Mode, Run
from entp.data.places import add_place
from entp.errors import InputError, one_of
from entp.hf import is_huggingface, refuse_gguf
from entp.tasks.base import Split, Task
from entp.terminal import counted, format_table

if TYPE_CHECKING:
    from entp.tasks.metrics import Totals

Checkpoint = Literal["best", "last"]


@dataclass(frozen=True)
class EvaluateOptions:
    """Measure a trained run."""

    split: Split = "test"
    """Stream of sequences."""
    batches: int | Literal["all"] = 16
    """Batches of the run's size; all: the whole split, where it has an end."""
    seed: int | None = None
    """Seed of the sequences. None: the run's."""
    checkpoint: Checkpoint = "best"
    """The best checkpoint by validation, or the last."""
    mode: Mode | None = None
    """entp, decoder, prefix-lm or refresh-N, such as refresh-8. None: the run's."""
    by: tuple[str, ...] = ()
    """Also measure by these slices, such as length; `entp tasks TASK` lists those of a task."""
    generate: bool = False
    """Also measure generated answers: the model reads its own answers instead of the right ones."""
    baselines: bool = False
    """Also measure the task's baselines, which answer without a model."""
    data: str | None = None
    """Where the task's data is, or other data with the same tokens. None: found by ENTP_DATA."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    impl: Impl = "auto"
    """Engine for mode entp."""
    task: str | None = None
    """module:Class of the run's task, if it is not a built-in one."""
    on: str | None = None
    """Another task to measure the run on, such as winogrande; its options are --on.NAME. Unless
    --batches is given, all of it is measured. None: the run's own."""
    json: bool = False
    """Print JSON instead of tables."""


def evaluate_command(args: list[str]) -> int:
    """evaluate RUN: measure a trained run, or a pretrained model"""
    folder = name_of(args, "run folder", [], "evaluate")
    on, words = take_on(args[1:])
    first = None if on is None else on_options(EvaluateOptions, on, folder)
    kind = EvaluateOptions if first is None else type(first)
    options = parse(kind, words, f"entp evaluate {folder}", first)
    model, run, device = open_run(
        *(folder, options.checkpoint, options.device, options.task),
        options.data if on is None else None,
    )
    if options.mode is not None:
        run = dataclasses.replace(run, mode=options.mode, importance=None)
    if on is not None:
        other: Any = options.on
        run = run_on(run, other.with_data(options.data))
    check_slices(run.task, options.by)
    found = _measure(model, run, options, device)
    count = _count(run, found["model"])
    if options.json:
        told = {} if on is None else {"task": run.task.name, "caveats": _caveats(run, on)}
        print(json.dumps({**_as_json(folder, options, found), "n": count, **told}))
    else:
        what = "items" if run.task.only_tests else "sequences"
        print(f"{run.task.name}, mode {run.mode}, {count} {what} of {options.split}")
        print("\n\n".join(_tables(name, totals, options.by) for name, totals in found.items()))
        print("".join(f"\n{told}" for told in _caveats(run, on)), end="\n" if on else "")
    return 0


def _count(run: Run, totals: Totals) -> int:
    """Sequences, or items of a task whose sequences are the options of each."""
    first = run.task.metrics[0].name
    return round(totals.all[first].w) if run.task.only_tests else totals.sequences


def _caveats(run: Run, on: str | None) -> list[str]:
    """What a reader must know of another task than the run's own."""
    return [] if on is None else run.task.caveats(0)


def open_run(
    folder: str, checkpoint: Checkpoint, device: str, task: str | None, data: str | None = None
) -> tuple[Any, Run, Any]:
    """Model, run and device of a run folder, or of one in HuggingFace's format, whose task is its
    own text; data: where the task's files are."""
    asked = None if task is None else named_task(task)
    from entp.training.checkpoint import find, load, load_run
    from entp.training.distributed import World, pick_device

    where = pick_device(device, World())
    refuse_gguf(Path(folder))
    if is_huggingface(Path(folder).expanduser()):
        return *_open_folder(folder, task, data, where), where
    run = load_run(folder, checkpoint)
    if asked is not None and not isinstance(run.task, asked):
        raise InputError(
            f"--task is {task}, and {folder} was trained on {run.task.name}, of another class: "
            "leave --task out, or measure it on another task by --on."
        )
    if run.task.takes_data:
        _look_into(find(Path(folder), checkpoint))
    if data is not None:
        run = dataclasses.replace(run, task=run.task.with_data(data))
    return load(folder, checkpoint, where), run, where


def _open_folder(folder: str, task: str | None, data: str | None, device: Any) -> tuple[Any, Run]:
    """A pretrained model as it is, on text."""
    if task is not None:
        raise InputError(
            f"{folder} is a model in HuggingFace's format, which has no task of its own: leave "
            "--task out, and name a task on text by --on."
        )
    from entp.hf.beginning import open_pretrained

    model, run = open_pretrained(folder, data)
    return model.to(device), run


def _look_into(weights: Path) -> None:
    """Let the task's files in a run folder be found: beside the weights, or above checkpoints."""
    add_place(weights.parents[1] if weights.parent.name == "checkpoints" else weights)


def slices_of(task: Task) -> list[str]:
    """What the task's metrics can be measured by."""
    return sorted({name for metric in task.metrics for name in metric.slices})


def check_slices(task: Task, by: tuple[str, ...]) -> None:
    """InputError for a slice that no metric of the task has."""
    allowed = slices_of(task)
    if by and not allowed:
        raise InputError(f"--by {by[0]}: no metric of {task.name} has slices; leave it out.")
    for name in by:
        if name not in allowed:
            raise one_of(f"slice of {task.name}", name, allowed)


def _measure(model: Any, run: Run, options: EvaluateOptions, device: Any) -> dict[str, Totals]:
    """What was found, by who answered."""
    from entp.training.evaluate import (
        evaluate,
        evaluate_baseline,
        evaluate_generated,
        split_batches,
    )
    from entp.training.forward import Forward

    task = run.task
    baselines = list(task.baselines()) if options.baselines else []
    if options.baselines and not baselines:
        raise InputError(f"{task.name} has no baselines: leave --baselines out.")
    seed = run.seed if options.seed is None else options.seed
    count = None if options.batches == "all" else options.batches
    asked = (task, options.split, count, run.batch_size, seed)
    how = dataclasses.replace(Forward.of(run), impl=options.impl)
    there = task.split_batches(options.split, run.batch_size)
    total = min((one for one in (count, there) if one is not None), default=0)
    shown = counted(f"{task.name} {how.mode}", split_batches(*asked), total, "batch")
    found = {"model": evaluate(model, task, shown, how, device=device)}
    if options.generate:
        batches = split_batches(*asked)
        found["generated"] = evaluate_generated(model, task, batches, how, device=device)
    for name in baselines:
        found[f"baseline {name}"] = evaluate_baseline(task, name, split_batches(*asked))
    return found


def _tables(name: str, totals: Totals, by: tuple[str, ...]) -> str:
    """A table of all metrics, and one for each metric and slice."""
    head = ["metric" if name == "model" else f"metric, {name}", "value", "95% interval"]
    rows = [
        [metric, f"{totals.value(metric):.4f}", _interval(totals.interval(metric))]
        for metric in totals.all
    ]
    parts = [format_table(head, rows)]
    for metric, part in _sliced(totals, by):
        rows = [
            [key, f"{value:.4f}", _interval(totals.sliced_interval(metric, part, key))]
            for key, value in totals.sliced(metric, part).items()
        ]
        parts.append(format_table([part, metric, "95% interval"], rows))
    return "\n\n".join(parts)


def _sliced(totals: Totals, by: tuple[str, ...]) -> list[tuple[str, str]]:
    """Metrics with the slices that were asked for and found."""
    return [
        (metric, part) for part in by for metric, found in totals.slices.items() if part in found
    ]


def _interval(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.4f}..{ends[1]:.4f}"


def _as_json(folder: str, options: EvaluateOptions, found: dict[str, Totals]) -> dict[str, Any]:
    asked = {"run": folder, "checkpoint": options.checkpoint, "split": options.split}
    if options.mode is not None:
        asked["mode"] = options.mode
    others = {
        name: _values(totals, options.by) for name, totals in found.items() if name != "model"
    }
    return {**asked, **_values(found["model"], options.by), **others}


def _values(totals: Totals, by: tuple[str, ...]) -> dict[str, Any]:
    """Values, intervals and slices as plain data."""
    found: dict[str, Any] = totals.values()
    found["intervals"] = {metric: totals.interval(metric) for metric in totals.all}
    for metric, part in _sliced(totals, by):
        found.setdefault("by", {}).setdefault(part, {})[metric] = totals.sliced(metric, part)
    return found
