"""What a technique may do to training: every method has a default that does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from entp.config import OptimConfig, Run
from entp.errors import InputError
from entp.registry import find_named
from entp.tasks.base import Batch
from entp.training.distributed import World
from entp.training.forward import Forward
from entp.training.techniques import TECHNIQUES

if TYPE_CHECKING:
    from entp.training.inputs import Inputs
    from entp.training.state import State


class Coming(NamedTuple):
    """The step that comes next."""

    step: int
    batch: Batch
    how: Forward
    device: torch.device


class Technique:
    """A change to training, made from the run that asks for it."""

    name = ""
    changes: tuple[int, ...] = ()
    """Steps at which the batch size or the mode changes."""

    def __init__(self, run: Run) -> None:
        """Keep what is needed of the run."""

    @property
    def version(self) -> object:
        """Another object whenever captured steps must be captured anew."""
        return None

    def check(self, run: Run, batch: Batch, world: World) -> None:
        """InputError if the run cannot be trained with this technique."""

    def batch_size(self, step: int, size: int) -> int:
        """Sequences of a step."""
        return size

    def mode(self, step: int, mode: str) -> str:
        """The mode of a step."""
        return mode

    def schedule(self, step: int, optim: OptimConfig) -> tuple[OptimConfig, int] | None:
        """The schedule that a step belongs to, and the step at which it begins; None: the run's."""
        return None

    def arrange(self, step: int, batch: Batch) -> Batch:
        """The sequences of a step in the order in which they are computed."""
        return batch

    def arrays(self, step: int, batch: Batch, world: World) -> dict[str, Tensor]:
        """Arrays on the CPU that the step reads, of this process's share of an arranged batch.

        "weights" multiplies the targets' weights. "y" replaces the targets: it may drop some.
        """
        return {}

    def prepare(self, state: State, coming: Coming) -> None:
        """Between steps, outside the CUDA graph."""

    def choose(self, model: Any, how: Forward, inputs: Inputs) -> Inputs:
        """Which predictions carry the loss, with which weights; inside the graph."""
        return inputs

    def layouts(self, how: Forward) -> list[tuple[Tensor, bool]] | None:
        """Masks that `choose` computes instead of the inputs' chunks; True: whole sequences."""
        return None

    def typical(self, batch: Batch) -> Batch:
        """A batch as large as what gets gradients."""
        return batch

    def updated(self, state: State) -> None:
        """After the optimizer, inside the graph."""

    def measured(self) -> Any | None:
        """The model that is evaluated and kept as best, if not the trained one."""
        return None

    def state_dict(self) -> dict[str, Any] | None:
        """For a checkpoint; None if there is nothing to keep."""
        return None

    def load_state_dict(self, saved: dict[str, Any] | None, model: Any) -> None:
        """What `state_dict` gave, or None where a checkpoint has none."""

    def survives_fork(self, old: Run, new: Run, step: int) -> bool:
        """Whether a fork continues with the source's state rather than anew."""
        from entp.training.plan import Plan

        sizes = {Plan(run).batch_size(step) for run in (old, new)}
        same = getattr(old, self.name) == getattr(new, self.name)
        return same and old.task == new.task and len(sizes) == 1


def make_techniques(run: Run) -> list[Technique]:
    """Those that a run asks for, in the order in which they act."""
    from entp.config import TECHNIQUE_CONFIGS

    asked = [name for name in TECHNIQUE_CONFIGS if getattr(run, name) is not None]
    for name in asked:
        if name not in TECHNIQUES:
            raise InputError(f"the run asks for {name}, which this version of entp has not.")
    found = []
    for name in TECHNIQUES:
        if name in asked:
            technique = find_named("technique", name, TECHNIQUES, "module:Class")(run)
            technique.name = name
            found.append(technique)
    return found
