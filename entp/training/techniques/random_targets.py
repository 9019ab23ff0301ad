"""Random targets: a few targets of each sequence carry the loss, unbiased.

In mode entp every target costs a prefix of its own. With a few of each sequence, a step costs less,
or reads more sequences at the same cost.

Of the n targets of a sequence, k = min(count, n) are drawn, each with probability k / n, and weigh
n / k. They are spread over the sequence (systematic sampling): number j of them is target

    ((j B + r) n + d) // (B k)

where r is the sequence's place in a random order of the B sequences, and d < n is random too. So in
a batch whose sequences all have their targets at the same positions, every position is drawn
equally often, up to one. (r, d) takes B n values, of which B k draw a given target.

There d is kept for RENEW steps. Row r of the batch then has the same targets in every step, and
only the sequence that stands in it is drawn anew: shapes repeat, as CUDA graphs need it. Given d, a
target's probability is the number of rows that draw its position, over B. Its weight is one over
that, which is n / k if n divides B k. All prefixes of a sequence stay in one row, so that they
share layer 1.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from entp.config import Run
from entp.tasks.base import IGNORE, Batch
from entp.training.distributed import World
from entp.training.techniques.base import Coming, Technique

if TYPE_CHECKING:
    from entp.training.state import State

RENEW = 2500
"""Steps that d is kept for where shapes repeat: with another d, other positions are drawn once more
than the rest."""
ORDER, OFFSET, KEPT_OFFSET = 1000, 1001, 1002
"""Streams of random numbers: no split has these numbers."""


class Drawn(NamedTuple):
    """The targets of a batch that carry the loss."""

    mask: np.ndarray
    """(B, T) where they are."""
    weights: np.ndarray
    """(B, T) float64: one over each one's probability, 0 elsewhere."""


def spread(targets: np.ndarray, count: int, offset: np.ndarray) -> np.ndarray:
    """(B, T) which targets are drawn: at most `count` in each row, with offsets (B,) as d.

    A target is drawn if the formula above reaches its number: if more of the row's numbers j lie
    before the target's end than before its start.
    """
    size = len(targets)
    total = targets.sum(1)[:, None].clip(1)
    drawn = np.minimum(total, count)
    first = np.arange(size)[:, None] * total + offset[:, None]

    def before(number: np.ndarray) -> np.ndarray:
        """How many of a row's draws come before this target."""
        return -((first - number * size * drawn) // (size * total))

    number = np.cumsum(targets, 1) - 1
    return targets & (before(number + 1) > before(number))


def draw_targets(targets: np.ndarray, count: int, offset: np.ndarray) -> Drawn:
    """The draw of rows that have their targets at any positions."""
    mask = spread(targets, count, offset)
    total = targets.sum(1).clip(1)
    return Drawn(mask, mask * (total / np.minimum(total, count))[:, None])


def draw_positions(positions: np.ndarray, size: int, count: int, offset: int) -> Drawn:
    """The draw of `size` rows that have their targets at the same positions (T,).

    With at least as many draws as positions none is left out.
    """
    mask = spread(np.tile(positions, (size, 1)), count, np.full(size, offset))
    return Drawn(mask, mask * (size / mask.sum(0).clip(1)))


class RandomTargets(Technique):
    """Each sequence keeps random_targets.count of its targets."""

    def __init__(self, run: Run) -> None:
        assert run.random_targets is not None
        self.count, self.seed = run.random_targets.count, run.seed
        self.current: Drawn | None = None
        self.kept: tuple[tuple[object, ...], Drawn] | None = None
        """The last draw whose shapes repeat, and what it was made for."""

    @property
    def version(self) -> object:
        return self.current

    def prepare(self, state: State, coming: Coming) -> None:
        """A padded batch carries its own draw: nothing is captured anew for it (drawn.py)."""
        if coming.batch.lengths is None:
            self.current = self.draw(coming.step, coming.batch)

    def arrange(self, step: int, batch: Batch) -> Batch:
        if not self._drops(batch):
            return batch
        order = self._rng(ORDER, step).permutation(len(batch.y))
        arrays = {f.name: getattr(batch, f.name) for f in fields(batch)}
        return replace(batch, **{name: v[order] for name, v in arrays.items() if v is not None})

    def arrays(self, step: int, batch: Batch, world: World) -> dict[str, Tensor]:
        drawn = self.draw(step, batch)
        if drawn is None:
            return {}
        found = {"y": np.where(drawn.mask, batch.y, IGNORE), "weights": drawn.weights}
        return {n: torch.from_numpy(v)[world.rank :: world.size] for n, v in found.items()}

    def draw(self, step: int, batch: Batch) -> Drawn | None:
        """The draw of a step, for the rows as `arrange` leaves them; None if a batch without
        padding keeps all targets.

        A padded batch is drawn even then: its targets must not get other ones beside them
        (cover.py).
        """
        targets, padded = batch.target_mask, batch.lengths is not None
        if not padded and not self._drops(batch):
            return None
        alike = not padded and bool((targets == targets[0]).all())
        if alike and len(targets) * self.count >= targets[0].sum():
            return self._repeating(step // RENEW, targets[0], len(targets))
        offset = self._rng(OFFSET, step).integers(targets.sum(1).clip(1))
        return draw_targets(targets, self.count, offset)

    def _repeating(self, period: int, positions: np.ndarray, size: int) -> Drawn:
        """The draw of all steps of a period: one object, as long as it stays the same."""
        total = int(positions.sum())
        offset = int(self._rng(KEPT_OFFSET, period).integers(total))
        offset -= offset % gcd(total, size * self.count)  # those between give the same
        made_for = (size, offset, positions.tobytes())
        if self.kept is None or self.kept[0] != made_for:
            self.kept = made_for, draw_positions(positions, size, self.count, offset)
        return self.kept[1]

    def _drops(self, batch: Batch) -> bool:
        """Whether a sequence has more targets than are kept."""
        return bool((batch.target_mask.sum(1) > self.count).any())

    def _rng(self, stream: int, number: int) -> np.random.Generator:
        """Random numbers that belong to the seed and this number, a step or a period, alone."""
        sequence = np.random.SeedSequence((self.seed, stream, number))
        return np.random.Generator(np.random.Philox(sequence))
