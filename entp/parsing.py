"""Words of the command line to options: what a user got wrong becomes one sentence."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from typing import Any, TypeVar

from entp.errors import InputError
from entp.tasks.base import Task, task_class

Options = TypeVar("Options")


def name_of(args: list[str], what: str, allowed: Any, command: str) -> str:
    """The word after the command; its absence is an error that lists what could stand there."""
    if args and not args[0].startswith("-"):
        return args[0]
    choices = f": allowed are {', '.join(allowed)}" if allowed else ""
    if args and args[0] in ("-h", "--help"):
        name = what.upper().replace(" ", "_")
        print(f"usage: entp {command} {name} [OPTIONS]{choices}\n\noptions: entp {command} {name} --help")
        raise SystemExit(0)
    raise InputError(f"entp {command} needs a {what}{choices}.")


def look_here(name: str) -> None:
    """Something of your own, module:NAME, may lie in the current folder."""
    if ":" in name and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def named_task(name: str) -> type[Task]:
    """The class of a task, which may be your own."""
    look_here(name)
    return task_class(name)


def parse(kind: type[Options], args: list[str], program: str, default: Options | None = None) -> Options:
    """Options from words, by tyro; its complaints become one sentence."""
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=args, prog=program, default=tyro.MISSING_NONPROP if default is None else default)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise InputError(_one_sentence(complaint.getvalue(), program)) from None


def _one_sentence(box: str, program: str) -> str:
    """The text inside tyro's box on one line: the complaint, and what it thinks was meant."""
    lines = [re.sub(r"[│╭╮╰╯─]+|-{3,}", "", line).strip() for line in box.splitlines()]
    text = " ".join(line for line in lines[1:] if line)
    text = text.partition("For full helptext")[0]
    text = re.sub(r"^Error parsing \S+: ", "", text)
    text = re.sub(r" Argument helptext:", " Expected", text).strip()
    text = re.sub(r"^no type matching .*?(?=invalid literal|could not convert)", "", text).replace("{None}|", "")
    text = re.sub(r"^invalid literal for int\(\) with base 10: (.*?) Expected", r"\1 is not a whole number. Expected", text)
    text = re.sub(r"^could not convert string to float: (.*?) Expected", r"\1 is not a number. Expected", text)
    text = text.rstrip(".")
    return f"{text}{'' if text.endswith('?') else '.'} See {program} --help."
