"""Random prefixes: between a decoder and ENTP, at a decoder's cost.

The tokens of a sequence up to a random place see each other, those after it only what is before them, and the predictions from
that place on count. The first of them is ENTP's; the further from it, the nearer to a decoder's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from entp.config import Run
from entp.tasks.base import IGNORE, SPLITS, Batch


class Drawn(NamedTuple):
    """What was drawn for the sequences of a batch."""

    prefix: Tensor
    """(B,) int32: how many first tokens see each other."""
    weights: Tensor
    """(B, T) fp32: what each prediction counts, 0 or the same number, with start.even one for each length; over the batch they
    add up to its targets."""

    def part(self, rank: int, world: int) -> Drawn:
        """The share of one of `world` processes, as Batch.part gives it."""
        return Drawn(*(t[rank::world] for t in self))

    def to(self, device: torch.device) -> Drawn:
        return Drawn(*(t.to(device) for t in self))


def draw_prefixes(run: Run, step: int, batch: Batch, chance: float) -> Drawn:
    """With this chance for each sequence a prefix that ends where something is predicted, all places alike; else a decoder's.

    It belongs to the run's seed and the step alone.
    """
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((run.seed, len(SPLITS) + 1, step))))
    where, whether = rng.random((2, len(batch.y)))
    asked = batch.y != IGNORE
    number, total = np.cumsum(asked, 1), asked.sum(1, keepdims=True)
    first = np.floor(where[:, None] * total).astype(int) + 1  # 1, 2, ...: which of the sequence's predictions
    place = np.where(whether < chance, np.argmax(asked & (number == first), 1), 0)
    weights = (asked & (np.arange(asked.shape[1]) >= place[:, None])).astype(float)
    if run.start.even:
        weights /= 1 - chance + chance * number.clip(1) / total.clip(1)  # how likely each prediction counts
    weights *= asked.sum() / max(1, weights.sum())
    return Drawn(torch.from_numpy(place.astype(np.int32) + 1), torch.from_numpy(weights.astype(np.float32)))
