"""`entp bench step`: one training step by the reference loop, by each engine and by the decoder of
the same size."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from entp.bench.measure import (
    Step,
    bench_device,
    default_warmup,
    prepare,
    release,
    take_turns,
    time_cells,
)
from entp.bench.options import BenchStepOptions
from entp.bench.profile import expensive_kernels, kernel_table
from entp.bench.roofline import describe, roofline
from entp.bench.shapes import LABELS, VARIANTS, Shape, named_shapes, reached, split_list
from entp.config import AnyModelConfig, ModelConfig, Run
from entp.engine.budget import step_token_budget
from entp.engine.choice import choose
from entp.engine.devices import triton_missing
from entp.engine.flops import Flops, decoder_flops, engine_flops, reference_flops
from entp.engine.layout import rows_of, split
from entp.model.build import build_model
from entp.results.environment import environment
from entp.tasks.counting import Match3
from entp.terminal import format_table
from entp.training.cuda_graph import Stepper
from entp.training.distributed import World
from entp.training.forward import Forward
from entp.training.plan import Plan
from entp.training.state import new_state

FORMULAS: dict[str, Callable[[AnyModelConfig, Tensor], Flops]] = {
    "reference": reference_flops,
    "packed": engine_flops,
    "triton": engine_flops,
    "decoder": decoder_flops,
    "decoder-triton": decoder_flops,
}
"""The operations over which each variant's rate is taken."""

FAST_STEPS = 5
"""Steps in a row that a variant other than the reference does in each round on CUDA, where they
are short."""


def make_step(run: Run, device: torch.device) -> Step:
    """A function that does one training step of a run: forward, backward, optimizer."""
    torch.manual_seed(0)
    model = build_model(run.model).to(device)
    plan, how = Plan(run), {run.mode: Forward.of(run)}
    state = new_state(model, run.optim, plan.techniques)
    graphs = run.train.cuda_graph
    stepper = Stepper(state, plan, how, run.optim, graphs, device, World())
    batch = run.task.batch(0, "train", 0, run.batch_size)
    return lambda: stepper(batch)


def bench(
    options: BenchStepOptions, save: Callable[[dict[str, Any]], object] = lambda _: None
) -> dict[str, Any]:
    """What a results file keeps and `report` prints: every shape, measured; `save` gets what there
    is after each."""
    device = bench_device(options.device)
    names = _variants(options, device)
    shapes = named_shapes(options.shapes) if options.shapes else [_shape(options)]
    warmup = default_warmup(device) if options.warmup is None else options.warmup
    section: dict[str, Any] = {
        "environment": environment(device, 1),
        "config": {"variants": names, "repeats": options.repeats, "warmup": warmup},
        "note": options.note,
        "shapes": [],
        "targets": [],
    }
    for shape in shapes:
        section["shapes"].append(
            _measure(shape, names, options.repeats, warmup, options.profile, device)
        )
        if device.type == "cuda":
            section["targets"] += _targets(section["shapes"][-1])
        release(device)
        save(section)
    return section


def report(section: dict[str, Any]) -> str:
    """The tables for a person."""
    where = section["environment"]
    parts = [
        f"one training step; {where['device']}, {where['threads']} threads, torch {where['torch']}"
    ]
    for shape in section["shapes"]:
        parts.append(f"{_title(shape)}\n{_table(shape)}{_bound(shape)}")
        parts += [kernel_table(name, profile) for name, profile in shape.get("profile", {}).items()]
    if section["targets"]:
        parts.append(targets_table(section["targets"]))
    if section["note"]:
        parts.append(f"note: {section['note']}")
    return "\n\n".join(parts)


def targets_table(targets: list[dict[str, Any]]) -> str:
    """What is wanted, hoped for and reached; the names of measures are those of Target."""
    head = ["reference / this", "measure", "wanted", "aim", "reached", "met"]
    rows = [
        [
            f"{t['shape']}, {t['variant']}",
            t["measure"],
            f"{t['wanted']:g}x",
            f"{t['aim']:g}x",
            f"{t['reached']:.2f}x",
            t["met"],
        ]
        for t in targets
    ]
    return format_table(head, rows)


def _variants(options: BenchStepOptions, device: torch.device) -> list[str]:
    """What is measured: the variants asked for, each of which must run, or all that can."""
    if options.variants is not None:
        asked = split_list(options.variants, "variant", list(VARIANTS))
        for name in asked:
            choose(VARIANTS[name][1], device)
        return [name for name in VARIANTS if name in asked]
    kernels = device.type == "cuda" and triton_missing(device) is None
    return [name for name, (_, impl) in VARIANTS.items() if kernels or impl != "triton"]


def _shape(options: BenchStepOptions) -> Shape:
    """The shape of --size, --length and --batch-size: a target at every position."""
    task = Match3(length=options.length or 64)
    return Shape("own", task, options.size or "small", options.batch_size or 8)


def _measure(
    shape: Shape, names: list[str], repeats: int, warmup: int, profile: bool, device: torch.device
) -> dict[str, Any]:
    """All variants on one shape. They are in memory together, so that they can take turns."""
    ready = {name: prepare(make_step, (shape.run(name),), device, warmup) for name in names}
    steps = {name: step for name, (step, _) in ready.items()}
    many = FAST_STEPS if device.type == "cuda" else 1
    each = {name: 1 if name == "reference" else many for name in names}
    seconds = take_turns(steps, device, repeats, each, f"bench {shape.name}")
    targets = torch.from_numpy(shape.task.batch(0, "train", 0, shape.batch_size).target_mask)
    flops = {name: FORMULAS[name](shape.run(name).model, targets).total for name in names}
    rows = [_row(name, seconds[name], flops[name], ready[name][1]) for name in names]
    found = {**_describe(shape, targets), "steps": _with_ratios(rows)}
    if "triton" in names:
        config = shape.run("triton").model
        assert isinstance(config, ModelConfig)
        with torch.device("meta"):
            budget = step_token_budget(build_model(config), device, sum(rows_of(targets)))
        chunks = len(list(split(targets, budget)))
        found["roofline"] = roofline(config, targets, device, chunks)
    if profile:
        found["profile"] = {
            LABELS[n]: expensive_kernels(steps[n], device) for n in names if n != "reference"
        }
    return found


def _describe(shape: Shape, target_mask: Tensor) -> dict[str, Any]:
    """What the step computes."""
    lengths = target_mask.nonzero()[:, 1] + 1
    return {
        "name": shape.name,
        "size": shape.size,
        "batch_size": shape.batch_size,
        "tokens": target_mask.shape[1],
        "prefixes": [int(lengths.min()), int(lengths.max())],
        "rows": int(lengths.sum()),
        "model": dataclasses.asdict(shape.run("decoder").model),
    }


def _row(name: str, seconds: list[float], flops: int, peak_bytes: int) -> dict[str, Any]:
    median = statistics.median(seconds)
    rate = flops / median / 1e12
    return {
        "name": LABELS[name],
        "seconds": seconds,
        "median": median,
        "flops": flops,
        "tflops_per_s": rate,
        "peak_bytes": peak_bytes,
    }


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with the reference's time and memory over its own; None where that is unknown."""
    reference = next((row for row in rows if row["name"] == LABELS["reference"]), None)
    if reference is None:
        return [{**row, "ratio": None, "memory_ratio": None} for row in rows]
    return [
        {
            **row,
            "ratio": reference["median"] / row["median"],
            "memory_ratio": reference["peak_bytes"] / max(1, row["peak_bytes"]),
        }
        for row in rows
    ]


def _targets(shape: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets of a measured shape beside what it reached."""
    time = {row["name"]: row["ratio"] for row in shape["steps"]}
    memory = {row["name"]: row["memory_ratio"] for row in shape["steps"]}
    return reached(shape["name"], {"time": time, "memory": memory})


def _title(shape: dict[str, Any]) -> str:
    first, last = shape["prefixes"]
    name = "" if shape["name"] == "own" else f"{shape['name']}: "
    outputs = shape["model"]["outputs"] or shape["model"]["vocab"]
    return (
        f"{name}{shape['size']}, {shape['batch_size']} sequences of {shape['tokens']} tokens, "
        f"prefixes of {first} to {last}, {outputs} outputs"
    )


def _bound(shape: dict[str, Any]) -> str:
    """The roofline of the kernels, where they were measured."""
    if "roofline" not in shape:
        return ""
    took = next(row["median"] for row in shape["steps"] if row["name"] == LABELS["triton"])
    return f"\n{describe(shape['roofline'], took)}"


def _table(shape: dict[str, Any]) -> str:
    head = [
        "",
        "ms (median)",
        "spread",
        "reference / this",
        "TFLOP/s",
        "peak memory MiB",
        "reference / this",
    ]
    rows = [
        [
            row["name"],
            *time_cells(row["seconds"]),
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}x",
            f"{row['tflops_per_s']:.3g}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            "-" if row["memory_ratio"] is None else f"{row['memory_ratio']:.2f}x",
        ]
        for row in shape["steps"]
    ]
    return format_table(head, rows)
