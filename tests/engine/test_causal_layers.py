"""First layers that are causal in every mode: by hand, when generating, and with changed blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_models import random_inputs, random_model
from torch import Tensor

from entp import InputError, ModelConfig, all_prefixes, generate
from entp.engine import choose
from entp.engine.generation.generate import make_cache
from entp.model import Transformer


def by_hand(model: Transformer, x: Tensor) -> Tensor:
    """One causal pass of the first layers over the sequence; the others over each prefix of it."""
    causal, outputs = model.config.causal_layers, []
    ids = torch.arange(x.shape[1])
    below = model.vectors(x)
    for block in model.blocks[:causal]:
        below = block(below, ids, None, True)
    for m in range(1, x.shape[1] + 1):
        h = below[:, :m]
        for block in model.blocks[causal:]:
            h = block(h, ids[:m])
        outputs.append(model.readout(h[:, -1]))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("impl", ["reference", "packed"])
@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
@pytest.mark.parametrize("causal", [0, 1, 2])
def test_they_run_once_and_the_others_for_each_prefix(
    causal: int, positions: Any, impl: str
) -> None:
    model = random_model(layers=3, causal_layers=causal, position_embedding=positions)
    x = random_inputs(model, 2, 7)
    with torch.no_grad():
        torch.testing.assert_close(
            all_prefixes(model, x, impl=impl), by_hand(model, x), rtol=1e-10, atol=1e-10
        )


def test_with_one_other_layer_the_model_is_a_decoder() -> None:
    model = random_model(layers=3, causal_layers=2)
    x = random_inputs(model, 2, 6)
    torch.testing.assert_close(model(x, "entp"), model(x, "decoder"), rtol=1e-10, atol=1e-10)
    other = random_model(layers=3, causal_layers=1)
    assert (other(x, "entp") - other(x, "decoder")).abs().max() > 1e-3


def test_they_tell_the_order_without_positions() -> None:
    """Without positions ENTP sees a bag of tokens and the last one."""
    x = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    for causal, same in ((0, True), (1, False)):
        model = random_model(layers=3, causal_layers=causal, position_embedding="none")
        one, two = (model(tokens, "entp", at=[3]) for tokens in (x, swapped))
        assert torch.allclose(one, two, atol=1e-10) == same


@pytest.mark.parametrize("mode", ["entp", "decoder", "prefix-lm"])
def test_generation_is_one_prediction_after_the_other(mode: Any) -> None:
    model = random_model(layers=3, causal_layers=1).eval()
    prompts = random_inputs(model, 3, 4)
    more = {"prefix": 4} if mode == "prefix-lm" else {}
    found = generate(model, prompts, 5, mode, **more)
    tokens = prompts
    for _ in range(5):
        last = model(tokens, mode, at=[tokens.shape[1] - 1], **more)
        tokens = torch.cat([tokens, last.argmax(-1)], 1)
    assert torch.equal(found, tokens)
    assert type(make_cache(model, mode, 9)).__name__ == "NoCache"


def test_a_hook_on_one_of_them_is_noticed() -> None:
    model = random_model(layers=3, causal_layers=1)
    assert choose("auto", "cpu", model).impl == "packed"
    model.blocks[0].register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.warns(UserWarning, match="block 0 has a hook"):
        assert choose("auto", "cpu", model).impl == "reference"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"causal_layers": 3}, "of 3 layers 0 to 2 can be causal"),
        ({"causal_layers": -1}, "model.causal_layers is -1"),
        ({"causal_layers": 1, "loops": 2}, "needs model.loops 1"),
    ],
)
def test_numbers_that_no_model_has(config: dict[str, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ModelConfig(vocab=4, layers=3, **config)
