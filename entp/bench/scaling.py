"""`entp bench scaling`: how a training step and one more generated token grow with the length n, as
fitted exponents.

This is the paper's complexity table, measured: a sequence costs ENTP O(n³) and a decoder O(n²), a
token O(n²) and O(n). The exponents are those of large n. Below it linear layers dominate (a power
less), and small work does not fill a device (no growth at all), so the exponents of the exact
operation counts over the same lengths stand beside the measured ones. Peak memory includes
gradients and optimizer state, which do not grow, and it is bounded where the token budget cuts a
step into chunks.
"""

from __future__ import annotations

import dataclasses
import statistics
from functools import partial
from typing import Any

import torch

from entp.bench.measure import (
    bench_device,
    default_warmup,
    prepare,
    release,
    take_turns,
    time_cells,
    timed,
)
from entp.bench.options import BenchScalingOptions
from entp.bench.shapes import RandomTokens
from entp.bench.step import make_step
from entp.config import Mode, ModelConfig, Run, model_for
from entp.engine.budget import step_token_budget
from entp.engine.flops import decoder_flops, engine_flops, token_flops
from entp.engine.generation.generate import make_cache
from entp.engine.layout import rows_of, split
from entp.model import Transformer
from entp.model.build import build_model
from entp.results.environment import environment
from entp.stats import fit_exponent
from entp.terminal import format_table

MODES: tuple[Mode, ...] = ("entp", "decoder")
ASYMPTOTIC = {
    ("entp", "step"): 3,
    ("decoder", "step"): 2,
    ("entp", "token"): 2,
    ("decoder", "token"): 1,
    ("entp", "memory"): 2,
    ("decoder", "memory"): 1,
}
"""Powers of n for large n: time as in the paper's table; memory by the rows a step keeps, as long
as it is one chunk."""
WHAT = {"step": "training step", "token": "one more token", "memory": "step's peak memory"}
VOCAB = 64


def bench(options: BenchScalingOptions) -> dict[str, Any]:
    """What a results file keeps and `report` prints: every length, measured."""
    device = bench_device(options.device)
    warmup = default_warmup(device) if options.warmup is None else options.warmup
    batch_size = options.batch_size or (16 if device.type == "cuda" else 1)
    points = []
    for n in options.numbers():
        points.append(_measure(n, batch_size, options, warmup, device))
        release(device)
    return {
        "environment": environment(device, 1),
        "config": {
            "size": options.size,
            "batch_size": batch_size,
            "repeats": options.repeats,
            "warmup": warmup,
            "vocab": VOCAB,
        },
        "points": points,
        "fits": [_fitted(points, mode, what) for what in WHAT for mode in MODES],
    }


def report(section: dict[str, Any]) -> str:
    """The tables for a person: every length, then the exponents."""
    where, config = section["environment"], section["config"]
    machine = f"{where['device']}, {where['threads']} threads, torch {where['torch']}"
    title = (
        f"growth with n: {config['size']}, batch size {config['batch_size']}, every prefix "
        f"predicted; {machine}"
    )
    head = [
        "n",
        "",
        "step ms",
        "spread",
        "chunks",
        "TFLOP/s",
        "peak memory MiB",
        "token ms",
        "spread",
    ]
    rows = [
        [
            str(point["n"]),
            mode,
            *time_cells(point[mode]["step_seconds"]),
            str(point[mode]["chunks"]),
            f"{point[mode]['step_flops'] / point[mode]['step'] / 1e12:.3g}",
            f"{point[mode]['memory'] / 2**20:.0f}",
            *time_cells(point[mode]["token_seconds"]),
        ]
        for point in section["points"]
        for mode in MODES
    ]
    return f"{title}\n{format_table(head, rows)}\n\n{_fits_table(section['fits'])}"


def _measure(
    n: int, batch_size: int, options: BenchScalingOptions, warmup: int, device: torch.device
) -> dict[str, Any]:
    """Step, memory and token of both modes at one length."""
    task = RandomTokens(n, VOCAB)
    model = model_for(task, options.size)
    runs = {mode: Run(task, model, mode, batch_size=batch_size) for mode in MODES}
    ready = {mode: prepare(make_step, (run,), device, warmup) for mode, run in runs.items()}
    steps = {str(mode): step for mode, (step, _) in ready.items()}
    seconds = take_turns(steps, device, options.repeats, label=f"bench n = {n}")
    point: dict[str, Any] = {"n": n}
    for mode, run in runs.items():
        tokens = token_seconds(model, mode, n, batch_size, warmup, options.repeats, device)
        point[mode] = {
            "step_seconds": seconds[mode],
            "step": statistics.median(seconds[mode]),
            "memory": ready[mode][1],
            "token_seconds": tokens,
            "token": statistics.median(tokens),
            **_counts(run, n, device),
        }
    return point


def _counts(run: Run, n: int, device: torch.device) -> dict[str, int]:
    """Exact operations of a step and of a token of one sequence, and the chunks that the token
    budget cuts the step into."""
    targets = torch.ones(run.batch_size, n, dtype=torch.bool)
    token = token_flops(run.model, n, run.mode).total
    if run.mode != "entp":
        step = decoder_flops(run.model, targets).total
        return {"step_flops": step, "token_flops": token, "chunks": 1}
    with torch.device("meta"):
        budget = step_token_budget(build_model(run.model), device, sum(rows_of(targets)))
    step = engine_flops(run.model, targets).total
    chunks = len(list(split(targets, budget)))
    return {"step_flops": step, "token_flops": token, "chunks": chunks}


@torch.no_grad()
def token_seconds(
    config: ModelConfig,
    mode: Mode,
    n: int,
    batch_size: int,
    warmup: int,
    repeats: int,
    device: torch.device,
) -> list[float]:
    """Seconds of adding single tokens to a cache, the middle one as token number n (or soon after
    it, if n is small)."""
    start = max(1, n - 1 - warmup - repeats // 2)
    capacity = start + warmup + repeats
    torch.manual_seed(0)
    model = Transformer(dataclasses.replace(config, context_length=capacity)).to(device)
    cache = make_cache(model, mode, capacity)
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (batch_size, capacity), generator=rng).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        cache.prefill(tokens[:, :start], torch.full((batch_size,), start, device=device))
        seconds = [
            timed(partial(cache.append, tokens[:, t]), device) for t in range(start, capacity)
        ]
    return seconds[warmup:]


def _fitted(points: list[dict[str, Any]], mode: str, what: str) -> dict[str, Any]:
    """The exponent of one measure in one mode, that of its exact operations, and the asymptotic
    one."""
    lengths = [point["n"] for point in points]
    exponent, error = fit_exponent(
        lengths,
        [max(1, point[mode][what]) if what == "memory" else point[mode][what] for point in points],
    )
    counted = None
    if what != "memory":
        counted = fit_exponent(lengths, [point[mode][f"{what}_flops"] for point in points])[0]
    return {
        "what": what,
        "mode": mode,
        "from_n": lengths[len(lengths) // 2],
        "exponent": exponent,
        "standard_error": error,
        "flops_exponent": counted,
        "asymptotic": ASYMPTOTIC[mode, what],
    }


def _fits_table(fits: list[dict[str, Any]]) -> str:
    rows = [
        [
            f"{WHAT[fit['what']]}, {fit['mode']}",
            f"{fit['exponent']:.2f}",
            "-" if fit["standard_error"] is None else f"{fit['standard_error']:.2f}",
            "-" if fit["flops_exponent"] is None else f"{fit['flops_exponent']:.2f}",
            str(fit["asymptotic"]),
        ]
        for fit in fits
    ]
    head = [
        f"growth as n^p from n = {fits[0]['from_n']}",
        "p measured",
        "standard error",
        "p of exact FLOPs",
        "p for large n",
    ]
    return format_table(head, rows)
