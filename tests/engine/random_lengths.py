"""Random lengths by kernels and graphs beside torch's own: `python random_lengths.py SEED SECONDS`.

Prints one line for each length and mode, and ends with an error where losses or gradient norms
differ. Run several at once: processes on one GPU have found what a single one did not.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_runs import new_stepper

from entp.bench.shapes import RandomTokens
from entp.config import ModelConfig, OptimConfig, Run, TrainConfig
from entp.engine.layout import rows_of
from entp.tasks.base import IGNORE, Batch
from entp.training.cuda_graph import EAGER_STEPS

LONGEST, MODES = 300, ("decoder", "entp", "prefix-lm")
STEPS = EAGER_STEPS + 4


class WithPrefix(RandomTokens):
    """The same with a third of the tokens as the prefix of mode prefix-lm."""

    @property
    def prefix(self) -> int:
        return max(1, self.length // 3)


def draw_run(rng: np.random.Generator) -> Run:
    """A random length, mode, depth and width; AdamW, or Muon as in a run that failed on CUDA."""
    length, mode = int(rng.integers(1, LONGEST + 1)), str(rng.choice(MODES))
    heads, width = ((2, 64), (4, 256))[int(rng.integers(2))]
    layers, task = int(rng.choice([1, 2, 5, 10])), WithPrefix(length, 8)
    model = ModelConfig(vocab=8, context_length=length, layers=layers, heads=heads, width=width)
    if rng.random() < 0.3:
        model = replace(model, position_embedding="rotary")
    optim = (
        OptimConfig("muon", lr=1e-3, min_lr=1e-4, precondition_every=300)
        if rng.random() < 0.5
        else OptimConfig()
    )
    tokens = 12_000 if mode == "entp" else 17_536
    batch = max(1, min(128, tokens // length))
    return Run(task, model, mode, batch_size=batch, optim=optim)  # type: ignore[arg-type]


def some_targets(run: Run, rng: np.random.Generator) -> Batch:
    """A batch with targets at the last eight positions at most."""
    batch = run.task.batch(0, "train", 0, run.batch_size)
    y = batch.y.copy()
    y[:, : max(0, y.shape[1] - int(rng.integers(1, 9)))] = IGNORE
    return Batch(batch.x, y)


def losses(run: Run, batch: Batch) -> list[tuple[float, float]]:
    """Loss and gradient norm of a few steps on one batch."""
    stepper = new_stepper(run, "cuda")
    found = []
    for _ in range(STEPS):
        loss, norm, _ = stepper(batch)
        found.append((float(loss), float(norm)))
        stepper.state.step += 1
    assert len(stepper.graphs) == int(run.train.cuda_graph)
    return found


def compare(run: Run, batch: Batch) -> float:
    """Largest relative difference, in fp32, of kernels with graphs from torch's own without."""
    kernels = replace(run, train=TrainConfig(impl="triton", precision="fp32"))
    plain = replace(run, train=TrainConfig(impl="packed", precision="fp32", cuda_graph=False))
    got, want = np.array(losses(kernels, batch)), np.array(losses(plain, batch))
    return float((np.abs(got - want) / np.abs(want)).max())


def main(seed: int, seconds: float) -> None:
    rng, end, number = np.random.default_rng(seed), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        run = draw_run(rng)
        batch = some_targets(run, rng)
        close = 1e-4 if run.optim.name == "adamw" else 2e-2  # muon works in bf16 on CUDA
        off = compare(run, batch)
        half = losses(replace(run, train=TrainConfig(impl="triton", precision="bf16")), batch)
        rows = sum(rows_of(torch.from_numpy(batch.y != IGNORE)))
        tokens = f"{batch.x.shape[1]} tokens x {run.batch_size}, {run.mode}, {rows} rows"
        name = f"{tokens}, {run.model.layers} layers of {run.model.width}"
        kind = f"{run.model.position_embedding}, {run.optim.name}"
        print(f"{name}, {kind}: off by {off:.1e}", flush=True)
        assert off < close, name
        assert np.isfinite(half).all(), name
        number += 1
    print(f"seed {seed}: {number} lengths", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
