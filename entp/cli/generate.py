"""`entp generate RUN`: prompts continued by a trained run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from entp.cli.evaluate import Checkpoint, open_run
from entp.cli.parse import name_of, parse
from entp.config import Mode, Run
from entp.errors import InputError
from entp.tasks.base import Task, read_prompt

PROMPTS = 3
"""Prompts of the task's own, where none is given."""
FEWEST = 32
"""New tokens at least, by default, of a task that streams: after a long prompt it slides."""
BETWEEN = "\n" + "-" * 20 + "\n"
"""What is printed between texts."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""How `to_text` ends where a character's last bytes are still to come."""


@dataclass(frozen=True)
class GenerateOptions:
    """Let a trained run continue prompts."""

    prompt: list[str] = field(default_factory=list)
    """One or more prompts, such as "3 1 4 1 5". None: three from the task's test stream."""
    max_new_tokens: int | None = None
    """Tokens to add. None: up to the task's last target."""
    mode: Mode | None = None
    """entp, decoder, prefix-lm or refresh-N, such as refresh-8. None: the run's."""
    temperature: float = 0.0
    """0 takes the likeliest token; above 0 samples."""
    top_k: int | None = None
    """Sample among the k likeliest tokens only."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability."""
    seed: int = 0
    """Seed of the sampling, and of the task's own prompts."""
    checkpoint: Checkpoint = "best"
    """The best checkpoint by validation, or the last."""
    data: str | None = None
    """Where the task's data is. None: found by ENTP_DATA; a run keeps its tokenizer itself."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    task: str | None = None
    """module:Class of the run's task, if it is not a built-in one."""


def generate_command(args: list[str]) -> int:
    """generate RUN: continue prompts, by a run or a pretrained model"""
    folder = name_of(args, "run folder", [], "generate")
    options = parse(GenerateOptions, args[1:], f"entp generate {folder}")
    model, run, _ = open_run(folder, options.checkpoint, options.device, options.task, options.data)
    task = run.task
    for name, value in (("top-k", options.top_k), ("top-p", options.top_p)):
        if value is not None and not options.temperature:
            raise InputError(
                f"--{name} chooses among tokens that are drawn, and --temperature 0 takes the best "
                f"one: give a temperature, such as 1, or leave --{name} out."
            )
    prompts = [read_prompt(task, text) for text in options.prompt]
    prompts = prompts or task.prompts(options.seed, PROMPTS)
    how = {
        "max_new_tokens": _new_tokens(options, task, prompts),
        "mode": options.mode or run.mode,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "stop": task.stop,
    }
    if task.streams:
        _print_streams(model, run, prompts, options.seed, how)
    else:
        _print_all(model, task, prompts, {**how, "seed": options.seed})
    return 0


def _print_all(model: Any, task: Task, prompts: list[list[int]], how: dict[str, Any]) -> None:
    """Each prompt with what follows, a line each."""
    from entp.engine.generation.generate import generate
    from entp.training.evaluate import position_function

    for tokens in generate(model, prompts, position_ids=position_function(task), **how):
        print(task.to_text(tokens))


def _print_streams(
    model: Any, run: Run, prompts: list[list[int]], seed: int, how: dict[str, Any]
) -> None:
    """Each prompt with what follows, one after the other, as it comes."""
    from entp.engine.generation.generate import stream

    for number, prompt in enumerate(prompts):
        new = stream(model, prompt, seed=seed + number, slide=True, **how)
        first = next(new)  # what cannot be generated is refused before anything is printed
        _say_if_sliding(model, len(prompt) + how["max_new_tokens"] - 1)
        if number:
            print(BETWEEN)
        for text in pieces(run.task, _chain(prompt, chain([first], new))):
            print(text, end="", flush=True)
        print(flush=True)


def _say_if_sliding(model: Any, reads: int) -> None:
    limit = model.context_length
    if limit is not None and reads > limit:
        print(
            f"from token {limit + 1} on, each token is predicted from the last {limit} alone: the "
            "model has no more positions.",
            file=sys.stderr,
        )


def _chain(prompt: list[int], new: Iterable[int]) -> Iterator[list[int]]:
    """The whole prompt, then one token at a time."""
    yield prompt
    for token in new:
        yield [token]


def pieces(task: Task, tokens: Iterable[list[int]]) -> Iterator[str]:
    """The text of tokens as they come; together it is `to_text` of all.

    A character of which bytes are missing is held back until they come.
    """
    waiting: list[int] = []
    shown = 0
    for some in tokens:
        waiting += some
        text = task.to_text(waiting)
        if text.endswith(INCOMPLETE):
            yield text[shown:-1]
            shown = len(text) - 1
        else:
            yield text[shown:]
            waiting, shown = [], 0
    yield task.to_text(waiting)[shown:]


def _new_tokens(options: GenerateOptions, task: Task, prompts: list[list[int]]) -> int:
    if options.max_new_tokens is not None:
        return options.max_new_tokens
    longest = max(map(len, prompts))
    if task.streams:
        return max(FEWEST, int(task.model_needs()["context_length"]) + 1 - longest)
    return max(1, _answer_end(task) - longest)


def _answer_end(task: Task) -> int:
    """Tokens of a sequence up to its last target, which itself is never read."""
    position = task.batch(0, "test", 0, 8).position
    return int(position.max(initial=0)) + 2
