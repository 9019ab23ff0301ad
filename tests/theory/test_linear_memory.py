"""Attention with O(D) memory: the same numbers as torch's, and its memory as measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from entp import InputError
from entp.theory.linear_memory import (
    attend_as_printed,
    attend_at_once,
    attend_streaming,
    peak_bytes,
    working_memory,
)

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def inputs(
    m: int, n: int, d: int = 4, width: int = 6, size: float = 1.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (m, d), keys (n, d), values (n, width); scores grow with the square of size."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(rows, w, generator=generator, dtype=torch.float64)
        for rows, w in ((m, d), (n, d), (n, width))
    )
    return size * q, size * k, v


def by_torch(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], **options)[
        0, 0
    ]


def blocks_of(block: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attend_streaming(q, k, v, block=block)


# The same numbers


@pytest.mark.parametrize("n", [1, 2, 5, 33])
def test_as_printed_is_attention_without_a_scale(n: int) -> None:
    q, k, v = inputs(n, n)
    torch.testing.assert_close(
        attend_as_printed(q[-1], k, v), by_torch(q, k, v, scale=1.0)[-1], **CLOSE
    )


@pytest.mark.parametrize("block", [1, 3, 16, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, 16, 17, 35])
def test_streaming_is_attention(n: int, causal: bool, block: int) -> None:
    q, k, v = inputs(n, n)
    for scale in (1.0, 0.37):
        expected = by_torch(q, k, v, scale=scale, is_causal=causal)
        torch.testing.assert_close(
            attend_streaming(q, k, v, scale, causal, block), expected, **CLOSE
        )


def test_any_number_of_queries() -> None:
    for m in (0, 1, 5, 40):
        q, k, v = inputs(m, 20)
        torch.testing.assert_close(attend_streaming(q, k, v), by_torch(q, k, v, scale=1.0), **CLOSE)
    q, k, v = inputs(40, 20)  # more causal queries than keys: the later ones see them all
    mask = torch.arange(20) <= torch.arange(40)[:, None]
    torch.testing.assert_close(
        attend_streaming(q, k, v, causal=True),
        by_torch(q, k, v, scale=1.0, attn_mask=mask),
        **CLOSE,
    )


@pytest.mark.parametrize("block", [1, 7])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_in_the_thousands(block: int, causal: bool) -> None:
    q, k, v = inputs(24, 24, size=40.0)
    scores = q @ k.T
    assert scores.max() > 3000
    assert scores.min() < -3000
    y = attend_streaming(q, k, v, causal=causal, block=block)
    assert y.isfinite().all()
    torch.testing.assert_close(y, by_torch(q, k, v, scale=1.0, is_causal=causal), **CLOSE)


def test_as_printed_overflows_and_underflows_where_streaming_does_not() -> None:
    v = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    k = torch.ones(2, 1, dtype=torch.float64)
    for score, fine in ((700.0, True), (710.0, False), (-700.0, True), (-746.0, False)):
        q = torch.full((1, 1), score, dtype=torch.float64)
        printed = attend_as_printed(q[0], k, v)
        assert bool(printed.isfinite().all()) == fine, score
        torch.testing.assert_close(
            attend_streaming(q, k, v), torch.tensor([[2.0]], dtype=torch.float64), **CLOSE
        )


def test_a_maximum_that_comes_last_or_first() -> None:
    """The sums so far shrink to nothing, or what comes later does."""
    for order in (1, -1):
        k = order * torch.linspace(-2000, 2000, 9, dtype=torch.float64)[:, None]
        v = torch.arange(9, dtype=torch.float64)[:, None]
        y = attend_streaming(torch.ones(1, 1, dtype=torch.float64), k, v, block=1)
        assert y.item() == pytest.approx(8.0 if order > 0 else 0.0, abs=1e-200)


def test_what_cannot_be_attended() -> None:
    q, k, v = inputs(3, 5)
    for bad in ((q[:, :2], k, v), (q, k[:4], v), (q[0], k, v), (q, k[None], v)):
        with pytest.raises(
            InputError, match=r"queries \(m, d\), keys \(n, d\) and values \(n, D\)"
        ):
            attend_streaming(*bad)
    with pytest.raises(InputError, match="0 keys, block 16"):
        attend_streaming(q, k[:0], v[:0])
    with pytest.raises(InputError, match="5 keys, block 0"):
        attend_streaming(q, k, v, block=0)


# Memory


def test_the_meter_counts_what_is_held_at_once() -> None:
    def one_after_the_other() -> Tensor:
        for _ in range(5):
            x = torch.empty(1000)
            del x
        return torch.empty(10)

    def all_together() -> list[Tensor]:
        return [torch.empty(1000) for _ in range(5)]

    assert peak_bytes(one_after_the_other) == 4000
    assert peak_bytes(all_together) == 20000
    assert peak_bytes(lambda: None) == 0
    kept = torch.empty(1000)
    assert peak_bytes(lambda: kept.add_(1)) < 100  # in place: a number at most


def test_the_meter_sees_inside_operations() -> None:
    """Fused attention has buffers of its own, which no Python code ever holds."""
    x = torch.zeros(64, 64)
    inside = peak_bytes(
        lambda: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
    )
    # More than the output and the logarithms of sums that come with it.
    assert inside > x.nbytes + 64 * 4


def test_one_key_at_a_time_takes_the_same_memory_for_every_length() -> None:
    taken = {n: working_memory(n, 8, blocks_of(1)) for n in (8, 16, 32)}
    assert len(set(taken.values())) == 1
    for width in (8, 32, 128):  # at most a few vectors of width D and a few numbers
        assert working_memory(8, width, blocks_of(1)) <= 5 * 8 * width + 200
    printed = {
        n: working_memory(n, 8, lambda q, k, v: attend_as_printed(q[0], k, v), queries=1)
        for n in (16, 64, 256)
    }
    assert len(set(printed.values())) == 1


def test_streaming_takes_the_same_memory_for_every_length() -> None:
    taken = {n: working_memory(n, 8) for n in (16, 32, 64, 128, 256)}
    assert taken[16] <= taken[32]  # one block of keys: there is nothing yet to add it to
    assert len({taken[n] for n in taken if n > 16}) == 1
    assert taken[256] < 2**14
    assert working_memory(1024, 8, queries=1) <= taken[256]


def test_ordinary_attention_takes_the_square() -> None:
    taken = [working_memory(n, 8, attend_at_once) for n in (64, 128, 256, 512, 1024)]
    exponents = [math.log2(b / a) for a, b in itertools.pairwise(taken)]
    assert all(abs(p - 2) < 0.05 for p in exponents)
    assert taken[-1] > 1000 * working_memory(1024, 8, queries=32)
