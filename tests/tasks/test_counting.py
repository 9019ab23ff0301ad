"""Count3, Count2 and Match3 against brute force from their definitions, and what every task
promises about its batches, texts and name."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import yardstick

from entp import InputError
from entp.tasks import IGNORE, Task, task_class
from entp.tasks.addition import Addition
from entp.tasks.base import read_prompt, task_name
from entp.tasks.composition import Compose
from entp.tasks.counting import Count2, Count3, Match3
from entp.tasks.path_star import PathStar
from entp.tasks.pointers import Chase

PROMPT = [52, 14, 22, 48, 28, 37, 3, 28, 14, 1, 12, 20, 38, 48, 51, 41]
CONTINUATION = [
    *(0, 13, 14, 17, 12, 20, 17, 2, 10, 0, 6, 25, 26, 1, 28, 29, 22, 20, 19, 3, 22, 8, 4, 21),
    *(24, 4, 39, 41, 36, 38, 40, 44, 16, 34, 7, 0, 5, 10, 1, 46, 5, 51, 8, 1, 32, 15, 44, 54),
]
"""The paper's printed Count3 example."""


def count3(x: list[int]) -> int:
    """|{(i, j) in [n]^2 : x_i + x_j + x_n = 0 mod n}| mod n."""
    n = len(x)
    return sum((a + b + x[-1]) % n == 0 for a in x for b in x) % n


def count2(x: list[int]) -> int:
    """|{i in [n] : x_i + x_n = 0 mod n}| mod n."""
    n = len(x)
    return sum((a + x[-1]) % n == 0 for a in x) % n


def match3(x: list[int], modulus: int) -> int:
    """1 if there are i, j with x_1 + x_i + x_j = 0 mod modulus, else 0."""
    return int(any((x[0] + a + b) % modulus == 0 for a in x for b in x))


RULES = {Count3: count3, Count2: count2}
counting = st.sampled_from([Count3, Count2])
seeds = st.integers(0, 2**31)
TASKS: list[Task] = [Count3(), Count2(), Match3(), Addition(), Chase(), Compose(), PathStar()]
tasks = pytest.mark.parametrize("task", TASKS, ids=[task.name for task in TASKS])


@given(
    counting, st.integers(1, 12), st.integers(1, 16), st.integers(1, 300), st.integers(1, 4), seeds
)
def test_counting_batch_follows_the_definition(
    cls: Any, prompt_length: int, more: int, values: int, size: int, seed: int
) -> None:
    task = cls(prompt_length, prompt_length + more, values)
    batch = task.batch(seed, "train", 3, size)
    assert batch.x.shape == batch.y.shape == (size, task.length - 1)
    assert batch.lengths is None
    for x, y in zip(batch.x.tolist(), batch.y.tolist(), strict=True):
        assert all(0 <= v < values for v in x[:prompt_length])
        assert y[: prompt_length - 1] == [IGNORE] * (prompt_length - 1)
        assert y[prompt_length - 1 :] == [
            RULES[cls](x[: t + 1]) for t in range(prompt_length - 1, len(x))
        ]
        assert x[prompt_length:] == y[prompt_length - 1 : -1]
        assert max(*x, *y, 0) < task.model_needs()["vocab"]


@given(counting, st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_rule_holds_for_any_integers(cls: Any, x: list[int]) -> None:
    assert cls.rule(np.array([x])).tolist() == [RULES[cls](x)]


@given(
    st.integers(1, 20),
    st.integers(1, 200),
    st.none() | st.integers(1, 300),
    st.integers(1, 4),
    seeds,
)
def test_match3_batch_follows_the_definition(
    length: int, modulus: int, values: int | None, size: int, seed: int
) -> None:
    task = Match3(length, modulus, values)
    batch = task.batch(seed, "valid", 2, size)
    assert batch.x.shape == batch.y.shape == (size, length)
    assert 0 <= batch.x.min() <= batch.x.max() < (values or modulus) == task.model_needs()["vocab"]
    for x, y in zip(batch.x.tolist(), batch.y.tolist(), strict=True):
        assert y == [match3(x[: t + 1], modulus) for t in range(length)]


@pytest.mark.parametrize("values", [64, 2**14 - 1, 2**14, 2**15 - 1, 2**20])
@pytest.mark.parametrize("cls", [Count3, Count2])
def test_counting_does_not_overflow(cls: Any, values: int) -> None:
    seeds = (
        values - 1 - np.array([*itertools.product((0, 1), repeat=3)])
    )  # the largest values there are
    for row in cls(3, 9, values).extend(seeds).tolist():
        assert row[3:] == [RULES[cls](row[:n]) for n in range(3, 9)]


def test_count3_gives_the_papers_example() -> None:
    assert Count3().extend(np.array([PROMPT])).tolist() == [PROMPT + CONTINUATION]


@pytest.mark.parametrize("cls", [Count3, Count2])
def test_counting_defaults_are_the_papers(cls: Any) -> None:
    task = cls()
    assert (task.prompt_length, task.length, task.num_values, task.prefix) == (16, 64, 64, 16)
    assert task.model_needs() == {"vocab": 64, "context_length": 64}
    batch = task.batch(0, "train", 0, 512)
    assert (batch.target_mask == (np.arange(63) >= 15)).all()
    assert (batch.target_mask.sum(1) == 48).all()
    assert set(np.unique(batch.x[:, :16])) == set(range(64))


def test_match3_defaults_are_the_papers() -> None:
    task = Match3()
    batch = task.batch(0, "train", 0, 256)
    assert (task.length, task.modulus, task.prefix) == (64, 128, None)
    assert task.model_needs() == {"vocab": 128, "context_length": 64, "outputs": 2}
    assert batch.x.shape == batch.y.shape == (256, 64)
    assert set(np.unique(batch.x)) == set(range(128))
    assert set(np.unique(batch.y)) == {0, 1}


@tasks
def test_batch_is_a_pure_function_of_seed_split_and_step(task: Task) -> None:
    arguments = [
        (s, split, step)
        for s in (0, 1, 7)
        for split in ("train", "valid", "test")
        for step in (0, 1, 10**6)
    ]
    first = [task.batch(*a, 4) for a in arguments]  # type: ignore[arg-type]
    again = [task.batch(*a, 4) for a in reversed(arguments)][::-1]  # type: ignore[arg-type]
    for one, two in zip(first, again, strict=True):
        assert np.array_equal(one.x, two.x)
        assert np.array_equal(one.y, two.y)
    assert len({b.x.tobytes() for b in first}) == len(arguments)


def test_seed_ends_where_streams_would_meet() -> None:
    assert Count3().batch(2**32 - 1, "train", 0, 1).x.shape == (1, 63)
    for seed in (-1, 2**32):
        with pytest.raises(InputError, match=f"seed {seed} is outside 0 to"):
            Count3().batch(seed, "train", 0, 1)


@tasks
def test_batch_refuses_an_unknown_split(task: Task) -> None:
    with pytest.raises(InputError, match="unknown split 'dev': allowed are train, valid, test"):
        task.batch(0, "dev", 0, 1)  # type: ignore[arg-type]


def test_count3_makes_20000_sequences_a_second() -> None:
    """On a machine whose yardstick is half a second, and in proportion on others."""
    task, seconds = Count3(), []
    for step in range(4):
        start = time.process_time()
        task.batch(0, "train", step, 1024)
        seconds.append(time.process_time() - start)
    assert min(seconds) < yardstick() / 10


def test_draw_shows_inputs_above_targets() -> None:
    task = Count3()
    one = task.batch(5, "train", 0, 1)
    lines = task.draw(5).splitlines()
    assert all(line.startswith("input ") for line in lines[::2])
    assert all(line.startswith("target ") for line in lines[1::2])
    assert len({len(line) for line in lines[:2]}) == 1
    inputs, targets = (
        " ".join(line[7:] for line in part).split() for part in (lines[::2], lines[1::2])
    )
    assert inputs == [str(v) for v in one.x[0]]
    assert targets == ["." if v == IGNORE else str(v) for v in one.y[0]]


def test_draw_fits_short_sequences_in_two_aligned_lines() -> None:
    one = Match3(length=5).batch(0, "train", 0, 1)
    width = max(len(str(v)) for v in one.x[0])
    assert Match3(length=5).draw().splitlines() == [
        label + "".join(" " + str(v).rjust(width) for v in row)
        for label, row in (("input ", one.x[0]), ("target", one.y[0]))
    ]


@given(st.lists(st.integers(0, 63), max_size=30))
def test_text_is_read_back(tokens: list[int]) -> None:
    assert Count3().from_text(Count3().to_text(tokens)) == tokens


def test_text_may_have_commas() -> None:
    assert Count3().from_text("3, 1,4\n1  5") == [3, 1, 4, 1, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3 one", "not a list of whole numbers"),
        ("1.5", "not a list of whole numbers"),
        ("3 64", "64, outside the vocabulary of count3: allowed are 0 to 63"),
        ("-1", "-1, outside the vocabulary"),
    ],
)
def test_text_that_is_no_prompt_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Count3().from_text(text)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"prompt_length": 0}, "task.prompt_length 0"),
        ({"prompt_length": 64}, "below task.length 64"),
        ({"prompt_length": 70}, "task.prompt_length 70"),
        ({"length": 16}, "task.length 16"),
        ({"num_values": 0}, "task.num_values is 0"),
    ],
)
@pytest.mark.parametrize("cls", [Count3, Count2])
def test_counting_refuses_sizes(cls: Any, sizes: dict[str, int], named: str) -> None:
    with pytest.raises(InputError, match=named):
        cls(**sizes)


@pytest.mark.parametrize(
    "sizes",
    [{"length": 0}, {"modulus": 0}, {"modulus": -128}, {"num_values": 0}, {"num_values": -1}],
)
def test_match3_refuses_sizes(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="must be at least 1"):
        Match3(**sizes)


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("count3", Count3),
        ("count2", Count2),
        ("match3", Match3),
        ("addition", Addition),
        ("chase", Chase),
        ("compose", Compose),
        ("path-star", PathStar),
    ],
)
def test_task_is_found_by_name(name: str, cls: type[Task]) -> None:
    assert task_class(name) is cls
    assert cls.name == name
    assert task_name(cls()) == name


def test_own_task_is_found_by_its_path(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    header = "from dataclasses import dataclass\nfrom entp.tasks import Task\n"
    source = header + "@dataclass(frozen=True)\nclass Mine(Task):\n    n: int = 3\n"
    (tmp_path / "entp_test_own.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    cls = task_class("entp_test_own:Mine")
    assert issubclass(cls, Task)
    assert task_class(task_name(cls())) is cls
    del sys.modules["entp_test_own"]


class Clumsy(Count3):
    def from_text(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def test_prompt_that_a_task_stumbles_over_is_an_input_error() -> None:
    assert read_prompt(Clumsy(), "1 2") == [1, 2]
    with pytest.raises(InputError, match=r"cannot read the prompt '1 x': invalid literal for int"):
        read_prompt(Clumsy(), "1 x")
    with pytest.raises(InputError) as ours:
        read_prompt(Count3(), "1 x")
    assert "cannot read the prompt" not in str(ours.value)  # a task's own sentence stays as it is


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cuont3",
            "unknown task 'cuont3': allowed are .*count3.*module:Class.*Did you mean count3",
        ),
        ("", "unknown task ''"),
        ("no_such_module_of_entp:Mine", "cannot be imported: No module named"),
        ("os:Missing", "cannot be imported: .*Missing"),
        ("os:path", "not a class derived from entp.tasks.Task"),
        ("os:getcwd", "not a class derived from entp.tasks.Task"),
        (":Mine", "module:Class"),
        (".x:Mine", "module:Class"),
    ],
)
def test_task_class_refuses_unknown_names(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        task_class(name)


@pytest.mark.parametrize(
    ("task", "there"),
    [(Count3(2, 6, 4), 16), (Count2(3, 6, 2), 8), (Count3(), 64**16)],
    ids=["count3", "count2", "the paper's"],
)
def test_caveat_is_given_once_sequences_repeat(task: Task, there: int) -> None:
    """There are as many sequences as seeds: after reading more, some were read twice."""
    assert task.caveats(there) == []
    (caveat,) = task.caveats(there + 1)
    assert f"only {there:,} different sequences of {task.length} integers" in caveat
    assert f"training read {there + 1:,}" in caveat


@tasks
def test_caveat_is_not_given_for_the_papers_sizes(task: Task) -> None:
    assert task.caveats(10**9) == []
