"""Gradients of the predictions that matter: an unbiased choice among those of a batch.

In mode entp every prediction has a cost of its own. Late in training most are right, and their gradients next to nothing. So
predictions are tried without gradients, and some of them taken: the larger the error of its outputs, the likelier one is taken,
and it counts by one over that chance. The expected gradient is that of the whole batch (Horvitz and Thompson, 1952).

How many are tried and taken at each length is fixed for a while, so that a step keeps its shapes; which are taken is drawn anew
in every step. Where hardly anything goes wrong, fewer sequences are tried as well.

Or a decoder's pass tries all predictions of a sequence at once (`optim.take`). Its errors are not ENTP's, which makes single
gradients noisier, but many times as many sequences can be looked through.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from entp.config import Run
from entp.engine.layout import split
from entp.errors import InputError
from entp.tasks.base import IGNORE, SPLITS, Batch, Task

RENEW = 2500
"""Steps after which the numbers tried and taken at each length are decided anew."""
REMEMBERED = 0.99
"""How much of the mean errors, which decide about these numbers, is kept at each step."""
FLOOR = 0.1
"""A prediction's error counts as larger by so much of the mean at its length, so that no chance is next to 0."""
GUESS_FLOOR = 1.0
"""The same where errors are a decoder's: none counts by more than twice what it would if chances were equal."""
WITHOUT_GRADIENTS = 1 / 3
"""What a prediction without gradients costs of one with them."""
PAYS_BELOW = 0.9
"""Nothing is chosen unless the price (see Prices) is below so much of the plain step's."""
HARDLY_BETTER = 1.03
"""Numbers stay if the price of new ones would be hardly lower: the step would have to be recorded anew."""


@dataclass(eq=False)
class Selection:
    """What is known about the errors at each place, and how many predictions are tried and taken there."""

    places: tuple[int, ...]
    """Positions after which something is predicted, the same in every sequence."""
    batch: int
    """Sequences in a batch."""
    mean: Tensor
    """(places,) running mean of the errors."""
    square: Tensor
    """(places,) running mean of their squares."""
    tried: tuple[int, ...]
    """How many sequences are tried at each place: the first ones of the batch."""
    taken: tuple[int, ...]
    """How many of these are taken."""
    as_decoder: bool = False
    """Whether they are tried by a decoder's pass."""

    @property
    def floor(self) -> float:
        """By how much of their mean errors count as larger."""
        return GUESS_FLOOR if self.as_decoder else FLOOR

    @cached_property
    def tried_mask(self) -> Tensor:
        """(batch, time up to the last place) on the CPU: the prefixes that are tried."""
        wanted = torch.zeros(self.batch, max(self.places) + 1, dtype=torch.bool)
        for place, count in zip(self.places, self.tried, strict=True):
            wanted[:count, place] = True
        return wanted

    @cached_property
    def taken_mask(self) -> Tensor:
        """(taken, time up to the last place) on the CPU: each row the end of one prefix, the shortest first."""
        wanted = torch.zeros(sum(self.taken), max(self.places) + 1, dtype=torch.bool)
        wanted[torch.arange(len(wanted)), torch.tensor(self.places)[self.place]] = True
        return wanted

    @cached_property
    def place(self) -> Tensor:
        """(taken,) on the CPU: which place each row is of."""
        return torch.repeat_interleave(torch.arange(len(self.taken)), torch.tensor(self.taken))

    @cached_property
    def turn(self) -> Tensor:
        """(taken,) on the CPU: 0, 1, ... within each place."""
        return torch.cat([torch.arange(count) for count in self.taken])

    def note(self, errors_BP: Tensor, tried_P: Tensor) -> None:
        """Follow the errors of a batch, 0 where none were tried, in place."""
        self.mean.lerp_(errors_BP.sum(0) / tried_P, 1 - REMEMBERED)
        self.square.lerp_(errors_BP.square().sum(0) / tried_P, 1 - REMEMBERED)

    def save(self) -> dict[str, Any]:
        """For a checkpoint."""
        tensors = {"mean": self.mean.cpu(), "square": self.square.cpu()}
        numbers = {"batch": self.batch, "tried": self.tried, "taken": self.taken, "as_decoder": self.as_decoder}
        return {"places": self.places, **numbers, **tensors}

    @classmethod
    def restore(cls, saved: dict[str, Any], device: torch.device) -> Selection:
        """What `save` gave."""
        mean, square = (saved[name].to(device) for name in ("mean", "square"))
        places, tried, taken = (tuple(saved[name]) for name in ("places", "tried", "taken"))
        return cls(places, saved["batch"], mean, square, tried, taken, saved.get("as_decoder", False))


class Chosen(NamedTuple):
    """A selection on the device, with a step's random numbers."""

    selection: Selection
    try_parts: list[Tensor]
    """Masks (B, T) on the CPU: the predictions tried."""
    take_parts: list[Tensor]
    """Masks (taken, T) on the CPU: those taken."""
    start: Tensor
    """(places,) random numbers."""
    places: Tensor
    tried: Tensor
    taken: Tensor
    place: Tensor
    turn: Tensor


def chosen(selection: Selection, start_P: Tensor, budget: int, device: torch.device) -> Chosen:
    """The selection there, in parts of at most `budget` tokens."""
    tried, taken = (list(split(mask, budget)) for mask in (selection.tried_mask, selection.taken_mask))
    if selection.as_decoder:
        tried = [selection.tried_mask]
    return Chosen(
        selection,
        tried,
        taken,
        start=start_P.to(device),
        places=torch.tensor(selection.places, device=device),
        tried=torch.tensor(selection.tried, device=device),
        taken=torch.tensor(selection.taken, device=device),
        place=selection.place.to(device),
        turn=selection.turn.to(device),
    )


def places_of(batch: Batch, task: Task, known: Selection | None = None) -> tuple[int, ...]:
    """Where a batch asks for predictions; an InputError if not all sequences ask there, and those that are known before."""
    asked = batch.y != IGNORE
    if not asked.any():
        raise InputError(f"no sequence of this batch of {task.name} has a target: there is nothing to choose from.")
    places = tuple(np.flatnonzero(asked[0]).tolist())
    moved = known is not None and places != known.places
    if batch.lengths is not None or not (asked == asked[0]).all() or moved:
        raise InputError(
            "optim.select and optim.take need predictions at the same places of every sequence, without padding, and "
            f"{task.name} does not have them: leave them out."
        )
    return places


@dataclass(frozen=True, eq=False)
class Prices:
    """What numbers of tried and taken predictions cost, from the errors at each place."""

    length: np.ndarray
    mean: np.ndarray
    square: np.ndarray
    batch: int

    @cached_property
    def carrying(self) -> np.ndarray:
        """The share of predictions that carry the errors at each place, (sum of errors)^2 / (number x sum of squares)."""
        return np.divide(self.mean**2, self.square, out=np.ones_like(self.mean), where=self.square > 0)

    def of(self, tried: np.ndarray, taken: np.ndarray) -> float:
        """Cost times the square of the gradient's variance, as a share of the plain step's.

        Cost times variance alone would not mind smaller batches; the square keeps the noise of a step about what it was. Taking
        as many as carry the errors is reckoned to have 5/4 of the variance of taking all, twice as many 17/16, half as many
        twice: about what errors late in training give.
        """
        cost = self.length @ (WITHOUT_GRADIENTS * tried + taken) / (self.batch * self.length.sum())
        variance = self.square @ (self.batch / tried * (1 + 0.25 * (self.carrying * tried / taken) ** 2))
        return float(cost * (variance / self.square.sum()) ** 2) if self.square.sum() > 0 else float(cost)

    def of_guesses(self, _: np.ndarray, taken: np.ndarray) -> float:
        """The variance, up to a factor, if all are tried and those taken are drawn by a decoder's errors."""
        return float((self.mean**2 / taken).sum())

    def shared_out(self, take: int) -> tuple[np.ndarray, np.ndarray]:
        """How many to try and to take at each place if all are tried and `take` taken: at least 1, at most the batch.

        In proportion to the errors over the root of the length: the least variance for what they cost.
        """
        wish = self.mean / np.sqrt(self.length) + np.finfo(float).tiny
        taken = np.ones(len(wish), int)
        while (left := take - taken.sum()) > 0:
            room = np.where(taken < self.batch, wish, 0.0)
            more = np.floor(left * room / room.sum()).astype(int)
            if not more.any():
                more[np.argsort(-room)[:left]] = 1
            taken = np.minimum(taken + more, self.batch)
        return np.full_like(taken, self.batch), taken

    def cheapest(self) -> tuple[np.ndarray, np.ndarray]:
        """How many to try and to take at each place: the best of a grid, in proportions at which the price is stationary."""
        least = -(-self.batch // 16)
        found = []
        for many in np.geomspace(1 / 16, 30, 25):
            tried = np.clip(np.rint(many * self.batch * _top_1(np.sqrt(self.square / self.length))), least, self.batch)
            wish = _top_1((self.square * tried * self.carrying**2 / self.length) ** (1 / 3))
            found += [(tried, np.clip(np.rint(scale * wish), 1, tried)) for scale in np.geomspace(1, 30 * self.batch, 60)]
        tried, taken = min(found, key=lambda numbers: self.of(*numbers))
        return tried.astype(int), taken.astype(int)


def _top_1(values: np.ndarray) -> np.ndarray:
    """Divided by the largest; ones if all are 0."""
    return values / values.max() if values.max() > 0 else np.ones_like(values)


def errors(task: Task, outputs_MK: Tensor, targets_M: Tensor) -> Tensor:
    """(M,) the size of the loss's gradient by each row of outputs, up to a constant."""
    wide = outputs_MK.to(torch.promote_types(outputs_MK.dtype, torch.float32))
    if task.loss == "squared_error":
        return (wide.squeeze(-1) - targets_M.to(wide.dtype)).abs()
    miss = wide.softmax(-1)
    miss = miss.scatter_add(1, targets_M[:, None], torch.full_like(miss[:, :1], -1.0))
    return miss.norm(dim=1)


def chances(errors_BP: Tensor, tried_P: Tensor, taken_P: Tensor, floor: float = FLOOR) -> Tensor:
    """(B, P) float64: each tried prediction's chance to be taken. Those of a place add up to its number, none is above 1.

    In proportion to the errors, but for those whose chance would be above 1: they are taken in any case.
    """
    error = errors_BP.double()
    number = torch.arange(len(error), device=error.device)[:, None]
    error = error + floor * error.sum(0) / tried_P + torch.finfo(torch.float32).tiny
    error = torch.where(number < tried_P, error, 0.0)
    largest = error.sort(0, descending=True).values
    left = largest.flip(0).cumsum(0).flip(0)  # the sum of this one and all smaller ones
    others = taken_P - number  # to be taken besides all larger ones
    sure = (largest * others > left).int().cummin(0).values.sum(0)  # how many of the largest have chance 1
    unit = left.gather(0, sure[None]) / (taken_P - sure)
    return (error / unit).clamp(max=1.0)


def draw(chances_BP: Tensor, tried_P: Tensor, place_M: Tensor, turn_M: Tensor, start_P: Tensor) -> Tensor:
    """(M,) the sequences taken: systematic sampling at each place, from the random number start_P in [0, 1).

    Chances are laid end to end, and whatever lies at start, start + 1, ... is taken: each with its chance, none twice.
    """
    ends = chances_BP.cumsum(0)[:, place_M]
    found = (ends <= (start_P[place_M] + turn_M)[None]).sum(0)
    return torch.minimum(found, tried_P[place_M] - 1)  # the last end may be a little below the number to be taken


def starts(run: Run, step: int, places: int) -> Tensor:
    """(places,) the random numbers of one step: they belong to its seed and step alone, and are no split's."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((run.seed, len(SPLITS), step))))
    return torch.from_numpy(rng.random(places))


def check_take(take: int, batch: int, places: tuple[int, ...]) -> None:
    """An InputError unless so many can be taken of a batch, at least one at every place."""
    most = batch * len(places)
    if not len(places) <= take <= most:
        raise InputError(
            f"optim.take is {take}: allowed are {len(places)}, one for each place where a sequence has predictions, to {most}, "
            "all of a batch."
        )


def renewed(
    old: Selection | None, errors_BP: Tensor | None, places: tuple[int, ...], batch: int, take: int = 0
) -> Selection | None:
    """The choice for the next RENEW steps: from old's means, or from the errors of one batch; None if it would not pay.

    take: so many predictions, by a decoder's errors. Old numbers are kept if they are hardly worse.
    """
    if old is not None:
        mean, square = old.mean, old.square
    else:
        assert errors_BP is not None
        mean, square = errors_BP.mean(0), errors_BP.square().mean(0)
    prices = Prices(np.array(places) + 1.0, mean.double().cpu().numpy(), square.double().cpu().numpy(), batch)
    tried, taken = prices.shared_out(take) if take else prices.cheapest()
    price = prices.of_guesses if take else prices.of
    if not take and price(tried, taken) > PAYS_BELOW:
        return None
    enough = HARDLY_BETTER * price(tried, taken)
    if old is not None and old.batch == batch and price(np.array(old.tried), np.array(old.taken)) <= enough:
        return old
    return Selection(places, batch, mean, square, tuple(tried.tolist()), tuple(taken.tolist()), as_decoder=take > 0)
