"""The roofline of a step: counts against what kernels move, rates that were measured."""

from __future__ import annotations

import pytest
import torch

from entp.bench.roofline import describe, roofline, row_passes
from entp.config import ModelConfig
from entp.engine.flops import engine_flops

CONFIG = ModelConfig(vocab=5, context_length=20, layers=4, heads=2, width=32)


def test_passes_by_layer() -> None:
    """Of a middle layer; GELU computed again costs four more in all layers but the last."""
    assert row_passes(7, recompute=False) - row_passes(6, recompute=False) == 24 + 27
    assert [row_passes(n, recompute=True) - row_passes(n, recompute=False) for n in (2, 3, 6)] == [
        4,
        8,
        20,
    ]


def test_roofline_is_counts_over_measured_rates() -> None:
    targets = torch.ones(3, 20, dtype=torch.bool)
    found = roofline(CONFIG, targets, torch.device("cpu"))
    assert found["flops"] == engine_flops(CONFIG, targets).total
    assert found["bytes"] == row_passes(4, recompute=False) * 3 * 210 * 32 * 4
    assert found["seconds"] == pytest.approx(
        found["flops"] / (1e12 * found["tflops_per_s"])
        + found["bytes"] / (1e12 * found["tbytes_per_s"])
    )
    assert 0 < found["tflops_per_s"] < 100
    assert 0 < found["tbytes_per_s"] < 100
    assert "entp triton takes 2.00 times that" in describe(found, 2 * found["seconds"])


def test_step_in_chunks_may_keep_what_a_whole_one_recomputes() -> None:
    config = ModelConfig(vocab=5, context_length=20, layers=10_000, heads=1, width=100)
    targets = torch.ones(
        1, 20, dtype=torch.bool
    )  # 210 rows: times width and layers, more than keeps a GPU busy
    whole, halves = (
        roofline(config, targets, torch.device("cpu"), chunks)["passes"] for chunks in (1, 2)
    )
    assert (whole, halves) == (
        row_passes(10_000, recompute=True),
        row_passes(10_000, recompute=False),
    )


def test_description_has_its_units() -> None:
    told = {
        "flops": 5e12,
        "tflops_per_s": 500.0,
        "product_seconds": 0.01,
        "bytes": 6e10,
        "tbytes_per_s": 3.0,
    }
    assert describe({**told, "pass_seconds": 0.02, "seconds": 0.03}, 0.045) == (
        "roofline of the kernels: 5 TFLOP at 500 TFLOP/s (10.00 ms) + 60 GB at 3 TB/s (20.00 ms) "
        "= 30.00 ms; entp triton takes 1.50 times that"
    )
