"""A trained model as a small folder that says how it was made: what `entp/pretrained` holds.

runs/first --entp export--> model.safetensors (bfloat16), config.json, made.json, checksums.json

The same in HuggingFace's formats: entp/hf/export.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from entp.config import Run
from entp.errors import InputError
from entp.files import json_bytes
from entp.results.environment import environment, read_environment
from entp.tasks.metrics import Totals
from entp.training.checkpoint import find, load, load_run, save_model
from entp.training.evaluate import evaluate, untouched_batches
from entp.training.forward import Forward
from entp.training.loggers import read_metrics

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Measured(NamedTuple):
    """A trained model with rounded weights, its run, and made.json: how it was made, what it does
    on test sequences."""

    model: Any
    run: Run
    made: dict[str, Any]


def export(
    source: Path,
    out: Path,
    *,
    checkpoint: Literal["best", "last"] = "best",
    dtype: str = "bf16",
    shard_mib: float | None = None,
    test_sequences: int = 10_000,
    data: str | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Write the rounded weights of a run to `out`, with what they do on test sequences.

    shard_mib: no file of weights is larger than so many MiB; None: one file.
    data: where the task's files are, if it needs some. Returns made.json.
    """
    check_new(out)
    model, run, made = measure(source, checkpoint, dtype, test_sequences, data, device)
    files = {**run.task.files(), "made.json": json_bytes(made)}
    save_model(model, out, run, DTYPES[dtype], files, shard_mib)
    return made


def check_new(out: Path) -> None:
    """InputError if there is something at `out`."""
    if out.exists():
        raise InputError(f"{out} exists: give --out a new folder.")


def measure(
    source: Path,
    checkpoint: Literal["best", "last"],
    dtype: str,
    test_sequences: int,
    data: str | None,
    device: torch.device | str,
) -> Measured:
    """The model of a run with its weights rounded to `dtype`, measured as it is then."""
    if test_sequences < 1:
        raise InputError(
            f"--test-sequences is {test_sequences}: at least 1 is needed to measure anything."
        )
    weights, run = find(source, checkpoint), load_run(source, checkpoint)
    if data is not None:
        run = replace(run, task=run.task.with_data(data))
    model = load(weights, device=device)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(DTYPES[dtype]))
    batches = untouched_batches(run.task, test_sequences, run.batch_size, run.seed)
    totals = evaluate(model, run.task, batches, Forward.of(run), device=device)
    made = {
        "checkpoint": f"{weights.name} in {dtype}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "training": _training(source, weights),
        "test": with_intervals(totals),
        "measured": environment(torch.device(device), 1),
    }
    return Measured(model, run, made)


def with_intervals(totals: Totals) -> dict[str, Any]:
    """The values of an evaluation, each with its 95 % interval over test sequences."""
    intervals = {f"{name}_interval": totals.interval(name) for name in totals.all}
    return {**totals.values(), **intervals}


def _training(source: Path, weights: Path) -> dict[str, Any]:
    """Where and for how long the weights were trained; empty where only the weights are there."""
    step = int(weights.name.rpartition("-")[2]) if weights.parent.name == "checkpoints" else None
    if step is None or not (source / "environment.json").is_file():
        print(
            f"{source} is not a run folder: made.json will not say how the weights were trained.",
            file=sys.stderr,
        )
        return {}
    rows = [row for row in read_metrics(source) if row["step"] <= step]
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    return {
        "step": step,
        "seconds": seconds[-1] if seconds else None,
        "environment": read_environment(source),
    }
