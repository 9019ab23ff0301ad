"""Steps of a whole run: eager, or replayed as one CUDA graph.

A graph replays captured kernels on fixed memory, so that the GPU never waits for Python: what
bounds small models otherwise. A step is captured when the same shapes and the same targets have
come a few times, and replayed whenever they come again. Padded batches are given one shape and the
same targets (cover.py); the few that do not fit run as they are.
"""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from entp.config import OptimConfig
from entp.engine.api import choose
from entp.engine.streams import side_stream
from entp.engine.support import Support, support_of
from entp.errors import EngineWarning
from entp.tasks.base import Batch, Task
from entp.training.cover import COVERED_MODES, Cover
from entp.training.distributed import Stop, World
from entp.training.forward import Forward
from entp.training.gradients import Updated, gradients, update
from entp.training.inputs import Inputs, chunk_tables, make_inputs, step_arrays
from entp.training.optimizers import renew_preconditioners, set_learning_rate
from entp.training.plan import Plan
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
"""Rows that a padded batch may have in its cover, as a multiple of its own."""
LOOK_AHEAD = 256
"""Batches that covers are made for before the first step."""
MOST_WAIT = 8
"""Each time a cover outgrows its graphs, the next one waits for twice as many steps; so often at
most."""
NOBODY = Stop()
STEPS_AHEAD = 4
"""Steps that may wait for the device at a time."""


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
        self.outgrown: Counter[int] = Counter()
        """How often graphs were dropped because a cover grew."""
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
        if self.stream is None or not self._can_capture(how, batch):
            return self._update(how, self._inputs(how, batch), stop)
        version = (how.mode, *(technique.version for technique in self.state.techniques))
        if any(a is not b for a, b in zip(version, self.version, strict=False)) or not self.version:
            self.version = version
            self._forget()  # the old graphs' memory goes back
        constant = batch if batch.lengths is None else self._covered(how, batch)
        if constant is None:
            return self._update(how, self._inputs(how, batch), stop)
        key, wait = _key(constant, covered=constant is not batch), EAGER_STEPS
        if constant is not batch:
            wait <<= min(self.outgrown[len(batch.x)], MOST_WAIT)
        if key not in self.graphs:
            if len(self.seen) >= MOST_SEEN:
                self.seen.clear()  # masks that differ from batch to batch: nothing to capture
            self.seen[key] += 1
            if self.seen[key] <= wait or not self._make_room():
                return self._eager(how, constant, stop)
            inputs = self._inputs(how, constant)
            layouts = self._layouts(how, inputs)
            inputs.tables.extend(chunk_tables(layouts, inputs["x"].device))  # cuda:0, not cuda
            captured = self._capture(how, inputs)
            if captured is None:
                return self._eager(how, constant, stop)
            self.graphs[key] = captured
        self.replayed[key] = self.state.step
        loss, norm = self.graphs[key].replay(self._arrays(constant))
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
            batch = self._first_batch(task, seed, part, how)
            if how.mode == "entp":
                for technique in self.state.techniques:
                    batch = technique.typical(batch)
            arrays = step_arrays(batch, step, self.state.techniques, self.world)
            inputs = make_inputs(arrays, batch, how, self.state.model, self.device)
            gradients(self.state.model, inputs, how)
        torch.cuda.synchronize(self.device)

    def _first_batch(self, task: Task, seed: int, part: range, how: Forward) -> Batch:
        """The first batch of these steps as its step will see it: if it is padded, in a cover that
        holds those after it too."""
        size = self.plan.batch_size(part[0])
        first = task.batch(seed, "train", part[0], size)
        if first.lengths is None or not self._can_capture(how, first):
            return first
        cover = self.covers.setdefault(size, Cover())
        for step in part[:LOOK_AHEAD]:
            cover.grow(task.batch(seed, "train", step, size))
        return self._covered(how, first) or first

    def _covered(self, how: Forward, batch: Batch) -> Batch | None:
        """A padded batch in its cover; None if it does not fit or costs too much. A cover that is
        part of graphs grows only when many did not fit: those graphs are dropped then."""
        size = len(batch.x)
        cover = self.covers.setdefault(size, Cover())
        if not cover.holds(batch):
            old = [key for key in self.graphs if key[:2] == ("cover", size)]
            if old and not cover.miss(batch):
                return None
            cover.grow(batch)
            self.outgrown[size] += bool(old)
            for key in old:
                del self.graphs[key]
            for key in [key for key in self.seen if key[:2] == ("cover", size)]:
                del self.seen[key]
        return cover(batch) if cover.cost(batch, how.mode) <= MOST_COVER else None

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
            self.chosen.clear()
            self._forget()

    def _can_capture(self, how: Forward, batch: Batch) -> bool:
        """One process, nothing that depends on Python, an engine that does not wait for the device,
        and for padding what a cover needs."""
        if not self.use_graphs or self.world.size > 1:
            return False
        if batch.lengths is not None and not self._can_cover(how, batch):
            return False
        if self.model is None or not self.model[0].graphs:
            return False
        if how.mode != "entp":
            return True
        if how.mode not in self.chosen:
            with how.autocast(self.device):
                self.chosen[how.mode] = choose(how.impl, self.device, self.state.model).impl
        return self.chosen[how.mode] != "reference"

    def _can_cover(self, how: Forward, batch: Batch) -> bool:
        """Whether padding changes nothing in this mode, and no technique reads the targets."""
        return how.mode in COVERED_MODES and not any(
            type(technique).choose is not Technique.choose
            or technique.arrays(self.state.step, batch, self.world)
            for technique in self.state.techniques
        )

    def _arrays(self, batch: Batch) -> dict[str, Tensor]:
        return step_arrays(batch, self.state.step, self.state.techniques, self.world)

    def _inputs(self, how: Forward, batch: Batch) -> Inputs:
        return make_inputs(self._arrays(batch), batch, how, self.state.model, self.device)

    def _layouts(self, how: Forward, inputs: Inputs) -> list[tuple[Tensor, bool]]:
        """The masks that the step computes, and whether as whole sequences."""
        for technique in self.state.techniques:
            own = technique.layouts(how)
            if own is not None:
                return own
        return [(chunk, how.mode != "entp") for chunk in inputs.chunks]

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

    def _eager(self, how: Forward, batch: Batch, stop: Stop) -> Updated:
        """A step on the stream that capturing will use."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            result = self._update(how, self._inputs(how, batch), stop)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return result


Key = tuple[object, ...]
"""What a graph is captured for."""


def _key(batch: Batch, covered: bool) -> Key:
    """Shapes, targets, and which arrays a batch has; a cover knows the shape and the targets."""
    extras = (batch.position_ids is not None, batch.loss_weights is not None)
    types = (batch.x.dtype.char, batch.x.shape[2:], batch.y.dtype.char, *extras)
    if covered:
        return "cover", len(batch.x), types
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
