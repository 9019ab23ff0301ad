"""Padded batches with what techniques do to them: a step then reads nothing but the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from entp.tasks.base import IGNORE, Batch
from entp.training.cover import padding_is_nothing, skips_targets
from entp.training.distributed import World
from entp.training.forward import Forward
from entp.training.techniques.base import Technique


def drawn(batch: Batch, how: Forward, step: int, techniques: Sequence[Technique]) -> Batch | None:
    """A padded batch with the targets that carry the loss in this step; None where padding counts,
    or where a technique needs more than the batch.

    In mode entp the other targets are gone. Elsewhere they cost little and stay with weight 0, so
    that targets are alike from step to step.
    """
    if not _padding_is_nothing(batch, how):
        return None
    for technique in techniques:
        if type(technique).choose is not Technique.choose:
            return None
        batch = technique.arrange(step, batch)
    for technique in techniques:
        arrays = technique.arrays(step, batch, World())
        if not arrays:
            continue
        # Weights of its own divide the loss by another sum than those of a draw.
        if set(arrays) != {"y", "weights"} or batch.loss_weights is not None:
            return None
        y, weights = arrays["y"].numpy(), arrays["weights"].numpy()
        weights = np.where(y == IGNORE, 0.0, weights)
        if not np.isclose(weights.sum(), batch.target_mask.sum()):
            return None
        batch = replace(batch, y=y if skips_targets(how.mode) else batch.y, loss_weights=weights)
    return batch


def _padding_is_nothing(batch: Batch, how: Forward) -> bool:
    """Whether padding changes no prediction in this mode."""
    if how.mode != "prefix-lm":
        return padding_is_nothing(how.mode)
    first = how.prefix_length if batch.prefix_lengths is None else batch.prefix_lengths
    lengths = batch.lengths
    return lengths is None or (first is not None and bool((first <= lengths).all()))
