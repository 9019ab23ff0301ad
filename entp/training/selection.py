"""Gradients of the predictions that matter: an unbiased choice among those of a batch.

In mode entp every prediction has a cost of its own. Late in training most are right, and their gradients next to nothing. So
all are made once without gradients, and some are chosen: the larger the error of its outputs, the likelier a prediction is
taken, and it counts by one over that chance. The expected gradient is that of the whole batch (Horvitz and Thompson, 1952).

How many are taken at each length is fixed for a while, so that a step keeps its shapes; which sequences they are of is drawn
anew in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entp.config import Run
from entp.errors import InputError
from entp.tasks.base import IGNORE, Batch, Task

RENEW = 5000
"""Steps after which the numbers taken at each length are decided anew."""
REMEMBERED = 0.99
"""How much of the mean errors, which decide about these numbers, is kept at each step."""
FLOOR = 0.1
"""A prediction's error counts as larger by so much of the mean at its length, so that no chance is next to 0."""

WITHOUT_GRADIENTS = 1 / 3
"""What a prediction without gradients costs of one with them."""
PAYS_BELOW = 0.9
"""Nothing is chosen unless cost times variance is below so much of the plain step's."""
HARDLY_BETTER = 1.03
"""New counts are not used if cost times variance of the old ones is within this of theirs: the step would be recorded anew."""


@dataclass(eq=False)
class Selection:
    """What is known about the errors at each place, and how many predictions are taken there."""

    places: tuple[int, ...]
    """Positions after which something is predicted, the same in every sequence."""
    mean: Tensor
    """(places,) running mean of the errors."""
    square: Tensor
    """(places,) running mean of their squares."""
    counts: tuple[int, ...]
    """How many of a batch's predictions are taken at each place."""

    @cached_property
    def mask(self) -> Tensor:
        """(taken, time up to the last place) on the CPU: each row the end of one prefix, the shortest first."""
        wanted = torch.zeros(sum(self.counts), max(self.places) + 1, dtype=torch.bool)
        wanted[torch.arange(len(wanted)), torch.tensor(self.places)[self.place]] = True
        return wanted

    @cached_property
    def place(self) -> Tensor:
        """(taken,) on the CPU: which place each row is of."""
        return torch.repeat_interleave(torch.arange(len(self.counts)), torch.tensor(self.counts))

    @cached_property
    def turn(self) -> Tensor:
        """(taken,) on the CPU: 0, 1, ... within each place."""
        return torch.cat([torch.arange(count) for count in self.counts])

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """places, counts, place and turn, there."""
        places, counts = torch.tensor(self.places, device=device), torch.tensor(self.counts, device=device)
        return places, counts, self.place.to(device), self.turn.to(device)

    def note(self, errors_BP: Tensor) -> None:
        """Follow the errors of a batch, in place."""
        self.mean.lerp_(errors_BP.mean(0), 1 - REMEMBERED)
        self.square.lerp_(errors_BP.square().mean(0), 1 - REMEMBERED)

    @property
    def rows(self) -> int:
        """Tokens of all prefixes taken."""
        return sum((place + 1) * count for place, count in zip(self.places, self.counts, strict=True))

    def save(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"places": self.places, "mean": self.mean.cpu(), "square": self.square.cpu(), "counts": self.counts}

    @classmethod
    def restore(cls, saved: dict[str, Any], device: torch.device) -> Selection:
        """What `save` gave."""
        mean, square = (saved[name].to(device) for name in ("mean", "square"))
        return cls(tuple(saved["places"]), mean, square, tuple(saved["counts"]))


def places_of(batch: Batch, task: Task) -> tuple[int, ...]:
    """Where a batch asks for predictions; an InputError if that is not the same in every sequence."""
    asked = batch.y != IGNORE
    if batch.lengths is not None or not (asked == asked[0]).all():
        raise InputError(
            f"optim.select needs predictions at the same places of every sequence, without padding, and {task.name} does "
            "not have them: leave it out."
        )
    return tuple(np.flatnonzero(asked[0]).tolist())


def price(counts: np.ndarray, mean: Tensor, square: Tensor, places: tuple[int, ...], batch: int) -> float:
    """Cost times variance of the gradient, as a share of the plain step's, if so many of `batch` are taken at each place.

    As many as carry the errors, (sum of errors)^2 / sum of squares, are taken to have 5/4 of the variance of all, twice as many
    17/16, half as many twice: that is about what errors late in training give.
    """
    length, square_ = np.array(places) + 1.0, square.double().cpu().numpy()
    cost = WITHOUT_GRADIENTS + length @ counts / (batch * length.sum())
    variance = square_ @ (1 + 0.25 * (_carrying(mean, square, batch) / counts) ** 2)
    return float(cost * variance / square_.sum()) if square_.sum() > 0 else float(cost)


def decide(mean: Tensor, square: Tensor, places: tuple[int, ...], batch: int) -> np.ndarray:
    """How many predictions to take at each place, of `batch`: the cheapest, in the proportions that follow from `price`."""
    length = np.array(places) + 1.0
    wish = (square.double().cpu().numpy() * _carrying(mean, square, batch) ** 2 / length) ** (1 / 3)
    wish = wish / wish.max() if wish.max() > 0 else np.ones_like(wish)
    scales = np.geomspace(1, batch / max(wish.min(), 1e-3), 200)
    tried = [np.clip(np.rint(scale * wish), 1, batch).astype(int) for scale in scales]
    return min(tried, key=lambda counts: price(counts, mean, square, places, batch))


def _carrying(mean: Tensor, square: Tensor, batch: int) -> np.ndarray:
    """How many of `batch` predictions carry the errors at each place."""
    mean_, square_ = mean.double().cpu().numpy(), square.double().cpu().numpy()
    return batch * np.divide(mean_**2, square_, out=np.ones_like(mean_), where=square_ > 0)


def errors(task: Task, outputs_MK: Tensor, targets_M: Tensor) -> Tensor:
    """(M,) the size of the loss's gradient by each row of outputs, up to a constant."""
    wide = outputs_MK.to(torch.promote_types(outputs_MK.dtype, torch.float32))
    if task.loss == "squared_error":
        return (wide.squeeze(-1) - targets_M.to(wide.dtype)).abs()
    miss = wide.softmax(-1)
    miss = miss.scatter_add(1, targets_M[:, None], torch.full_like(miss[:, :1], -1.0))
    return miss.norm(dim=1)


def chances(errors_BP: Tensor, counts_P: Tensor) -> Tensor:
    """(B, P) float64: each prediction's chance to be taken. Those of a place add up to its count, none is above 1.

    In proportion to the errors, but for those whose chance would be above 1: they are taken in any case.
    """
    error = errors_BP.double()
    error = error + FLOOR * error.mean(0) + torch.finfo(torch.float32).tiny
    largest = error.sort(0, descending=True).values
    left = largest.flip(0).cumsum(0).flip(0)  # the sum of this one and all smaller ones
    others = counts_P - torch.arange(len(error), device=error.device)[:, None]  # to be taken besides all larger ones
    sure = (largest * others > left).cummin(0).values.sum(0)  # how many of the largest have chance 1
    sure = torch.minimum(sure, counts_P - 1)
    unit = left.gather(0, sure[None]) / (counts_P - sure)
    return (error / unit).clamp(max=1.0)


def draw(chances_BP: Tensor, place_M: Tensor, turn_M: Tensor, start_P: Tensor) -> Tensor:
    """(M,) the sequences taken: systematic sampling at each place, from the random number start_P in [0, 1).

    Chances are laid end to end, and whatever lies at start, start + 1, ... is taken: each with its chance, none twice.
    """
    ends = chances_BP.cumsum(0)[:, place_M]
    taken = (ends <= (start_P[place_M] + turn_M)[None]).sum(0)
    return taken.clamp(max=len(chances_BP) - 1)


def starts(run: Run, step: int, places: int, rank: int = 0) -> Tensor:
    """(places,) the random numbers of one step: they belong to its seed, step and process alone."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((run.seed, 3, step, rank))))
    return torch.from_numpy(rng.random(places))


def renewed(old: Selection | None, errors_BP: Tensor | None, places: tuple[int, ...], batch: int) -> Selection | None:
    """The choice for the next RENEW steps: from old's means, or from the errors of one batch; None if it would not pay."""
    if old is not None:
        mean, square = old.mean, old.square
    else:
        assert errors_BP is not None
        mean, square = errors_BP.mean(0), errors_BP.square().mean(0)

    def priced(counts: np.ndarray) -> float:
        return price(counts, mean, square, places, batch)

    counts = decide(mean, square, places, batch)
    if priced(counts) > PAYS_BELOW:
        return None
    if old is not None and priced(np.array(old.counts)) < HARDLY_BETTER * priced(counts):
        return old
    return Selection(places, mean, square, tuple(counts.tolist()))
