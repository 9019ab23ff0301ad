"""The formulas for operations are what torch counts while the real steps run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from random_models import random_inputs, random_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from entp import SIZES, ModelConfig
from entp.config import PretrainedConfig
from entp.engine.flops import (
    decoder_flops,
    engine_flops,
    mode_flops,
    reference_flops,
    token_flops,
)
from entp.engine.generation.caches import DecoderCache, EntpCache

BATCH, TIME = 3, 9


def counted(work: Any) -> Counter[str]:
    """Operations by kind, with attention as plain products: torch counts fused ones otherwise."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return Counter(
        {str(op): int(flops) for op, flops in counter.get_flop_counts()["Global"].items()}
    )


def mask(kind: str) -> torch.Tensor:
    """All prefixes, those after a seed, or some at random with nothing at the last position."""
    target_mask = torch.ones(BATCH, TIME, dtype=torch.bool)
    if kind == "seed":
        target_mask[:, :4] = False
    if kind == "some":
        target_mask = torch.rand(BATCH, TIME, generator=torch.Generator().manual_seed(1)) < 0.4
        target_mask[:, -1] = False
        assert target_mask.any()
    return target_mask


def step(
    target_mask: torch.Tensor, mode: str, impl: str, **config: Any
) -> tuple[ModelConfig, Counter[str]]:
    """A model and what its forward and backward pass do."""
    model = random_model(context_length=TIME, **config)
    x = random_inputs(model, BATCH, TIME)
    return model.config, counted(lambda: model(x, mode, at=target_mask, impl=impl).sum().backward())


@pytest.mark.parametrize("kind", ["all", "seed", "some"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_reference_and_decoder_are_exact(layers: int, kind: str) -> None:
    target_mask = mask(kind)
    config, found = step(target_mask, "entp", "reference", layers=layers, heads=4)
    assert reference_flops(config, target_mask).total == found.total()
    config, found = step(target_mask, "decoder", "auto", layers=layers, heads=4)
    assert decoder_flops(config, target_mask).total == found.total()


@pytest.mark.parametrize("kind", ["all", "seed", "some"])
@pytest.mark.parametrize("every", [2, 4, 20])
def test_refreshed_rows_are_exact(every: int, kind: str) -> None:
    target_mask, mode = mask(kind), f"refresh-{every}"
    config, found = step(target_mask, mode, "auto", layers=2, heads=4)
    assert mode_flops(config, target_mask, mode).total == found.total()


OPTIONS: list[dict[str, Any]] = [
    {"kv_heads": 2},
    {"activation": "swiglu"},
    {"loops": 2},
    {"position_embedding": "rotary"},
    {"bias": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_the_model_are_counted(options: dict[str, Any]) -> None:
    """The loop and the decoder exactly; of the engine the linear layers."""
    target_mask = mask("all")
    config, found = step(target_mask, "entp", "reference", layers=2, heads=4, **options)
    assert reference_flops(config, target_mask).total == found.total()
    config, found = step(target_mask, "decoder", "auto", layers=2, heads=4, **options)
    assert decoder_flops(config, target_mask).total == found.total()
    config, found = step(target_mask, "entp", "packed", layers=2, heads=4, **options)
    flops = engine_flops(config, target_mask)
    absorbed = (
        0
        if config.position_embedding == "rotary"
        else 2 * 3 * 3 * config.width**2 * int(target_mask.sum())
    )
    assert found["aten.addmm"] + found["aten.mm"] == flops.linear - absorbed + flops.readout


@pytest.mark.parametrize(
    "kind", [{"input_dim": 5, "outputs": 3}, {"vocab": 7, "outputs": 3}], ids=["vectors", "tokens"]
)
def test_vectors_and_a_head_are_counted(kind: dict[str, int]) -> None:
    target_mask = mask("seed")
    config, found = step(target_mask, "entp", "reference", **kind)
    assert reference_flops(config, target_mask).total == found.total()
    config, found = step(target_mask, "decoder", "auto", **kind)
    assert decoder_flops(config, target_mask).total == found.total()


@pytest.mark.parametrize("kind", ["all", "seed", "some"])
@pytest.mark.parametrize(("layers", "causal"), [(1, 0), (2, 0), (3, 0), (3, 1), (4, 2), (2, 1)])
def test_the_engine_is_what_packed_does(layers: int, causal: int, kind: str) -> None:
    """Linear layers exactly; attention up to what packed's blocks of lengths add to layer 1.

    Linear layers and the readout are (add)mm. The absorbed W_Q, W_K, W_V of the last layer, 3 D²
    per prefix, run as bmm together with all attention. Packed computes layer 1's outputs and
    gradients densely for the lengths of a block, so it does more there than the formula, and never
    less.
    """
    target_mask = mask(kind)
    config, found = step(
        target_mask, "entp", "packed", layers=layers, heads=4, causal_layers=causal
    )
    flops = engine_flops(config, target_mask)
    layers -= causal
    absorbed = 2 * 3 * 3 * config.width**2 * int(target_mask.sum()) if layers > 1 else 0
    assert found["aten.addmm"] + found["aten.mm"] == flops.linear - absorbed + flops.readout
    assert found.total() >= flops.total
    blocks_add = found.total() - flops.total
    longest = int(target_mask.nonzero()[:, 1].max()) + 1
    lengths = int(target_mask.any(0).sum())
    # Every length over every pair, forward and backward.
    dense = 3 * 2 * config.width * BATCH * longest**2 * lengths
    assert blocks_add <= dense if layers > 1 else blocks_add == 0


def test_fractions_of_the_document_come_out() -> None:
    """Linear work left is (12 L - 15) / (12 L) in the limit of long sequences: docs/engine.md."""
    target_mask = torch.ones(1, 4096, dtype=torch.bool)
    for layers, fraction in ((2, 9 / 24), (6, 57 / 72)):
        config = ModelConfig(vocab=2, context_length=4096, layers=layers, heads=2, width=32)
        left = (
            engine_flops(config, target_mask).linear / reference_flops(config, target_mask).linear
        )
        assert left == pytest.approx(fraction, rel=1e-2)
        assert left > fraction


def test_the_engine_never_does_more_than_the_loop() -> None:
    target_mask = torch.ones(2, 64, dtype=torch.bool)
    for size in SIZES.values():
        config = ModelConfig(vocab=64, context_length=64, **size)
        engine, loop = engine_flops(config, target_mask), reference_flops(config, target_mask)
        assert engine.total < loop.total
        assert engine.readout == loop.readout
        assert decoder_flops(config, target_mask).total < 0.1 * engine.total


def test_no_targets_cost_nothing() -> None:
    target_mask = torch.zeros(2, 5, dtype=torch.bool)
    config = ModelConfig(vocab=7, context_length=5, layers=3, heads=1, width=8)
    assert (
        reference_flops(config, target_mask).total == engine_flops(config, target_mask).total == 0
    )


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_one_more_token(layers: int) -> None:
    """Decoder exactly; torch does not count the elementwise products of ENTP's first layer."""
    model = random_model(layers=layers, heads=4, context_length=TIME)
    x, lengths = random_inputs(model, 1, TIME), torch.tensor([TIME - 1])
    for mode in ("decoder", "entp") if layers > 1 else ("decoder",):
        cache = DecoderCache(model, TIME) if mode == "decoder" else EntpCache(model, TIME)
        with torch.no_grad():
            cache.prefill(x[:, :-1], lengths)
            found = counted(lambda cache=cache: cache.append(x[:, -1]))
        first = 2 * 4 * model.config.width * TIME if mode == "entp" else 0
        assert token_flops(model.config, TIME, mode).total - first == found.total()
    assert layers > 1 or token_flops(model.config, TIME, "entp") == token_flops(
        model.config, TIME, "decoder"
    )


def test_heads_wider_than_the_model_are_counted() -> None:
    """Qwen3's heads are together wider than its layers: by torch's count of HuggingFace's model."""
    pytest.importorskip("transformers", reason="needs the transformers library")
    from small_networks import network_of

    from entp.hf.building import describe

    network = network_of("qwen3", num_attention_heads=4, head_dim=24)
    network.set_attn_implementation("eager")
    config = PretrainedConfig(describe(network.config))
    assert (config.width, config.attention_width) == (32, 96)
    x = torch.randint(0, 10, (2, 6))
    found = counted(lambda: network(x, use_cache=False).logits.sum().backward())
    expected = decoder_flops(config, torch.ones(2, 6, dtype=torch.bool))
    assert found.total() == expected.total
