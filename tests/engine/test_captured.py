"""Caches at fixed shapes give the logits of no cache; on a GPU their steps are captured once."""

from __future__ import annotations

import gc

import pytest
import torch
from random_models import random_model

import entp
from entp.engine.generation import cuda_graph
from entp.engine.generation.caches import NoCache
from entp.engine.generation.cuda_graph import CapturedCache, DecoderStep, EntpStep

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
KINDS = {"entp": EntpStep, "decoder": DecoderStep, "prefix-lm": DecoderStep}


def prompts(lengths: list[int], vocab: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens, 0 past each length, and the lengths."""
    size = torch.tensor(lengths, device=DEVICE)
    tokens = torch.randint(
        vocab, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed)
    ).to(DEVICE)
    return tokens * (torch.arange(max(lengths), device=DEVICE) < size[:, None]), size


@torch.no_grad()
def worst(
    model: entp.Transformer, cache: CapturedCache, mode: str, lengths: list[int], steps: int
) -> float:
    """Largest deviation from the logits without a cache, over a prompt and `steps` tokens."""
    vocab = model.config.vocab or 0
    tokens, size = prompts(lengths, vocab)
    plain = NoCache(model, mode, size if mode == "prefix-lm" else None)
    errors = [(cache.prefill(tokens, size) - plain.prefill(tokens, size)).abs().max()]
    for step in range(steps):
        new = torch.randint(
            vocab, (len(lengths),), generator=torch.Generator().manual_seed(step)
        ).to(DEVICE)
        errors.append((cache.append(new) - plain.append(new)).abs().max())
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("config", [{"layers": 2}, {"layers": 3, "norm": "none"}], ids=str)
def test_logits_are_those_without_a_cache(
    mode: str, config: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of different lengths, also of 1, in a step of before, and past its size."""
    monkeypatch.setattr(cuda_graph, "SMALLEST", 2)
    model = random_model(**config).to(DEVICE)
    for lengths, size in (([3, 1, 2], 6), ([1, 1, 2], 6), ([1, 1, 1], 4)):
        prefix = torch.tensor(lengths, device=DEVICE) if mode == "prefix-lm" else None
        cache = CapturedCache(KINDS[mode], model, 6, prefix)
        assert worst(model, cache, mode, lengths, 3) < 1e-9
        assert cache.step.size == size


def test_two_caches_at_once_do_not_share_a_step() -> None:
    model = random_model(layers=3).to(DEVICE)
    tokens, size = prompts([4, 2], model.config.vocab or 0)
    with torch.no_grad():
        first, second = CapturedCache(EntpStep, model, 5), CapturedCache(EntpStep, model, 5)
        a = first.prefill(tokens, size)
        second.prefill(tokens.flip(0), size.flip(0))
        assert first.step is not second.step
        new = torch.tensor([1, 2], device=DEVICE)
        plain = NoCache(model, "entp")
        torch.testing.assert_close(a, plain.prefill(tokens, size))
        torch.testing.assert_close(first.append(new), plain.append(new))


def test_a_step_is_used_again_and_goes_with_its_model() -> None:
    model = random_model(layers=2).to(DEVICE)
    steps = []
    for _ in range(2):
        cache = CapturedCache(EntpStep, model, 5)
        worst(model, cache, "entp", [3, 2], 2)
        steps.append(id(cache.step))
        del cache
        gc.collect()
    assert steps[0] == steps[1]
    assert model in CapturedCache.kept
    before = len(CapturedCache.kept)
    del model
    gc.collect()
    assert len(CapturedCache.kept) < before


def test_few_and_small_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(layers=2).to(DEVICE)
    for batch in range(1, 7):
        worst(model, CapturedCache(DecoderStep, model, 4), "decoder", [2] * batch, 1)
    assert [key.batch for key in CapturedCache.kept[model]] == [3, 4, 5, 6]
    monkeypatch.setattr(cuda_graph, "LARGEST_KEPT", 8)
    worst(model, CapturedCache(DecoderStep, model, 4), "decoder", [2] * 7, 1)
    assert [key.batch for key in CapturedCache.kept[model]] == [3, 4, 5, 6]


def test_weights_that_moved_are_noticed() -> None:
    model = random_model(layers=2).to(DEVICE)
    cache = CapturedCache(EntpStep, model, 8)
    worst(model, cache, "entp", [2], 2)
    old = cache.step
    del cache
    gc.collect()
    for p in model.parameters():
        p.data = p.data * 1.5  # new memory, new values
    cache = CapturedCache(EntpStep, model, 8)
    assert worst(model, cache, "entp", [2], 2) < 1e-9
    assert cache.step is not old


@pytest.mark.gpu
@pytest.mark.parametrize("mode", KINDS)
def test_graphs_follow_weights_that_change_in_place(mode: str) -> None:
    model = random_model(layers=3).cuda()
    for scale in (1.0, 1.5):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(scale)
        prefix = torch.tensor([5, 3], device=DEVICE) if mode == "prefix-lm" else None
        cache = CapturedCache(KINDS[mode], model, 16, prefix)
        assert worst(model, cache, mode, [5, 3], 8) < 1e-9
        assert cache.step.graph is not None


@pytest.mark.gpu
@pytest.mark.parametrize("mode", KINDS)
def test_generation_in_half_precision_agrees_with_no_cache(mode: str) -> None:
    """Greedy tokens under autocast, where rounding may flip a near tie: 95 % are the same."""
    torch.manual_seed(0)
    model = entp.Transformer(
        entp.ModelConfig(vocab=64, context_length=48, layers=3, heads=2, width=64)
    ).cuda()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.ndim == 2 else 1)
    tokens, _ = prompts([8] * 16, 64)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        a, b = (entp.generate(model, tokens, 1, mode, cache=cache) for cache in (True, False))
        assert (a == b).float().mean() > 0.95
        runs = [entp.generate(model, tokens, 40, mode) for _ in range(3)]
    assert torch.equal(runs[1], runs[2])
