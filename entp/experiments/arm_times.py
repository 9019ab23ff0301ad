"""`entp bench arms RECIPE`: what a step of each arm of a recipe takes here, on its own batches.

Weights are random, and nothing is saved: how long a recipe takes on this device, and which of its
steps run as CUDA graphs, before hours go into it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import NamedTuple

import torch

from entp.bench.measure import bench_device, wait
from entp.bench.options import BenchArmsOptions
from entp.config import PretrainedConfig, Run
from entp.errors import InputError, one_of
from entp.experiments.recipe import find_recipe
from entp.model.build import build_model
from entp.terminal import format_table
from entp.training.compiling import compile_layers, explained
from entp.training.cuda_graph import EAGER_STEPS, Stepper
from entp.training.distributed import World
from entp.training.forward import Forward
from entp.training.plan import Plan
from entp.training.state import new_state


class ArmTime(NamedTuple):
    """What the steps of an arm took."""

    label: str
    seconds: float
    """The mean step."""
    before: float
    """Until the first timed step: compilation, capture."""
    captured: bool
    """Whether they were replayed as CUDA graphs."""
    memory: int | None
    """Most bytes held on the GPU."""
    steps: int
    """Those of the whole run."""


def bench_arms(name: str, options: BenchArmsOptions) -> list[ArmTime]:
    """The arms of a recipe, one after the other."""
    recipe = find_recipe(name)
    if options.data is not None:
        recipe = recipe.with_data(options.data)
    if options.init is not None:
        recipe = recipe.with_init(options.init)
    labels = [arm.label for arm in recipe.arms]
    for label in options.only:
        if label not in labels:
            raise one_of(f"arm of {recipe.name}", label, labels)
    device, found = bench_device(options.device), []
    for arm in recipe.arms:
        if options.only and arm.label not in options.only:
            continue
        run = replace(arm.run, task=arm.run.task.for_seed(0))
        if options.compile_layers and isinstance(run.model, PretrainedConfig):
            run = replace(run, train=replace(run.train, compile_layers=True))
        print(arm.label, file=sys.stderr, flush=True)
        with explained():
            found.append(_time(arm.label, run, options, device))
    return found


def _time(label: str, run: Run, options: BenchArmsOptions, device: torch.device) -> ArmTime:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    begin, plan = time.perf_counter(), Plan(run)
    torch.manual_seed(0)
    state = new_state(build_model(run.model).to(device), run.optim, plan.techniques)
    if run.train.compile_layers:
        compile_layers(state.model)
    state.step = min(options.first, max(0, run.steps - 1))
    modes = {plan.mode(part[0]) for part in plan.segments(0, run.steps)} | {run.mode}
    how = {mode: Forward.of(run, mode) for mode in modes}
    stepper = Stepper(state, plan, how, run.optim, run.train.cuda_graph, device, World())
    stepper.warm_up(run.task, run.seed, state.step + 1)
    ahead = EAGER_STEPS + 2 if cuda else 1
    steps = range(state.step, state.step + ahead + options.steps)
    batches = [run.task.batch(run.seed, "train", n, plan.batch_size(n)) for n in steps]
    start = begin
    for number, batch in enumerate(batches):
        if number == ahead:
            wait(device)
            start = time.perf_counter()
        stepper(batch)
        state.step += 1
    wait(device)
    taken = time.perf_counter() - start
    memory = torch.cuda.max_memory_allocated(device) if cuda else None
    captured = max(stepper.replayed.values(), default=-1) == state.step - 1
    return ArmTime(label, taken / options.steps, start - begin, captured, memory, run.steps)


def report(times: list[ArmTime]) -> str:
    """A table: milliseconds, and minutes of all steps of a run."""
    if not times:
        raise InputError("no arm was timed.")
    rows = [
        [
            one.label,
            f"{1e3 * one.seconds:.1f}",
            f"{one.steps:,}",
            f"{one.seconds * one.steps / 60:.1f}",
            f"{one.before:.0f}",
            "-" if one.memory is None else "yes" if one.captured else "no",
            "-" if one.memory is None else f"{one.memory / 2**20:,.0f}",
        ]
        for one in times
    ]
    names = ["arm", "ms a step", "steps", "minutes", "s before", "captured", "MiB"]
    return format_table(names, rows)
