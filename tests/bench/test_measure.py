"""Timing, memory and counting measure what they say."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from entp.bench.measure import count_flops, default_warmup, prepare, release, take_turns, time_cells

CPU = torch.device("cpu")


def test_flops_are_counted_attention_included() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert count_flops(lambda: a @ b) == 2 * 3 * 4 * 5
    q = torch.randn(1, 2, 6, 8)
    attention = count_flops(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert attention == 2 * 2 * 2 * 6 * 6 * 8
    q.requires_grad_()
    trained = count_flops(
        lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    )
    assert (
        trained == 3.5 * attention
    )  # two products forward; backward makes the scores again, and four gradients


def test_variants_take_turns_and_steps_in_a_row_are_averaged() -> None:
    order: list[str] = []
    steps = {
        "slow": lambda: (order.append("slow"), time.sleep(0.02)),
        "fast": lambda: order.append("fast"),
    }
    seconds = take_turns(steps, CPU, 2, {"fast": 3})
    assert order == ["slow", "fast", "fast", "fast"] * 2
    assert [len(times) for times in seconds.values()] == [2, 2]
    assert min(seconds["slow"]) >= 0.02
    assert min(seconds["fast"]) < 0.02


def make_block(megabytes: int, device: torch.device) -> Callable[[], object]:
    """A step that needs so many megabytes while it runs, and counts its calls."""
    calls = []

    def step() -> int:
        calls.append(torch.ones(megabytes * 2**18, device=device))
        calls[-1] = torch.zeros(0)
        return len(calls)

    return step


def test_memory_is_that_of_one_step_in_a_process_of_its_own() -> None:
    keep = torch.ones(300 * 2**18)  # what this process holds does not count
    step, peak = prepare(make_block, (64,), CPU, warmup=2)
    assert 60 <= peak / 2**20 <= 80
    assert step() == 3  # two steps of warm-up went before
    assert keep.numel()
    release(CPU)


def test_a_row_shows_median_and_range_in_milliseconds() -> None:
    assert time_cells([0.003, 0.001, 0.0011]) == ["1.10", "1.00..3.00"]


@pytest.mark.parametrize(("device", "steps"), [("cpu", 1), ("cuda", 5)])
def test_warm_up_is_longer_where_a_graph_may_be_captured(device: str, steps: int) -> None:
    assert default_warmup(torch.device(device)) == steps
