"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from entp.fields import check_numbers, choice_problems, raise_problems


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule; the defaults are those of the authors' Count3 runs, with
    gradient clipping added."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw as in the paper; muon for matrices inside the blocks, AdamW for the rest."""
    lr: float = 5e-4
    """Learning rate after the warm-up."""
    min_lr: float = 5e-5
    """Learning rate at the end of the decay and after it."""
    warmup_steps: int = 500
    """Steps of linear warm-up."""
    decay_steps: int = 100_000
    """Step at which the decay reaches min_lr. It does not depend on --steps: a longer run only
    adds steps."""
    decay_by: Literal["steps", "seconds"] = "steps"
    """steps: decay until decay_steps. seconds: decay until train.max_seconds, on any machine."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """Shape of the decay from lr to min_lr."""
    beta1: float = 0.9
    """AdamW's first decay."""
    beta2: float = 0.99
    """AdamW's second decay."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors get none."""
    grad_clip: float = 1.0
    """Largest gradient norm. 0: no clipping."""
    precondition_every: int = 0
    """For muon: precondition the MLPs' hidden side, with a new preconditioner every so many steps.
    0: no preconditioner."""

    def __post_init__(self) -> None:
        check_numbers(self, "optim.")
        problems = []
        if self.min_lr > self.lr:
            problems.append(
                f"optim.min_lr {self.min_lr:g} is above optim.lr {self.lr:g}: give a lower "
                "optim.min_lr too, or are they swapped?"
            )
        if self.lr <= 0 or self.min_lr < 0:
            problems.append(
                f"optim.lr {self.lr:g} must be positive and optim.min_lr {self.min_lr:g} not "
                "negative"
            )
        if self.warmup_steps < 0 or self.decay_steps <= self.warmup_steps:
            problems.append(
                f"optim.decay_steps {self.decay_steps} must be above optim.warmup_steps "
                f"{self.warmup_steps}, which must not be negative"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(
                    f"optim.{name} is {getattr(self, name)}: allowed is 0 up to, not including, 1"
                )
        if self.weight_decay < 0 or self.grad_clip < 0:
            problems.append("optim.weight_decay and optim.grad_clip must not be negative")
        every = self.precondition_every
        if every < 0 or (every and self.name != "muon"):
            problems.append(
                f"optim.precondition_every is {every} with optim.name {self.name}: it must be 0, "
                "or a number of steps and muon"
            )
        raise_problems(problems + choice_problems(self, "optim."))
