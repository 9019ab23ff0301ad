"""First steps in a cheaper mode, with a schedule of their own.

Mode random-prefix lies between a decoder and ENTP, at a decoder's cost. The tokens of a sequence up
to a random position see each other, those after it only what is before them. The predictions from
that position on carry the loss: the first is ENTP's, later ones are nearer to a decoder's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from entp.config import OptimConfig, Run
from entp.tasks.base import SPLITS, Batch
from entp.training.distributed import World
from entp.training.techniques.base import Coming, Technique

if TYPE_CHECKING:
    from entp.training.state import State


class Curriculum(Technique):
    """curriculum.steps steps in curriculum.mode, then the run itself, from the measured weights."""

    def __init__(self, run: Run) -> None:
        assert run.curriculum is not None
        self.config, self.seed = run.curriculum, run.seed
        self.changes = (self.config.steps,)

    def mode(self, step: int, mode: str) -> str:
        return self.config.mode if step < self.config.steps else mode

    def batch_size(self, step: int, size: int) -> int:
        own = self.config.batch_size
        return own if own is not None and step < self.config.steps else size

    def schedule(self, step: int, optim: OptimConfig) -> tuple[OptimConfig, int]:
        """From curriculum.lr to optim.lr, then the run's own schedule without a warm-up."""
        if step >= self.config.steps:
            return optim, self.config.steps
        first = self.config.lr or optim.lr
        return replace(optim, lr=first, min_lr=optim.lr, decay_steps=self.config.steps), 0

    def prepare(self, state: State, coming: Coming) -> None:
        """The run itself begins with the weights that were measured, such as their average."""
        if coming.step == self.config.steps and state.measured is not state.model:
            state.model.load_state_dict(state.measured.state_dict())

    def probability(self, step: int) -> float:
        """How likely a sequence of this step has a random prefix: 0, then from half-way up to 1."""
        if self.config.prefixes == "always":
            return 1.0
        return max(0.0, 2 * step / self.config.steps - 1)

    def arrays(self, step: int, batch: Batch, world: World) -> dict[str, Tensor]:
        if step >= self.config.steps or self.config.mode != "random-prefix":
            return {}
        drawn = draw_prefixes(
            self.seed, step, batch, self.probability(step), self.config.uniform_lengths
        )
        return {name: value[world.rank :: world.size] for name, value in drawn._asdict().items()}


class Drawn(NamedTuple):
    """What was drawn for the sequences of a batch."""

    prefix: Tensor
    """(B,) int32: how many first tokens see each other."""
    weights: Tensor
    """(B, T) fp32: the weight of each prediction; over the batch they add up to its targets."""


def draw_prefixes(
    seed: int, step: int, batch: Batch, probability: float, uniform_lengths: bool = False
) -> Drawn:
    """A prefix for each sequence: with this probability it ends at a random target, else it is 1.

    It belongs to the seed and the step alone. Predictions before the prefix's end weigh 0.
    """
    sequence = np.random.SeedSequence((seed, len(SPLITS) + 1, step))
    rng = np.random.Generator(np.random.Philox(sequence))
    where, whether = rng.random((2, len(batch.y)))
    targets = batch.target_mask
    number, total = np.cumsum(targets, 1), targets.sum(1, keepdims=True)
    first = np.floor(where[:, None] * total).astype(int) + 1  # 1, 2, ...: which of the targets
    at = np.where(whether < probability, np.argmax(targets & (number == first), 1), 0)
    weights = (targets & (np.arange(targets.shape[1]) >= at[:, None])).astype(float)
    if uniform_lengths:  # divided by how likely each prediction counts
        weights /= 1 - probability + probability * number.clip(1) / total.clip(1)
    weights *= targets.sum() / max(1, weights.sum())
    return Drawn(
        torch.from_numpy(at.astype(np.int32) + 1), torch.from_numpy(weights.astype(np.float32))
    )
