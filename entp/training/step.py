"""One optimizer step: eager, or the whole of it (forward, backward, update) replayed as one CUDA graph.

A graph replays recorded kernels on fixed memory, so that the GPU never waits for Python: what bounds small models otherwise. It
is recorded when the same shapes and the same prefixes have come a few times, and used whenever they come again.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from entp.config import Run
from entp.engine.api import choose
from entp.engine.budget import step_token_budget
from entp.engine.layout import pack, positions_of, rows_of, split, trim, whole_sequences
from entp.engine.support import Support, support_of
from entp.model import Transformer
from entp.tasks.base import IGNORE, Batch
from entp.training import checkpoint
from entp.training.distributed import World, add_up_gradients
from entp.training.evaluation import forward, loss_rows, loss_sum, rounding
from entp.training.feed import Feed
from entp.training.optim import learning_rate, renew_whiteners, restore_optimizer, save_optimizer, set_learning_rate
from entp.training.prefixes import Drawn, draw_prefixes
from entp.training.selection import RENEW, Chosen, Selection, chances, chosen, draw, errors, places_of, renewed, starts

EAGER_STEPS = 3
"""Steps of the same shapes before they are recorded: kernels are compiled and optimizer state made in them."""
MOST_SEEN = 1000
"""Different shapes whose steps are counted."""
MOST_GRAPHS = 4
"""Graphs kept for different shapes: each holds the memory of a step."""


@dataclass
class State:
    """All that changes while a run goes on."""

    model: Transformer
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    mean: Transformer | None = None
    """With optim.average: the model with the running mean of the weights."""
    selection: Selection | None = None

    def save(self) -> dict[str, Any]:
        """Everything but the weights, as plain values and tensors."""
        states = [save_optimizer(o) for o in self.optimizers]
        saved: dict[str, Any] = {"step": self.step, "seconds": self.seconds, "best": self.best, "optimizers": states}
        if self.mean is not None:
            saved["mean"] = self.mean.state_dict()
        if self.selection is not None:
            saved["selection"] = self.selection.save()
        return saved

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        saved = checkpoint.read_trainer(folder)
        self.model.load_state_dict(checkpoint.load(folder).state_dict())
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            restore_optimizer(optimizer, state)
        self.step, self.seconds, self.best = saved["step"], saved["seconds"], saved["best"]
        if self.mean is not None:
            self.mean.load_state_dict(saved["mean"])
        if "selection" in saved:
            self.selection = Selection.restore(saved["selection"], next(self.model.parameters()).device)


def rate_of(run: Run, state: State) -> float:
    """The learning rate of the step that comes next; after a start the run's own schedule begins, without a warm-up."""
    now = run.at(state.step)
    first = run.start.steps if now is run else 0
    return learning_rate(now.optim, state.step, state.seconds / (run.train.max_seconds or math.inf), first)


class Inputs(NamedTuple):
    """A batch on the device, and how its prefixes are split."""

    x: Tensor
    y: Tensor
    lengths: Tensor | None
    parts: list[Tensor]
    """Masks (B, T) on the CPU: the prefixes computed together."""
    asked: int
    """Targets in the whole batch, over all processes."""
    tables: list[object]
    """What the engine looks up for the parts, held for as long as a recorded step may read it."""
    chosen: Chosen | None = None
    """Which predictions get gradients, if not all."""
    drawn: Drawn | None = None
    """The sequences' prefixes, if they are drawn."""


class Work(NamedTuple):
    """What gradients are computed of: rows of x with their targets and weights, part by part."""

    x: Tensor
    y: Tensor
    lengths: Tensor | None
    weights: Tensor | None
    """Of each sequence, or of each of its predictions."""
    parts: list[Tensor]


def train_step(
    run: Run, state: State, batch: Batch, device: torch.device, world: World, stop: bool = False
) -> tuple[Tensor, Tensor, bool]:
    """One optimizer step. Returns the global loss, the gradient's norm and whether any process was told to stop.

    In mode entp the prefixes are split by the token budget; the gradients of the parts add up to the same gradient.
    """
    _prepare(run, state, batch, device, world)
    return _update(run.at(state.step), state, _inputs(run, state, batch, device, world), world, stop)


def _prepare(run: Run, state: State, batch: Batch, device: torch.device, world: World) -> None:
    """What changes between steps: in the optimizers, in which predictions are chosen, and where a start ends.

    A start ends with the mean of its weights, if there is one.
    """
    set_learning_rate(state.optimizers, rate_of(run, state))
    if state.mean is not None and state.step == run.start.steps > 0:
        state.model.load_state_dict(state.mean.state_dict())
    renew_whiteners(state.optimizers, run.optim, state.step)
    old, optim = state.selection, run.at(state.step).optim
    due = state.step % RENEW == 0 or (optim.take > 0 and old is None) or (old is not None and old.batch != len(batch.x))
    if due and (optim.select or optim.take):
        places, found = places_of(batch, run.task, old), None
        if old is None:
            inputs = _inputs(run, state, batch, device, world)
            parts = [torch.from_numpy(batch.y != IGNORE)] if optim.take else inputs.parts
            found = _errors(run, state.model, inputs, parts, as_decoder=optim.take > 0)[0][:, list(places)]
        state.selection = renewed(old, found, places, len(batch.x), optim.take)


def _inputs(run: Run, state: State, batch: Batch, device: torch.device, world: World, step: int | None = None) -> Inputs:
    """What a step needs; step: another than the one that comes next."""
    step = state.step if step is None else step
    model, chance = state.model, run.prefix_chance(step)
    asked = int((batch.y != IGNORE).sum())
    drawn = None if chance is None else draw_prefixes(run, step, batch, chance).part(world.rank, world.size).to(device)
    batch, run = batch.part(world.rank, world.size), run.at(step)
    at = torch.from_numpy(batch.y != IGNORE)
    budget = run.train.token_budget or step_token_budget(model, device, sum(rows_of(at)))
    parts = list(split(at, budget)) if run.mode == "entp" else [at]
    x, y = (torch.from_numpy(part).to(device, non_blocking=True) for part in (batch.x, batch.y))
    lengths = None if batch.lengths is None else torch.from_numpy(batch.lengths).to(device)
    picked = None
    if state.selection is not None:
        places_of(batch, run.task, state.selection)  # it must ask for the same predictions
        start = starts(run, step, len(state.selection.places))
        picked = chosen(state.selection, start, budget, device)
    return Inputs(x, y, lengths, parts, asked, [], picked, drawn)


def _tables(run: Run, inputs: Inputs) -> list[object]:
    """The tables of all parts, made before a step is recorded."""
    device, by = inputs.x.device, inputs.chosen
    kinds = [(part, run.mode != "entp") for part in (inputs.parts if by is None else by.take_parts)]
    if by is not None:
        kinds += [(part, by.selection.as_decoder) for part in by.try_parts]
    tables: list[object] = [positions_of(part, device) for part, _ in kinds]
    for part, whole in kinds:
        packing = whole_sequences(part.shape[0], part.shape[1], device) if whole else pack(part[trim(part)], device)
        tables += [packing, packing.tables()]
    return tables


def _update(run: Run, state: State, inputs: Inputs, world: World, stop: bool) -> tuple[Tensor, Tensor, bool]:
    """Gradients of every part, added up, and the optimizers' step."""
    model = state.model
    total, sums = _gradients(run, model, inputs)
    for p, gradient in sums.items():
        p.grad = gradient
    total, stop = add_up_gradients(list(model.parameters()), total, stop, world)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.optim.clip or float("inf"))
    for optimizer in state.optimizers:
        optimizer.step()
    if state.mean is not None:
        with torch.no_grad():
            torch._foreach_lerp_(list(state.mean.parameters()), list(state.model.parameters()), 1 / run.optim.average)
    return total, norm, stop


def _gradients(run: Run, model: Transformer, inputs: Inputs) -> tuple[Tensor, dict[Tensor, Tensor | None]]:
    """The loss and its gradient by every parameter, over all parts; if predictions are chosen, an unbiased estimate of it."""
    total = torch.zeros((), device=inputs.x.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    sums: list[Tensor | None] = [None] * len(parameters)
    prefix, weights = (None, None) if inputs.drawn is None else inputs.drawn
    work = Work(inputs.x, inputs.y, inputs.lengths, weights, inputs.parts)
    if inputs.chosen is not None:
        work, estimate = _choose(run, model, inputs, inputs.chosen)
    for part in work.parts:
        outputs = forward(model, run, work.x, part, work.lengths, prefix)
        at = positions_of(part, work.y.device)
        weights = work.weights
        if weights is not None:
            weights = weights.flatten().index_select(0, at if weights.ndim == 2 else at // part.shape[1])
        loss = loss_sum(run.task, outputs, work.y.flatten().index_select(0, at), weights) / max(1, inputs.asked)
        sums = _added(sums, torch.autograd.grad(loss, parameters, allow_unused=True))
        total += loss.detach()
    tried = inputs.chosen is not None and not inputs.chosen.selection.as_decoder  # else the parts give an estimate too
    return estimate if tried else total, dict(zip(parameters, sums, strict=True))


@torch.no_grad()
def _errors(
    run: Run, model: Transformer, inputs: Inputs, parts: list[Tensor], as_decoder: bool = False
) -> tuple[Tensor, Tensor]:
    """(B, T) the error of each prediction in the parts and its loss, as a share of the batch's; 0 elsewhere."""
    alone = torch.ones(len(inputs.x), dtype=torch.int32, device=inputs.x.device) if as_decoder else None
    found, losses = (torch.zeros(inputs.y.numel(), device=inputs.y.device) for _ in range(2))
    for part in parts:
        time = part.shape[1]
        at = positions_of(part, inputs.y.device)
        where = at // time * inputs.y.shape[1] + at % time  # parts may end before the last token
        outputs = forward(model, run, inputs.x[:, :time], part, None, alone)
        targets = inputs.y.flatten().index_select(0, where)
        found.index_copy_(0, where, errors(run.task, outputs, targets).to(found.dtype))
        losses.index_copy_(0, where, loss_rows(run.task, outputs, targets).to(found.dtype) / inputs.asked)
    return found.view(inputs.y.shape), losses.view(inputs.y.shape)


@torch.no_grad()
def _choose(run: Run, model: Transformer, inputs: Inputs, by: Chosen) -> tuple[Work, Tensor]:
    """The predictions that get gradients, and an estimate of the batch's loss: exact if all were tried."""
    tried = _errors(run, model, inputs, by.try_parts, by.selection.as_decoder)
    found, losses = (t.index_select(1, by.places) for t in tried)
    by.selection.note(found, by.tried)
    chance = chances(found, by.tried, by.taken, by.selection.floor)
    taken = draw(chance, by.tried, by.place, by.turn, by.start)
    one_for = by.selection.batch / by.tried  # each one tried stands for so many
    weights = (one_for[by.place] / chance[taken, by.place]).to(found.dtype)
    time = by.selection.taken_mask.shape[1]
    work = Work(inputs.x[taken, :time], inputs.y[taken, :time], None, weights, by.take_parts)
    return work, (losses.sum(0) * one_for).sum()


def _added(sums: list[Tensor | None], more: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """sums + more in a few launches; a part that does not use a parameter has no gradient for it.

    New tensors, not in place: autograd may give two parameters the same tensor.
    """
    both = [(n, a, b) for n, (a, b) in enumerate(zip(sums, more, strict=True)) if a is not None and b is not None]
    out = [b if a is None else a for a, b in zip(sums, more, strict=True)]
    if both:
        for (n, _, _), added in zip(both, torch._foreach_add([a for _, a, _ in both], [b for _, _, b in both]), strict=True):
            out[n] = added
    return out


class Stepper:
    """train_step for a whole run, by graphs where that is possible."""

    def __init__(self, run: Run, state: State, device: torch.device, world: World) -> None:
        self.run, self.state, self.device, self.world = run, state, device, world
        self.seen: Counter[bytes] = Counter()
        self.graphs: dict[bytes, _Recorded] = {}
        self.now = run.at(state.step)
        self.selection: Selection | None = None
        """The choice of predictions that the graphs belong to, as they belong to `now`, the start or the run."""
        self.model: tuple[Support, list[tuple[int, bool]]] | None = None
        """The state of the model that they belong to, and where its weights are."""
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch, stop: bool = False) -> tuple[Tensor, Tensor, bool]:
        """As train_step. On CUDA the loss and norm returned are overwritten by the next step."""
        now = self.run.at(self.state.step)
        if self.stream is not None:
            self._forget_another_model()
        if self.stream is None or not self._can_record(now, batch):
            return train_step(self.run, self.state, batch, self.device, self.world, stop)
        _prepare(self.run, self.state, batch, self.device, self.world)
        if self.selection is not self.state.selection or self.now is not now:  # the old graphs' memory goes back
            self.selection, self.now = self.state.selection, now
            self.graphs.clear()
            self.seen.clear()
        key = hashlib.blake2b(repr(batch.x.shape).encode() + (batch.y != IGNORE).tobytes()).digest()
        if key not in self.graphs:
            if len(self.seen) >= MOST_SEEN:
                self.seen.clear()  # masks that differ from batch to batch: nothing to record
            self.seen[key] += 1
            if self.seen[key] <= EAGER_STEPS or len(self.graphs) >= MOST_GRAPHS:
                return self._eager(batch, stop)
            inputs = self._to_device(batch)
            inputs.tables.extend(_tables(now, inputs))
            self.graphs[key] = _Recorded(now, self.state, inputs, self.world, self.stream)
        return *self.graphs[key].replay(self.run, self.state, batch), stop

    def _forget_another_model(self) -> None:
        """Drop all graphs if the model was changed, or its weights moved, since they were captured."""
        support = support_of(self.state.model)
        model = support, support.fingerprint.weights()
        if model != self.model:
            self.model = model
            self.graphs.clear()
            self.seen.clear()

    def warm_up(self) -> None:
        """Have everything compiled and tuned that steps need on CUDA, without changing anything: their gradients, unused."""
        plain = replace(self.state, selection=None)  # a choice would note the errors it sees
        if self.stream is not None:
            for step in {self.state.step, max(self.state.step, self.run.start.steps)}:
                batch = self.run.task.batch(self.run.seed, "train", step, self.run.batch_at(step))
                if take := self.run.at(step).optim.take:  # as many sequences as have so many predictions
                    batch = batch.part(0, max(1, int((batch.y != IGNORE).sum()) // take))
                inputs = _inputs(self.run, plain, batch, self.device, self.world, step)
                _gradients(self.run.at(step), self.state.model, inputs)
            torch.cuda.synchronize(self.device)

    def _can_record(self, run: Run, batch: Batch) -> bool:
        """One process, no padding, a model without hooks, and an engine that does not wait for the device."""
        if not run.train.graph or self.world.size > 1 or batch.lengths is not None:
            return False
        if self.model is None or not self.model[0].graphs:
            return False
        with rounding(run, self.device):
            return run.mode != "entp" or choose(run.train.impl, self.device, self.state.model).impl == "triton"

    def _to_device(self, batch: Batch) -> Inputs:
        return _inputs(self.run, self.state, batch, self.device, self.world)

    def _eager(self, batch: Batch, stop: bool) -> tuple[Tensor, Tensor, bool]:
        """A step on the stream that recording will use."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            result = _update(self.now, self.state, self._to_device(batch), self.world, stop)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return result


class _Recorded:
    """A step of fixed shapes as a CUDA graph."""

    def __init__(self, run: Run, state: State, inputs: Inputs, world: World, stream: torch.cuda.Stream) -> None:
        self.inputs = inputs
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what eager steps used goes back: the graph brings its own memory
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.loss, self.norm, _ = _update(run, state, inputs, world, False)
        start = [] if inputs.chosen is None else [inputs.chosen.start]
        self.feed = Feed([inputs.x, inputs.y, *start, *(inputs.drawn or ())])

    def replay(self, run: Run, state: State, batch: Batch) -> tuple[Tensor, Tensor]:
        """The recorded step on this batch: its loss and the gradient's norm."""
        new = [torch.from_numpy(batch.x), torch.from_numpy(batch.y)]
        if self.inputs.chosen is not None:
            new.append(starts(run, state.step, len(self.inputs.chosen.places)))
        chance = run.prefix_chance(state.step)
        if chance is not None:
            new.extend(draw_prefixes(run, state.step, batch, chance))
        self.feed(new)
        self.graph.replay()
        return self.loss, self.norm
