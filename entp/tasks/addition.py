"""Addition in the paper's format: `$12+34=46$`, or with the sum reversed, `$12+34=64$`.

`layout` says what a training sequence is: one line with the loss on its answer, or a window of the
concatenated lines with the loss on every character, which is what the authors ran. Tests are
always one line at a time. `sampling` says which sums there are (entp/tasks/addition_data.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from entp.errors import InputError
from entp.fields import check_numbers, choice_problems, raise_problems
from entp.tasks.addition_data import (
    VALID,
    Lines,
    Pairs,
    all_pairs,
    join,
    length_pairs,
    most_paper_examples,
    one_text,
    operand_lengths,
    paper_pairs,
    write_lines,
)
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
    right_answers,
    token_accuracy,
)

ALPHABET = "$+=0123456789"
"""Of lines; windows have a line feed as well."""
MOST_DIGITS = 100


@dataclass(frozen=True)
class Addition(Task):
    """Sums of two numbers; the loss is on the answer and the closing `$`.

    input   $  1  2  +  3  4  =  6  4
    target  .  .  .  .  .  .  6  4  $
    """

    name: ClassVar[str] = "addition"
    about: ClassVar[str] = "add two numbers, trained on a part of all sums and scored on others"

    digits: int = 2
    """Numbers to train on go from 0 to 10^digits - 1."""
    train_examples: int = 1000
    """Distinct sums to train on; validation and test have others."""
    reversed: bool = True
    """Write the sum with its last digit first, as a person computes it."""
    split_seed: int = 0
    """Decides which sums are for training. Each seed of a recipe's arm has its own."""
    layout: Literal["lines", "windows"] = "lines"
    """A training sequence: one line, or a window of all lines joined by line feeds."""
    sampling: Literal["all", "paper", "lengths"] = "all"
    """all: every pair of numbers. paper: nine tenths of the longest dropped, splits stratified by
    digits and carries, all one-digit pairs in train. lengths: the digits of each number uniform."""
    test_digits: int | None = None
    """For sampling lengths: test numbers have up to so many digits."""
    test: Literal["longer", "grid"] = "longer"
    """For sampling lengths: one number longer than in training, or all pairs of lengths."""
    window: int = 64
    """Characters of a window."""
    operands: Literal["plain", "reversed", "padded"] = "plain"
    """Numbers as they are written, units first, or with zeros up to equal length."""
    positions: Literal["index", "abacus", "coupled"] = "index"
    """Position ids. index: the place in the sequence. abacus: that in the number, 0 elsewhere.
    coupled: the same for digits of the same place in both numbers and in the sum."""
    max_offset: int = 100
    """For abacus and coupled: training adds a random number below this to the ids of digits."""

    def __post_init__(self) -> None:
        check_numbers(self, "task.")
        raise_problems(choice_problems(self, "task.") + self._problems())

    def _problems(self) -> list[str]:
        problems = []
        most = {"all": 3, "paper": 3, "lengths": MOST_DIGITS}.get(self.sampling, 0)
        least = {"all": 1, "paper": 2, "lengths": 3}.get(self.sampling, 1)
        if self.split_seed < 0:
            problems.append(f"task.split_seed is {self.split_seed}: it must be at least 0")
        if not least <= self.digits <= most:
            return [
                *problems,
                f"task.digits is {self.digits}: allowed are {least} to {most} with sampling "
                f"{self.sampling}",
            ]
        fewest, most = self._example_limits()
        if not fewest <= self.train_examples <= most:
            problems.append(
                f"task.train_examples is {self.train_examples}: allowed are {fewest} to {most} "
                f"with {self.digits} digits and sampling {self.sampling}"
            )
        problems += self._test_problems()
        if self.layout == "windows" and self.positions != "index":
            problems.append(
                f"task.positions {self.positions} is for layout lines: a window may begin within a "
                "number"
            )
        if self.positions == "coupled" and not self.reversed:
            problems.append("task.positions coupled needs task.reversed: the sum units first")
        if self.window < 2:
            problems.append(f"task.window is {self.window}: it must be at least 2")
        if self.max_offset < 1:
            problems.append(f"task.max_offset is {self.max_offset}: it must be at least 1")
        return problems

    def _example_limits(self) -> tuple[int, int]:
        if self.sampling == "all":
            return 1, 100**self.digits - 2
        if self.sampling == "paper":
            return 101, most_paper_examples(self.digits)
        return 1, max(1, 100**self.digits // 4 - VALID)

    def _test_problems(self) -> list[str]:
        if self.sampling != "lengths":
            if self.test_digits is not None:
                return [f"task.test_digits is for sampling lengths, not for {self.sampling}"]
            return []
        if not self.digits < self.longest <= MOST_DIGITS:
            return [
                f"task.test_digits is {self.test_digits}: it must be above task.digits "
                f"{self.digits}, and at most {MOST_DIGITS}"
            ]
        return []

    @property
    def longest(self) -> int:
        """Digits of the longest number, in training or test."""
        if self.sampling != "lengths":
            return self.digits
        return self.digits + 5 if self.test_digits is None else self.test_digits

    @property
    def more_splits(self) -> tuple[str, ...]:
        """Of windows: validation sums one line at a time, as tests are."""
        return ("valid_lines",) if self.layout == "windows" else ()

    def for_seed(self, seed: int) -> Addition:
        """As in the authors' runs, the seed draws the split too."""
        return replace(self, split_seed=seed)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Exact match also by the digits of the longer number, by carries, by whether b + a was
        trained on; on a grid, by the digits of both numbers."""
        slices: tuple[str, ...] = ("digits", "carries", "swap in train")
        if self.sampling == "lengths" and self.test == "grid":
            slices = ("digits", "operands")
        return replace(EXACT_MATCH, slices=slices), TOKEN_ACCURACY, LOSS

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        found = {"token_accuracy": token_accuracy(batch, got), "loss": mean_loss(got)}
        if batch.note is None:
            return {"exact_match": self._whole_lines(batch, got), **found}
        every = self._data().slices
        wanted = self.metrics[0].slices
        slices = {name: bins[batch.note] for name, bins in every.items() if name in wanted}
        return {"exact_match": exact_match(batch, got, slices), **found}

    def _whole_lines(self, batch: Batch, got: Predicted) -> Score:
        """Of windows: the lines that begin and end within them, and those of them with no wrong
        character in the answer."""
        end, sign = self.alphabet.index("\n"), self.alphabet.index("=")
        x, y = batch.x, batch.y
        line = (x == end).cumsum(1)
        place = np.arange(x.shape[1])
        last_end = np.maximum.accumulate(np.where(x == end, place, -1), 1)
        last_sign = np.maximum.accumulate(np.where(x == sign, place, -1), 1)
        asked = (last_sign > last_end) & (y != end) & (line > 0)
        closing = asked & (y == self.stop)
        wrong = np.zeros(x.shape, dtype=bool)
        wrong[batch.row, batch.position] = ~right_answers(batch, got)
        lines = int(line.max(initial=0)) + 1
        at = np.arange(len(x))[:, None] * lines + line
        size = len(x) * lines
        whole = np.bincount(at[closing], minlength=size) > 0
        failed = np.bincount(at[asked & wrong], minlength=size) > 0
        right = (whole & ~failed).reshape(len(x), lines).sum(1)
        return Score(right.astype(float), whole.reshape(len(x), lines).sum(1).astype(float))

    @property
    def alphabet(self) -> str:
        return ALPHABET + "\n" if self.layout == "windows" else ALPHABET

    @property
    def stop(self) -> int:
        return self.alphabet.index("$")

    def model_needs(self) -> dict[str, Any]:
        length = 3 * self.longest + 5
        if self.layout == "windows":
            length = max(self.window, length - 1)
        if self.positions != "index":
            length = max(length, self.max_offset + self.longest + 3)
        return {"vocab": len(self.alphabet), "context_length": length}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        """Training lines and windows at random; held-out sums in an order by the seed, each once
        before any comes twice. Rows beyond the last sum have no target."""
        data = self._data()
        if self._is_drawn(split):
            rng = self.rng(seed, split, step)
            if self.layout == "windows":
                return self._windows(data.texts[split], rng, size)
            rows = rng.integers(*data.rows("train"), size)
            return self._lines(rows, rng)
        order = _order(self, seed, split)
        number = step % _batches(order, size) * size + np.arange(size)
        found = self._lines(order[number % len(order)])
        there = number[:, None] < len(order)
        return replace(found, y=np.where(there, found.y, IGNORE))

    def split_batches(self, split: Split, size: int) -> int | None:
        return None if self._is_drawn(split) else _batches(_order(self, 0, split), size)

    def _is_drawn(self, split: Split) -> bool:
        """Whether sequences of a split are drawn at random, without an end."""
        return split == "train" or (split == "valid" and self.layout == "windows")

    def _windows(self, text: np.ndarray, rng: np.random.Generator, size: int) -> Batch:
        """Windows that begin anywhere."""
        starts = rng.integers(0, len(text) - self.window, size)
        tokens = text[starts[:, None] + np.arange(self.window + 1)]
        return Batch(tokens[:, :-1], tokens[:, 1:])

    def _lines(self, rows: np.ndarray, rng: np.random.Generator | None = None) -> Batch:
        """These sums; with rng, as in training, positions get their random offset."""
        lines = self._data().lines
        lengths, equals = lines.lengths[rows] - 1, lines.equals[rows]
        tokens = lines.tokens[rows, : int(lengths.max()) + 1].astype(np.int64)
        return self._answers(tokens, lengths, equals, rng, note=rows)

    def _answers(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        equals: np.ndarray,
        rng: np.random.Generator | None = None,
        note: np.ndarray | None = None,
    ) -> Batch:
        """Inputs, and targets from each `=` to the end of its line."""
        place = np.arange(tokens.shape[1] - 1)
        asked = (place >= equals[:, None]) & (place < lengths[:, None])
        x = np.where(place < lengths[:, None], tokens[:, :-1], 0)
        y = np.where(asked, tokens[:, 1:], IGNORE)
        return Batch(x, y, lengths, self._offset_ids(x, rng), note=note)

    def _offset_ids(self, x: np.ndarray, rng: np.random.Generator | None) -> np.ndarray | None:
        """Position ids, in training with a random offset: abacus has one for the batch, coupled
        one for each sequence."""
        ids = self.position_ids(x)
        if ids is None or rng is None:
            return ids
        count = 1 if self.positions == "abacus" else len(x)
        return np.where(ids > 0, ids + rng.integers(0, self.max_offset, (count, 1)), ids)

    def position_ids(self, tokens: np.ndarray) -> np.ndarray | None:
        """As in evaluation, without offset: abacus ids are 1 for the first digit of a number.
        Coupled ids are 1 for signs and 2 for units."""
        if self.positions == "index":
            return None
        place = np.arange(tokens.shape[1])
        digit = tokens >= ALPHABET.index("0")
        if self.positions == "abacus":
            before = np.maximum.accumulate(np.where(digit, -1, place), 1)
            return np.where(digit, place - before, 0)
        plus, sign = (_first(tokens == ALPHABET.index(c)) for c in "+=")
        sides = (place < plus, (place >= plus) & (place < sign))
        steps = np.select(sides, (plus - place, sign - place), place - sign)
        if self.operands == "reversed":
            steps = np.select(sides, (place, place - plus), place - sign)
        ids = np.where(digit, 1 + steps, 1)
        ids[:, 0] = 0
        return np.where(place <= sign, ids, np.where(digit, ids, 0))

    def line(self, a: int, b: int) -> str:
        """`$12+34=64$`."""
        places = max(len(str(a)), len(str(b)))
        digits = [[int(c) for c in str(n)[::-1].ljust(places, "0")] for n in (a, b)]
        pairs = Pairs(*(np.array([d], dtype=np.int8) for d in digits))
        written = self._written(pairs, newline=False)
        return self.to_text(written.tokens[0, : written.lengths[0]].tolist())

    def encode(self, lines: list[str]) -> Batch:
        """Lines to inputs and targets, padded on the right."""
        lengths = np.array([len(line) - 1 for line in lines])
        tokens = np.zeros((len(lines), lengths.max() + 1), dtype=np.int64)
        for row, line in enumerate(lines):
            tokens[row, : len(line)] = self.from_text(line)
        equals = np.array([line.index("=") for line in lines])
        return self._answers(tokens, lengths, equals)

    def to_text(self, tokens: list[int]) -> str:
        return "".join(self.alphabet[t] for t in tokens)

    def from_text(self, text: str) -> list[int]:
        bad = sorted(set(text) - set(self.alphabet))
        if bad:
            raise InputError(
                f"the prompt has {bad[0]!r}: allowed are the characters of {ALPHABET}, as in "
                "'$12+34='."
            )
        return [self.alphabet.index(c) for c in text]

    def _written(self, pairs: Pairs, newline: bool) -> Lines:
        return write_lines(pairs, self.alphabet, self.operands, self.reversed, newline)

    def _data(self) -> _Data:
        return _data(self)


class _Data(NamedTuple):
    """All sums of a task, train, valid and test one after the other."""

    ends: dict[str, int]
    """Where each split ends."""
    lines: Lines
    slices: dict[str, np.ndarray]
    """By slice, the bin of each sum."""
    texts: dict[str, np.ndarray]
    """For windows: all lines of train and of valid."""

    def rows(self, split: str) -> tuple[int, int]:
        """First and end of a split."""
        names = list(self.ends)
        at = names.index(split)
        return (self.ends[names[at - 1]] if at else 0), self.ends[split]


@lru_cache(maxsize=8)
def _data(task: Addition) -> _Data:
    splits = _splits(task)
    ends = dict(zip(splits, np.cumsum([len(p) for p in splits.values()]).tolist(), strict=True))
    pairs = join(list(splits.values()))
    swapped = np.isin(pairs.keys(swapped=True), pairs[: ends["train"]].keys())
    slices = {
        "digits": pairs.digits,
        "carries": pairs.carries,
        "swap in train": np.where(swapped, "yes", "no"),
    }
    if task.test == "grid":
        slices["operands"] = np.array(list(operand_lengths(pairs)))
    texts = {}
    if task.layout == "windows":
        texts = {s: one_text(task._written(splits[s], newline=True)) for s in ("train", "valid")}
    return _Data(ends, task._written(pairs, newline=False), slices, texts)


def _splits(task: Addition) -> dict[str, Pairs]:
    """Train, valid and test, whatever the sums are written like."""
    if task.sampling == "all":
        return all_pairs(task.digits, task.train_examples, task.split_seed)
    if task.sampling == "paper":
        return paper_pairs(task.digits, task.train_examples, task.split_seed)
    grid = task.test == "grid"
    return length_pairs(task.digits, task.train_examples, task.split_seed, task.longest, grid)


@lru_cache(maxsize=16)
def _order(task: Addition, seed: int, split: str) -> np.ndarray:
    """The sums of validation or test in the order of this seed: each comes once before any comes
    twice."""
    rng = task.rng(seed, split, 0)
    first, end = task._data().rows("valid" if split == "valid_lines" else split)
    return rng.permutation(np.arange(first, end))


def _batches(order: np.ndarray, size: int) -> int:
    """How many batches hold all of them."""
    return -(-len(order) // size)


def _first(where: np.ndarray) -> np.ndarray:
    """(batch, 1) the first place where it is true; behind the end if nowhere."""
    return np.where(where.any(1), where.argmax(1), where.shape[1])[:, None]
