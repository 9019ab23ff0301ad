"""Runs that train in a second, and the command line as a real process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from entp.config import OptimConfig, Run, TrainConfig, model_for
from entp.model.build import build_model
from entp.tasks.base import IGNORE, Batch, Split, Task
from entp.tasks.counting import Count3
from entp.training.checkpoint import load
from entp.training.cuda_graph import Stepper
from entp.training.distributed import World
from entp.training.forward import Forward
from entp.training.loggers import read_metrics
from entp.training.plan import Plan
from entp.training.state import new_state
from entp.training.trainer import Result, train

TASK = Count3(prompt_length=4, length=10, num_values=10)
FLAGS = [
    "--task.prompt-length=4",
    "--task.length=10",
    "--task.num-values=10",
    "--model.layers=2",
    "--model.heads=2",
]
FLAGS += ["--model.width=16"]
"""The command line's way to ask for `small_run()`'s task and model."""


@dataclass(frozen=True)
class Parity(Task):
    """Whether the number of ones is even: a class for a whole sequence."""

    name: ClassVar[str] = "parity"

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": 10, "context_length": 10, "outputs": 2}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        x = self.rng(seed, split, step).integers(0, 2, (size, 10))
        y = np.full(x.shape, IGNORE)
        y[:, -1] = x.sum(1) % 2
        return Batch(x, y)


def small_run(**changes: Any) -> Run:
    """Count3 of 10 integers, two layers of width 16, 10 steps of 8 sequences."""
    train = {
        "eval_every": 5,
        "eval_batches": 2,
        "checkpoint_every": 5,
        "log_every": 1,
        **changes.pop("train", {}),
    }
    optim = {
        "lr": 3e-3,
        "min_lr": 3e-4,
        "warmup_steps": 3,
        "decay_steps": 40,
        **changes.pop("optim", {}),
    }
    config: dict[str, Any] = {
        "task": TASK,
        "model": model_for(TASK, "small", layers=2, heads=2, width=16),
        "steps": 10,
        "batch_size": 8,
        "optim": OptimConfig(**optim),
        "train": TrainConfig(**train),
    }
    return Run(**{**config, **changes})


def fit(run: Run, out: Path, **options: Any) -> Result:
    """Train on the CPU, without output."""
    return train(run, out, device="cpu", **{"quiet": True, **options})


def last_weights(out: Path) -> dict[str, Tensor]:
    """Those of a run's last checkpoint."""
    return load(out, "last").state_dict()


def new_stepper(run: Run, device: str = "cpu", world: World | None = None) -> Stepper:
    """The steps of a run from its first on; `stepper.state` is what they change."""
    where, plan = torch.device(device), Plan(run)
    torch.manual_seed(run.seed)
    state = new_state(build_model(run.model).to(where), run.optim, plan.techniques)
    modes = {plan.mode(part[0]) for part in plan.segments(0, run.steps)} | {run.mode}
    how = {mode: Forward.of(run, mode) for mode in modes}
    graphs = run.train.cuda_graph
    return Stepper(state, plan, how, run.optim, graphs, where, world or World())


def environment() -> dict[str, str]:
    """One thread per process, so that tests side by side do not fight for cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def yardstick() -> float:
    """Seconds that this machine takes just now to add up six million squares: what a limit of time
    is a multiple of."""
    start = time.process_time()
    sum(i * i for i in range(6_000_000))
    return time.process_time() - start


def run_python(*words: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python with WORDS as a process of its own and wait for it."""
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=environment(), timeout=300, **options
    )


def entp(*words: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `entp WORDS`."""
    return run_python("-m", "entp", *words, cwd=cwd, **options)


def start_entp(*words: str, cwd: Path) -> subprocess.Popen[str]:
    """Start `entp WORDS` and do not wait."""
    command = [sys.executable, "-m", "entp", *words]
    return subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until metrics.jsonl has that step, or the process is gone."""
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        rows = read_metrics(out)
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.01)
