"""Generation token by token, and beyond the model's context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from entp.config import MODES, ModelConfig
from entp.engine.generation.caches import SlidingCache
from entp.engine.generation.generate import generate, make_cache, stream
from entp.errors import InputError
from entp.model import Transformer

VOCAB, CONTEXT = 11, 9
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [7] * CONTEXT]
modes = pytest.mark.parametrize("mode", MODES)


def build(**shape: Any) -> Transformer:
    """A tiny model whose outputs depend on every token and its position."""
    torch.manual_seed(0)
    config = {"vocab": VOCAB, "context_length": CONTEXT, "layers": 3, "heads": 2, "width": 8}
    model = Transformer(ModelConfig(**{**config, **shape}))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.3 * torch.randn_like(tensor)
    return model.double()


@torch.no_grad()
def by_hand(model: Transformer, tokens: list[int], mode: str, first: int) -> Tensor:
    """Logits after the last tokens that fit, by a forward pass of its own."""
    window = tokens[-CONTEXT:]
    seen = max(1, first - (len(tokens) - len(window)))
    prefix = seen if mode == "prefix-lm" else None
    x = torch.tensor([window])
    return model(x, mode=mode, prefix=prefix, at=[len(window) - 1], impl="reference")[0, 0]


@modes
@pytest.mark.parametrize("layers", [1, 3])
@torch.no_grad()
def test_sliding_logits_are_those_of_the_last_tokens(mode: str, layers: int) -> None:
    """Prompts that are shorter than the context and fill it, in one batch."""
    model, prompts = build(layers=layers), [p for p in PROMPTS if len(p) <= CONTEXT]
    first = torch.tensor([max(1, len(p) - 1) for p in prompts])
    prefix = first if mode == "prefix-lm" else None
    inner = make_cache(model, mode, CONTEXT, prefix, cache=True)
    cache = SlidingCache(model, mode, CONTEXT, inner, prefix)
    lengths = torch.tensor([len(p) for p in prompts])
    tokens = torch.tensor([p + [0] * (CONTEXT - len(p)) for p in prompts])
    known = [list(p) for p in prompts]
    found = cache.prefill(tokens, lengths)
    for new in torch.randint(VOCAB, (14, len(prompts))):
        for row, p, number in zip(found, known, first.tolist(), strict=True):
            torch.testing.assert_close(row, by_hand(model, p, mode, number))
        found = cache.append(new)
        known = [[*p, token] for p, token in zip(known, new.tolist(), strict=True)]


@modes
@pytest.mark.parametrize("cache", [True, False])
def test_sliding_generation_reads_the_last_tokens_again(mode: str, cache: bool) -> None:
    """One of the prompts is longer than the context."""
    model = build()
    found = generate(model, PROMPTS, 14, mode, slide=True, cache=cache)
    for prompt, row in zip(PROMPTS, found, strict=True):
        assert row[: len(prompt)] == prompt
        for length in range(len(prompt), len(row)):
            best = by_hand(model, row[:length], mode, len(prompt)).argmax()
            assert row[length] == best


def test_sliding_changes_nothing_within_the_context() -> None:
    model = build()
    short = [[3, 1, 4], [9]]
    assert generate(model, short, 7, slide=True) == generate(model, short, 7)
    with pytest.raises(InputError, match="need 10 positions and the model has 9"):
        generate(model, short, 8)


def test_sliding_model_without_positions_never_forgets() -> None:
    model = build(position_embedding="none")
    assert generate(model, PROMPTS, 12, slide=True) == generate(model, PROMPTS, 12)


def test_sliding_with_position_ids_is_refused() -> None:
    with pytest.raises(InputError, match="slide is for position ids 0, 1, 2"):
        generate(build(), [[1]], 20, slide=True, position_ids=lambda tokens: tokens * 0)


@modes
def test_stream_gives_the_tokens_of_generate(mode: str) -> None:
    model = build()
    how: dict[str, Any] = {"temperature": 1.2, "top_k": 8, "seed": 4, "slide": True}
    for prompt in PROMPTS:
        whole = generate(model, [prompt], 15, mode, **how)[0]
        assert prompt + list(stream(model, prompt, 15, mode, **how)) == whole


def test_stream_ends_with_the_stop_token() -> None:
    model = build()
    tokens = list(stream(model, [3, 1, 4], 30, slide=True, temperature=2.0, seed=1))
    stop = tokens[9]
    first = tokens.index(stop)
    some = stream(model, [3, 1, 4], 30, slide=True, temperature=2.0, seed=1, stop=stop)
    assert list(some) == tokens[: first + 1]


def test_stream_draws_a_token_only_when_asked_for() -> None:
    """The model can be changed between two tokens."""
    model = build()
    tokens = stream(model, [3, 1, 4], 5)
    first = next(tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    assert 0 <= first < VOCAB
    with pytest.raises(InputError, match="outputs are not finite"):
        next(tokens)


def test_stream_leaves_gradients_to_the_caller() -> None:
    """Between two tokens the caller may train."""
    tokens = stream(build(), [3], 3)
    next(tokens)
    assert torch.is_grad_enabled()
