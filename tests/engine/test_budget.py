"""How many rows at once: a step is halved where halves keep a GPU busy, and never where they would not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from entp.config import SIZES, ModelConfig
from entp.engine.budget import BUSY, default_token_budget, memory_counts, step_token_budget
from entp.model import Transformer

GPU = torch.device("cuda")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Transformer:
    """Medium, and a GPU of 80 GiB to ask for its memory."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    with torch.device("meta"):
        return Transformer(ModelConfig(vocab=2, positions=1, **SIZES["medium"]))


def test_a_large_step_is_halved_and_a_small_one_is_not(model: Transformer) -> None:
    busy = BUSY // (6 * 384)
    fits = default_token_budget(model, GPU)
    assert fits == int(0.4 * 80 * 2**30 / (72 * 6 * 384))
    assert step_token_budget(model, GPU, 2 * busy) == fits
    assert step_token_budget(model, GPU, 2 * busy + 3) == busy + 2
    assert step_token_budget(model, GPU, 100 * fits) == fits
    assert memory_counts(model.config, busy + 1)
    assert not memory_counts(model.config, busy)


def test_a_cpu_takes_what_fits(model: Transformer) -> None:
    cpu = torch.device("cpu")
    assert step_token_budget(model, cpu, 10**9) == default_token_budget(model, cpu) == 4854
