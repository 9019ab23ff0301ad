"""Small models with nothing trivially zero in them, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch

from entp import ModelConfig, Transformer

NOISE = 0.3
"""Added to every weight: fresh GPT-2 weights are so small that many mistakes would not show."""


def random_model(seed: int = 0, **config: Any) -> Transformer:
    """A float64 Transformer, 2 layers of width 8 unless told, with every weight perturbed."""
    defaults: dict[str, Any] = {"context_length": 40, "layers": 2, "heads": 2, "width": 8}
    if "input_dim" not in config:
        defaults["vocab"] = 11
    elif "outputs" not in config:
        defaults["outputs"] = 2
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**{**defaults, **config})).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(NOISE * torch.randn_like(p))
    if model.config.position_embedding == "given":
        model.set_positions(NOISE * torch.randn(model.config.context_length, model.config.width))
    return model


def random_inputs(model: Transformer, batch: int, time: int, seed: int = 0) -> torch.Tensor:
    """Random token ids (batch, time), or float64 vectors (batch, time, input_dim)."""
    generator = torch.Generator().manual_seed(seed)
    if model.config.vocab is not None:
        return torch.randint(model.config.vocab, (batch, time), generator=generator)
    assert model.config.input_dim is not None
    return torch.randn(
        batch, time, model.config.input_dim, generator=generator, dtype=torch.float64
    )
