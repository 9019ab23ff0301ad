"""Log-likelihoods of windows: those of one prefix at a time."""

from __future__ import annotations

import pytest
import torch

from entp.config import ModelConfig
from entp.hf.scoring import Scorer
from entp.model import Transformer
from entp.tasks.windows import Window
from entp.training.forward import Forward


def small_model() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab=11, context_length=6, layers=2, heads=2, width=16))
    for p in model.parameters():
        p.data *= 8
    return model.double().eval()


def how(mode: str) -> Forward:
    return Forward(mode, None, "cross_entropy", "auto", None, "fp32")


@torch.no_grad()
@pytest.mark.parametrize("mode", ["entp", "decoder"])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_scores_are_those_of_one_prefix_at_a_time(mode: str, batch_size: int) -> None:
    model = small_model()
    rows = [Window([1, 2, 3], 2), Window([4, 5], 1), Window([1, 2, 3, 4, 5, 6, 7], 6)]
    best = int(model(torch.tensor([[4, 5]]), mode)[0, -1].argmax())
    rows.append(Window([4, 5, best], 1))
    found = Scorer(model, how(mode), torch.device("cpu"), batch_size).score(rows)
    for row, (score, greedy) in zip(rows, found, strict=True):
        expected, likeliest = 0.0, True
        for at in range(len(row.tokens) - row.scored, len(row.tokens)):
            logits = model(torch.tensor([row.tokens[:at]]), mode)[0, -1].log_softmax(-1)
            expected += float(logits[row.tokens[at]])
            likeliest &= int(logits.argmax()) == row.tokens[at]
        assert score == pytest.approx(expected, rel=1e-9)
        assert greedy == likeliest
    assert found[-1][1]
    assert not found[0][1]


def test_entp_computes_the_scored_positions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model is asked for are the scored tokens, however long the contexts are."""
    model, asked = small_model(), []
    forward = Forward.__call__

    def counted(self: Forward, model: Transformer, x: torch.Tensor, at: torch.Tensor) -> object:
        asked.append(int(at.sum()))
        return forward(self, model, x, at)

    monkeypatch.setattr(Forward, "__call__", counted)
    Scorer(model, how("entp"), torch.device("cpu")).score([Window([1, 2, 3, 4], 1)] * 3)
    assert asked == [3]


def test_outputs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = small_model(), []
    monkeypatch.setattr("entp.hf.scoring.MOST_OUTPUTS", 5 * 11)
    scorer = Scorer(model, how("decoder"), torch.device("cpu"))
    whole = scorer._scores

    def counted(rows: list[Window]) -> list[tuple[float, bool]]:
        sizes.append(sum(row.scored for row in rows))
        return whole(rows)

    monkeypatch.setattr(scorer, "_scores", counted)
    scorer.score([Window([1, 2, 3], 2)] * 5)
    assert sizes == [4, 4, 2]
