"""The roofline of the GPU engine's design for a step: its matrix products, and its passes over the
rows between them.

    roofline = operations / rate of its products + bytes / rate of a copy

Both rates are measured on the same device and on the step's own shapes, so that the roofline says
what is left to gain without another design: docs/engine.md, roofline.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from entp.bench.measure import timed
from entp.config import ModelConfig
from entp.engine.budget import memory_counts
from entp.engine.flops import engine_flops
from entp.engine.layout import rows_of

MOST_ROWS = 131_072
"""Rows on which rates are measured at most: enough for any device, and they fit."""


def row_passes(layers: int, *, recompute: bool) -> int:
    """Passes over the rows in half precision outside products, forward and backward; recompute:
    GELU is computed again in the backward pass."""
    norm, activation, attention = 6 + 4, 8 + (16 if recompute else 12), 4 + 7
    # The scan writes once and reads twice; the stream comes from tokens.
    first = (1 + 2) + (4 + 4) + activation
    # The stream is read at the end of each prefix only; one query each.
    last = (4 + 3) + (1 + 2)
    return first + (layers - 2) * (2 * norm + activation + attention) + last


def roofline(
    config: ModelConfig, target_mask: Tensor, device: torch.device, chunks: int = 1
) -> dict[str, Any]:
    """Operations, bytes, the rates measured on this device, and the seconds they come to."""
    rows = sum(rows_of(target_mask))
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    recompute = memory_counts(config.width, config.layers, rows // chunks)
    passes = row_passes(config.layers, recompute=recompute)
    flops = engine_flops(config, target_mask).total
    moved = passes * rows * config.width * half.itemsize
    products, copies = rates(config, min(rows, MOST_ROWS), half, device)
    return {
        "flops": flops,
        "bytes": moved,
        "passes": passes,
        "tflops_per_s": products / 1e12,
        "tbytes_per_s": copies / 1e12,
        "product_seconds": flops / products,
        "pass_seconds": moved / copies,
        "seconds": flops / products + moved / copies,
    }


def rates(
    config: ModelConfig, rows: int, half: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Operations per second of the products of an MLP and its weights' gradients; bytes per second
    of a copy."""
    from entp.engine.triton.cublaslt import product

    x = torch.randn(rows, config.width, device=device, dtype=half)
    a = torch.randn(rows, 4 * config.width, device=device, dtype=half)
    w = x.new_ones(4 * config.width, config.width)
    back, other = w.T.contiguous(), torch.empty_like(a)
    steps = (
        lambda: product(x, w),
        lambda: product(a, back),
        lambda: torch.mm(a.T, x),
        lambda: other.copy_(a),
    )
    seconds = [_median(step, device) for step in steps]
    flops = 3 * 2 * rows * 4 * config.width**2
    return flops / sum(seconds[:3]), 2 * a.numel() * a.element_size() / seconds[3]


def _median(step: Any, device: torch.device) -> float:
    for _ in range(3):
        step()
    return statistics.median(timed(step, device, 10) for _ in range(5))


def describe(found: dict[str, Any], seconds: float) -> str:
    """The roofline as a line of text, beside the seconds that a step took."""
    return (
        f"roofline of the kernels: {found['flops'] / 1e12:.3g} TFLOP at "
        f"{found['tflops_per_s']:.3g} TFLOP/s ({found['product_seconds'] * 1e3:.2f} ms) + "
        f"{found['bytes'] / 1e9:.3g} GB at {found['tbytes_per_s']:.2g} TB/s "
        f"({found['pass_seconds'] * 1e3:.2f} ms) = {found['seconds'] * 1e3:.2f} ms; "
        f"entp triton takes {seconds / found['seconds']:.2f} times that"
    )
