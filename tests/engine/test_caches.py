"""Every cache gives the logits of no cache, for every option of the model and given position ids."""

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
LENGTHS = [5, 2, 4]


def caches(model: Any, mode: str, prefix: Tensor | None) -> list[Cache]:
    """All caches that are exact for a model."""
    if mode != "entp":
        return [DecoderCache(model, 20, prefix), CapturedCache(DecoderStep, model, 20, prefix)]
    found: list[Cache] = [EntpCache(model, 20)]
    if support_of(model).kernels is None:
        found.append(CapturedCache(EntpStep, model, 20))
    return found


@torch.no_grad()
@pytest.mark.parametrize("given", [False, True], ids=["0, 1, 2, ...", "given ids"])
@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm"])
@pytest.mark.parametrize("config", MODELS, ids=str)
def test_every_cache_gives_the_logits_of_no_cache(
    config: dict[str, Any], mode: str, given: bool
) -> None:
    """Prompts of different lengths, then four tokens; on a GPU the last of these are replays of a
    graph."""
    model = random_model(layers=3, **config).to(DEVICE)
    generator = torch.Generator().manual_seed(0)

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator).to(DEVICE)

    lengths = torch.tensor(LENGTHS, device=DEVICE)
    tokens = draw(11, 3, 5) * (torch.arange(5, device=DEVICE) < lengths[:, None])
    prefix = lengths if mode == "prefix-lm" else None
    plain = NoCache(model, mode, prefix)
    others = caches(model, mode, prefix)
    ids = draw(40, 3, 5) if given else None
    want = plain.prefill(tokens, lengths, ids)
    errors = [(cache.prefill(tokens, lengths, ids) - want).abs().max() for cache in others]
    for _ in range(4):
        new, own = draw(11, 3), draw(40, 3) if given else None
        want = plain.append(new, own)
        errors += [(cache.append(new, own) - want).abs().max() for cache in others]
    assert max(errors) < 1e-9
