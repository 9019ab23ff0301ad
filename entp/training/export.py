"""A trained model as a small folder that says how it was made: what `entp/pretrained` holds.

runs/first --entp export--> model.safetensors (bfloat16), config.json, made.json, checksums.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import torch

from entp.errors import InputError
from entp.files import json_bytes
from entp.results.environment import environment, read_environment
from entp.tasks.metrics import Totals
from entp.training.checkpoint import find, load, load_run, save_model
from entp.training.evaluate import evaluate, untouched_batches
from entp.training.forward import Forward
from entp.training.loggers import read_metrics

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export(
    source: Path,
    out: Path,
    *,
    checkpoint: Literal["best", "last"] = "best",
    dtype: str = "bf16",
    test_sequences: int = 10_000,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Write the rounded weights of a run to `out`, with what they do on test sequences.

    Returns made.json.
    """
    if out.exists():
        raise InputError(f"{out} exists: give --out a new folder.")
    if test_sequences < 1:
        raise InputError(
            f"--test-sequences is {test_sequences}: at least 1 is needed to measure anything."
        )
    weights, run = find(source, checkpoint), load_run(source, checkpoint)
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
    save_model(model, out, run, DTYPES[dtype], {"made.json": json_bytes(made)})
    return made


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
