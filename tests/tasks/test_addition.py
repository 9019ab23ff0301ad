"""Addition: right sums, splits that never meet, and targets on the answer only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entp.errors import InputError
from entp.tasks.addition import ALPHABET, Addition
from entp.tasks.addition_data import (
    Pairs,
    all_pairs,
    from_integers,
    in_proportion,
    length_pairs,
    paper_pairs,
    stratified,
)
from entp.tasks.base import IGNORE, SPLITS, Batch
from entp.tasks.metrics import Predicted, Totals
from entp.training.evaluate import split_batches


def lines_of(task: Addition, split: str, size: int = 64, step: int = 0) -> list[str]:
    """The lines of a batch, put together again from inputs and targets."""
    return text_of(task, task.batch(0, split, step, size))


def text_of(task: Addition, batch: Batch) -> list[str]:
    """The lines with a target: a split's last batch may have others."""
    assert batch.lengths is not None
    rows = zip(batch.x, batch.y, batch.lengths, batch.target_mask.any(1), strict=True)
    return [task.to_text([*x[:n].tolist(), int(y[n - 1])]) for x, y, n, some in rows if some]


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
    assert sum(map(len, all_pairs(1, 30, 0).values())) == 100  # and every sum is in one


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
        ("window", 1),
        ("max_offset", 0),
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


def numbers(pairs: Pairs) -> list[tuple[int, int]]:
    """The pairs as whole numbers."""
    sides = [["".join(map(str, row))[::-1] for row in side.tolist()] for side in (pairs.a, pairs.b)]
    return [(int(a), int(b)) for a, b in zip(*sides, strict=True)]


def carries_of(a: int, b: int) -> int:
    """How often 1 is carried, by adding digit by digit."""
    carry = found = 0
    while a or b:
        carry = (a % 10 + b % 10 + carry) // 10
        found += carry
        a, b = a // 10, b // 10
    return found


def test_digits_carries_and_sums_by_definition() -> None:
    a, b = (part.ravel() for part in np.meshgrid(np.arange(120), np.arange(120)))
    pairs = from_integers(a, b, 3)
    both = list(zip(a.tolist(), b.tolist(), strict=True))
    assert numbers(pairs) == both
    assert pairs.carries.tolist() == [carries_of(*pair) for pair in both]
    assert pairs.digits.tolist() == [len(str(max(pair))) for pair in both]
    totals = ["".join(map(str, row))[::-1] for row in pairs.total.tolist()]
    assert list(map(int, totals)) == (a + b).tolist()


def test_exact_match_by_digits_and_carries() -> None:
    """Answers right only where nothing is carried: 1 in that slice, 0 in the others."""
    task = Addition(digits=2, train_examples=100)
    batch = task.batch(0, "test", 0, 200)
    terms = [line.strip("$").split("=")[0].split("+") for line in text_of(task, batch)]
    pairs = [(int(a), int(b)) for a, b in terms]
    right = np.array([carries_of(*pair) == 0 for pair in pairs])[batch.row]
    got = Predicted(np.where(right, batch.targets, 0), None)
    totals = Totals.of(task.metrics, batch, task.measure(batch, got))
    assert totals.sliced("exact_match", "carries") == {"0": 1.0, "1": 0.0, "2": 0.0}
    digits = totals.slices["exact_match"]["digits"]
    values, counts = np.unique([len(str(max(pair))) for pair in pairs], return_counts=True)
    expected = {str(d): int(n) for d, n in zip(values, counts, strict=True)}
    assert {key: sums.n for key, sums in digits.items()} == expected


def test_exact_match_by_whether_the_swapped_sum_was_trained_on() -> None:
    task = Addition(digits=1, train_examples=50)
    trained = set(numbers(all_pairs(1, 50, 0)["train"]))
    batch = task.batch(0, "test", 0, 25)
    terms = [line.strip("$").split("=")[0].split("+") for line in text_of(task, batch)]
    swapped = ["yes" if (int(b), int(a)) in trained else "no" for a, b in terms]
    got = Predicted(batch.targets, None)
    sums = Totals.of(task.metrics, batch, task.measure(batch, got)).slices["exact_match"]
    found = {name: one.n for name, one in sums["swap in train"].items()}
    assert found == {name: swapped.count(name) for name in ("no", "yes")}


def test_paper_splits_are_the_authors() -> None:
    """Their counts of test sums by digits and carries, all one-digit sums in train."""
    splits = paper_pairs(3, 1_250, 0)
    assert {name: len(pairs) for name, pairs in splits.items()} == {
        "train": 1_250,
        "valid": 10_000,
        "test": 70_000,
    }
    test = splits["test"]
    strata = test.digits * 10 + test.carries
    found = dict(
        zip(*(part.tolist() for part in np.unique(strata, return_counts=True)), strict=True)
    )
    two = {20: 1909, 21: 2864, 22: 1591}
    assert found == two | {30: 10500, 31: 22779, 32: 21607, 33: 8750}
    train = numbers(splits["train"])
    assert {pair for pair in train if max(pair) < 10} == {
        (a, b) for a in range(10) for b in range(10)
    }
    sets = [set(numbers(pairs)) for pairs in splits.values()]
    assert sum(map(len, sets)) == 81_250 == len(set.union(*sets))  # none twice
    again = numbers(paper_pairs(3, 1_250, 0)["train"])
    other = numbers(paper_pairs(3, 1_250, 1)["train"])
    assert train == again != other


def test_strata_keep_their_proportions() -> None:
    assert in_proportion(np.array([1, 1, 2]), 5).tolist() == [1, 1, 3]
    rng = np.random.default_rng(0)
    strata = np.repeat([7, 8, 9], [10, 30, 60])
    parts = stratified(strata, [50, 50], rng)
    for part in parts:
        assert np.bincount(strata[part])[7:].tolist() == [5, 15, 30]
    assert sorted(np.concatenate(parts).tolist()) == list(range(100))


def test_windows_are_pieces_of_the_joined_lines() -> None:
    task = Addition(digits=2, train_examples=300, layout="windows", window=20)
    batch = task.batch(0, "train", 0, 50)
    assert batch.lengths is None
    assert (batch.y[:, :-1] == batch.x[:, 1:]).all()  # a target everywhere
    trained = set(numbers(all_pairs(2, 300, 0)["train"]))
    for row in batch.x:
        whole = task.to_text(row.tolist()).split("\n")[1:-1]  # the ends may be cut
        for line in whole:
            terms, answer = line.strip("$").split("=")
            a, b = map(int, terms.split("+"))
            assert (a, b) in trained
            assert int(answer[::-1]) == a + b


def test_exact_match_of_windows_counts_lines_within_them() -> None:
    task = Addition(digits=2, train_examples=300, layout="windows", window=30)
    batch = task.batch(0, "valid", 0, 40)
    right = Totals.of(task.metrics, batch, task.measure(batch, Predicted(batch.targets, None)))
    assert right.value("exact_match") == 1.0
    whole = 0
    for x, y in zip(batch.x, batch.y, strict=True):
        pieces = task.to_text([*x.tolist(), int(y[-1])]).split("\n")[1:]
        whole += sum(len(p) > 1 and p.endswith("$") for p in pieces)
    assert right.all["exact_match"].w == whole > 20
    digits = batch.targets >= ALPHABET.index("0")
    answers = np.where(digits & (batch.row == 0), 0, batch.targets)  # row 0 wrong
    got = Totals.of(task.metrics, batch, task.measure(batch, Predicted(answers, None)))
    first = task.to_text([*batch.x[0].tolist(), int(batch.y[0, -1])]).split("\n")[1:]
    lost = sum(len(p) > 1 and p.endswith("$") for p in first)
    assert got.all["exact_match"].v == whole - lost


def test_windows_are_tested_line_by_line() -> None:
    task = Addition(digits=2, train_examples=300, layout="windows", window=20)
    held = set(numbers(all_pairs(2, 300, 0)["valid"]))
    for line in lines_of(task, "valid_lines"):
        a, b = map(int, line.strip("$").split("=")[0].split("+"))
        assert (a, b) in held
    assert all(line.startswith("$") and line.endswith("$") for line in lines_of(task, "test"))


@pytest.mark.parametrize("split", ["valid", "test"])
def test_every_held_out_sum_comes_once_before_any_comes_twice(split: str) -> None:
    task = Addition(digits=1, train_examples=60)
    drawn = [line for step in range(4) for line in lines_of(task, split, size=5, step=step)]
    assert len(set(drawn)) == 20
    assert set(lines_of(task, split, size=20, step=1)) == set(drawn)


@pytest.mark.parametrize(
    ("task", "splits"),
    [
        (Addition(digits=1, train_examples=61), {"valid": 19, "test": 20}),
        (Addition(digits=2, train_examples=300, sampling="paper"), {"valid": 98, "test": 692}),
        (
            Addition(digits=2, train_examples=300, sampling="paper", layout="windows"),
            {"valid_lines": 98, "test": 692},
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 20, 64, 1000])
def test_whole_split_has_each_sum_once(task: Addition, splits: dict[str, int], size: int) -> None:
    """As a target; rows beyond the last sum have none."""
    pairs = task._data().lines.tokens
    for split, count in splits.items():
        batches = list(split_batches(task, split, None, size, seed=3))
        assert len(batches) == -(-count // size)
        notes = [b.note[b.target_mask.any(1)] for b in batches if b.note is not None]
        first, end = task._data().rows(split.removesuffix("_lines"))
        assert end - first == count
        assert sorted(np.concatenate(notes).tolist()) == list(range(first, end))
        assert len(np.unique(pairs[first:end], axis=0)) == count
        got = [Predicted(b.targets, np.ones(len(b.targets))) for b in batches]
        scores = [task.measure(b, g) for b, g in zip(batches, got, strict=True)]
        totals = [Totals.of(task.metrics, b, s) for b, s in zip(batches, scores, strict=True)]
        assert sum(one.sequences for one in totals) == count
        assert sum(one.all["exact_match"].n for one in totals) == count


def test_papers_test_has_its_70_000_sums() -> None:
    task = Addition(digits=3, train_examples=1_250, sampling="paper", layout="windows")
    batches = split_batches(task, "test", None, 64, seed=0)
    rows = [b.note[b.target_mask.any(1)] for b in batches if b.note is not None]
    assert len(np.unique(np.concatenate(rows))) == sum(map(len, rows)) == 70_000


@pytest.mark.parametrize("layout", ["lines", "windows"])
def test_random_splits_have_no_end(layout: Any) -> None:
    task = Addition(layout=layout)
    drawn = {"train": None} | ({"valid": None} if layout == "windows" else {})
    assert {split: task.split_batches(split, 8) for split in drawn} == drawn
    with pytest.raises(InputError, match="unknown split 'some'"):
        task.split_batches("some", 8)


def test_prompts_are_no_more_than_there_are_sums() -> None:
    task = Addition(digits=1, train_examples=97)
    assert sum(len(pairs) for pairs in all_pairs(1, 97, 0).values()) == 100
    prompts = {task.to_text(prompt) for prompt in task.prompts(0, 5)}
    assert len(prompts) == len(task.prompts(0, 5)) == 2
    assert all(prompt.endswith("=") for prompt in prompts)


LENGTHS = Addition(digits=4, train_examples=2_000, sampling="lengths", test_digits=7)


def test_lengths_are_uniform_and_no_sum_comes_twice() -> None:
    splits = length_pairs(4, 2_000, 0, 7, grid=False)
    train, test = splits["train"], splits["test"]
    assert len(set(numbers(train))) == 2_000
    for pairs in (train, splits["valid"]):
        assert set(np.unique(pairs.a_digits)) == {1, 2, 3, 4}
    long = np.bincount(train.a_digits)[3:]
    assert abs(long / 2_000 - 0.27).max() < 0.05  # a quarter; few are of one digit by one
    assert len(set(numbers(test))) == len(test)
    assert (test.digits > 4).all()
    shares = np.bincount(test.digits)[5:] / len(test)
    first, others = 5 / 7 / 3, 1 / 7 / 3
    expected = [first, first + others * 2, first + others * 4]  # one longer, the other any
    assert np.abs(shares - expected).max() < 0.02
    assert not set(numbers(train)) & set(numbers(splits["valid"]))


def test_grid_has_every_pair_of_lengths_and_no_sum_of_training() -> None:
    splits = length_pairs(4, 2_000, 0, 7, grid=True)
    test = splits["test"]
    cells = np.bincount(test.a_digits * 8 + test.b_digits, minlength=64).reshape(8, 8)[1:, 1:]
    assert (cells.ravel()[1:] > 20).all()  # of one digit by one almost all are in training
    assert not set(numbers(splits["train"])) & set(numbers(test))
    task = Addition(**{**LENGTHS.__dict__, "test": "grid"})
    batch = task.batch(0, "test", 0, 200)
    totals = Totals.of(task.metrics, batch, task.measure(batch, Predicted(batch.targets, None)))
    assert set(totals.slices["exact_match"]["operands"]) <= {
        f"{a}x{b}" for a in range(1, 8) for b in range(1, 8)
    }


def test_long_lines_are_right_and_fit() -> None:
    task = Addition(digits=20, train_examples=100, sampling="lengths", test_digits=25)
    batch = task.batch(0, "test", 0, 64)
    assert batch.x.shape[1] <= task.model_needs()["context_length"]
    for line in text_of(task, batch):
        terms, answer = line.strip("$").split("=")
        assert int(answer[::-1]) == sum(map(int, terms.split("+")))


def positioned(positions: str, operands: str) -> Addition:
    return Addition(
        digits=4,
        train_examples=2_000,
        sampling="lengths",
        positions=positions,  # type: ignore[arg-type]
        operands=operands,  # type: ignore[arg-type]
        max_offset=9,
    )


@pytest.mark.parametrize(
    ("positions", "operands", "line", "ids"),
    [
        ("abacus", "reversed", "$21+3=51$", "012010120"),
        ("coupled", "padded", "$12+03=510$", "03213212340"),
        ("coupled", "plain", "$12+3=51$", "032121230"),
        ("coupled", "reversed", "$21+3=51$", "023121230"),
    ],
)
def test_position_ids(positions: str, operands: str, line: str, ids: str) -> None:
    """Abacus: from 1 in each number. Coupled: 1 for signs, 2 for units, 3 for tens in all three."""
    task = positioned(positions, operands)
    assert task.line(12, 3) == line
    found = task.position_ids(np.array([task.from_text(line)]))
    assert found is not None
    assert "".join(map(str, found[0].tolist())) == ids


@pytest.mark.parametrize(("positions", "operands"), [("abacus", "reversed"), ("coupled", "padded")])
def test_offsets_are_random_in_training_only(positions: str, operands: str) -> None:
    task = positioned(positions, operands)
    train, test = task.batch(0, "train", 0, 64), task.batch(0, "test", 0, 64)
    assert test.position_ids is not None
    assert np.array_equal(test.position_ids, task.position_ids(test.x))
    plain = task.position_ids(train.x)
    assert plain is not None
    assert train.position_ids is not None
    moved = train.position_ids - plain
    offsets = [set(row[ids > 0].tolist()) for row, ids in zip(moved, plain, strict=True)]
    assert all(len(found) == 1 for found in offsets)  # one for a sequence
    several = len(set.union(*offsets))
    assert (several == 1) == (positions == "abacus")  # one for the batch
    assert set.union(*offsets) <= set(range(9))
    assert (moved[plain == 0] == 0).all()
    largest = max(task.batch(0, "train", step, 64).position_ids.max() for step in range(20))  # type: ignore[union-attr]
    assert largest < task.model_needs()["context_length"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"sampling": "paper", "digits": 1}, "task.digits is 1: allowed are 2 to 3"),
        ({"sampling": "paper", "digits": 3, "train_examples": 99}, "allowed are 101 to"),
        ({"sampling": "lengths", "digits": 2}, "task.digits is 2: allowed are 3 to 100"),
        ({"sampling": "lengths", "digits": 5, "test_digits": 5}, "above task.digits 5"),
        ({"test_digits": 5}, "test_digits is for sampling lengths"),
        ({"layout": "windows", "positions": "abacus"}, "abacus is for layout lines"),
        ({"positions": "coupled", "reversed": False}, "needs task.reversed"),
        ({"layout": "words"}, "task.layout"),
    ],
)
def test_addition_refuses_what_does_not_fit(fields: dict[str, object], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Addition(**fields)  # type: ignore[arg-type]


def test_each_seed_of_an_experiment_has_its_own_split() -> None:
    assert Addition().for_seed(3) == Addition(split_seed=3)
