"""`entp bench generate`: tokens per second of ENTP and of the decoder, each with its cache and without."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch

from entp.bench.measure import Step, bench_device, default_warmup, prepare, take_turns, time_cells
from entp.bench.shapes import RandomTokens, reached
from entp.bench.step import targets_table
from entp.config import Mode, ModelConfig, model_for
from entp.engine.generate import generate
from entp.model import Transformer
from entp.options import BenchGenerateOptions
from entp.table import format_table
from entp.training.metrics import environment

CONTENDERS: dict[str, tuple[Mode, bool]] = {
    "entp uncached": ("entp", False),
    "entp": ("entp", True),
    "decoder uncached": ("decoder", False),
    "decoder": ("decoder", True),
}
"""Mode, and whether it keeps a cache."""

TARGET_SHAPE = {"size": "medium", "batch": 64, "prompt": 16, "total": 64}
"""The generation that has a target."""


def make_generation(config: ModelConfig, mode: Mode, cache: bool, batch: int, prompt: int, device: torch.device) -> Step:
    """A function that continues `batch` prompts of `prompt` tokens to all of the model's positions, as training would round."""
    torch.manual_seed(0)
    model = Transformer(config).to(device)
    prompts = torch.randint(config.vocab or 1, (batch, prompt), generator=torch.Generator().manual_seed(0)).to(device)
    new = config.positions - prompt

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            return generate(model, prompts, new, mode, cache=cache)

    return step


def bench(options: BenchGenerateOptions) -> dict[str, Any]:
    """Measure every contender; returns what a results file keeps and `report` prints."""
    device = bench_device(options.device)
    batch = options.batch or (64 if device.type == "cuda" else 4)
    warmup = default_warmup(device) if options.warmup is None else options.warmup
    config = model_for(RandomTokens(options.total, options.vocab), options.size)
    ready = {
        name: prepare(make_generation, (config, mode, cache, batch, options.prompt), device, warmup)
        for name, (mode, cache) in CONTENDERS.items()
    }
    seconds = take_turns({name: step for name, (step, _) in ready.items()}, device, options.repeats, label="bench generate")
    tokens = batch * (options.total - options.prompt)
    rows = _rows(seconds, {name: peak for name, (_, peak) in ready.items()}, tokens)
    shape = {"size": options.size, "batch": batch, "prompt": options.prompt, "total": options.total}
    ratios: dict[str, float | None] = {row["name"]: row["ratio"] for row in rows}
    has_target = device.type == "cuda" and shape == TARGET_SHAPE
    return {
        "environment": environment(device, 1),
        "config": {**shape, "repeats": options.repeats, "warmup": warmup, "model": dataclasses.asdict(config)},
        "runs": rows,
        "targets": reached("generate", {"tokens/s": ratios}) if has_target else [],
    }


def report(section: dict[str, Any]) -> str:
    """The table for a person."""
    where, shape = section["environment"], section["config"]
    title = (
        f"generation, {shape['size']}, {shape['batch']} sequences from {shape['prompt']} to {shape['total']} tokens; "
        f"{where['device']}, {where['threads']} threads, torch {where['torch']}"
    )
    head = ["", "ms (median)", "spread", "tokens/s", "to entp uncached", "to decoder", "peak memory MiB"]
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


def _rows(seconds: dict[str, list[float]], peaks: dict[str, int], tokens: int) -> list[dict[str, Any]]:
    """One entry per contender; ratios are of tokens per second."""
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
