"""Steps of a whole run: eager, or replayed as one CUDA graph.

A graph replays captured kernels on fixed memory, so that the GPU never waits for Python: what
bounds small models otherwise. A step is captured when the same shapes and the same targets have
come a few times, and replayed whenever they come again.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
from torch import Tensor

from entp.config import OptimConfig
from entp.engine.api import choose
from entp.engine.support import Support, support_of
from entp.tasks.base import Batch, Task
from entp.training.distributed import Stop, World
from entp.training.forward import Forward
from entp.training.gradients import Updated, gradients, update
from entp.training.inputs import Inputs, chunk_tables, make_inputs, step_arrays
from entp.training.optimizers import renew_preconditioners, set_learning_rate
from entp.training.plan import Plan
from entp.training.state import State
from entp.training.techniques.base import Coming

EAGER_STEPS = 3
"""Steps of the same shapes before they are captured: kernels are compiled in them, and optimizer
state is made."""
MOST_SEEN = 1000
"""Different shapes whose steps are counted."""
MOST_GRAPHS = 4
"""Graphs kept for different shapes: each holds the memory of a step."""
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
        self.seen: Counter[bytes] = Counter()
        self.graphs: dict[bytes, _Captured] = {}
        self.version: tuple[object, ...] = ()
        """What the graphs belong to: the mode, and the techniques' versions."""
        self.model: tuple[Support, list[tuple[int, bool]]] | None = None
        """The state of the model that they belong to, and where its weights are."""
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

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
        key = _key(batch)
        if key not in self.graphs:
            if len(self.seen) >= MOST_SEEN:
                self.seen.clear()  # masks that differ from batch to batch: nothing to capture
            self.seen[key] += 1
            if self.seen[key] <= EAGER_STEPS or len(self.graphs) >= MOST_GRAPHS:
                return self._eager(how, batch, stop)
            inputs = self._inputs(how, batch)
            layouts = self._layouts(how, inputs)
            inputs.tables.extend(chunk_tables(layouts, inputs["x"].device))  # cuda:0, not cuda
            self.graphs[key] = _Captured(self, how, inputs, self.stream)
        loss, norm = self.graphs[key].replay(self._arrays(batch))
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
        for step in {part[0] for part in self.plan.segments(self.state.step, steps)}:
            how = self.how[self.plan.mode(step)]
            batch = task.batch(seed, "train", step, self.plan.batch_size(step))
            if how.mode == "entp":
                for technique in self.state.techniques:
                    batch = technique.typical(batch)
            arrays = step_arrays(batch, step, self.state.techniques, self.world)
            inputs = make_inputs(arrays, batch, how, self.state.model, self.device)
            gradients(self.state.model, inputs, how)
        torch.cuda.synchronize(self.device)

    def _forget(self) -> None:
        self.graphs.clear()
        self.seen.clear()

    def _forget_another_model(self) -> None:
        """Drop all graphs if the model was changed, or its weights moved, since capture."""
        support = support_of(self.state.model)
        model = support, support.fingerprint.weights()
        if model != self.model:
            self.model = model
            self._forget()

    def _can_capture(self, how: Forward, batch: Batch) -> bool:
        """One process, no padding, no hooks, and an engine that does not wait for the device."""
        if not self.use_graphs or self.world.size > 1 or batch.lengths is not None:
            return False
        if self.model is None or not self.model[0].graphs:
            return False
        if how.mode != "entp":
            return True
        with how.autocast(self.device):
            return choose(how.impl, self.device, self.state.model).impl == "triton"

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

    def _eager(self, how: Forward, batch: Batch, stop: Stop) -> Updated:
        """A step on the stream that capturing will use."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            result = self._update(how, self._inputs(how, batch), stop)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return result


def _key(batch: Batch) -> bytes:
    """What a graph is captured for: shapes, targets, and which arrays a batch has."""
    extras = (batch.position_ids is not None, batch.loss_weights is not None)
    shape = repr((batch.x.shape, batch.x.dtype.str, extras))
    return hashlib.blake2b(shape.encode() + batch.target_mask.tobytes()).digest()


class _Captured:
    """A step of fixed shapes as a CUDA graph."""

    def __init__(
        self, stepper: Stepper, how: Forward, inputs: Inputs, stream: torch.cuda.Stream
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
