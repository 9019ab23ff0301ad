"""A run: everything that decides what training computes.

run = Run(task=Count3(), model=model_for(Count3(), "small"), mode="entp", steps=200, batch_size=16)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from entp.config.mode import Mode, mode_problems
from entp.config.optim import OptimConfig
from entp.config.pretrained import AnyModelConfig, PretrainedConfig
from entp.config.techniques import (
    BatchScheduleConfig,
    CurriculumConfig,
    EmaConfig,
    ImportanceConfig,
    RandomTargetsConfig,
)
from entp.config.training import TrainConfig
from entp.fields import check_numbers, raise_problems
from entp.tasks.base import Task


@dataclass(frozen=True)
class Run:
    """Everything that decides what a training run computes."""

    task: Task
    """What is learned."""
    model: AnyModelConfig
    """The network."""
    mode: Mode = "entp"
    """entp, decoder, prefix-lm, or refresh-N: entp that is computed anew every N tokens only."""
    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 64
    """Sequences per step, over all processes together, and in a batch of an evaluation."""
    seed: int = 0
    """Decides the initial weights and the data."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and schedule."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Measuring, saving, budgets."""
    ema: EmaConfig | None = None
    """Moving average of the weights."""
    importance: ImportanceConfig | None = None
    """Sampled targets."""
    random_targets: RandomTargetsConfig | None = None
    """A few targets of each sequence."""
    batch_schedule: BatchScheduleConfig | None = None
    """Another batch size late in training."""
    curriculum: CurriculumConfig | None = None
    """First steps in another mode."""
    init: str = ""
    """The first 16 digits of the sha256 of the weights that it begins with; empty: random ones."""

    def __post_init__(self) -> None:
        check_numbers(self, "")
        problems = mode_problems(self.mode)
        for name, least in (("steps", 1), ("batch_size", 1), ("seed", 0)):
            if getattr(self, name) < least:
                problems.append(f"{name} is {getattr(self, name)}: it must be at least {least}")
        if self.seed >= 2**32:
            problems.append(
                f"seed is {self.seed}: it must be below 2^32, so that no two streams of data meet"
            )
        if self.optim.decay_by == "seconds" and self.train.max_seconds is None:
            problems.append(
                "optim.decay_by seconds needs train.max_seconds: the time at whose end the "
                "learning rate is optim.min_lr"
            )
        if self.importance is not None and self.mode != "entp":
            problems.append(
                "importance is for mode entp, where each prediction has a cost of its own, not "
                f"for {self.mode}"
            )
        if self.importance is not None and self.random_targets is not None:
            problems.append(
                "importance and random_targets both choose which targets get gradients: leave one "
                "of them out"
            )
        if not isinstance(self.init, str) or not re.fullmatch("([0-9a-f]{16})?", self.init):
            problems.append(f"init is {self.init!r}: it must be 16 hexadecimal digits, or empty")
        problems += self._model_problems()
        problems += self._curriculum_problems()
        modes = [self.mode, self.curriculum.mode if self.curriculum else self.mode]
        if "prefix-lm" in modes and not self.task.has_prefix:
            problems.append(
                f"mode prefix-lm needs a task with a prefix, and {self.task.name} has none: use "
                "entp or decoder"
            )
        names = [metric.name for metric in self.task.metrics]
        if self.monitor not in names:
            problems.append(
                f"train.monitor {self.train.monitor!r} is not measured: allowed are "
                f"{', '.join(names)}"
            )
        raise_problems([*problems, *self._split_problems()])

    def _split_problems(self) -> list[str]:
        """Splits that are to be measured and that the task does not have."""
        allowed = ("test", *self.task.more_splits)
        return [
            f"train.eval_splits has {name!r}: {self.task.name} allows {', '.join(allowed)}"
            for name in self.train.eval_splits
            if name not in allowed
        ]

    def _model_problems(self) -> list[str]:
        """Where the model does not fit the task."""
        problems, needs = [], self.task.model_needs()
        pretrained = isinstance(self.model, PretrainedConfig)
        if "context_length" not in needs:
            return [f"model_needs of {self.task.name} has no context_length: give it one"]
        if self.model.has_limit and self.model.context_length < needs["context_length"]:
            problems.append(
                f"model.context_length {self.model.context_length} is shorter than the sequences "
                f"of {self.task.name}, {needs['context_length']}: "
                + ("shorten" if pretrained else "raise model.context_length or shorten")
                + " the task"
            )
        for name in ("vocab", "input_dim", "outputs"):
            if getattr(self.model, name) != needs.get(name):
                problems.append(
                    f"model.{name} is {getattr(self.model, name)} but {self.task.name} needs "
                    f"{needs.get(name)}"
                )
        if isinstance(self.model, PretrainedConfig) and self.optim.name == "muon":
            problems.append(
                "optim.name muon is for the blocks of entp.Transformer, not for HuggingFace's "
                "models: use adamw"
            )
        if self.task.loss == "squared_error" and self.model.outputs != 1:
            problems.append(
                f"model.outputs is {self.model.outputs}: squared_error is of one number, so it "
                "must be 1"
            )
        return problems

    def _curriculum_problems(self) -> list[str]:
        first, optim = self.curriculum, self.optim
        if first is None:
            return []
        problems = []
        if first.steps <= optim.warmup_steps:
            problems.append(
                f"curriculum.steps {first.steps} must be above optim.warmup_steps "
                f"{optim.warmup_steps}, which is part of them"
            )
        if first.lr is not None and first.lr < optim.lr:
            problems.append(f"optim.lr {optim.lr:g} is above curriculum.lr {first.lr:g}: swapped?")
        if optim.decay_by == "seconds":
            problems.append(
                "curriculum needs optim.decay_by steps: by the clock there is one schedule"
            )
        return problems

    @property
    def monitor(self) -> str:
        """The metric that decides which checkpoint is best."""
        return self.train.monitor or self.task.metrics[0].name
