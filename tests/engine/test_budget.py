"""Rows at once: a step is halved only where halves keep a GPU busy; a budget is kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from random_models import random_inputs, random_model

from entp import InputError, all_prefixes
from entp.config import SIZES, ModelConfig
from entp.engine.budget import BUSY, default_token_budget, memory_counts, step_token_budget
from entp.model import Transformer

GPU = torch.device("cuda")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Transformer:
    """Medium, and a GPU of 80 GiB to ask for its memory."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30)
    )
    with torch.device("meta"):
        return Transformer(ModelConfig(vocab=2, context_length=1, **SIZES["medium"]))


def test_a_large_step_is_halved_and_a_small_one_is_not(model: Transformer) -> None:
    busy = BUSY // (6 * 384)
    fits = default_token_budget(model, GPU)
    assert fits == int(0.4 * 80 * 2**30 / (72 * 6 * 384))
    assert step_token_budget(model, GPU, 2 * busy) == fits
    assert step_token_budget(model, GPU, 2 * busy + 3) == busy + 2
    assert step_token_budget(model, GPU, 100 * fits) == fits
    assert memory_counts(384, 6, busy + 1)
    assert not memory_counts(384, 6, busy)


def test_a_cpu_takes_what_fits(model: Transformer) -> None:
    cpu = torch.device("cpu")
    assert step_token_budget(model, cpu, 10**9) == default_token_budget(model, cpu) == 4854


def test_the_largest_models_get_a_thousand_rows_at_least() -> None:
    with torch.device("meta"):
        large = Transformer(ModelConfig(vocab=2, context_length=1, layers=3, heads=1, width=8192))
    assert default_token_budget(large, torch.device("cpu")) == 1024


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("budget", [9, 30, 90, 1000])
def test_no_more_rows_than_the_budget_are_computed_at_once(budget: int, gradients: bool) -> None:
    """In the forward pass, and when chunks are recomputed in the backward one."""
    model, at_once = random_model(layers=3), list[int]()
    for block in model.blocks:
        block.fc.register_forward_hook(lambda _module, _inputs, rows: at_once.append(len(rows)))  # type: ignore[union-attr]
    with torch.set_grad_enabled(gradients):
        x = random_inputs(model, 3, 8)  # 36 rows in each sequence
        model(x)  # with hooks, the first call also compares packed with the reference
        at_once.clear()
        out = model(x, impl="packed", token_budget=budget)
    forward = len(at_once)
    if gradients:
        out.sum().backward()
    assert max(at_once) <= budget
    assert (forward > 3) == (budget < 3 * 36)
    assert len(at_once) == (2 * forward if gradients and forward > 3 else forward)


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_of_nothing_is_refused(budget: int) -> None:
    model = random_model()
    with pytest.raises(
        InputError, match=f"token_budget is {budget}: it must be a whole number from 1 on"
    ):
        all_prefixes(model, random_inputs(model, 1, 3), token_budget=budget)
