"""Composition: functions in tables, then a start and choices that say which function comes next.

After chase: there every step follows the same table, here each step has a table of its own, and
what it does depends on a choice that comes after all tables.

Chen, Peng and Wu (2024, arXiv:2412.02975) prove that a decoder of a constant number of layers needs
a width that grows like a power of the input's length to compose as many functions in sequence, and
that one layer more, or an encoder with exponentially fewer, do with little. This task has that
shape. It is not their function: we have read their abstract and not their definition, theirs is
about lengths that grow, and nothing of theirs is known to carry over to tables of one size or to
permutations. docs/theory.md has what is known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from entp.errors import InputError
from entp.fields import check_numbers, choice_problems, raise_problems
from entp.tasks.base import IGNORE, Baseline, Batch, Split, Task, few_sequences
from entp.tasks.metrics import EXACT_MATCH, LOSS, TOKEN_ACCURACY, Metric, Predicted


@dataclass(frozen=True)
class Compose(Task):
    """T tables of c permutations of 0..m-1, a start s, T choices; after w_k the k-th value i_k.

    i_0 = s and i_b = f_b(w_b, i_(b-1)); table b is f_b(0, 0..m-1), f_b(1, 0..m-1), ...

    input    0 1 1 0  1 0 0 1 | 1 | 0 1      T = 2, c = 2, m = 2
    target   . . . .  . . . . | . | 1 1      f_1(0, 1) = 1, f_2(1, 1) = 1
    """

    name: ClassVar[str] = "compose"
    about: ClassVar[str] = (
        "take 1, 2, ... T steps, each by its own table and a choice that comes after all tables"
    )

    tables: int = 4
    """Tables, and steps, T."""
    choices: int = 4
    """Permutations in a table, c; a step takes the one that its choice names."""
    size: int = 8
    """Values that are permuted, m."""
    order: Literal["first-to-last", "last-to-first"] = "first-to-last"
    """How tables stand in the sequence. last-to-first: the next step's table comes before."""

    def __post_init__(self) -> None:
        check_numbers(self, "task.")
        raise_problems(choice_problems(self, "task."))
        if min(self.tables, self.choices) < 1 or self.size < 2:
            raise InputError(
                f"task.tables {self.tables} and task.choices {self.choices} must be at least 1, "
                f"and task.size {self.size} at least 2."
            )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return EXACT_MATCH, replace(TOKEN_ACCURACY, slices=("steps",)), LOSS

    def token_slices(self, batch: Batch) -> dict[str, np.ndarray]:
        return {"steps": batch.position - self.start_at}

    def baselines(self) -> dict[str, Baseline]:
        return {"guess": self._guess, "one step": self._one_step}

    def _guess(self, batch: Batch) -> Predicted:
        """Always 0, all values being equally likely."""
        loss = np.full(len(batch.targets), math.log(self.size))
        return Predicted(np.zeros_like(batch.targets), loss)

    def _one_step(self, batch: Batch) -> Predicted:
        """The value after the first step, everywhere."""
        x = batch.x[batch.row]
        start, choice = x[:, self.start_at], x[:, self.start_at + 1]
        at = self.table_at(1) + self.size * choice + start
        return Predicted(np.take_along_axis(x, at[:, None], axis=1)[:, 0], None)

    def caveats(self, sequences_read: int) -> list[str]:
        tables = math.factorial(self.size) ** (self.choices * self.tables)
        there = tables * self.size * self.choices**self.tables
        of = f"{self.tables} tables of {self.choices} permutations of {self.size}"
        return few_sequences(there, sequences_read, of)

    @property
    def start_at(self) -> int:
        """The position of the start: tables are before it, choices after it."""
        return self.tables * self.choices * self.size

    def table_at(self, number: int) -> int:
        """The position where a table begins; the first is number 1."""
        before = number - 1 if self.order == "first-to-last" else self.tables - number
        return before * self.choices * self.size

    @property
    def prefix(self) -> int:
        """Tables and start are the prefix of mode `prefix-lm`."""
        return self.start_at + 1

    def model_needs(self) -> dict[str, Any]:
        return {
            "vocab": max(self.size, self.choices),
            "context_length": self.start_at + 1 + self.tables,
        }

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        rng = self.rng(seed, split, step)
        shape = (size, self.tables, self.choices, self.size)
        tables = rng.permuted(np.broadcast_to(np.arange(self.size), shape), axis=-1)
        start = rng.integers(0, self.size, (size, 1))
        choices = rng.integers(0, self.choices, (size, self.tables))
        return self.lay_out(tables, start, choices)

    def lay_out(self, tables: np.ndarray, start: np.ndarray, choices: np.ndarray) -> Batch:
        """The sequences of tables (batch, T, c, m), starts (batch, 1) and choices (batch, T)."""
        placed = tables if self.order == "first-to-last" else tables[:, ::-1]
        x = np.concatenate([placed.reshape(len(tables), -1), start, choices], axis=1)
        y = np.full_like(x, IGNORE)
        y[:, self.start_at + 1 :] = self.answers(tables, start, choices)
        return Batch(x, y)

    def answers(self, tables: np.ndarray, start: np.ndarray, choices: np.ndarray) -> np.ndarray:
        """(batch, T) the value after each step."""
        value, every = start[:, 0], np.arange(len(start))
        answers = np.empty_like(choices)
        for k in range(self.tables):
            value = tables[every, k, choices[:, k], value]
            answers[:, k] = value
        return answers
