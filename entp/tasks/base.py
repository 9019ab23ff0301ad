"""What a task is, and where tasks are found by name.

A task is one frozen dataclass. A batch is a pure function of (seed, split, step): resuming needs
only the step, and the streams of two splits never meet. Targets of IGNORE (-100) carry no loss, and
in mode entp no prefix is computed for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np

from entp.errors import InputError, one_of
from entp.registry import find_named
from entp.tasks.metrics import (
    EXACT_MATCH,
    LOSS,
    TOKEN_ACCURACY,
    Metric,
    Predicted,
    Score,
    exact_match,
    mean_loss,
    token_accuracy,
)

IGNORE = -100
SPLITS = {"train": 0, "valid": 1, "test": 2}
Split = str
"""train, valid, test, or one of the task's `more_splits`."""


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of some sequences, as numpy arrays; (batch, time) unless said otherwise.

    x: token ids, or (batch, time, input_dim) vectors.
    y: the token, class or number to predict after reading x[:, :t+1]; IGNORE where there is none.
    lengths: (batch,) true lengths when the rows are padded on the right, else None.
    position_ids: the position of each token, where it is not its place in the row.
    loss_weights: the weight of each target's loss, where they are not all 1.
    note: (batch,) something about each sequence that metrics may be sliced by.
    prefix_lengths: (batch,) first tokens that see each other in mode prefix-lm, where they are not
        as many in every sequence.
    """

    x: np.ndarray
    y: np.ndarray
    lengths: np.ndarray | None = None
    position_ids: np.ndarray | None = None
    loss_weights: np.ndarray | None = None
    note: np.ndarray | None = None
    prefix_lengths: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Any numbers will do: whole ones become int64, others float32, in memory as torch reads
        it."""
        for name in ("x", "y", "lengths", "position_ids", "loss_weights", "prefix_lengths"):
            value = getattr(self, name)
            if value is not None:
                if not isinstance(value, np.ndarray):
                    raise InputError(
                        f"a batch has {name} of type {type(value).__name__}: give numpy arrays, of "
                        "a torch tensor its .numpy()."
                    )
                floats = np.issubdtype(value.dtype, np.floating) or name == "loss_weights"
                if floats and name in ("lengths", "position_ids", "prefix_lengths"):
                    raise InputError(
                        f"a batch has {name} of type {value.dtype}: they must be whole numbers."
                    )
                kind = np.float32 if floats else np.int64
                object.__setattr__(self, name, np.ascontiguousarray(value, dtype=kind))
        if self.x.ndim not in (2, 3) or self.y.shape != self.x.shape[:2]:
            raise InputError(
                f"a batch has x of shape {self.x.shape} and y of {self.y.shape}: x must be tokens "
                "(batch, time) or vectors (batch, time, input_dim), and y (batch, time)."
            )
        wanted = {"position_ids": self.y.shape, "loss_weights": self.y.shape}
        wanted |= dict.fromkeys(("lengths", "note", "prefix_lengths"), self.y.shape[:1])
        for name, shape in wanted.items():
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise InputError(
                    f"a batch has {name} of shape {value.shape}: with x of {self.x.shape} it must "
                    f"be {shape}."
                )

    @cached_property
    def target_mask(self) -> np.ndarray:
        """(batch, time) whether there is a target."""
        return self.y != IGNORE

    @cached_property
    def targets(self) -> np.ndarray:
        """All targets, sequence by sequence."""
        return self.y[self.target_mask]

    @cached_property
    def row(self) -> np.ndarray:
        """The sequence of each target."""
        return self.target_mask.nonzero()[0]

    @cached_property
    def position(self) -> np.ndarray:
        """The place of each target in its row."""
        return self.target_mask.nonzero()[1]

    @property
    def weight_sum(self) -> float:
        """What a mean over the targets divides by: their number, or the sum of their weights."""
        if self.loss_weights is None:
            return float(self.target_mask.sum())
        return float(self.loss_weights[self.target_mask].sum(dtype=np.float64))

    def part(self, rank: int, world: int) -> Batch:
        """The share of one of `world` processes: every world-th sequence."""
        arrays: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        mine = {name: v[rank::world] for name, v in arrays.items() if v is not None}
        return replace(self, **mine)


Baseline = Callable[[Batch], Predicted]
"""Answers to a batch without a model."""


@dataclass(frozen=True)
class Task:
    """Base of all tasks: give `name`, `model_needs` and `batch`; the rest has defaults."""

    name: ClassVar[str] = ""
    about: ClassVar[str] = ""
    loss: ClassVar[Literal["cross_entropy", "squared_error"]] = "cross_entropy"
    takes_data: ClassVar[bool] = False
    """Whether the task reads files, which `with_data` chooses."""
    only_tests: ClassVar[bool] = False
    """Whether there is nothing to train on: runs of other tasks are measured by `--on`."""
    one_test: ClassVar[bool] = False
    """Whether runs of all seeds are tested on the same sequences, those of a file."""
    sequence_targets: ClassVar[int | None] = None
    """Targets of a sequence, where a task always has so many and may not have its data."""
    streams: ClassVar[bool] = False
    """Whether sequences are text without an end: `entp generate` prints them as they come, and
    slides over them beyond the model's context."""
    writes: ClassVar[bool] = False
    """Whether generated answers are texts of any length, which `measure_texts` reads."""

    def with_data(self, data: str | None) -> Self:
        """The task on these files, which `--data` names; None: those that it has, or the
        default."""
        if data is not None:
            raise InputError(f"{self.name} makes its own data: leave --data {data} out.")
        return self

    def for_model(self, folder: Path) -> Self:
        """The task as the pretrained model in this folder reads it, with its tokens where the task
        is text."""
        return self.with_tokenizer(folder)

    def with_tokenizer(self, folder: Path) -> Self:
        """A task on text that has no tokenizer yet, with that of a run or of a pretrained model."""
        return self

    def files(self) -> dict[str, bytes]:
        """What a run folder needs to hold so that the model can be used where the data is not."""
        return {}

    @property
    def more_splits(self) -> tuple[str, ...]:
        """Splits besides train, valid and test that `batch` can draw from."""
        return ()

    def for_seed(self, seed: int) -> Self:
        """The task of a run of this seed, where an experiment's seeds are to differ in more than
        the draws."""
        return self

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What evaluation measures; the first decides the best checkpoint, the last ties."""
        if self.loss == "squared_error":
            return (LOSS,)
        return (EXACT_MATCH, TOKEN_ACCURACY, LOSS)

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        """A score for each metric; None, or nothing, where it cannot be measured.

        Answers of a model, generated answers and baselines all come through here.
        """
        if self.loss == "squared_error":
            return {"loss": mean_loss(got)}
        return {
            "exact_match": exact_match(batch, got),
            "token_accuracy": token_accuracy(batch, got, self.token_slices(batch)),
            "loss": mean_loss(got),
        }

    def token_slices(self, batch: Batch) -> dict[str, np.ndarray] | None:
        """The bins of the targets by slice of token accuracy, as `metrics` names them. None: by
        length."""
        return None

    def measure_texts(self, batch: Batch, rows: list[list[int]]) -> dict[str, Score | None]:
        """Scores of the tokens that a model wrote after each prompt, of a task that `writes`."""
        raise NotImplementedError

    @property
    def most_new_tokens(self) -> int:
        """Tokens after which an answer is cut off, of a task that `writes`."""
        raise NotImplementedError

    def reordered(self, batch: Batch, rng: np.random.Generator) -> list[Batch]:
        """Queries of a batch again, with the examples before them in a random order and their
        targets at the same places; none where the order matters or there are no examples."""
        return []

    def baselines(self) -> dict[str, Baseline]:
        """Answers without a model, by name, to compare with."""
        return {}

    def caveats(self, sequences_read: int) -> list[str]:
        """What a reader of results must know after training read so many sequences."""
        return []

    def position_ids(self, tokens: np.ndarray) -> np.ndarray | None:
        """The position ids of tokens (batch, time), for generation; None if they are 0, 1, ..."""
        return None

    @property
    def prefix(self) -> int | None:
        """How many first tokens are given rather than predicted: the prefix of mode `prefix-lm`."""
        return None

    @property
    def has_prefix(self) -> bool:
        """Whether there is a prefix for mode `prefix-lm`: `prefix`, or a batch's prefix_lengths."""
        return self.prefix is not None

    @property
    def stop(self) -> int | None:
        """The token that ends a generated sequence, if there is one."""
        return None

    def prompts(self, seed: int, size: int) -> list[list[int]]:
        """What a person would let the model continue: test sequences up to their first target,
        fewer where a task has not as many."""
        batch = self.batch(seed, "test", 0, size)
        some = batch.target_mask.any(axis=1)
        first = batch.target_mask[some].argmax(axis=1)
        return [row[: at + 1].tolist() for row, at in zip(batch.x[some], first, strict=True)]

    def model_needs(self) -> dict[str, Any]:
        """`context_length`, and `vocab` or `input_dim`, and `outputs` if not the vocabulary, for
        ModelConfig."""
        raise self._without("model_needs")

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        """The batch of one step: the same arguments give the same batch, on any machine."""
        raise self._without("batch")

    def _without(self, method: str) -> InputError:
        return InputError(
            f"the task {self.name} has no method {method}: every task has model_needs and batch "
            "(docs/add-a-task.md)."
        )

    def split_batches(self, split: Split, size: int) -> int | None:
        """How many batches of this size hold a split exactly once; None if it has no end."""
        return None

    def rng(self, seed: int, split: Split, step: int) -> np.random.Generator:
        """Random numbers that belong to this (seed, split, step) alone."""
        splits = [*SPLITS, *self.more_splits]
        if split not in splits:
            raise one_of("split", split, splits)
        if not 0 <= seed < 2**32:
            raise InputError(
                f"seed {seed} is outside 0 to 2^32 - 1, where no two streams of data can meet."
            )
        return np.random.Generator(
            np.random.Philox(np.random.SeedSequence((seed, splits.index(split), step)))
        )

    def to_text(self, tokens: list[int]) -> str:
        """Tokens as a person reads them."""
        return " ".join(str(t) for t in tokens)

    def from_text(self, text: str) -> list[int]:
        """The tokens of a prompt; the inverse of to_text."""
        try:
            tokens = [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            raise InputError(
                f"the prompt {text!r} is not a list of whole numbers such as '3 1 4 1 5'."
            ) from None
        vocab = self.model_needs().get("vocab")
        bad = [t for t in tokens if not 0 <= t < vocab] if vocab is not None else []
        if bad and vocab is not None:
            raise InputError(
                f"the prompt has {bad[0]}, outside the vocabulary of {self.name}: allowed are 0 to "
                f"{vocab - 1}."
            )
        return tokens

    def draw(self, seed: int = 0) -> str:
        """One example, inputs above targets, a dot where there is no loss."""
        one = self.batch(seed, "train", 0, 1)
        length = one.x.shape[1] if one.lengths is None else int(one.lengths[0])
        xs = [self._cell(v) for v in one.x[0, :length]]
        ys = ["." if np.all(v == IGNORE) else self._cell(v) for v in one.y[0, :length]]
        width = max(map(len, xs + ys))
        per_line = max(1, 100 // (width + 1))
        lines = []
        for start in range(0, length, per_line):
            for label, row in (("input ", xs), ("target", ys)):
                lines.append(
                    f"{label} " + " ".join(v.rjust(width) for v in row[start : start + per_line])
                )
        return "\n".join(lines)

    def _cell(self, value: Any) -> str:
        if np.ndim(value):
            return "(" + " ".join(f"{v:.1f}" for v in value) + ")"
        return f"{value:.2f}" if isinstance(value, np.floating) else self.to_text([int(value)])


def few_sequences(there: int, read: int, of: str) -> list[str]:
    """The caveat of a task with fewer different sequences than training read; none with more."""
    if there >= read:
        return []
    return [
        f"There are only {there:,} different sequences of {of}, and training read {read:,}: most "
        "test sequences had been seen, so their accuracy does not tell a learned rule from "
        "memorised sequences."
    ]


TASKS: dict[str, str] = {
    "count2": "entp.tasks.counting:Count2",
    "count3": "entp.tasks.counting:Count3",
    "match3": "entp.tasks.counting:Match3",
    "addition": "entp.tasks.addition:Addition",
    "chase": "entp.tasks.pointers:Chase",
    "compose": "entp.tasks.composition:Compose",
    "path-star": "entp.tasks.path_star:PathStar",
    "icl": "entp.tasks.in_context:InContext",
    "text": "entp.tasks.text:Text",
    "clutrr": "entp.tasks.clutrr:Clutrr",
    "count-text": "entp.llm.counting_text:CountText",
    "winogrande": "entp.tasks.choices:Winogrande",
    "lambada": "entp.tasks.choices:Lambada",
    "piqa": "entp.tasks.choices:Piqa",
    "sciq": "entp.tasks.choices:Sciq",
    "arc_easy": "entp.tasks.choices:ArcEasy",
}
"""Built-in tasks and where their class lives. `module:Class` names any other."""


def task_class(name: str) -> type[Task]:
    """The class of a task, by its name or as `module:Class` for a task of your own."""
    cls = find_named("task", name, TASKS, "module:Class")
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise InputError(f"task {name!r} is not a class derived from entp.tasks.Task.")
    return cls


def read_prompt(task: Task, text: str) -> list[int]:
    """The tokens of a person's text; what a task of one's own stumbles over is an InputError as
    well."""
    try:
        return task.from_text(text)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{task.name} cannot read the prompt {text!r}: {error}") from None


def task_name(task: Task) -> str:
    """The name under which `task_class` finds this task again."""
    path = f"{type(task).__module__}:{type(task).__qualname__}"
    return task.name if TASKS.get(task.name) == path else path
