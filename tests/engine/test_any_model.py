"""Attention kernels for any model, against the plain functions of packed.py and the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_models import random_inputs, random_model
from torch import Tensor

from entp.engine import packed
from entp.engine.layout import Packing

pytest.importorskip("triton")
from test_packed import assert_same, results
from test_triton_rows import (
    CLOSE,
    DEVICE,
    EXAMPLES,
    memory_full_of_nan,
    numbers,
    of_lengths,
    packing,
    with_gradients,
    worst,
)

from entp.engine.triton import any_model

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "first": (packed.first_attention, any_model.first_attention),
    "prefix": (packed.prefix_attention, any_model.prefix_attention),
    "last": (packed.last_attention, any_model.last_attention),
}
SHAPES = {
    "first": lambda plan: [(plan.batch, plan.longest)] * 3,
    "prefix": lambda plan: [(plan.rows,)] * 3,
    "last": lambda plan: [(len(plan.length),), (plan.rows,), (plan.rows,)],
}
"""Rows of q, k and v."""


def qkv(which: str, plan: Packing, heads: int, size: int, seed: int = 0) -> list[Tensor]:
    shapes = SHAPES[which](plan)
    return [numbers(*s, heads, size, seed=seed + n, size=1.5) for n, s in enumerate(shapes)]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """packed.py by torch alone, on a GPU too."""
    monkeypatch.setattr(packed, "attention_kernels", lambda device, size: False)


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """packed.py by the kernels, also interpreted; the rows of each attention they computed."""
    rows: list[int] = []
    monkeypatch.setattr(packed, "attention_kernels", lambda device, size: True)
    for name in ("first_attention", "prefix_attention", "last_attention"):
        real = getattr(any_model, name)

        def noted(*qkv: Any, real: Callable[..., Tensor] = real) -> Tensor:
            rows.append(len(qkv[1]))
            return real(*qkv)

        monkeypatch.setattr(any_model, name, noted)
    return rows


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("which", PAIRS)
@settings(max_examples=EXAMPLES)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
@example(1, 2, 40, 5)
def test_kernels_are_the_plain_attention(
    which: str, batch: int, heads: int, time: int, size: int
) -> None:
    plan, (plain, kernel) = packing(batch, time, seed=time), PAIRS[which]
    inputs = qkv(which, plan, heads, size)
    want = with_gradients(plain, inputs, plan, 0.6)
    assert worst(with_gradients(kernel, inputs, plan, 0.6), want) < CLOSE


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("which", PAIRS)
def test_rows_may_be_views_of_one_product(which: str) -> None:
    plan, (plain, kernel) = of_lengths(1, 3, 34, 35), PAIRS[which]
    (rows,) = SHAPES[which](plan)[1:2]
    q, *_ = qkv(which, plan, 2, 4)
    product = numbers(*rows, 3, 2, 4, seed=5)

    def by(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda q, x: compute(q, x[..., 1, :, :], x[..., 2, :, :], plan, 0.6)

    want = with_gradients(by(plain), [q, product])
    assert worst(with_gradients(by(kernel), [q, product]), want) < CLOSE


@pytest.mark.parametrize("which", PAIRS)
def test_nothing_outside_the_rows_is_read(which: str) -> None:
    plan = of_lengths(1, 2, 33)
    inputs = qkv(which, plan, 2, 5)
    want = with_gradients(PAIRS[which][1], inputs, plan, 0.6)
    with memory_full_of_nan():
        got = with_gradients(PAIRS[which][1], inputs, plan, 0.6)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("which", PAIRS)
def test_half_precision_rounds_once(which: str) -> None:
    """Against float64 of the same rounded inputs: an output is off by one rounding of fp16."""
    plan, (plain, kernel) = of_lengths(1, 7, 20), PAIRS[which]
    half = [x.to(torch.float16) for x in qkv(which, plan, 2, 8)]
    got = kernel(*half, plan, 0.3)
    assert got.dtype == torch.float16
    want = plain(*(x.double() for x in half), plan, 0.3)
    assert (got.double() - want).abs().max() < 2e-3 * want.abs().max()


MODELS: dict[str, dict[str, Any]] = {
    "two key heads": {"heads": 4, "kv_heads": 2, "width": 32},
    "rotary": {"position_embedding": "rotary"},
    "norms after the residuals": {"norm_placement": "post", "activation": "gelu-exact"},
    "relative": {"position_embedding": "relative"},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("single", [False, True], ids=["", "one prefix each"])
def test_packed_by_kernels_equals_the_reference(
    name: str, single: bool, by_kernels: list[int]
) -> None:
    model = random_model(layers=3, **MODELS[name]).to(DEVICE)
    x = random_inputs(model, 2, 9).to(DEVICE)
    at = torch.zeros(2, 9, dtype=torch.bool)
    at[0, [4]] = at[1, [8]] = True
    if not single:
        at[0, [0, 1]] = at[1, [2, 4, 5]] = True
    want = results(model, x, at=at, impl="reference")
    assert_same(results(model, x, at=at, impl="packed"), want)
    assert bool(by_kernels) == (name != "relative")
