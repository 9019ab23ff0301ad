"""A trained model as a small folder that says how it was made: what `entp/pretrained` holds.

runs/first --entp export--> model.safetensors (bfloat16), config.json, made.json, checksums.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from entp.config import Run
from entp.errors import InputError
from entp.intervals import wilson
from entp.model import Transformer
from entp.tasks.base import Batch
from entp.training.checkpoint import find, load, load_run, save_model
from entp.training.evaluation import evaluate, fresh_batches
from entp.training.metrics import environment, read_environment, read_metrics

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export(
    source: Path,
    out: Path,
    *,
    which: Literal["best", "last"] = "best",
    dtype: str = "bf16",
    fresh: int = 10_000,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Write the weights of a run to `out`, rounded, with what these very weights do on fresh sequences. Returns made.json."""
    if out.exists():
        raise InputError(f"{out} exists: give --out a new folder.")
    if fresh < 1:
        raise InputError(f"--fresh is {fresh}: at least 1 sequence is needed to measure anything.")
    weights, run = find(source, which), load_run(source, which)
    model = load(weights, device=device)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(DTYPES[dtype]))
    made = {
        "weights": f"{weights.name} in {dtype}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "training": _training(source, weights),
        "fresh": measured(model, run, fresh_batches(run, fresh), device),
        "measured": environment(torch.device(device), 1),
    }
    save_model(model, out, run, DTYPES[dtype], {"made.json": (json.dumps(made, indent=1) + "\n").encode()})
    return made


def measured(model: Transformer, run: Run, batches: Iterable[Batch], device: torch.device | str) -> dict[str, Any]:
    """Loss and accuracies on these batches, with a 95 % interval of the share of right sequences."""
    values: dict[str, Any] = {**evaluate(model, run, batches=batches, device=device)}
    if "sequence_accuracy" in values:
        n = values["n"]
        values["sequence_accuracy_interval"] = wilson(round(values["sequence_accuracy"] * n), n)
    return values


def _training(source: Path, weights: Path) -> dict[str, Any]:
    """Where and for how long the weights were trained; empty where only the weights are there."""
    step = int(weights.name.rpartition("-")[2]) if weights.parent.name == "checkpoints" else None
    if step is None or not (source / "environment.json").is_file():
        print(f"{source} is not a run folder: made.json will not say how the weights were trained.", file=sys.stderr)
        return {}
    seconds = [row["seconds"] for row in read_metrics(source) if row["kind"] == "train" and row["step"] <= step]
    return {"step": step, "seconds": seconds[-1] if seconds else None, "environment": read_environment(source)}
