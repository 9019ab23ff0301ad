"""All that changes while a run goes on, and how it is saved and restored."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from entp.config import OptimConfig
from entp.config.upgrade import upgrade_values
from entp.training import checkpoint
from entp.training.optimizers import make_optimizers, restore_optimizer, save_optimizer
from entp.training.techniques.base import Technique


@dataclass
class State:
    """All that changes while a run goes on."""

    model: Any
    optimizers: list[torch.optim.Optimizer]
    techniques: list[Technique] = field(default_factory=list)
    step: int = 0
    seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    """The values of the best evaluation, and its step."""
    unlogged: tuple[float, int] = (0.0, 0)
    """The sum of the losses since the last line of metrics, and their number."""
    measured_at: int = 0
    """The step of the last evaluation that `best` knows of; 0 before the first."""

    @property
    def measured(self) -> Any:
        """The model that is evaluated and kept as best: the trained one, or a technique's."""
        found = [technique.measured() for technique in self.techniques]
        return next((model for model in found if model is not None), self.model)

    def save(self) -> dict[str, Any]:
        """Everything but the weights, as plain values and tensors."""
        states = {technique.name: technique.state_dict() for technique in self.techniques}
        return {
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
            "unlogged": list(self.unlogged),
            "measured_at": self.measured_at,
            "optimizers": [save_optimizer(optimizer) for optimizer in self.optimizers],
            "techniques": {name: saved for name, saved in states.items() if saved is not None},
        }

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        saved = upgrade_trainer(checkpoint.read_trainer(folder))
        self.model.load_state_dict(checkpoint.load(folder).state_dict())
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            restore_optimizer(optimizer, state)
        self.step, self.seconds, self.best = saved["step"], saved["seconds"], saved["best"]
        total, count = saved.get("unlogged", (0.0, 0))
        self.unlogged = total, count
        self.measured_at = saved["measured_at"]
        for technique in self.techniques:
            technique.load_state_dict(saved["techniques"].get(technique.name), self.model)


def new_state(model: Any, optim: OptimConfig, techniques: list[Technique]) -> State:
    """A run before its first step."""
    for technique in techniques:
        technique.load_state_dict(None, model)
    return State(model, make_optimizers(model, optim), techniques)


def upgrade_trainer(saved: dict[str, Any]) -> dict[str, Any]:
    """The trainer's state of a checkpoint under today's names."""
    saved = dict(saved)
    techniques = dict(saved.get("techniques", {}))
    average, selection = saved.pop("mean", None), saved.pop("selection", None)
    if average is not None:
        techniques["ema"] = {"weights": average}
    if selection is not None:
        techniques["importance"] = selection
    return {**saved, "best": upgrade_values(saved["best"]), "techniques": techniques}
