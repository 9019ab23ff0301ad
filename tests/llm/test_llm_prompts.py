"""Prompts are the paper's, and answers are read as they are written."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest

from entp.errors import InputError
from entp.llm.prompts import answer_text, code_text, counting_task, parse_answer, prompt_text
from entp.llm.score import score_texts, summary
from entp.stats import wilson

PAPER_SEED = [52, 14, 22, 48, 28, 37, 3, 28, 14, 1, 12, 20, 38, 48, 51, 41]
PAPER_PROMPT = """\
def f(x: list[int]) -> int:
    n = len(x)
    count = 0
    for i in range(n):
        for j in range(n):
            if (x[i] + x[j] + x[-1]) % n == 0:
                count += 1
    return count % n
x = [52, 14, 22, 48, 28, 37, 3, 28, 14, 1, 12, 20, 38, 48, 51, 41]
for _ in range(48):
    x.append(f(x))
print(x)
What is the output of this code ?"""
PAPER_OUTPUT = (
    "[52, 14, 22, 48, 28, 37, 3, 28, 14, 1, 12, 20, 38, 48, 51, 41, 0, 13, 14, 17, 12, 20, 17, 2, "
    "10, 0, 6, 25, 26, 1, 28, 29, 22, 20, 19, 3, 22, 8, 4, 21, 24, 4, 39, 41, 36, 38, 40, 44, 16, "
    "34, 7, 0, 5, 10, 1, 46, 5, 51, 8, 1, 32, 15, 44, 54]"
)


def test_prompt_and_answer_are_those_of_the_paper() -> None:
    task = counting_task("count3")
    assert prompt_text(task, PAPER_SEED) == PAPER_PROMPT
    (sequence,) = task.extend(np.array([PAPER_SEED]))
    assert answer_text(sequence) == PAPER_OUTPUT


@pytest.mark.parametrize("name", ["count3", "count2"])
@pytest.mark.parametrize("sizes", [(16, 64, 64), (3, 12, 20)])
def test_code_of_the_prompt_prints_the_answer(name: str, sizes: tuple[int, int, int]) -> None:
    prompt_length, length, num_values = sizes
    task = counting_task(name, prompt_length=prompt_length, length=length, num_values=num_values)
    seeds = np.random.default_rng(0).integers(0, num_values, (3, prompt_length))
    for seed, sequence in zip(seeds, task.extend(seeds), strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code_text(task, seed), {})
        assert printed.getvalue() == answer_text(sequence) + "\n"


def test_unknown_task_and_seed_of_another_length_are_refused() -> None:
    with pytest.raises(InputError, match="unknown task 'count4': allowed are count3, count2"):
        counting_task("count4")
    with pytest.raises(InputError, match="the seed has 2 integers: count3 takes 16"):
        prompt_text(counting_task("count3"), [1, 2])


@pytest.mark.parametrize(
    ("text", "integers", "well_formed"),
    [
        ("[1, 2, 3]", [1, 2, 3], True),
        (" [1,2 , -3]\n", [1, 2, -3], True),
        ("[1, 2]", [1, 2], False),
        ("[1, 2, 3, 4]", [1, 2, 3, 4], False),
        ("The output is [1, 2, 3]", [1, 2, 3], False),
        ("[1, 2, 3].", [1, 2, 3], False),
        ("```\n[1, 2, 3]\n```", [1, 2, 3], False),
        ("[1, 2, 3] [4]", [1, 2, 3], False),
        ("[[1, 2, 3]]", [], False),
        ("[1, 2, 3", [1, 2], False),
        ("[1, 2, ", [1, 2], False),
        ("[1, , 3]", [1], False),
        ("[1, 2.5, 3]", [1], False),
        ("[1, ..., 3]", [1], False),
        ("[1, 2, x]", [1, 2], False),
        ("[1, ２, 3]", [1], False),
        (f"[1, 2, {'9' * 5000}]", [1, 2], False),
        ("1, 2, 3", [], False),
        ("[]", [], False),
        ("", [], False),
    ],
)
def test_answers_are_parsed(text: str, integers: list[int], well_formed: bool) -> None:
    assert parse_answer(text, 3) == (integers, well_formed)


def test_scores_of_texts() -> None:
    task = counting_task("count3", prompt_length=2, length=4, num_values=8)
    sequences = task.extend(np.array([[5, 3]] * 5))
    (a, b, c, d) = sequences[0].tolist()
    texts = [
        f"[{a}, {b}, {c}, {d}]",
        f"Output: [{a}, {b}, {c}, {d}]",
        f"[{a + 1}, {b}, {c}, {d}]",
        f"[{a}, {b}, {c}, {d + 1}]",
        f"[{a}, {b}, {c}, ",
    ]
    found = summary(score_texts(task, sequences, texts))
    assert found["n"] == 5
    assert found["well_formed"] == {"value": 0.6, "interval": wilson(3, 5)}
    assert found["exact_match"] == {"value": 0.2, "interval": wilson(1, 5)}
    assert found["token_accuracy"]["value"] == pytest.approx(8 / 10)
    assert found["token_accuracy_by_position"] == {
        "2": {"value": 1.0, "interval": wilson(5, 5)},
        "3": {"value": 0.6, "interval": wilson(3, 5)},
    }
    with pytest.raises(InputError, match="there are 4 texts for 5 sequences"):
        score_texts(task, sequences, texts[1:])


def test_list_that_is_too_long_is_scored_by_its_first_integers() -> None:
    task = counting_task("count2", prompt_length=2, length=4, num_values=8)
    sequences = task.extend(np.array([[5, 3]]))
    totals = score_texts(task, sequences, [str([*sequences[0].tolist(), 1])])
    assert totals.values() == {"well_formed": 0, "exact_match": 0, "token_accuracy": 1, "n": 1}
