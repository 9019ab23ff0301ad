"""The options of the commands: each field's docstring is its help text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from entp.config import SIZES, Impl, Mode, OptimConfig, Run, TrainConfig, model_for
from entp.errors import InputError
from entp.tasks.base import Split, Task

TaskType = TypeVar("TaskType", bound=Task)


@dataclass(frozen=True)
class ModelOptions:
    """Changes to the model of the chosen size."""

    layers: int | None = None
    """Transformer blocks."""
    heads: int | None = None
    """Attention heads."""
    width: int | None = None
    """Embedding dimension."""
    norm: Literal["layer", "none"] | None = None
    """Layer normalisation or none."""
    activation: Literal["gelu", "relu"] | None = None
    """The MLP's non-linearity."""
    position: Literal["learned", "none"] | None = None
    """Learned position vectors or none."""
    scale: Literal["sqrt", "one"] | None = None
    """Scores multiplied by 1/sqrt(head size) or by 1."""

    def changes(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


@dataclass(frozen=True)
class TrainOptions(Generic[TaskType]):
    """Train a model on a task. With --resume, settings that are not given are those of the run in --out."""

    task: TaskType
    """Sizes of the task."""
    mode: Mode = "entp"
    """How predictions attend: entp, decoder or prefix."""
    size: Literal["small", "medium", "large", "small-deep"] | None = None
    """One of the paper's sizes (small if not given)."""
    steps: int = 1000
    """Optimizer steps."""
    batch: int = 64
    """Sequences per step."""
    seed: int = 0
    """Decides the initial weights and the data."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    out: Path | None = None
    """Folder of the run (default: runs/TASK-MODE)."""
    resume: bool = False
    """Continue the run in --out."""
    model: ModelOptions = field(default_factory=ModelOptions)
    """Changes to the model."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and schedule."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Measuring, saving, budgets."""

    def run(self, saved: Run | None) -> Run:
        """The run these options ask for."""
        if saved is None:
            model = model_for(self.task, self.size or "small", **self.model.changes())
        else:
            sized: dict[str, Any] = dict(SIZES[self.size]) if self.size else {}
            model = dataclasses.replace(saved.model, **self.task.model_needs(), **{**sized, **self.model.changes()})
        return Run(self.task, model, self.mode, self.steps, self.batch, self.seed, self.optim, self.train)


@dataclass(frozen=True)
class EvaluateOptions:
    """Measure a trained run on fresh sequences."""

    split: Split = "test"
    """Stream of sequences: train, valid or test."""
    batches: int = 16
    """Batches of the run's size."""
    seed: int | None = None
    """Seed of the sequences (default: the run's)."""
    which: Literal["best", "last"] = "best"
    """Weights of the best validation, or the last."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    impl: Impl = "auto"
    """Engine for mode entp."""
    task: str | None = None
    """module:Class of the run's task, if it is not a built-in one."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class GenerateOptions:
    """Let a trained run continue prompts."""

    prompt: list[str] = field(default_factory=list)
    """One or more prompts, such as "3 1 4 1 5" (default: three from the task's test stream)."""
    max_new_tokens: int | None = None
    """Tokens to add (default: as many as the model has positions for)."""
    mode: Mode | None = None
    """Mode of attention (default: the run's)."""
    temperature: float = 0.0
    """0 takes the likeliest token; above 0 samples."""
    top_k: int | None = None
    """Sample among the k likeliest tokens only."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability."""
    seed: int = 0
    """Seed of the sampling."""
    which: Literal["best", "last"] = "best"
    """Weights of the best validation, or the last."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    task: str | None = None
    """module:Class of the run's task, if it is not a built-in one."""


@dataclass(frozen=True)
class ReproduceOptions:
    """Train what a figure or table of the paper needs and print paper | ours. Run again to continue."""

    tiny: bool = False
    """A version for a CPU minute: shows that everything works, not the result."""
    only: str | None = None
    """Train this arm only."""
    out: Path = Path("runs")
    """Folder for all recipes' runs."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""


@dataclass(frozen=True)
class DemoOptions:
    """Train ENTP and a decoder side by side on a CPU."""

    out: Path = Path("demo")
    """Folder for the two runs and the picture."""
    steps: int = 1500
    """Optimizer steps of each."""
    seed: int = 0
    """Seed of both."""


@dataclass(frozen=True)
class BenchOptions:
    """Measure one training step with every prefix predicted, by each engine and by the decoder."""

    size: Literal["small", "medium", "large", "small-deep"] = "small"
    """One of the paper's sizes."""
    length: int = 64
    """Tokens per sequence."""
    batch: int = 8
    """Sequences."""
    repeats: int = 5
    """Timed steps of each contender, after one that is not timed."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    out: Path | None = None
    """Write the numbers to this JSON file as well."""

    def __post_init__(self) -> None:
        for name in ("length", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} is {getattr(self, name)}: it must be at least 1.")
        if self.out is not None and not self.out.parent.is_dir():
            raise InputError(f"--out {self.out} is in a folder that does not exist: make {self.out.parent} first.")
