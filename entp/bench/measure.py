"""How things are measured: variants take turns, so that a machine that slows down slows all;
memory is each one's own."""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from entp.terminal import Progress
from entp.training.distributed import World, pick_device

Step = Callable[[], object]
"""A variant: each call does the measured work once."""

REPLAYS = 3
"""Steps after the warm-up in which peak memory is still watched: by then a step does what it will
do for good."""


def take_turns(
    steps: Mapping[str, Step],
    device: torch.device,
    repeats: int,
    each: Mapping[str, int] | None = None,
    label: str = "bench",
) -> dict[str, list[float]]:
    """Seconds per step: `repeats` rounds, in each of which every variant does one step, or
    each[name] of them in a row.

    Steps in a row follow each other as in training, where nothing waits for the device after each.
    """
    counts = {name: (each or {}).get(name, 1) for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    progress = Progress(label, repeats * sum(counts.values()), 0, True)
    done = 0
    try:
        for _ in range(repeats):
            for name, step in steps.items():
                seconds[name].append(timed(step, device, counts[name]))
                progress.step(done := done + counts[name])
    finally:
        progress.close()
    return seconds


def timed(step: Step, device: torch.device, count: int = 1) -> float:
    """Seconds per step of `count` steps, from an idle device to an idle device."""
    wait(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait(device)
    return (time.perf_counter() - start) / count


def prepare(
    make: Callable[..., Step], args: tuple[Any, ...], device: torch.device, warmup: int
) -> tuple[Step, int]:
    """make(*args, device) after `warmup` steps, and the most bytes that steps add to the weights.

    On CUDA as torch counts it, from before the first step (so with gradients and optimizer) through
    the steps that may capture a graph and REPLAYS more; on a CPU the growth of a fresh process
    through one step.
    """
    step = make(*args, device)
    if device.type != "cuda":
        for _ in range(warmup):
            step()
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return step, pool.submit(resident_growth, make, args).result()
    wait(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(warmup + REPLAYS):
        step()
    wait(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return step, peak


def resident_growth(make: Callable[..., Step], args: tuple[Any, ...]) -> int:
    """How much this process's peak resident memory grows through one step on the CPU."""
    step = make(*args, torch.device("cpu"))
    before = peak_resident()
    step()
    return peak_resident() - before


def peak_resident() -> int:
    """Most bytes this process has had in memory. (On Linux, getrusage's figure is inherited from
    the parent process.)"""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def bench_device(name: str) -> torch.device:
    """The device of --device, made torch's current one: graphs and kernels go to that."""
    device = pick_device(name, World())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def default_warmup(device: torch.device) -> int:
    """Steps that are not timed: on CUDA the first few may still capture a graph."""
    return 5 if device.type == "cuda" else 1


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back the memory of variants that are gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_cells(seconds: list[float]) -> list[str]:
    """Median and range in milliseconds, for a table."""
    return [
        f"{statistics.median(seconds) * 1e3:.2f}",
        f"{min(seconds) * 1e3:.2f}..{max(seconds) * 1e3:.2f}",
    ]


def count_flops(work: Step) -> int:
    """Floating-point operations of the matrix products and attention that `work` really does, as
    torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    aten = torch.ops.aten  # torch counts its CUDA attention itself, not its CPU kernel
    on_cpu = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
            q, k, v
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
        ),
    }
    counter = FlopCounterMode(display=False, custom_mapping=on_cpu)
    with counter:
        work()
    return int(counter.get_total_flops())
