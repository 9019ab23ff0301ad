"""Padded batches as batches of one shape.

In modes entp and decoder a token changes nothing at earlier positions. So a padded row may be
computed as it stands, padding included, and be made longer: predictions at its real tokens stay
what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from entp.config import refresh_of
from entp.engine.refreshed import computed_rows
from entp.tasks.base import IGNORE, Batch

ARRAYS = tuple(field.name for field in fields(Batch))


def padding_is_nothing(mode: str) -> bool:
    """Whether a token changes nothing at earlier positions in this mode: not prefix-lm."""
    return mode in ("entp", "decoder") or refresh_of(mode) is not None


def skips_targets(mode: str) -> bool:
    """Whether a step of this mode is cheaper with fewer targets."""
    return mode == "entp" or refresh_of(mode) is not None


def prefix_rows(batch: Batch) -> int:
    """Rows of all prefixes that end in a target: what mode entp computes."""
    return computed_rows(batch.target_mask, "entp")


def widened(batch: Batch, width: int) -> Batch:
    """The batch with so many columns, without targets in the new ones; lengths stay."""
    more = width - batch.y.shape[1]
    if more == 0:
        return batch
    fill = {"x": 0, "y": IGNORE, "position_ids": 0, "loss_weights": 0}
    arrays = {name: getattr(batch, name) for name in fill}
    found = {
        name: np.concatenate([a, np.full((len(a), more, *a.shape[2:]), fill[name], a.dtype)], 1)
        for name, a in arrays.items()
        if a is not None
    }
    return replace(batch, **found)


def real_tokens(batch: Batch) -> np.ndarray:
    """(batch, time) whether a token is not padding."""
    if batch.lengths is None:
        return np.ones(batch.y.shape, bool)
    return np.arange(batch.y.shape[1]) < batch.lengths[:, None]


def without_lengths(batch: Batch) -> Batch:
    """The batch with token 0, at position 0, as its padding, for modes in which padding changes
    nothing; the same batch if it has targets there, which only its lengths keep out."""
    if batch.lengths is None:
        return batch
    real = real_tokens(batch)
    if (batch.target_mask > real).any():
        return batch
    x, ids = batch.x.copy(), batch.position_ids
    x[~real] = 0  # also where it is not a number
    if ids is not None:
        ids = np.where(real, ids, 0)
    return replace(batch, x=x, position_ids=ids, lengths=None)


def joinable(one: Batch, two: Batch) -> bool:
    """Whether both have the same arrays, and the same width or lengths to pad by."""
    for name in ARRAYS:
        a, b = getattr(one, name), getattr(two, name)
        if (a is None) != (b is None):
            return False
        if a is not None and (a.dtype.kind != b.dtype.kind or a.shape[2:] != b.shape[2:]):
            return False
    return one.lengths is not None or one.y.shape[1] == two.y.shape[1]


def joined(batches: Sequence[Batch]) -> Batch:
    """The sequences of all batches as one batch, padded to the widest."""
    if len(batches) == 1:
        return batches[0]
    width = max(batch.y.shape[1] for batch in batches)
    wide = [widened(batch, width) for batch in batches]
    there = [name for name in ARRAYS if getattr(wide[0], name) is not None]
    return Batch(**{name: np.concatenate([getattr(b, name) for b in wide]) for name in there})


NEIGHBOURS = 1
"""Ranks on either side whose targets a rank of a cover has too: batches to come differ a little."""
MOST_MISSES = 16
"""Batches that a cover does not hold until it grows to hold them: graphs are lost by that."""


def ranks(mask: np.ndarray) -> np.ndarray:
    """(size,) the rows of a target mask in order: by their last target, then by how many there
    are."""
    last = mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)
    return np.lexsort((mask.sum(1), np.where(mask.any(1), last, 0)))


class Misses:
    """A shape for padded batches, which grows for many that it does not hold, not for each."""

    def __init__(self) -> None:
        self.missed: list[Batch] = []
        """Batches that it does not hold."""

    def holds(self, batch: Batch) -> bool:
        """Whether the batch fits as it is."""
        raise NotImplementedError

    def _grow(self, batches: list[Batch]) -> None:
        """Hold these, too."""
        raise NotImplementedError

    def grow(self, batch: Batch) -> bool:
        """Whether it had to grow to hold this batch."""
        if self.holds(batch):
            return False
        self._grow([batch])
        return True

    def miss(self, batch: Batch) -> bool:
        """Note a batch that it does not hold; whether there were so many by now that it grew to
        hold them all."""
        self.missed.append(batch)
        if len(self.missed) < MOST_MISSES:
            return False
        self._grow(self.missed)
        self.missed = []
        return True


class Cover(Misses):
    """A shape for all padded batches of one size: the largest width, and where there are targets in
    its first row, its second and so on, for batches whose rows are put in the order of `ranks`.

    In that order the rows of different batches are much alike: covering lines of addition costs
    half of what it does where every row has the targets of all. A batch so covered has a target
    wherever the cover has one, of weight 0 where it has none itself. Its shape and its targets'
    positions are then always the same, as a captured step needs them, and its loss and gradients
    are those of the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: np.ndarray = np.zeros((0, 0), bool)
        """(size, width) where any batch had a target in its row of that rank."""
        self.mask: np.ndarray = self.seen
        """The same, with the ranks beside."""
        self.rows = 0
        """Rows of the prefixes that end at its targets."""

    @property
    def width(self) -> int:
        return self.mask.shape[1]

    def holds(self, batch: Batch) -> bool:
        """Whether the batch fits into the cover as it is."""
        own = _ranked(batch)
        return own.shape[1] <= self.width and not (own & ~self.mask[:, : own.shape[1]]).any()

    def _grow(self, batches: list[Batch]) -> None:
        for batch in batches:
            own = _ranked(batch)
            self.seen = _union(self.seen, own) if self.seen.size else own
        self.mask = self.seen.copy()
        for by in range(1, NEIGHBOURS + 1):
            self.mask[by:] |= self.seen[:-by]
            self.mask[:-by] |= self.seen[by:]
        self.rows = computed_rows(self.mask, "entp")

    def cost(self, batch: Batch, mode: str) -> float:
        """How many times the rows of the batch itself its covered form has, in this mode."""
        own = max(1, computed_rows(batch.target_mask, mode))
        return computed_rows(self.mask, mode) / own

    def __call__(self, batch: Batch) -> Batch | None:
        """The batch in the cover's shape and order, without lengths; None if it has targets in its
        padding. It keeps its prefix_lengths."""
        size, time = batch.y.shape
        order = ranks(batch.target_mask)
        mask, real = batch.target_mask[order], real_tokens(batch)[order]
        if (mask > real).any():
            return None
        x = np.zeros((size, self.width, *batch.x.shape[2:]), batch.x.dtype)
        shown = real if x.ndim == 2 else real[..., None]
        np.copyto(x[:, :time], batch.x[order], where=shown)  # padding may be anything
        y = np.where(self.mask, 0, IGNORE).astype(batch.y.dtype)
        np.copyto(y[:, :time], batch.y[order], where=mask)
        weights = np.zeros(y.shape, np.float32)
        own = batch.loss_weights
        np.copyto(weights[:, :time], 1.0 if own is None else own[order], where=mask)
        ids = None
        if batch.position_ids is not None:
            ids = np.zeros_like(y, batch.position_ids.dtype)
            np.copyto(ids[:, :time], batch.position_ids[order], where=real)
        first = batch.prefix_lengths
        first = None if first is None else first[order]
        return Batch(x, y, position_ids=ids, loss_weights=weights, prefix_lengths=first)


def _ranked(batch: Batch) -> np.ndarray:
    """Its target mask in the order of ranks."""
    mask = batch.target_mask
    return mask[ranks(mask)]


def _union(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Where either has a target, as wide as the wider."""
    found: np.ndarray = np.zeros((len(two), max(one.shape[1], two.shape[1])), bool)
    found[:, : one.shape[1]] = one
    found[:, : two.shape[1]] |= two
    return found
