"""An exponential moving average of the weights, which is measured and kept as best."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from entp.config import Run
from entp.training.frozen import Frozen
from entp.training.techniques.base import Technique

if TYPE_CHECKING:
    from entp.training.state import State


class Ema(Technique):
    """After every step, average += (weights - average) / ema.steps."""

    def __init__(self, run: Run) -> None:
        assert run.ema is not None
        self.steps = run.ema.steps
        self.average: Any = None

    @torch.no_grad()
    def updated(self, state: State) -> None:
        torch._foreach_lerp_(
            list(self.average.parameters()), list(state.model.parameters()), 1 / self.steps
        )

    def measured(self) -> Any:
        return self.average

    def state_dict(self) -> dict[str, Any]:
        weights = self.average.state_dict()
        return {"weights": Frozen(self.average).trained(weights)}

    def load_state_dict(self, saved: dict[str, Any] | None, model: Any) -> None:
        """Without a saved average it begins with the model's weights."""
        if self.average is None:
            self.average = copy.deepcopy(model)
        weights = {} if saved is None else saved["weights"]
        self.average.load_state_dict({**model.state_dict(), **weights})

    def survives_fork(self, old: Run, new: Run, step: int) -> bool:
        return True
