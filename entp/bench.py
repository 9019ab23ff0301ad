"""`entp bench`: one training step by each implementation and by the decoder, in one run on one machine.

Times are comparable inside one table only: the ratio is the result. Repeats of the contenders take turns, so that a machine
that slows down slows all of them.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from entp.config import Impl, Mode, OptimConfig, Run, TrainConfig, model_for
from entp.engine.api import triton_missing
from entp.options import BenchOptions
from entp.table import format_table
from entp.tasks.counting import Match3
from entp.training.distributed import World, pick_device
from entp.training.metrics import environment
from entp.training.optim import make_optimizers
from entp.training.trainer import State, train_step

CONTENDERS: dict[str, tuple[Mode, Impl]] = {
    "entp reference": ("entp", "reference"),
    "entp packed": ("entp", "packed"),
    "entp triton": ("entp", "triton"),
    "decoder": ("decoder", "auto"),
}


@dataclass(frozen=True)
class Measured:
    """One contender's numbers."""

    name: str
    seconds: list[float]
    flops: int
    peak_bytes: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def bench_step(shape: BenchOptions) -> list[Measured]:
    """Time, FLOPs and peak memory of one training step (forward, backward, AdamW) by every contender."""
    device = pick_device(shape.device, World())
    kernels = device.type == "cuda" and triton_missing(device) is None
    names = [name for name in CONTENDERS if kernels or CONTENDERS[name][1] != "triton"]
    steps = {name: _make_step(shape, name, device) for name in names}
    flops = {name: count_flops(step) for name, step in steps.items()}  # the step that is not timed
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(shape.repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            _wait(device)
            seconds[name].append(time.perf_counter() - start)
    return [Measured(name, seconds[name], flops[name], _peak_bytes(shape, name, device)) for name in names]


def count_flops(work: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products and attention that `work` really does."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    aten = torch.ops.aten  # torch counts its CUDA attention itself, not its CPU kernel
    on_cpu = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
        ),
    }
    counter = FlopCounterMode(display=False, custom_mapping=on_cpu)
    with counter:
        work()
    return int(counter.get_total_flops())


def report(shape: BenchOptions, rows: list[Measured]) -> str:
    """The table for a person."""
    reference = rows[0].median
    where = environment(pick_device(shape.device, World()), 1)
    head = ["training step", "ms (median)", "spread", "reference / this", "GFLOP", "GFLOP/s", "peak memory MiB"]
    body = [
        [
            row.name,
            f"{row.median * 1e3:.1f}",
            f"{min(row.seconds) * 1e3:.1f}..{max(row.seconds) * 1e3:.1f}",
            f"{reference / row.median:.2f}x",
            f"{row.flops / 1e9:.2f}",
            f"{row.flops / row.median / 1e9:.0f}",
            f"{row.peak_bytes / 2**20:.0f}",
        ]
        for row in rows
    ]
    title = f"{shape.size}, {shape.batch} sequences of {shape.length} tokens, all prefixes"
    machine = f"{where['device']}, {where['threads']} threads, torch {where['torch']}"
    return f"{title}; {machine}\n{format_table(head, body)}"


def as_json(shape: BenchOptions, rows: list[Measured]) -> dict[str, Any]:
    """The same for a file."""
    return {
        "shape": {"size": shape.size, "length": shape.length, "batch": shape.batch},
        "environment": environment(pick_device(shape.device, World()), 1),
        "steps": [
            {
                "name": r.name,
                "seconds": r.seconds,
                "flops": r.flops,
                "peak_bytes": r.peak_bytes,
                "ratio": rows[0].median / r.median,
            }
            for r in rows
        ],
    }


def _make_step(shape: BenchOptions, name: str, device: torch.device) -> Callable[[], object]:
    """A function that does one training step of a contender."""
    mode, impl = CONTENDERS[name]
    task = Match3(length=shape.length)  # a target at every position
    run = Run(task, model_for(task, shape.size), mode, batch=shape.batch, optim=OptimConfig(), train=TrainConfig(impl=impl))
    torch.manual_seed(0)
    from entp.model import Transformer

    model = Transformer(run.model).to(device)
    state = State(model, make_optimizers(model, run.optim))
    batch = task.batch(0, "train", 0, shape.batch)
    return lambda: train_step(run, state, batch, device, World())


def _peak_bytes(shape: BenchOptions, name: str, device: torch.device) -> int:
    """Most memory a step adds: on CUDA as torch counts it, on a CPU the growth of a fresh process."""
    if device.type == "cuda":
        step = _make_step(shape, name, device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(resident_growth, shape, name).result()


def resident_growth(shape: BenchOptions, name: str) -> int:
    """How much this process's peak resident memory grows through one step."""
    step = _make_step(shape, name, torch.device("cpu"))
    before = peak_resident()
    step()
    return peak_resident() - before


def peak_resident() -> int:
    """Most bytes this process has had in memory. (On Linux, getrusage's figure is inherited from the parent process.)"""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
