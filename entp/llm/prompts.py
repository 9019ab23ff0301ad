"""The paper's prompt for language models, and what their answers say.

    task = counting_task("count3")
    prompt_text(task, seed)             # the code, the seed, "What is the output of this code ?"
    answer_text(sequence)               # "[52, 14, 22, ...]": what the code prints
    parse_answer(text, task.length)     # its integers, and whether it is such a list and no more

(paper: Table table:llm_prompt_code; docs/llm.md has what that table leaves open)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from entp.errors import InputError, one_of
from entp.tasks.counting import Count2, Count3

Counting = Count3 | Count2
COUNTING: dict[str, type[Count3] | type[Count2]] = {"count3": Count3, "count2": Count2}
QUESTION = "What is the output of this code ?"
CODE = {
    "count3": """\
def f(x: list[int]) -> int:
    n = len(x)
    count = 0
    for i in range(n):
        for j in range(n):
            if (x[i] + x[j] + x[-1]) % n == 0:
                count += 1
    return count % n
""",
    "count2": """\
def f(x: list[int]) -> int:
    n = len(x)
    count = 0
    for i in range(n):
        if (x[i] + x[-1]) % n == 0:
            count += 1
    return count % n
""",
}
"""The rule of each task. The paper prints that of Count3; Count2's has its condition changed."""
INTEGER = re.compile(r"-?[0-9]{1,18}")


class Answer(NamedTuple):
    """What a language model wrote."""

    integers: list[int]
    """Those of its first list, up to what is no integer."""
    well_formed: bool
    """Whether it is one list of as many integers as were asked for, and nothing else."""


def counting_task(name: str, **settings: Any) -> Counting:
    """The task of this name, count3 or count2, with these settings."""
    if name not in COUNTING:
        raise one_of("task", name, COUNTING)
    return COUNTING[name](**settings)


def code_text(task: Counting, seed: Iterable[int]) -> str:
    """The program that prints the sequence which begins with the seed."""
    start = [int(one) for one in seed]
    if len(start) != task.prompt_length:
        raise InputError(
            f"the seed has {len(start)} integers: {task.name} takes {task.prompt_length}."
        )
    steps = task.length - task.prompt_length
    loop = f"for _ in range({steps}):\n    x.append(f(x))\nprint(x)\n"
    return f"{CODE[task.name]}x = {start}\n{loop}"


def prompt_text(task: Counting, seed: Iterable[int]) -> str:
    """The paper's prompt for this seed."""
    return code_text(task, seed) + QUESTION


def answer_text(sequence: Iterable[int]) -> str:
    """What the program of the prompt prints: the seed, and the integers after it."""
    return str([int(one) for one in sequence])


def parse_answer(text: str, length: int) -> Answer:
    """The integers of the first list in a text, and whether it is well-formed.

    In a list without its end the last integer is left out, because it may be cut off.
    """
    _, _, rest = text.partition("[")
    inside, end, _ = rest.partition("]")
    pieces = inside.split(",")
    if not end:
        pieces.pop()
    integers: list[int] = []
    for piece in pieces:
        if not INTEGER.fullmatch(piece.strip()):
            break
        integers.append(int(piece))
    alone = text.strip() == f"[{inside}]"
    return Answer(integers, alone and len(integers) == len(pieces) == length)
