"""Padded batches with few targets as batches of one shape: a row for each prefix.

Full attention knows tokens by their position ids, not by their places. So a prefix may be read with
its last token first: its prediction then stands in column 0, however long it is. In mode prefix-lm,
with all of the prefix as the prefix, that is mode entp.

    a b c d .        d a b c .     ids 3 0 1 2 .
        ^   ^   ->   b a . . .     ids 1 0 . . .     for targets after b and d
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from entp.engine.support import not_compiled, weighted_gradients
from entp.errors import InputError
from entp.tasks.base import IGNORE, Batch
from entp.training.cover import Misses, prefix_rows
from entp.training.distributed import World
from entp.training.forward import Forward
from entp.training.inputs import make_inputs, step_arrays

MOST_ROWS = 2**14
"""Rows of all prefixes, padding included: with more, a step keeps a GPU busy without a graph."""

COMPARED, CLOSE = 2, 1e-3
"""Sequences on which a model is compared, and how far apart predictions may be, for the largest of
them, and gradients: rounding of fp32 is far below."""


class PrefixRows(Misses):
    """A shape for all padded batches of one size: the most targets, and the longest prefix; but for
    those that would make it larger than `most` rows."""

    def __init__(self, most: int = MOST_ROWS) -> None:
        super().__init__()
        self.most, self.count, self.width = most, 0, 0

    def holds(self, batch: Batch) -> bool:
        """Whether the batch fits as it is."""
        count, width = _size(batch)
        return count <= self.count and width <= self.width

    def _grow(self, batches: list[Batch]) -> None:
        for batch in batches:
            count, width = map(max, (self.count, self.width), _size(batch))
            if count * width <= self.most:
                self.count, self.width = count, width

    @property
    def rows(self) -> int:
        return self.count * self.width

    def cost(self, batch: Batch, mode: str) -> float:
        """How many times the rows of the batch itself this shape has."""
        return self.rows / max(1, prefix_rows(batch))

    def __call__(self, batch: Batch) -> Batch | None:
        """A row for each target, for mode prefix-lm; None if it has targets in its padding. Rows
        that are left over have a target of weight 0."""
        used, ends = len(batch.row), batch.position + 1
        if batch.lengths is not None and (ends > batch.lengths[batch.row]).any():
            return None
        column = np.arange(self.width)
        lengths = np.ones(self.count, np.int64)
        lengths[:used] = ends
        from_ = np.where(column == 0, lengths[:, None] - 1, column - 1)
        real = column < lengths[:, None]
        real[used:] = False
        row = np.zeros(self.count, np.int64)
        row[:used] = batch.row
        at = row[:, None], np.where(real, from_, 0)
        ids = from_ if batch.position_ids is None else batch.position_ids[at]
        x = np.zeros((self.count, self.width, *batch.x.shape[2:]), batch.x.dtype)
        np.copyto(x, batch.x[at], where=real if x.ndim == 2 else real[..., None])
        y = np.full((self.count, self.width), IGNORE, batch.y.dtype)
        y[:, 0] = 0
        y[:used, 0] = batch.targets
        weights = np.zeros(y.shape, np.float32)
        own = batch.loss_weights
        weights[:used, 0] = 1.0 if own is None else own[batch.target_mask]
        ids = np.where(real, ids, 0)
        return Batch(x, y, position_ids=ids, loss_weights=weights, prefix_lengths=lengths)


def _size(batch: Batch) -> tuple[int, int]:
    """Targets, and the length of the longest prefix that ends in one."""
    return len(batch.row), int(batch.position.max(initial=0)) + 1


def reads_rows(model: Any, how: Forward, batch: Batch, device: torch.device) -> bool | None:
    """Whether the model's own forward pass predicts from such rows what the engine does, with the
    same gradients; None where the batch has no prefixes that could tell.

    Models of others may take no masks, or tell tokens by their places.
    """
    long = (batch.target_mask & (np.arange(batch.y.shape[1]) > 0)).any(1)
    if not long.any():
        return None
    first = int(long.argmax())
    few, shape = batch.part(first, -(-len(batch.x) // COMPARED)), PrefixRows()
    shape.grow(few)
    alone = shape(few)
    if alone is None:
        return None
    found = []
    try:
        with not_compiled(model), torch.enable_grad():
            for one, mode in ((few, how.mode), (alone, "prefix-lm")):
                plain = replace(how, mode=mode, precision="fp32", token_budget=None)
                inputs = make_inputs(step_arrays(one, 0, (), World()), one, plain, model, device)
                names = ("lengths", "position_ids", "prefix_lengths")
                more = {name: inputs.get(name) for name in names}
                out = plain(model, inputs["x"], torch.from_numpy(one.target_mask), **more)
                found.append([out.detach(), *weighted_gradients(model, out)])
    except InputError:
        return False
    want, got = found
    size = max((float(g.abs().max()) for g in want[1:]), default=0.0)
    outputs, *gradients = (float((a - b).abs().max()) for a, b in zip(got, want, strict=True))
    return outputs <= CLOSE * float(want[0].abs().max()) and max(gradients, default=0.0) <= (
        CLOSE * size
    )
