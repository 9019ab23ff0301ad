"""Addition, one line per sequence, as in the paper's format: `$12+34=46$`, or with the sum reversed
`$12+34=64$`.

The pairs of numbers are split once: `train_examples` for training, the rest for validation and
test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from entp.errors import InputError
from entp.fields import check_numbers
from entp.tasks.base import IGNORE, Batch, Split, Task
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

ALPHABET = "$+=0123456789"


@dataclass(frozen=True)
class Addition(Task):
    """Sums of two numbers; the loss is on the answer and the closing `$`.

    input   $  1  2  +  3  4  =  6  4
    target  .  .  .  .  .  .  6  4  $
    """

    name: ClassVar[str] = "addition"
    about: ClassVar[str] = "add two numbers, trained on a part of all sums and scored on others"

    digits: int = 2
    """Numbers go from 0 to 10^digits - 1."""
    train_examples: int = 1000
    """Distinct sums to train on; validation and test share the others."""
    reversed: bool = True
    """Write the sum with its last digit first, as a person computes it."""
    split_seed: int = 0
    """Decides which sums are for training."""

    def __post_init__(self) -> None:
        check_numbers(self, "task.")
        if self.split_seed < 0:
            raise InputError(f"task.split_seed is {self.split_seed}: it must be at least 0.")
        if not 1 <= self.digits <= 3:
            raise InputError(f"task.digits is {self.digits}: allowed are 1, 2 and 3.")
        most = 100**self.digits - 2
        if not 1 <= self.train_examples <= most:
            raise InputError(
                f"task.train_examples is {self.train_examples}: allowed are 1 to {most} with "
                f"{self.digits} "
                "digits."
            )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Exact match also by the digits of the longer number and by carries."""
        return replace(EXACT_MATCH, slices=("digits", "carries")), TOKEN_ACCURACY, LOSS

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        a, b = self.operands(batch)
        slices = {"digits": count_digits(np.maximum(a, b)), "carries": count_carries(a, b)}
        return {
            "exact_match": exact_match(batch, got, slices),
            "token_accuracy": token_accuracy(batch, got),
            "loss": mean_loss(got),
        }

    def operands(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """The two numbers of each sequence, from its note."""
        assert batch.note is not None
        return batch.note // 10**self.digits, batch.note % 10**self.digits

    @property
    def stop(self) -> int:
        return ALPHABET.index("$")

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": len(ALPHABET), "context_length": 3 * self.digits + 5}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        rng = self.rng(seed, split, step)
        pairs = _split_pairs(self.digits, self.train_examples, self.split_seed)[split]
        chosen = pairs[rng.integers(0, len(pairs), size)]
        lines = [self.line(int(p) // 10**self.digits, int(p) % 10**self.digits) for p in chosen]
        return replace(self.encode(lines), note=chosen)

    def line(self, a: int, b: int) -> str:
        """`$12+34=64$`."""
        total = str(a + b)
        return f"${a}+{b}={total[::-1] if self.reversed else total}$"

    def encode(self, lines: list[str]) -> Batch:
        """Lines to inputs and targets, padded on the right."""
        lengths = np.array([len(line) - 1 for line in lines])
        x = np.zeros((len(lines), lengths.max()), dtype=np.int64)
        y = np.full_like(x, IGNORE)
        for row, line in enumerate(lines):
            tokens = self.from_text(line)
            x[row, : lengths[row]] = tokens[:-1]
            asked = slice(line.index("="), lengths[row])
            y[row, asked] = tokens[1:][asked]
        return Batch(x, y, lengths)

    def to_text(self, tokens: list[int]) -> str:
        return "".join(ALPHABET[t] for t in tokens)

    def from_text(self, text: str) -> list[int]:
        bad = sorted(set(text) - set(ALPHABET))
        if bad:
            raise InputError(
                f"the prompt has {bad[0]!r}: allowed are the characters of {ALPHABET}, as in "
                "'$12+34='."
            )
        return [ALPHABET.index(c) for c in text]


@lru_cache(maxsize=8)
def _split_pairs(digits: int, examples: int, split_seed: int) -> dict[str, np.ndarray]:
    """All pairs a 10^digits + b in a fixed random order, cut into train, valid and test."""
    order = np.random.Generator(np.random.Philox(split_seed)).permutation(100**digits)
    rest = order[examples:]
    return {
        "train": order[:examples],
        "valid": rest[: len(rest) // 2],
        "test": rest[len(rest) // 2 :],
    }


def count_digits(numbers: np.ndarray) -> np.ndarray:
    """Digits of each number as it is written; 1 for 0."""
    digits = np.ones_like(numbers)
    while (numbers >= 10).any():
        numbers = numbers // 10
        digits += numbers > 0
    return digits


def count_carries(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How often 1 is carried when a and b are added digit by digit."""
    carries, carry = np.zeros_like(a), np.zeros_like(a)
    while ((a > 0) | (b > 0)).any():
        carry = (a % 10 + b % 10 + carry) // 10
        carries += carry
        a, b = a // 10, b // 10
    return carries
