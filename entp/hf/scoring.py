"""Log-likelihoods of continuations, with predictions at their positions alone.

rows = windows(context, continuation, length=128)
Scorer(model, how, device).score(rows)      # nats of each row, and whether it is greedy
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from entp.tasks.windows import Window
from entp.training.evaluate import MOST_OUTPUTS
from entp.training.forward import Forward


@dataclass
class Scorer:
    """A model of text that scores windows, so many at once."""

    model: Any
    how: Forward
    device: torch.device
    batch_size: int = 64

    @torch.no_grad()
    def score(self, rows: Sequence[Window]) -> list[tuple[float, bool]]:
        """The log-likelihood of each row's scored tokens, and whether each was the likeliest."""
        order = sorted(range(len(rows)), key=lambda at: -len(rows[at].tokens))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for group in self._groups([(at, rows[at]) for at in order]):
            scores = self._scores([row for _, row in group])
            for (at, _), score in zip(group, scores, strict=True):
                found[at] = score
        return found

    def _groups(self, rows: list[tuple[int, Window]]) -> Iterator[list[tuple[int, Window]]]:
        """As many rows at once as the batch size and the memory for outputs allow."""
        most = MOST_OUTPUTS // self.model.vocab
        group: list[tuple[int, Window]] = []
        for one in rows:
            targets = sum(row.scored for _, row in [*group, one])
            if group and (len(group) == self.batch_size or targets > most):
                yield group
                group = []
            group.append(one)
        if group:
            yield group

    def _scores(self, rows: list[Window]) -> list[tuple[float, bool]]:
        """In the modes entp and decoder padding on the right changes nothing before it."""
        width = max(len(row.tokens) for row in rows) - 1
        x = torch.zeros(len(rows), width, dtype=torch.long)
        at = torch.zeros(len(rows), width, dtype=torch.bool)
        for place, row in enumerate(rows):
            read = len(row.tokens) - 1
            x[place, :read] = torch.tensor(row.tokens[:-1])
            at[place, read - row.scored : read] = True
        targets = torch.tensor([token for row in rows for token in row.tokens[-row.scored :]])
        outputs = self.how(self.model, x.to(self.device), at)
        nats = self.how.loss_rows(outputs, targets.to(self.device)).double().cpu().numpy()
        right = (outputs.argmax(-1).cpu() == targets).numpy()
        number = np.repeat(np.arange(len(rows)), [row.scored for row in rows])
        sums = np.bincount(number, nats, len(rows))
        wrong = np.bincount(number, ~right, len(rows))
        return [(-float(cost), not bad) for cost, bad in zip(sums, wrong, strict=True)]
