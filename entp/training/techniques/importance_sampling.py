"""Importance sampling of targets: gradients of some predictions of a batch, unbiased.

In mode entp every prediction has a cost of its own. Late in training most are right, and their
gradients next to nothing. So predictions are scored without gradients, and some of them sampled:
the larger the error of its outputs, the likelier one is sampled, and its weight is one over that
probability. The expected gradient is that of the whole batch (Horvitz and Thompson, 1952).

How many are scored and sampled at each length is fixed for a while, so that a step keeps its
shapes; which are sampled is drawn anew in every step.

proposal entp: ENTP itself scores; where hardly anything goes wrong, fewer sequences are scored.
proposal decoder: a decoder's pass scores all predictions of a sequence at once. Its errors are not
ENTP's, which makes single gradients noisier, but it reads many times as many sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from entp.config import Run
from entp.engine.layout import positions_of, rows_of, split
from entp.errors import InputError
from entp.tasks.base import SPLITS, Batch
from entp.training.distributed import World
from entp.training.forward import Forward
from entp.training.inputs import Inputs, token_budget
from entp.training.techniques.base import Coming, Technique

if TYPE_CHECKING:
    from entp.training.state import State

RENEW = 2500
"""Steps after which the numbers scored and sampled at each length are decided anew."""
REMEMBERED = 0.99
"""How much of the mean errors, which decide about these numbers, is kept at each step."""
FLOOR = 0.1
"""Added to each error, as a fraction of the mean at its length: no probability is next to 0."""
GUESS_FLOOR = 1.0
"""The same for a decoder's errors: no weight is above twice that of equal probabilities."""
WITHOUT_GRADIENTS = 1 / 3
"""What a prediction without gradients costs of one with them."""
PAYS_BELOW = 0.9
"""Nothing is chosen unless the price (see Prices) is below so much of the plain step's."""
HARDLY_BETTER = 1.03
"""Numbers stay if the price of new ones would be hardly lower: the step would have to be captured
anew."""


@dataclass(eq=False)
class Selection:
    """The errors at each position so far, and how many predictions are scored and sampled there."""

    positions: tuple[int, ...]
    """Positions after which something is predicted, the same in every sequence."""
    batch: int
    """Sequences in a batch."""
    mean: Tensor
    """(positions,) running mean of the errors."""
    square: Tensor
    """(positions,) running mean of their squares."""
    scored: tuple[int, ...]
    """How many sequences are scored at each position: the first ones of the batch."""
    sampled: tuple[int, ...]
    """How many of these are sampled."""
    as_decoder: bool = False
    """Whether they are scored by a decoder's pass."""

    @property
    def floor(self) -> float:
        """By how much of their mean errors count as larger."""
        return GUESS_FLOOR if self.as_decoder else FLOOR

    @cached_property
    def scored_mask(self) -> Tensor:
        """(batch, time up to the last position) on the CPU: the prefixes that are scored."""
        mask = torch.zeros(self.batch, max(self.positions) + 1, dtype=torch.bool)
        for position, count in zip(self.positions, self.scored, strict=True):
            mask[:count, position] = True
        return mask

    @cached_property
    def sampled_mask(self) -> Tensor:
        """(sampled, time up to the last position) on the CPU: each row the end of one prefix, the
        shortest first."""
        mask = torch.zeros(sum(self.sampled), max(self.positions) + 1, dtype=torch.bool)
        mask[torch.arange(len(mask)), torch.tensor(self.positions)[self.position]] = True
        return mask

    @cached_property
    def position(self) -> Tensor:
        """(sampled,) on the CPU: which position each row is of."""
        return torch.repeat_interleave(torch.arange(len(self.sampled)), torch.tensor(self.sampled))

    @cached_property
    def turn(self) -> Tensor:
        """(sampled,) on the CPU: 0, 1, ... within each position."""
        return torch.cat([torch.arange(count) for count in self.sampled])

    def update(self, errors_BP: Tensor, scored_P: Tensor) -> None:
        """Follow the errors of a batch, 0 where none were scored, in position."""
        self.mean.lerp_(errors_BP.sum(0) / scored_P, 1 - REMEMBERED)
        self.square.lerp_(errors_BP.square().sum(0) / scored_P, 1 - REMEMBERED)

    def save(self) -> dict[str, Any]:
        """For a checkpoint."""
        tensors = {"mean": self.mean.cpu(), "square": self.square.cpu()}
        numbers = {
            "batch": self.batch,
            "scored": self.scored,
            "sampled": self.sampled,
            "as_decoder": self.as_decoder,
        }
        return {"positions": self.positions, **numbers, **tensors}

    @classmethod
    def restore(cls, saved: dict[str, Any], device: torch.device) -> Selection:
        """What `save` gave, in this version or an earlier one."""
        old = {"positions": "places", "scored": "tried", "sampled": "taken"}
        positions, scored, sampled = (
            tuple(saved[new] if new in saved else saved[before]) for new, before in old.items()
        )
        mean, square = (saved[name].to(device) for name in ("mean", "square"))
        as_decoder = saved.get("as_decoder", False)
        return cls(positions, saved["batch"], mean, square, scored, sampled, as_decoder)


class Chosen(NamedTuple):
    """A selection on the device."""

    selection: Selection
    scored_chunks: list[Tensor]
    """Masks (B, T) on the CPU: the predictions scored."""
    sampled_chunks: list[Tensor]
    """Masks (sampled, T) on the CPU: those sampled."""
    positions: Tensor
    scored: Tensor
    sampled: Tensor
    position: Tensor
    turn: Tensor


def chosen(selection: Selection, budget: int, device: torch.device) -> Chosen:
    """The selection there, in parts of at most `budget` tokens."""
    scored, sampled = (
        list(split(mask, budget)) for mask in (selection.scored_mask, selection.sampled_mask)
    )
    if selection.as_decoder:
        scored = [selection.scored_mask]
    return Chosen(
        selection,
        scored,
        sampled,
        positions=torch.tensor(selection.positions, device=device),
        scored=torch.tensor(selection.scored, device=device),
        sampled=torch.tensor(selection.sampled, device=device),
        position=selection.position.to(device),
        turn=selection.turn.to(device),
    )


def target_positions(batch: Batch, task: str, known: Selection | None = None) -> tuple[int, ...]:
    """Target positions, which must be the same in every sequence, and those that are known."""
    mask = batch.target_mask
    if not mask.any():
        raise InputError(
            f"no sequence of this batch of {task} has a target: there is nothing to sample from."
        )
    positions = tuple(np.flatnonzero(mask[0]).tolist())
    moved = known is not None and positions != known.positions
    if batch.lengths is not None or not (mask == mask[0]).all() or moved:
        raise InputError(
            "importance needs targets at the same positions of every sequence, without padding, "
            f"and {task} does not have them: leave it out."
        )
    return positions


@dataclass(frozen=True, eq=False)
class Prices:
    """What numbers of scored and sampled predictions cost, from the errors at each position."""

    length: np.ndarray
    mean: np.ndarray
    square: np.ndarray
    batch: int

    @cached_property
    def carrying(self) -> np.ndarray:
        """The fraction of predictions that carry the errors at each position, (sum of errors)^2 /
        (number x sum of squares)."""
        return np.divide(
            self.mean**2, self.square, out=np.ones_like(self.mean), where=self.square > 0
        )

    def of(self, scored: np.ndarray, sampled: np.ndarray) -> float:
        """Cost times the square of the gradient's variance, as a fraction of the plain step's.

        Cost times variance alone would not mind smaller batches; the square keeps the noise of a
        step about what it was. Taking as many as carry the errors is reckoned to have 5/4 of the
        variance of taking all, twice as many 17/16, half as many
        twice: about what errors late in training give.
        """
        cost = (
            self.length @ (WITHOUT_GRADIENTS * scored + sampled) / (self.batch * self.length.sum())
        )
        variance = self.square @ (
            self.batch / scored * (1 + 0.25 * (self.carrying * scored / sampled) ** 2)
        )
        return (
            float(cost * (variance / self.square.sum()) ** 2)
            if self.square.sum() > 0
            else float(cost)
        )

    def of_guesses(self, _: np.ndarray, sampled: np.ndarray) -> float:
        """The variance, up to a factor, if all are scored and those sampled are drawn by a
        decoder's errors."""
        return float((self.mean**2 / sampled).sum())

    def shared_out(self, take: int) -> tuple[np.ndarray, np.ndarray]:
        """How many to try and to take at each position if all are scored and `take` sampled: at
        least 1, at most the batch.

        In proportion to the errors over the root of the length: the least variance for what they
        cost.
        """
        wish = self.mean / np.sqrt(self.length) + np.finfo(float).tiny
        sampled = np.ones(len(wish), int)
        while (left := take - sampled.sum()) > 0:
            room = np.where(sampled < self.batch, wish, 0.0)
            more = np.floor(left * room / room.sum()).astype(int)
            if not more.any():
                more[np.argsort(-room)[:left]] = 1
            sampled = np.minimum(sampled + more, self.batch)
        return np.full_like(sampled, self.batch), sampled

    def cheapest(self) -> tuple[np.ndarray, np.ndarray]:
        """How many to try and to take at each position: the best of a grid, in proportions at which
        the price is stationary."""
        least = -(-self.batch // 16)
        found = []
        for many in np.geomspace(1 / 16, 30, 25):
            scored = np.clip(
                np.rint(many * self.batch * _top_1(np.sqrt(self.square / self.length))),
                least,
                self.batch,
            )
            wish = _top_1((self.square * scored * self.carrying**2 / self.length) ** (1 / 3))
            found += [
                (scored, np.clip(np.rint(scale * wish), 1, scored))
                for scale in np.geomspace(1, 30 * self.batch, 60)
            ]
        scored, sampled = min(found, key=lambda numbers: self.of(*numbers))
        return scored.astype(int), sampled.astype(int)


def _top_1(values: np.ndarray) -> np.ndarray:
    """Divided by the largest; ones if all are 0."""
    return values / values.max() if values.max() > 0 else np.ones_like(values)


def errors(loss: str, outputs_MK: Tensor, targets_M: Tensor) -> Tensor:
    """(M,) the size of the loss's gradient by each row of outputs, up to a constant."""
    wide = outputs_MK.to(torch.promote_types(outputs_MK.dtype, torch.float32))
    if loss == "squared_error":
        return (wide.squeeze(-1) - targets_M.to(wide.dtype)).abs()
    miss = wide.softmax(-1)
    miss = miss.scatter_add(1, targets_M[:, None], torch.full_like(miss[:, :1], -1.0))
    return miss.norm(dim=1)


def probabilities(
    errors_BP: Tensor, scored_P: Tensor, sampled_P: Tensor, floor: float = FLOOR
) -> Tensor:
    """(B, P) float64: each scored prediction's probability to be sampled. Those of a position add
    up to its number, none is above 1.

    In proportion to the errors, but for those whose probability would be above 1: they are sampled
    in any case.
    """
    error = errors_BP.double()
    number = torch.arange(len(error), device=error.device)[:, None]
    error = error + floor * error.sum(0) / scored_P + torch.finfo(torch.float32).tiny
    error = torch.where(number < scored_P, error, 0.0)
    largest = error.sort(0, descending=True).values
    left = largest.flip(0).cumsum(0).flip(0)  # the sum of this one and all smaller ones
    others = sampled_P - number  # to be sampled besides all larger ones
    sure = (
        (largest * others > left).int().cummin(0).values.sum(0)
    )  # how many of the largest have probability 1
    unit = left.gather(0, sure[None]) / (sampled_P - sure)
    return (error / unit).clamp(max=1.0)


def draw(
    probabilities_BP: Tensor, scored_P: Tensor, position_M: Tensor, turn_M: Tensor, start_P: Tensor
) -> Tensor:
    """(M,) the sequences sampled: systematic sampling at each position, from the random number
    start_P in [0, 1).

    Probabilities are laid end to end, and whatever lies at start, start + 1, ... is sampled: each
    with its probability, none twice.
    """
    ends = probabilities_BP.cumsum(0)[:, position_M]
    found = (ends <= (start_P[position_M] + turn_M)[None]).sum(0)
    return torch.minimum(
        found, scored_P[position_M] - 1
    )  # the last end may be a little below the number to be sampled


def starts(seed: int, step: int, positions: int) -> Tensor:
    """(positions,) the random numbers of one step: they belong to its seed and step alone, and are
    no split's."""
    sequence = np.random.SeedSequence((seed, len(SPLITS), step))
    rng = np.random.Generator(np.random.Philox(sequence))
    return torch.from_numpy(rng.random(positions))


def check_samples(samples: int, batch: int, positions: tuple[int, ...]) -> None:
    """An InputError unless a batch has so many targets, at least one at every position."""
    most = batch * len(positions)
    if not len(positions) <= samples <= most:
        raise InputError(
            f"importance.samples is {samples}: allowed are {len(positions)}, one for each target "
            f"position, to {most}, all of a batch."
        )


def renewed(
    old: Selection | None,
    errors_BP: Tensor | None,
    positions: tuple[int, ...],
    batch: int,
    take: int = 0,
) -> Selection | None:
    """The choice for the next RENEW steps: from old's means, or from the errors of one batch; None
    if it would not pay.

    take: so many predictions, by a decoder's errors. Old numbers are kept if they are hardly worse.
    """
    if old is not None:
        mean, square = old.mean, old.square
    else:
        assert errors_BP is not None
        mean, square = errors_BP.mean(0), errors_BP.square().mean(0)
    prices = Prices(
        np.array(positions) + 1.0, mean.double().cpu().numpy(), square.double().cpu().numpy(), batch
    )
    scored, sampled = prices.shared_out(take) if take else prices.cheapest()
    price = prices.of_guesses if take else prices.of
    if not take and price(scored, sampled) > PAYS_BELOW:
        return None
    enough = HARDLY_BETTER * price(scored, sampled)
    if (
        old is not None
        and old.batch == batch
        and price(np.array(old.scored), np.array(old.sampled)) <= enough
    ):
        return old
    return Selection(
        positions,
        batch,
        mean,
        square,
        tuple(scored.tolist()),
        tuple(sampled.tolist()),
        as_decoder=take > 0,
    )


class ImportanceSampling(Technique):
    """Samples targets in steps of mode entp."""

    def __init__(self, run: Run) -> None:
        assert run.importance is not None
        self.samples = run.importance.samples or 0
        self.seed, self.task = run.seed, run.task.name
        self.selection: Selection | None = None
        self.on = False
        self.by: Chosen | None = None

    @property
    def version(self) -> object:
        return self.selection if self.on else None

    def check(self, run: Run, batch: Batch, world: World) -> None:
        if world.size > 1:
            raise InputError(
                "importance is for one process: each would have to sample from its own part. Leave "
                "it out."
            )
        positions = target_positions(batch, self.task)
        if self.samples:
            from entp.training.plan import Plan

            plan = Plan(run)
            begins = {0, *(step for technique in plan.techniques for step in technique.changes)}
            sizes = [plan.batch_size(step) for step in begins if plan.mode(step) == "entp"]
            check_samples(self.samples, min(sizes), positions)

    def prepare(self, state: State, coming: Coming) -> None:
        """Decide how many are scored and sampled, where that is due."""
        self.on = coming.how.mode == "entp"
        if not self.on:
            return
        old, size = self.selection, len(coming.batch.x)
        resized = old is not None and old.batch != size
        missing = old is None and self.samples > 0
        if coming.step % RENEW == 0 or missing or resized:
            positions, found = target_positions(coming.batch, self.task, old), None
            if old is None:
                found = self._first_errors(state.model, coming)[:, list(positions)]
            self.selection = renewed(old, found, positions, size, self.samples)
        if self.selection is not None:
            target_positions(coming.batch, self.task, self.selection)
        if self.selection is None:
            self.by = None
        elif self.by is None or self.by.selection is not self.selection:
            mask = torch.from_numpy(coming.batch.target_mask)
            budget = token_budget(coming.how, state.model, sum(rows_of(mask)))
            self.by = chosen(self.selection, budget, coming.device)

    def _first_errors(self, model: Any, coming: Coming) -> Tensor:
        """(B, T) the errors of a batch, before anything is known."""
        mask = torch.from_numpy(coming.batch.target_mask)
        chunks = [mask]
        if not self.samples:
            chunks = list(split(mask, token_budget(coming.how, model, sum(rows_of(mask)))))
        arrays = {"x": torch.from_numpy(coming.batch.x), "y": torch.from_numpy(coming.batch.y)}
        if coming.batch.position_ids is not None:
            arrays["position_ids"] = torch.from_numpy(coming.batch.position_ids)
        there = {name: value.to(coming.device) for name, value in arrays.items()}
        inputs = Inputs(there, chunks, int(mask.sum()))
        return score(model, coming.how, inputs, chunks, as_decoder=self.samples > 0)[0]

    def arrays(self, step: int, batch: Batch, world: World) -> dict[str, Tensor]:
        if self.by is None or not self.on:
            return {}
        return {"importance": starts(self.seed, step, len(self.by.positions))}

    @torch.no_grad()
    def choose(self, model: Any, how: Forward, inputs: Inputs) -> Inputs:
        """The sampled predictions with their weights, and an estimate of the batch's loss: exact if
        all were scored."""
        by, start = self.by, inputs.get("importance")
        if by is None or start is None:
            return inputs
        scored = score(model, how, inputs, by.scored_chunks, by.selection.as_decoder)
        found, losses = (t.index_select(1, by.positions) for t in scored)
        by.selection.update(found, by.scored)
        probability = probabilities(found, by.scored, by.sampled, by.selection.floor)
        sampled = draw(probability, by.scored, by.position, by.turn, start)
        one_for = by.selection.batch / by.scored  # each one scored stands for so many
        weights = (one_for[by.position] / probability[sampled, by.position]).to(found.dtype)
        time = by.selection.sampled_mask.shape[1]
        rows = {name: inputs[name][sampled, :time] for name in ("x", "y")}
        ids = inputs.get("position_ids")
        if ids is not None:
            rows["position_ids"] = ids[sampled, :time]
        target_weights = inputs.get("weights")
        if target_weights is not None:
            at = by.positions[by.position]
            weights = weights * target_weights[sampled, at]
            losses = losses * target_weights.index_select(1, by.positions)
        estimate = (losses.sum(0) * one_for).sum()
        exact = not by.selection.as_decoder  # a decoder's losses are not ENTP's
        return inputs.with_arrays(
            by.sampled_chunks, estimate if exact else None, weights=weights, **rows
        )

    def layouts(self, how: Forward) -> list[tuple[Tensor, bool]] | None:
        if self.by is None or not self.on:
            return None
        sampled = [(mask, False) for mask in self.by.sampled_chunks]
        as_decoder = self.by.selection.as_decoder
        return sampled + [(mask, as_decoder) for mask in self.by.scored_chunks]

    def typical(self, batch: Batch) -> Batch:
        """As many sequences as have so many targets."""
        if not self.samples:
            return batch
        return batch.part(0, max(1, int(batch.target_mask.sum()) // self.samples))

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.selection is None else self.selection.save()

    def load_state_dict(self, saved: dict[str, Any] | None, model: Any) -> None:
        if saved is not None:
            self.selection = Selection.restore(saved, next(model.parameters()).device)


@torch.no_grad()
def score(
    model: Any, how: Forward, inputs: Inputs, chunks: list[Tensor], as_decoder: bool = False
) -> tuple[Tensor, Tensor]:
    """(B, T) the error of each prediction in the chunks, and its part of the batch's loss; 0
    elsewhere."""
    x, y, ids = inputs["x"], inputs["y"], inputs.get("position_ids")
    causal = torch.ones(len(x), dtype=torch.int32, device=x.device) if as_decoder else None
    found, losses = (torch.zeros(y.numel(), device=y.device) for _ in range(2))
    for chunk in chunks:
        time = chunk.shape[1]
        at = positions_of(chunk, y.device)
        where = at // time * y.shape[1] + at % time  # chunks may end before the last token
        cut = None if ids is None else ids[:, :time]
        outputs = how(model, x[:, :time], chunk, prefix=causal, position_ids=cut)
        targets = y.flatten().index_select(0, where)
        rows = how.loss_rows(outputs, targets).to(found.dtype) / inputs.num_targets
        found.index_copy_(0, where, errors(how.loss, outputs, targets).to(found.dtype))
        losses.index_copy_(0, where, rows)
    return found.view(y.shape), losses.view(y.shape)
