"""Triton kernels against the plain functions that define them, outputs and every gradient.

Without a GPU they run through Triton's interpreter: the same code, one program after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import random_inputs, random_model
from torch import Tensor

import entp
from entp.engine import packed
from entp.engine.api import choose
from entp.engine.layout import Packing, pack
from entp.errors import InputError

pytest.importorskip("triton")
from entp.engine.triton import last, running

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packing(batch: int, time: int, seed: int) -> Packing:
    """Random prefixes, at least one, among them one of length 1 and the longest."""
    wanted = torch.rand(batch, time, generator=torch.Generator().manual_seed(seed)) > 0.5
    wanted[0, 0] = wanted[-1, -1] = True
    return pack(wanted, torch.device(DEVICE))


def numbers(*shape: int, seed: int, size: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * size).to(DEVICE, dtype)


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor], *rest: object) -> list[Tensor]:
    """The output, and the gradient of each input for a fixed direction."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = function(*leaves, *rest)
    out.backward(torch.sin(torch.arange(out.numel(), device=out.device, dtype=out.dtype)).view_as(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest deviation, relative to the largest number of its tensor, or to 1 (a one-row prefix has zero gradients)."""
    return max(float((g.double() - w).abs().max() / w.abs().max().clamp(min=1.0)) for g, w in zip(got, want, strict=True))


@settings(max_examples=8)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 35), st.sampled_from([1, 4, 5, 16]), st.integers(0, 99))
def test_running_attention(batch: int, heads: int, time: int, size: int, seed: int) -> None:
    plan = packing(batch, time, seed)
    qkv = [numbers(batch, heads, time, size, seed=seed + n, size=1.5) for n in range(3)]
    want = with_gradients(packed.running_attention, qkv, plan, 0.6)
    assert worst(with_gradients(running.running_attention, qkv, plan, 0.6), want) < 1e-9


@settings(max_examples=8)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 70), st.sampled_from([3, 16, 64, 80]), st.integers(0, 99))
def test_query_attention(batch: int, heads: int, time: int, width: int, seed: int) -> None:
    plan = packing(batch, time, seed)
    inputs = [numbers(plan.rows, width, seed=seed), numbers(len(plan.length), heads, width, seed=seed + 1, size=0.5)]
    want = with_gradients(packed.query_attention, inputs, plan)
    assert worst(with_gradients(last.query_attention, inputs, plan), want) < 1e-9


@pytest.mark.parametrize("growing", [False, True])
def test_extreme_scores_stay_finite_and_exact(growing: bool) -> None:
    """Scores in the hundreds, also with each key's far above those before it."""
    plan = packing(1, 20, 0)
    q, k, v = (numbers(1, 2, 20, 4, seed=n, size=10) for n in range(3))
    if growing:
        q, k = q.abs(), k.abs() * torch.arange(1, 21, device=DEVICE).double()[:, None]
    want = with_gradients(packed.running_attention, [q, k, v], plan, 1.0)
    got = with_gradients(running.running_attention, [q, k, v], plan, 1.0)
    assert all(bool(torch.isfinite(t).all()) for t in got)
    assert worst(got, want) < 1e-9


def test_float32_is_as_exact_as_plain_float32() -> None:
    plan = packing(2, 40, 1)
    qkv = [numbers(2, 2, 40, 16, seed=n) for n in range(3)]
    exact = with_gradients(packed.running_attention, qkv, plan, 0.25)
    single = [t.float() for t in qkv]
    plain, kernel = (worst(with_gradients(m.running_attention, single, plan, 0.25), exact) for m in (packed, running))
    assert kernel < 4 * plain + 1e-6


def test_every_row_is_written() -> None:
    """Outputs start as NaN and the same inputs give the same bits twice."""
    plan = packing(2, 21, 3)
    qkv = [numbers(2, 1, 21, 8, seed=n) for n in range(3)]
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        first, second = (with_gradients(running.running_attention, qkv, plan, 0.3) for _ in range(2))
        x, q = numbers(plan.rows, 24, seed=5), numbers(len(plan.length), 3, 24, seed=6)
        third, fourth = (with_gradients(last.query_attention, [x, q], plan) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
    for a, b in zip([*first, *third], [*second, *fourth], strict=True):
        assert bool(torch.isfinite(a).all())
        assert torch.equal(a, b)


@pytest.mark.parametrize("config", [{"layers": 1}, {"layers": 2}, {"layers": 3, "norm": "none"}, {"layers": 3, "scale": "one"}])
@pytest.mark.parametrize("budget", [None, 60])
def test_the_whole_engine_equals_the_reference(config: dict[str, object], budget: int | None) -> None:
    model = random_model(**config).to(DEVICE)
    x = random_inputs(model, 2, 19).to(DEVICE)
    lengths = torch.tensor([19, 11], device=DEVICE)

    def run(impl: str) -> dict[str, Tensor]:
        model.zero_grad()
        out = entp.all_prefixes(model, x, impl=impl, lengths=lengths, token_budget=budget if impl == "triton" else None)
        out.backward(torch.sin(torch.arange(out.numel(), device=DEVICE, dtype=out.dtype)).view_as(out))
        return {"out": out.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}

    want, got = run("reference"), run("triton")
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-9 * value.abs().max(), name


def test_triton_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InputError, match=r"impl 'triton' cannot run here: the device is cpu.*Use impl='packed'"):
        choose("triton", "cpu")
    assert choose("auto", "cpu").impl == "packed"
    assert choose("auto", "cuda").impl == "triton"
    assert choose("triton", "cuda").reason == "asked for by name"
