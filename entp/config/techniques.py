"""Options of the training techniques; `None` in a Run means off. Each is carried out by the file of
the same name in entp/training/techniques/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from entp.config.mode import RANDOM_PREFIX, CurriculumMode, mode_problems
from entp.errors import InputError
from entp.fields import check_numbers, choice_problems, raise_problems


@dataclass(frozen=True)
class EmaConfig:
    """An exponential moving average of the weights, which is what gets measured and kept as
    best."""

    steps: int
    """Steps that the average spans, about."""

    def __post_init__(self) -> None:
        check_numbers(self, "ema.")
        if self.steps < 1:
            raise InputError(f"ema.steps is {self.steps}: it must be at least 1.")


@dataclass(frozen=True)
class ImportanceConfig:
    """In mode entp: gradients of sampled targets only, weighted so that the gradient is
    unbiased."""

    samples: int | None = None
    """Targets per batch that get gradients. None: as many as pay, once most are right."""
    proposal: Literal["decoder", "entp"] = "entp"
    """Whose errors the probabilities follow: those of a decoder's pass, or of ENTP without
    gradients."""

    def __post_init__(self) -> None:
        check_numbers(self, "importance.")
        problems = choice_problems(self, "importance.")
        if (self.samples is None) != (self.proposal == "entp"):
            problems.append(
                f"importance.samples is {self.samples} with importance.proposal {self.proposal}: "
                "give a number of targets with proposal decoder, and none with proposal entp"
            )
        elif self.samples is not None and self.samples < 1:
            problems.append(f"importance.samples is {self.samples}: it must be at least 1")
        raise_problems(problems)


@dataclass(frozen=True)
class RandomTargetsConfig:
    """Gradients of a few targets of each sequence, drawn at random in every step and weighted so
    that the gradient is unbiased."""

    count: int
    """Targets per sequence that get gradients; all of a sequence that has no more."""

    def __post_init__(self) -> None:
        check_numbers(self, "random_targets.")
        if self.count < 1:
            raise InputError(f"random_targets.count is {self.count}: it must be at least 1.")


@dataclass(frozen=True)
class BatchScheduleConfig:
    """Another batch size from some step on: late in training gradients are noisier."""

    step: int
    """First step of the new batch size."""
    batch_size: int
    """Sequences per step from then on."""

    def __post_init__(self) -> None:
        check_numbers(self, "batch_schedule.")
        problems = [
            f"batch_schedule.{name} is {getattr(self, name)}: it must be at least 1"
            for name in ("step", "batch_size")
            if getattr(self, name) < 1
        ]
        raise_problems(problems)


@dataclass(frozen=True)
class CurriculumConfig:
    """First steps in a cheaper mode, with a schedule of their own; weights and optimizer state are
    kept."""

    steps: int
    """How many of the run's steps, warm-up included; optim.decay_steps counts from their end."""
    mode: CurriculumMode = "decoder"
    """What is trained, in a mode of runs or random-prefix; evaluations measure the run's own.
    random-prefix: a decoder for half of the steps, then ever more sequences whose tokens up to a
    random position see each other."""
    batch_size: int | None = None
    """Sequences per step. None: as many as later."""
    lr: float | None = None
    """Learning rate after the warm-up, which decays to optim.lr. None: optim.lr all along."""
    uniform_lengths: bool = False
    """With random-prefix: every length has the same weight, in large batches. Without it the first
    of n has 1/n of the last one's."""
    prefixes: Literal["rising", "always"] = "rising"
    """With random-prefix. always: every sequence has a random prefix, from the first step on."""

    def __post_init__(self) -> None:
        check_numbers(self, "curriculum.")
        problems = choice_problems(self, "curriculum.")
        problems += mode_problems(self.mode, RANDOM_PREFIX, name="curriculum.mode")
        for name in ("steps", "batch_size", "lr"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                problems.append(f"curriculum.{name} is {value:g}: it must be above 0")
        if self.uniform_lengths and self.mode != "random-prefix":
            problems.append(
                "curriculum.uniform_lengths is for curriculum.mode random-prefix, not "
                f"{self.mode}, where every length has the same weight anyway"
            )
        if self.prefixes != "rising" and self.mode != "random-prefix":
            problems.append(
                f"curriculum.prefixes {self.prefixes} is for curriculum.mode random-prefix, not "
                f"{self.mode}"
            )
        raise_problems(problems)


TECHNIQUE_CONFIGS: dict[str, type] = {
    "ema": EmaConfig,
    "importance": ImportanceConfig,
    "random_targets": RandomTargetsConfig,
    "batch_schedule": BatchScheduleConfig,
    "curriculum": CurriculumConfig,
}
"""Fields of a Run that are techniques, and their options."""
