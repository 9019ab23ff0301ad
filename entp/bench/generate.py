"""`entp bench generate`: tokens per second of ENTP and of the decoder, each with its cache and
without."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch

from entp.bench.measure import Step, bench_device, default_warmup, prepare, take_turns, time_cells
from entp.bench.options import BenchGenerateOptions
from entp.bench.shapes import RandomTokens, reached
from entp.bench.step import targets_table
from entp.config import Mode, ModelConfig, model_for
from entp.engine.generation.generate import generate
from entp.model import Transformer
from entp.results.environment import environment
from entp.terminal import format_table

VARIANTS: dict[str, tuple[Mode, bool]] = {
    "entp uncached": ("entp", False),
    "entp": ("entp", True),
    "decoder uncached": ("decoder", False),
    "decoder": ("decoder", True),
}
"""Mode, and whether it keeps a cache."""

TARGET_SHAPE = {"size": "medium", "batch_size": 64, "prompt_length": 16, "length": 64}
"""The generation that has a target."""


def make_generation(
    config: ModelConfig,
    mode: Mode,
    cache: bool,
    batch_size: int,
    prompt_length: int,
    device: torch.device,
) -> Step:
    """A function that continues prompts to the model's context length, in the precision of
    training."""
    torch.manual_seed(0)
    model = Transformer(config).to(device)
    shape = (batch_size, prompt_length)
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(config.vocab or 1, shape, generator=rng).to(device)
    new = config.context_length - prompt_length

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            return generate(model, prompts, new, mode, cache=cache)

    return step


def bench(options: BenchGenerateOptions) -> dict[str, Any]:
    """What a results file keeps and `report` prints: every variant, measured."""
    device = bench_device(options.device)
    shape = _shape(options, device)
    sizes = shape["batch_size"], shape["prompt_length"]
    warmup = default_warmup(device) if options.warmup is None else options.warmup
    config = model_for(RandomTokens(options.length, options.vocab), options.size)
    ready = {
        name: prepare(make_generation, (config, mode, cache, *sizes), device, warmup)
        for name, (mode, cache) in VARIANTS.items()
    }
    seconds = take_turns(
        {name: step for name, (step, _) in ready.items()},
        device,
        options.repeats,
        label="bench generate",
    )
    tokens = shape["batch_size"] * (options.length - options.prompt_length)
    rows = _rows(seconds, {name: peak for name, (_, peak) in ready.items()}, tokens)
    ratios: dict[str, float | None] = {row["name"]: row["ratio"] for row in rows}
    has_target = device.type == "cuda" and shape == TARGET_SHAPE
    return {
        "environment": environment(device, 1),
        "config": {
            **shape,
            "repeats": options.repeats,
            "warmup": warmup,
            "model": dataclasses.asdict(config),
        },
        "runs": rows,
        "targets": reached("generate", {"tokens/s": ratios}) if has_target else [],
    }


def _shape(options: BenchGenerateOptions, device: torch.device) -> dict[str, Any]:
    """What is generated."""
    return {
        "size": options.size,
        "batch_size": options.batch_size or (64 if device.type == "cuda" else 4),
        "prompt_length": options.prompt_length,
        "length": options.length,
    }


def report(section: dict[str, Any]) -> str:
    """The table for a person."""
    where, shape = section["environment"], section["config"]
    title = (
        f"generation, {shape['size']}, {shape['batch_size']} sequences from "
        f"{shape['prompt_length']} to {shape['length']} tokens; "
        f"{where['device']}, {where['threads']} threads, torch {where['torch']}"
    )
    head = [
        "",
        "ms (median)",
        "spread",
        "tokens/s",
        "to entp uncached",
        "to decoder",
        "peak memory MiB",
    ]
    rows = [
        [
            row["name"],
            *time_cells(row["seconds"]),
            f"{row['tokens_per_s']:.0f}",
            f"{row['ratio']:.2f}x",
            f"{row['decoder_ratio']:.3g}x",
            f"{row['peak_bytes'] / 2**20:.0f}",
        ]
        for row in section["runs"]
    ]
    table = f"{title}\n{format_table(head, rows)}"
    return f"{table}\n\n{targets_table(section['targets'])}" if section["targets"] else table


def _rows(
    seconds: dict[str, list[float]], peaks: dict[str, int], tokens: int
) -> list[dict[str, Any]]:
    """One entry per variant; ratios are of tokens per second."""
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        {
            "name": name,
            "seconds": seconds[name],
            "median": median[name],
            "tokens_per_s": tokens / median[name],
            "ratio": median["entp uncached"] / median[name],
            "decoder_ratio": median["decoder"] / median[name],
            "peak_bytes": peaks[name],
        }
        for name in seconds
    ]
