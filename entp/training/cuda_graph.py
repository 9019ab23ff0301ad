"""Steps of a whole run: eager, or replayed as one CUDA graph.

A graph replays captured kernels on fixed memory, so that the GPU never waits for Python: what
bounds small models otherwise. A step is captured when the same shapes and the same targets have
come a few times, and replayed whenever they come again. Padded batches are given one shape and the
same targets (cover.py, prefix_rows.py); the few that do not fit run as they are.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from entp.config import OptimConfig, refresh_of
from entp.engine.budget import default_token_budget
from entp.engine.choice import choose
from entp.engine.protocol import causal_stack
from entp.engine.refreshed import tables
from entp.engine.streams import side_stream
from entp.engine.support import Support, support_of
from entp.errors import EngineWarning
from entp.tasks.base import Batch, Task
from entp.training.cover import Cover, skips_targets
from entp.training.distributed import Stop, World
from entp.training.drawn import drawn
from entp.training.forward import Forward
from entp.training.gradients import Updated, gradients, update
from entp.training.inputs import Inputs, chunk_tables, make_inputs, step_arrays
from entp.training.optimizers import renew_preconditioners, set_learning_rate
from entp.training.plan import Plan
from entp.training.prefix_rows import MOST_ROWS, PrefixRows, reads_rows
from entp.training.state import State
from entp.training.techniques.base import Coming, Technique

EAGER_STEPS = 3
"""Steps of the same shapes before they are captured: kernels are compiled in them, and optimizer
state is made."""
MOST_SEEN = 1000
"""Different shapes whose steps are counted."""
MOST_GRAPHS = 4
"""Graphs kept for different shapes: each holds the memory of a step."""
IDLE_STEPS = 200
"""Steps without its shape after which a graph makes room for another: sequences may grow in the
course of training."""
MOST_COVER = 8
"""Rows that a padded batch may have in its shape, as a multiple of its own."""
LOOK_AHEAD = 256
"""Batches that covers are made for before the first step."""
MOST_WAIT = 8
"""Each time a cover outgrows its graphs, the next one waits for twice as many steps; so often at
most."""
NOBODY = Stop()
STEPS_AHEAD = 4
"""Steps that may wait for the device at a time."""


class Ready(NamedTuple):
    """A step as it is computed."""

    how: Forward
    batch: Batch
    shape: str
    """The shape that a padded batch was given; "" for one without padding."""
    techniques: Sequence[Technique]
    """Whose arrays the step reads beside the batch; those of a padded batch are in it already."""


class Stepper:
    """The optimizer steps of a run, by graphs where that is possible."""

    def __init__(
        self,
        state: State,
        plan: Plan,
        how: dict[str, Forward],
        optim: OptimConfig,
        use_graphs: bool,
        device: torch.device,
        world: World,
    ) -> None:
        """how: by mode, for every mode that the plan has."""
        self.state, self.plan, self.how, self.optim = state, plan, how, optim
        self.use_graphs, self.device, self.world = use_graphs, device, world
        self.seen: Counter[Key] = Counter()
        self.graphs: dict[Key, _Captured] = {}
        self.replayed: dict[Key, int] = {}
        """The last step of each graph."""
        self.covers: dict[int, Cover] = {}
        """For padded batches, by their size."""
        self.prefix_rows: dict[int, PrefixRows] = {}
        """For those of mode entp that cost too much in a cover."""
        self.in_rows: bool | None = None
        """Whether the model predicts the same from prefixes in rows of their own; None: not tried.
        """
        self.outgrown: Counter[Key] = Counter()
        """How often graphs were dropped because their shape grew."""
        self.version: tuple[object, ...] = ()
        """What the graphs belong to: the mode, and the techniques' versions."""
        self.model: tuple[Support, list[tuple[int, bool]]] | None = None
        """The state of the model that they belong to, and where its weights are."""
        self.chosen: dict[str, str] = {}
        """Which implementation runs that model, by mode."""
        self.stream = side_stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch, stop: Stop = NOBODY) -> Updated:
        """One optimizer step. On CUDA the loss and norm returned are overwritten by the next."""
        how = self.prepare(batch)
        if self.stream is not None:
            self._forget_another_model()
        if self.stream is None or not self._can_capture(how):
            return self._update(how, self._inputs(how, batch), stop)
        version = (how.mode, *(technique.version for technique in self.state.techniques))
        if any(a is not b for a, b in zip(version, self.version, strict=False)) or not self.version:
            self.version = version
            self._forget()  # the old graphs' memory goes back
        ready = self._ready(how, batch)
        if ready is None:
            return self._update(how, self._inputs(how, batch), stop)
        key, wait = _key(ready, len(batch.x)), EAGER_STEPS
        if ready.shape:
            wait <<= min(self.outgrown[key[:2]], MOST_WAIT)
        if key not in self.graphs:
            if len(self.seen) >= MOST_SEEN:
                self.seen.clear()  # masks that differ from batch to batch: nothing to capture
            self.seen[key] += 1
            if self.seen[key] <= wait or not self._make_room():
                return self._eager(ready, stop)
            inputs = self._inputs(*ready)
            inputs.tables.extend(self._tables(ready.how, inputs))
            captured = self._capture(ready.how, inputs)
            if captured is None:
                return self._eager(ready, stop)
            self.graphs[key] = captured
        self.replayed[key] = self.state.step
        loss, norm = self.graphs[key].replay(self._arrays(ready.batch, ready.techniques))
        return Updated(loss, norm, stop)

    def prepare(self, batch: Batch) -> Forward:
        """What changes between steps, in the optimizers and the techniques; how the step runs."""
        state, step = self.state, self.state.step
        set_learning_rate(state.optimizers, self.plan.learning_rate(step, state.seconds))
        how = self.how[self.plan.mode(step)]
        coming = Coming(step, batch, how, self.device)
        renew_preconditioners(state.optimizers, self.optim, step)
        for technique in state.techniques:
            technique.prepare(state, coming)
        return how

    def warm_up(self, task: Task, seed: int, steps: int) -> None:
        """Have everything compiled and tuned that steps need on CUDA: their gradients, unused."""
        if self.stream is None:
            return
        self._forget_another_model()
        for part in self.plan.segments(self.state.step, steps):
            step = part[0]
            how = self.how[self.plan.mode(step)]
            ready = self._first_step(task, seed, part, how)
            batch = ready.batch
            if ready.how.mode == "entp":
                for technique in self.state.techniques:
                    batch = technique.typical(batch)
            arrays = step_arrays(batch, step, ready.techniques, self.world)
            inputs = make_inputs(arrays, batch, ready.how, self.state.model, self.device)
            gradients(self.state.model, inputs, ready.how)
        torch.cuda.synchronize(self.device)

    def _first_step(self, task: Task, seed: int, part: range, how: Forward) -> Ready:
        """The first of these steps as it will be computed: if its batch is padded, in a shape that
        holds those after it too."""
        size = self.plan.batch_size(part[0])
        first = task.batch(seed, "train", part[0], size)
        plain = Ready(how, first, "", self.state.techniques)
        if first.lengths is None or not self._can_capture(how):
            return plain
        for step in part[:LOOK_AHEAD]:
            batch = drawn(task.batch(seed, "train", step, size), how, step, self.state.techniques)
            if batch is None:
                return plain
            for shape in self._shapes(how, size):
                shape.grow(batch)
        return self._ready(how, first, part[0]) or plain

    def _ready(self, how: Forward, batch: Batch, step: int | None = None) -> Ready | None:
        """The step as it may be captured; None for a padded batch that fits no shape, or that costs
        too much in each."""
        if batch.lengths is None:
            return Ready(how, batch, "", self.state.techniques)
        step = self.state.step if step is None else step
        size, own = len(batch.x), drawn(batch, how, step, self.state.techniques)
        if own is None or not own.target_mask.any():
            return None  # without a target gradients are None, not 0
        for shape in self._shapes(how, size):
            name = type(shape).__name__
            if not self._fits(shape, own, (name, size)):
                return None
            if shape.cost(own, how.mode) > MOST_COVER:
                continue
            if isinstance(shape, PrefixRows) and not self._reads_rows(how, own):
                return None
            found = shape(own)
            if found is None:
                return None
            if isinstance(shape, PrefixRows):
                how = replace(how, mode="prefix-lm")
            elif how.mode != "prefix-lm":
                found = replace(found, prefix_lengths=None)
            return Ready(how, found, name, ())
        return None

    def _shapes(self, how: Forward, size: int) -> Iterator[Cover | PrefixRows]:
        """Those that padded batches of this size may take, the first that is cheap enough."""
        yield self.covers.setdefault(size, Cover())
        if how.mode == "entp" and not causal_stack(self.state.model):
            if size not in self.prefix_rows:
                fitting = how.token_budget or default_token_budget(self.state.model, self.device)
                self.prefix_rows[size] = PrefixRows(min(MOST_ROWS, fitting))
            yield self.prefix_rows[size]

    def _reads_rows(self, how: Forward, batch: Batch) -> bool:
        """Tried once for each state of a model."""
        if self.in_rows is None:
            self.in_rows = reads_rows(self.state.model, how, batch, self.device)
        return self.in_rows is True

    def _fits(self, shape: Cover | PrefixRows, batch: Batch, key: Key) -> bool:
        """Whether a shape holds a batch, now that it may have grown. One that is part of graphs
        grows only when many did not fit: those graphs are dropped then."""
        if shape.holds(batch):
            return True
        old = [other for other in self.graphs if other[:2] == key]
        if old and not shape.miss(batch):
            return False
        shape.grow(batch)
        self.outgrown[key] += bool(old)
        for other in old:
            del self.graphs[other]
        for other in [other for other in self.seen if other[:2] == key]:
            del self.seen[other]
        return shape.holds(batch)

    def _make_room(self) -> bool:
        """Whether there may be one more graph, if need be instead of one long unused."""
        if len(self.graphs) < MOST_GRAPHS:
            return True
        oldest = min(self.graphs, key=lambda key: self.replayed[key])
        if self.state.step - self.replayed[oldest] < IDLE_STEPS:
            return False
        del self.graphs[oldest]
        return True

    def _forget(self) -> None:
        self.graphs.clear()
        self.seen.clear()

    def _forget_another_model(self) -> None:
        """Drop all graphs if the model was changed, or its weights moved, since capture."""
        support = support_of(self.state.model)
        model = support, support.fingerprint.weights()
        if model != self.model:
            self.model = model
            self.in_rows = None
            self.chosen.clear()
            self._forget()

    def _can_capture(self, how: Forward) -> bool:
        """One process, nothing that depends on Python, an engine that does not wait for the
        device."""
        if not self.use_graphs or self.world.size > 1:
            return False
        if self.model is None or not self.model[0].graphs:
            return False
        if not skips_targets(how.mode):
            return True
        if how.mode not in self.chosen:
            with how.autocast(self.device):
                self.chosen[how.mode] = choose(how.impl, self.device, self.state.model).impl
        return self.chosen[how.mode] != "reference"

    def _arrays(self, batch: Batch, techniques: Sequence[Technique]) -> dict[str, Tensor]:
        return step_arrays(batch, self.state.step, techniques, self.world)

    def _inputs(
        self,
        how: Forward,
        batch: Batch,
        shape: str = "",
        techniques: Sequence[Technique] | None = None,
    ) -> Inputs:
        """A batch as it is, or a step that is ready."""
        arrays = self._arrays(batch, self.state.techniques if techniques is None else techniques)
        return make_inputs(arrays, batch, how, self.state.model, self.device)

    def _tables(self, how: Forward, inputs: Inputs) -> list[object]:
        """What the engine looks up in this step."""
        device, every = inputs["x"].device, refresh_of(how.mode)  # cuda:0, not cuda
        for technique in self.state.techniques:
            own = technique.layouts(how)
            if own is not None:
                return chunk_tables(own, device)
        if every is not None:
            return [one for chunk in inputs.chunks for one in tables(chunk, every, device)]
        return chunk_tables([(chunk, how.mode != "entp") for chunk in inputs.chunks], device)

    def _update(self, how: Forward, inputs: Inputs, stop: Stop) -> Updated:
        return update(self.state, inputs, how, self.optim.grad_clip, self.world, stop)

    def _capture(self, how: Forward, inputs: Inputs) -> _Captured | None:
        """The step as a graph; None, with a warning, where modules that are not ours forbid it."""
        try:
            return _Captured(self, how, inputs, self.stream)
        except RuntimeError as error:
            ours = self.model is None or self.model[0].unknown is None
            if ours or isinstance(error, torch.OutOfMemoryError):
                raise
            # A capture that fails leaves its own stream behind.
            torch.cuda.set_stream(torch.cuda.default_stream(self.device))
            self.use_graphs = False
            text = f"this step cannot be captured and runs without a CUDA graph: {error}"
            warnings.warn(text.splitlines()[0], EngineWarning, stacklevel=4)
            return None

    def _eager(self, ready: Ready, stop: Stop) -> Updated:
        """A step on the stream that capturing will use."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            result = self._update(ready.how, self._inputs(*ready), stop)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return result


Key = tuple[object, ...]
"""What a graph is captured for."""


def _key(ready: Ready, size: int) -> Key:
    """Shapes, targets, and which arrays a batch has; what a padded one of this size was given has
    the shape and the targets."""
    batch = ready.batch
    optional = (batch.position_ids, batch.loss_weights, batch.prefix_lengths)
    extras = (array is not None for array in optional)
    types = (batch.x.dtype.char, batch.x.shape[2:], batch.y.dtype.char, *extras)
    if ready.shape:
        return ready.shape, size, types
    return "plain", batch.y.shape, types, np.packbits(batch.target_mask).tobytes()


class _Captured:
    """A step of fixed shapes as a CUDA graph."""

    def __init__(
        self, stepper: Stepper, how: Forward, inputs: Inputs, stream: torch.cuda.Stream | None
    ) -> None:
        self.inputs = inputs
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what eager steps used goes back: the graph has its own memory
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.loss, self.norm, _ = stepper._update(how, inputs, NOBODY)
        self.feed = Feed(inputs.arrays)

    def replay(self, arrays: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The captured step on these arrays: its loss and the gradient's norm."""
        self.feed(arrays)
        self.graph.replay()
        return self.loss, self.norm


class Feed:
    """New values for tensors on the device, copied from pinned memory, so that the host can be a
    few steps ahead.

    A copy from ordinary memory first waits until the device has done all it was given; the device
    then waits for the host.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.turn = tensors, 0
        self.pinned = []
        for _ in range(STEPS_AHEAD):
            memory = {
                name: torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
                for name, t in tensors.items()
            }
            self.pinned.append((memory, torch.cuda.Event()))

    def __call__(self, values: dict[str, Tensor]) -> None:
        """These values from the next step on. Waits only if the device has not read what was given
        STEPS_AHEAD calls ago."""
        memory, read = self.pinned[self.turn % STEPS_AHEAD]
        self.turn += 1
        read.synchronize()
        for name, tensor in self.tensors.items():
            memory[name].copy_(values[name])
            tensor.copy_(memory[name], non_blocking=True)
        read.record()
