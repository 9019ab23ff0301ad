"""Addition: right sums, splits that never meet, and targets on the answer only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entp.errors import InputError
from entp.tasks.addition import (
    ALPHABET,
    Addition,
    _split_pairs,
    count_carries,
    count_digits,
)
from entp.tasks.base import IGNORE, SPLITS
from entp.tasks.metrics import Predicted, Totals


def lines_of(task: Addition, split: str, size: int = 64, step: int = 0) -> list[str]:
    """The lines of a batch, put together again from inputs and targets."""
    batch = task.batch(0, split, step, size)  # type: ignore[arg-type]
    assert batch.lengths is not None
    return [
        task.to_text([*row[:n].tolist(), int(y[n - 1])])
        for row, y, n in zip(batch.x, batch.y, batch.lengths, strict=True)
    ]


@given(st.integers(1, 3), st.booleans(), st.sampled_from(sorted(SPLITS)))
def test_line_is_a_right_sum(digits: int, backwards: bool, split: str) -> None:
    for line in lines_of(Addition(digits=digits, train_examples=50, reversed=backwards), split):
        assert line.startswith("$")
        assert line.endswith("$")
        terms, answer = line.strip("$").split("=")
        a, b = map(int, terms.split("+"))
        assert int(answer[::-1] if backwards else answer) == a + b
        assert max(a, b) < 10**digits


def test_targets_are_the_answer_and_its_end() -> None:
    task = Addition(digits=2, reversed=False)
    batch = task.encode(["$12+34=46$", "$1+2=3$"])
    assert task.to_text([t for t in batch.y[0].tolist() if t != IGNORE]) == "46$"
    assert task.to_text([t for t in batch.y[1].tolist() if t != IGNORE]) == "3$"
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [9, 6]
    assert (batch.y[1, 6:] == IGNORE).all()
    first = (batch.y != IGNORE).argmax(axis=1)
    assert [ALPHABET[batch.x[i, t]] for i, t in enumerate(first)] == ["=", "="]


def test_splits_never_meet() -> None:
    task = Addition(digits=1, train_examples=30)
    seen = {
        split: {line for step in range(20) for line in lines_of(task, split, step=step)}
        for split in SPLITS
    }
    assert not seen["train"] & seen["valid"]
    assert not seen["train"] & seen["test"]
    assert not seen["valid"] & seen["test"]
    assert len(seen["train"]) <= 30
    assert sum(map(len, _split_pairs(1, 30, 0).values())) == 100  # and every sum is in one


def test_split_depends_on_its_own_seed() -> None:
    one, same, other = (
        Addition(train_examples=50, split_seed=seed).batch(0, "train", 0, 64) for seed in (1, 1, 2)
    )
    assert np.array_equal(one.x, same.x)
    assert one.x.shape != other.x.shape or not np.array_equal(one.x, other.x)


def test_drawing_has_no_padding_and_ends_with_the_stop() -> None:
    task = Addition(reversed=False)
    assert task.to_text([task.stop]) == "$"
    for seed in range(20):
        inputs, targets = (line[7:].split() for line in task.draw(seed).splitlines())
        a, b = map(int, "".join(inputs)[1:].split("=")[0].split("+"))
        assert "".join(inputs) == f"${a}+{b}={a + b}"
        assert "".join(targets).lstrip(".") == f"{a + b}$"


def test_longest_line_fits_the_context() -> None:
    task = Addition(digits=3, train_examples=10)
    longest = task.encode([task.line(999, 999)])
    assert longest.x.shape[1] <= task.model_needs()["context_length"]


def test_prompt_ends_with_the_equals_sign() -> None:
    task = Addition()
    for prompt in task.prompts(0, 5):
        text = task.to_text(prompt)
        assert text.startswith("$")
        assert text.endswith("=")
        assert task.from_text(text) == prompt


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digits", 0),
        ("digits", 4),
        ("train_examples", 0),
        ("train_examples", 9999),
        ("split_seed", -1),
    ],
)
def test_addition_refuses_sizes(field: str, value: int) -> None:
    with pytest.raises(InputError, match=f"task.{field} is {value}"):
        Addition(**{field: value})


def test_text_refuses_other_characters() -> None:
    with pytest.raises(InputError, match="'x'"):
        Addition().from_text("$1x2=")


def test_digits_and_carries_by_definition() -> None:
    """By strings and by adding digit by digit, for all pairs below 120."""
    a, b = (part.ravel() for part in np.meshgrid(np.arange(120), np.arange(120)))
    carries = []
    for one, other in zip(a.tolist(), b.tolist(), strict=True):
        carry = found = 0
        while one or other:
            carry = (one % 10 + other % 10 + carry) // 10
            found += carry
            one, other = one // 10, other // 10
        carries.append(found)
    assert count_carries(a, b).tolist() == carries
    assert count_digits(a).tolist() == [len(str(number)) for number in a]


def test_exact_match_by_digits_and_carries() -> None:
    """Answers right only where nothing is carried: 1 in that slice, 0 in the others."""
    task = Addition(digits=2, train_examples=100)
    batch = task.batch(0, "test", 0, 200)
    a, b = task.operands(batch)
    right = count_carries(a, b)[batch.row] == 0
    got = Predicted(np.where(right, batch.targets, 0), None)
    totals = Totals.of(task.metrics, batch, task.measure(batch, got))
    by_carries = totals.sliced("exact_match", "carries")
    assert by_carries == {"0": 1.0, "1": 0.0, "2": 0.0}
    digits = totals.slices["exact_match"]["digits"]
    longest = np.maximum(count_digits(a), count_digits(b))
    values, counts = np.unique(longest, return_counts=True)
    expected = {str(d): int(n) for d, n in zip(values, counts, strict=True)}
    assert {key: sums.n for key, sums in digits.items()} == expected
