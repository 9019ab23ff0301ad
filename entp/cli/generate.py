"""`entp generate RUN`: prompts continued by a trained run."""

from __future__ import annotations

from dataclasses import dataclass, field

from entp.cli.evaluate import Checkpoint, open_run
from entp.cli.parse import name_of, parse
from entp.config import Mode
from entp.tasks.base import Task, read_prompt

PROMPTS = 3
"""Prompts of the task's own, where none is given."""


@dataclass(frozen=True)
class GenerateOptions:
    """Let a trained run continue prompts."""

    prompt: list[str] = field(default_factory=list)
    """One or more prompts, such as "3 1 4 1 5". None: three from the task's test stream."""
    max_new_tokens: int | None = None
    """Tokens to add. None: up to the task's last target."""
    mode: Mode | None = None
    """Mode of attention. None: the run's."""
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
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    task: str | None = None
    """module:Class of the run's task, if it is not a built-in one."""


def generate_command(args: list[str]) -> int:
    """generate RUN: continue prompts"""
    folder = name_of(args, "run folder", [], "generate")
    options = parse(GenerateOptions, args[1:], f"entp generate {folder}")
    model, run, _ = open_run(folder, options.checkpoint, options.device, options.task)
    from entp.engine.generation.generate import generate
    from entp.training.evaluate import position_function

    task = run.task
    prompts = [read_prompt(task, text) for text in options.prompt]
    prompts = prompts or task.prompts(options.seed, PROMPTS)
    outputs = generate(
        model,
        prompts,
        _new_tokens(options, task, prompts),
        options.mode or run.mode,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=task.stop,
        position_ids=position_function(task),
    )
    for tokens in outputs:
        print(task.to_text(tokens))
    return 0


def _new_tokens(options: GenerateOptions, task: Task, prompts: list[list[int]]) -> int:
    if options.max_new_tokens is not None:
        return options.max_new_tokens
    return max(1, _answer_end(task) - max(map(len, prompts)))


def _answer_end(task: Task) -> int:
    """Tokens of a sequence up to its last target, which itself is never read."""
    position = task.batch(0, "test", 0, 8).position
    return int(position.max(initial=0)) + 2
