"""Count3, Count2 and Match3': the paper's counting tasks.

Count3(x_1..x_n) = |{(i, j) in [n]^2 : x_i + x_j + x_n = 0 mod n}| mod n
Count2(x_1..x_n) = |{i in [n] : x_i + x_n = 0 mod n}| mod n
Match3'(x_1..x_n) = 1 if there are i, j with x_1 + x_i + x_j = 0 mod 128, else 0

(paper: eq. Count3, a footnote in "Count3 with LLM", eq. Match3')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from entp.errors import InputError
from entp.fields import check_numbers
from entp.tasks.base import IGNORE, Batch, Split, Task, few_sequences


def count3_next(x: np.ndarray) -> np.ndarray:
    """Count3 of each row of x (batch, n), in O(n) per row: count the residues, then look each
    partner up."""
    batch, n = x.shape
    modulus = x.dtype.type(n)  # stay in the narrow type: these passes are bound by bytes
    residue = (
        x - x // modulus * modulus
    )  # numpy divides by a scalar far faster than it takes remainders
    row_start = np.arange(0, batch * n, n)[:, None]
    counts = np.bincount((residue + row_start).ravel(), minlength=batch * n)
    partner = -residue[:, -1:] % modulus - residue
    partner += (partner < 0) * modulus
    return counts.take(partner + row_start).sum(axis=1) % n


def count2_next(x: np.ndarray) -> np.ndarray:
    """Count2 of each row of x (batch, n)."""
    n = x.shape[1]
    return ((x + x[:, -1:]) % n == 0).sum(axis=1) % n


def match3_labels(x: np.ndarray, modulus: int) -> np.ndarray:
    """Match3' after each position of x (batch, n): 0s, then 1s from the first match on."""
    batch, n = x.shape
    rows = np.arange(batch)
    residue = x % modulus
    seen = np.zeros((batch, modulus), dtype=bool)
    labels = np.empty((batch, n), dtype=np.int64)
    found = np.zeros(batch, dtype=bool)
    for t in range(n):
        new = residue[:, t]
        seen[rows, new] = True  # before the look-up: i = j is allowed
        found |= seen[rows, (-residue[:, 0] - new) % modulus]
        labels[:, t] = found
    return labels


@dataclass(frozen=True)
class _Counting(Task):
    """A random seed, then integers made by a rule from all before them; the loss is on the
    rule-made ones.

    input   52 14 22 48 ... 51 41  0 13 14
    target   .  .  .  . ...  .  0 13 14 17      (targets start at the last seed integer)
    """

    prompt_length: int = 16
    """Random integers at the start of each sequence, without loss."""
    length: int = 64
    """Integers per sequence, the seed included."""
    num_values: int = 64
    """The seed's integers are drawn from 0..num_values-1."""

    def __post_init__(self) -> None:
        check_numbers(self, "task.")
        if not 1 <= self.prompt_length < self.length:
            raise InputError(
                f"task.prompt_length {self.prompt_length} must be at least 1 and below task.length "
                f"{self.length}."
            )
        if self.num_values < 1:
            raise InputError(f"task.num_values is {self.num_values}: it must be at least 1.")

    @staticmethod
    def rule(x: np.ndarray) -> np.ndarray:
        """The next integer after each row of x (batch, n)."""
        raise NotImplementedError

    @property
    def prefix(self) -> int:
        """The seed is the prefix of mode `prefix-lm`, as in the paper."""
        return self.prompt_length

    def caveats(self, sequences_read: int) -> list[str]:
        there = self.num_values**self.prompt_length
        return few_sequences(there, sequences_read, f"{self.length} integers")

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": max(self.num_values, self.length - 1), "context_length": self.length}

    def extend(self, seeds: np.ndarray) -> np.ndarray:
        """Seeds (batch, prompt_length) continued by the rule to (batch, length)."""
        start = seeds.shape[1]
        narrow = np.int16 if max(self.num_values, self.length) < 2**14 else np.int64
        out = np.empty((len(seeds), self.length), dtype=narrow)
        out[:, :start] = seeds
        for slab in np.array_split(out, max(1, len(out) // 256)):  # a slab stays in the cache
            for n in range(start, self.length):
                slab[:, n] = self.rule(slab[:, :n])
        return out.astype(np.int64)

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        seeds = self.rng(seed, split, step).integers(0, self.num_values, (size, self.prompt_length))
        sequences = self.extend(seeds)
        y = sequences[:, 1:].copy()
        y[:, : self.prompt_length - 1] = IGNORE
        return Batch(sequences[:, :-1], y)


@dataclass(frozen=True)
class Count3(_Counting):
    """Each integer counts the pairs that sum, with the last one, to 0 modulo the length so far."""

    name: ClassVar[str] = "count3"
    about: ClassVar[str] = (
        "count pairs i, j with x_i + x_j + x_n = 0 mod n (the paper: decoders do not learn it)"
    )
    rule = staticmethod(count3_next)


@dataclass(frozen=True)
class Count2(_Counting):
    """Each integer counts those that sum, with the last one, to 0 modulo the length so far."""

    name: ClassVar[str] = "count2"
    about: ClassVar[str] = "count i with x_i + x_n = 0 mod n (the paper's control)"
    rule = staticmethod(count2_next)


@dataclass(frozen=True)
class Match3(Task):
    """Random integers; after each one, is there a pair that sums with the first to 0 modulo 128?

    input   91  7 30 ...
    target   0  0  1 ...
    """

    name: ClassVar[str] = "match3"
    about: ClassVar[str] = (
        "is there a pair with x_1 + x_i + x_j = 0 mod 128? asked at every position (the paper: "
        "both learn it)"
    )

    length: int = 64
    """Integers per sequence."""
    modulus: int = 128
    """The sum must be 0 modulo this."""
    num_values: int | None = None
    """The integers are drawn from 0..num_values-1. None: from 0..modulus-1."""

    def __post_init__(self) -> None:
        check_numbers(self, "task.")
        if self.length < 1 or self.modulus < 1:
            raise InputError(
                f"task.length {self.length} and task.modulus {self.modulus} must be at least 1."
            )
        if self.num_values is not None and self.num_values < 1:
            raise InputError(
                f"task.num_values is {self.num_values}: it must be at least 1, or None."
            )

    def model_needs(self) -> dict[str, Any]:
        return {
            "vocab": self.num_values or self.modulus,
            "context_length": self.length,
            "outputs": 2,
        }

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        x = self.rng(seed, split, step).integers(
            0, self.num_values or self.modulus, (size, self.length)
        )
        return Batch(x, match3_labels(x, self.modulus))
