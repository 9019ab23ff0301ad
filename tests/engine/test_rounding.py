"""Rounding of float32 is told from errors by a copy of the model in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import entp
from entp.engine import packed, reference
from entp.engine.support import compare_once, support_of


class Cancels(nn.Module):
    """Adds a large number and takes it away again: float32 loses most digits, in its own order."""

    def __init__(self, norm: nn.Module, broken: bool) -> None:
        super().__init__()
        self.norm, self.broken = norm, broken

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        scale = torch.linspace(0.7, 1.3, len(x.flatten()), dtype=x.dtype).view_as(x)
        wrong = 0.1 * x.mean(0, keepdim=True) if self.broken else 0.0  # other rows matter
        return ((x * scale + 3e4) - 3e4) / scale + wrong


def model_of(broken: bool) -> entp.Transformer:
    torch.manual_seed(0)
    config = entp.ModelConfig(vocab=8, context_length=8, layers=3, heads=2, width=16)
    model = entp.Transformer(config)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    model.blocks[1].norm_2 = Cancels(model.blocks[1].norm_2, broken)
    return model


@pytest.mark.parametrize("broken", [False, True])
def test_rounding_is_no_error_and_an_error_no_rounding(broken: bool) -> None:
    model = model_of(broken)
    x = torch.randint(8, (2, 5), generator=torch.Generator().manual_seed(1))
    rows = [
        f(model, x, torch.ones(2, 5, dtype=torch.bool))
        for f in (packed.prefix_hidden, reference.prefix_hidden)
    ]
    off = float((rows[0] - rows[1]).abs().max() / rows[1].abs().max())
    assert off > 1e-4  # more than float32 may be off
    wrong = compare_once(model, x, None, packed.prefix_hidden, reference.prefix_hidden)
    assert (wrong is not None) == broken
    assert support_of(model).unknown is not None
    report = entp.check(model)
    assert report.exact
    row = next(row for row in report.rows if row.implementation == "packed")
    told = "not used" if broken else "in float64: float32 rounds"
    assert told in row.verdict
