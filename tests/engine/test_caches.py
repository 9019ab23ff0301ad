"""Every cache gives the logits of no cache, for every option of the model and of position ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_models import random_model
from torch import Tensor

from entp.engine.generation.caches import Cache, DecoderCache, EntpCache, NoCache
from entp.engine.generation.cuda_graph import CapturedCache, DecoderStep, EntpStep
from entp.engine.support import support_of

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
MODELS: list[dict[str, Any]] = [
    {},
    {"position_embedding": "rotary"},
    {"position_embedding": "relative"},
    {"position_embedding": "sinusoidal"},
    {"position_embedding": "none"},
    {"kv_heads": 1},
    {"loops": 2},
    {"norm_placement": "post", "activation": "gelu-exact"},
    {
        "position_embedding": "rotary",
        "norm": "rms",
        "activation": "silu",
        "bias": False,
        "tied_head": False,
    },
    {"position_embedding": "rotary", "norm": "rms", "activation": "swiglu", "kv_heads": 1},
]
CASES = [
    *((config, given) for config in MODELS[:3] for given in (False, True)),
    *((config, number % 2 == 0) for number, config in enumerate(MODELS[3:])),
]
"""Models, with position ids 0, 1, 2, ... or given: the first three with both."""
LENGTHS = [4, 1, 3]
NEW = 4 if DEVICE == "cuda" else 2
"""Tokens that are appended; on a GPU the last of them are replays of a graph."""
CAPACITY = 20 if DEVICE == "cuda" else 6


def caches(model: Any, mode: str, prefix: Tensor | None) -> list[Cache]:
    """All caches that are exact for a model."""
    if mode != "entp":
        captured = CapturedCache(DecoderStep, model, CAPACITY, prefix)
        return [DecoderCache(model, CAPACITY, prefix), captured]
    found: list[Cache] = [EntpCache(model, CAPACITY)]
    if support_of(model).kernels is None:
        found.append(CapturedCache(EntpStep, model, CAPACITY))
    return found


@torch.no_grad()
@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm"])
@pytest.mark.parametrize(("config", "given"), CASES, ids=str)
def test_every_cache_gives_the_logits_of_no_cache(
    config: dict[str, Any], given: bool, mode: str
) -> None:
    """Prompts of different lengths, then new tokens."""
    model = random_model(layers=3, **config).to(DEVICE)
    generator = torch.Generator().manual_seed(0)

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator).to(DEVICE)

    lengths = torch.tensor(LENGTHS, device=DEVICE)
    tokens = draw(11, 3, 4) * (torch.arange(4, device=DEVICE) < lengths[:, None])
    prefix = lengths if mode == "prefix-lm" else None
    plain = NoCache(model, mode, prefix)
    others = caches(model, mode, prefix)
    ids = draw(40, 3, 4) if given else None
    want = plain.prefill(tokens, lengths, ids)
    errors = [(cache.prefill(tokens, lengths, ids) - want).abs().max() for cache in others]
    for _ in range(NEW):
        new = draw(11, 3)
        own = draw(40, 3) if given else None
        want = plain.append(new, own)
        errors += [(cache.append(new, own) - want).abs().max() for cache in others]
    assert max(errors) < 1e-9
