"""When a run measures and saves, and on what budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from entp.config.mode import Impl
from entp.fields import check_numbers, choice_problems, raise_problems


@dataclass(frozen=True)
class TrainConfig:
    """How a run is carried out: when it measures and saves, and on what budget."""

    eval_every: int = 100
    """Steps between evaluations on the validation stream."""
    eval_batches: int = 4
    """Batches per evaluation."""
    eval_splits: tuple[str, ...] = ()
    """Splits that every evaluation measures beside validation: test, or a further one of the task.
    They decide nothing."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last two are kept, and the best by validation."""
    checkpoint_seconds: float | None = 60.0
    """A checkpoint too when so many seconds have passed since the last one; more, where writing one
    takes long. None: by steps alone."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    monitor: str | None = None
    """Validation metric that decides which checkpoint is best and when to stop. None: the task's
    first."""
    stop_at: float | None = None
    """Stop when the monitored metric reaches this value."""
    patience: int | None = None
    """Stop after so many evaluations in a row without a better value of the monitored metric. None:
    never."""
    patience_from: float | None = None
    """Evaluations count towards the patience once the monitored metric has reached this value (a
    loss: is at most this). None: from the first on."""
    max_seconds: float | None = None
    """Stop after so many seconds of training, evaluations included, compilation before it not.
    Resumed, it counts on."""
    impl: Impl = "auto"
    """Engine; auto is the fastest that can run here. In modes other than entp, reference and
    packed are torch's own attention."""
    token_budget: int | None = None
    """Most prefix tokens computed at once in mode entp; the gradients of the chunks add up. None:
    little memory first."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16: matrix products in bfloat16 under autocast; auto: that on CUDA only. Weights stay
    fp32."""
    cuda_graph: bool = True
    """On CUDA, replay steps whose shapes repeat as one CUDA graph."""
    compile_layers: bool = False
    """Compile HuggingFace's layers by torch.compile: faster steps, after about a minute more before
    the first."""
    logger: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Copy the metrics to a tracker as well; metrics.jsonl stays the truth."""

    def __post_init__(self) -> None:
        check_numbers(self, "train.")
        problems = [
            f"train.{name} is {getattr(self, name)}: it must be at least 1"
            for name in ("eval_every", "eval_batches", "checkpoint_every", "log_every")
            if getattr(self, name) < 1
        ]
        if self.token_budget is not None and self.token_budget < 1:
            problems.append(
                f"train.token_budget is {self.token_budget}: it must be at least 1, or None"
            )
        for name in ("checkpoint_seconds", "max_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and seconds <= 0:
                problems.append(f"train.{name} is {seconds:g}: it must be above 0, or None")
        if self.patience is not None and self.patience < 1:
            problems.append(f"train.patience is {self.patience}: it must be at least 1, or None")
        if self.patience_from is not None and self.patience is None:
            problems.append(
                f"train.patience_from is {self.patience_from:g} without train.patience: give both, "
                "or neither"
            )
        problems += self._split_problems()
        raise_problems(problems + choice_problems(self, "train."))

    def _split_problems(self) -> list[str]:
        """What is wrong with eval_splits; a list of names becomes a tuple: equal runs hash
        equal."""
        names = self.eval_splits
        if not isinstance(names, tuple | list) or not all(isinstance(n, str) for n in names):
            return [f"train.eval_splits is {names!r}: it must be a tuple of names"]
        object.__setattr__(self, "eval_splits", tuple(names))
        if len(set(names)) < len(names):
            return [f"train.eval_splits is {names!r}: give each name once"]
        return []
