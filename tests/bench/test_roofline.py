"""The floor of a step: counts against what kernels move, rates that were really measured."""

from __future__ import annotations

import pytest
import torch

from entp.bench.roofline import floor, row_passes, sentence
from entp.config import ModelConfig
from entp.engine.flops import engine_flops

CONFIG = ModelConfig(vocab=5, context_length=20, layers=4, heads=2, width=32)


def test_passes_by_layer() -> None:
    """Of a middle layer; GELU made again costs four more in all layers but the last."""
    assert row_passes(7, again=False) - row_passes(6, again=False) == 24 + 27
    assert [row_passes(n, again=True) - row_passes(n, again=False) for n in (2, 3, 6)] == [4, 8, 20]


def test_a_floor_is_counts_over_measured_rates() -> None:
    wanted = torch.ones(3, 20, dtype=torch.bool)
    found = floor(CONFIG, wanted, torch.device("cpu"))
    assert found["flops"] == engine_flops(CONFIG, wanted).total
    assert found["bytes"] == row_passes(4, again=False) * 3 * 210 * 32 * 4
    assert found["seconds"] == pytest.approx(
        found["flops"] / (1e12 * found["tflops_per_s"])
        + found["bytes"] / (1e12 * found["tbytes_per_s"])
    )
    assert 0 < found["tflops_per_s"] < 100
    assert 0 < found["tbytes_per_s"] < 100
    assert "entp triton takes 2.00 times that" in sentence(found, 2 * found["seconds"])


def test_a_step_in_parts_may_keep_what_a_whole_one_makes_again() -> None:
    config = ModelConfig(vocab=5, context_length=20, layers=10_000, heads=1, width=100)
    wanted = torch.ones(
        1, 20, dtype=torch.bool
    )  # 210 rows: times width and layers, more than keeps a GPU busy
    whole, halves = (
        floor(config, wanted, torch.device("cpu"), parts)["passes"] for parts in (1, 2)
    )
    assert (whole, halves) == (row_passes(10_000, again=True), row_passes(10_000, again=False))


def test_the_sentence_has_its_units() -> None:
    told = {
        "flops": 5e12,
        "tflops_per_s": 500.0,
        "product_seconds": 0.01,
        "bytes": 6e10,
        "tbytes_per_s": 3.0,
    }
    assert sentence({**told, "pass_seconds": 0.02, "seconds": 0.03}, 0.045) == (
        "floor of the kernels' design: 5 TFLOP at 500 TFLOP/s (10.00 ms) + 60 GB at 3 TB/s (20.00 "
        "ms) = 30.00 ms; "
        "entp triton takes 1.50 times that"
    )
