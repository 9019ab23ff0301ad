"""What torch.export makes of a model computes the same, at every length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import entp


class InMode(nn.Module):
    def __init__(self, model: nn.Module, mode: str) -> None:
        super().__init__()
        self.model, self.mode = model, mode

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, mode=self.mode)


@pytest.mark.parametrize("positions", ["learned", "rotary", "relative"])
def test_decoder_is_exported(positions: str) -> None:
    sizes = {"vocab": 16, "context_length": 16, "layers": 2, "heads": 2, "width": 16}
    config = entp.ModelConfig(**sizes, position_embedding=positions)  # type: ignore[arg-type]
    model = entp.Transformer(config)
    tokens = torch.randint(16, (2, 8))
    shapes = ({0: Dim("batch"), 1: Dim("time", max=16)},)
    program = torch.export.export(InMode(model, "decoder"), (tokens,), dynamic_shapes=shapes)
    for part in (tokens, tokens[:1, :5]):
        torch.testing.assert_close(program.module()(part), model(part, mode="decoder"))


def test_values_are_looked_at_where_there_are_some() -> None:
    model = entp.Transformer(
        entp.ModelConfig(vocab=4, context_length=4, layers=1, heads=1, width=4)
    )
    with pytest.raises(entp.InputError, match="token ids go from 4 to 4"):
        model(torch.tensor([[4]]), mode="decoder")
