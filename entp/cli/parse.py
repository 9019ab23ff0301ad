"""Words of the command line to options, by tyro; what a user got wrong becomes an InputError."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from entp.cli.aliases import translate
from entp.cli.derive import options_of
from entp.cli.help import part_list
from entp.errors import InputError, one_of
from entp.tasks.base import Task, task_class

Options = TypeVar("Options")
HELP = ("-h", "--help")


def name_of(args: list[str], what: str, allowed: Iterable[str], command: str) -> str:
    """The word after the command; its absence is an error that lists what could stand there."""
    if args and not args[0].startswith("-"):
        return args[0]
    choices = f": allowed are {', '.join(allowed)}" if allowed else ""
    if args and args[0] in (*HELP, "--help-all"):
        name = what.upper().replace(" ", "_")
        usage = f"usage: entp {command} {name} [OPTIONS]{choices}"
        print(f"{usage}\n\noptions: entp {command} {name} --help")
        raise SystemExit(0)
    raise InputError(f"entp {command} needs a {what}{choices}.")


def part_of(
    args: list[str], command: str, what: str, parts: Mapping[str, type], default: str
) -> tuple[str, list[str]]:
    """The part of a command that is asked for, such as step of `entp bench step`, and the words
    after it."""
    if args and args[0] in (*HELP, "--help-all"):
        print(part_list(command, parts, default))
        raise SystemExit(0)
    if not args or args[0].startswith("-"):
        return default, args
    if args[0] not in parts:
        raise one_of(what, args[0], parts)
    return args[0], args[1:]


def look_here(name: str) -> None:
    """Let `module:NAME` of one's own be imported from the current folder."""
    if ":" in name and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def named_task(name: str) -> type[Task]:
    """The class of a task, which may be your own."""
    look_here(name)
    return task_class(name)


def parse(
    kind: type[Options], args: list[str], program: str, default: Options | None = None
) -> Options:
    """The options of a command from its words, habits and old names included."""
    import tyro

    words = translate(args, options_of(kind))
    words = ["--help" if word == "--help-all" else word for word in words]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                kind,
                args=words,
                prog=program,
                default=tyro.MISSING_NONPROP if default is None else default,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        told = _one_sentence(complaint.getvalue())
        raise InputError(f"{told}{_meant(told, words, kind)} See {program} --help.") from None


SHORTER = (
    (r"^Error parsing \S+: ", ""),
    (r" Argument helptext:", " Expected"),
    (r" - typing\.Literal\[.*?(?= Expected)", ""),
    (r"^no type matching .*?(?=invalid literal|could not convert)", ""),
    (r"\{None\}\|", ""),
    (
        r"^invalid literal for int\(\) with base 10: (.*?) (?=Expected)",
        r"\1 is not a whole number. ",
    ),
    (r"^could not convert string to float: (.*?) (?=Expected)", r"\1 is not a number. "),
)
"""Patterns of tyro's messages, and what takes their place."""


def _meant(told: str, words: list[str], kind: type) -> str:
    """A guess at the option that was meant by an unknown one, where tyro has none."""
    if not told.startswith("Unrecognized") or told.endswith("?") or "Perhaps" in told:
        return ""
    names = options_of(kind)
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    unknown = [name for name in given if name in told and name not in names]
    close = [match for name in unknown for match in get_close_matches(name, names, n=1)]
    return f" Did you mean {', '.join(dict.fromkeys(close))}?" if close else ""


def _choices(found: re.Match[str]) -> str:
    """What is allowed in an order that is always the same, and what may have been meant: tyro keeps
    choices in a set."""
    names = sorted(name.strip(" '") for name in found[3].split(",") if name.strip())
    close = get_close_matches(found[2], names, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"{found[1]}: allowed are {', '.join(names)}.{hint}"


def _one_sentence(box: str) -> str:
    """The text inside tyro's box on one line: the complaint, and what it thinks was meant."""
    lines = [re.sub(r"[│╭╮╰╯─]+|-{3,}", "", line).strip() for line in box.splitlines()]
    text = " ".join(line for line in lines[1:] if line)
    text = text.partition("For full helptext")[0].strip()
    for pattern, instead in SHORTER:
        text = re.sub(pattern, instead, text)
    text = re.sub(r"(invalid choice '(.*?)'.*?)\. Expected one of \((.*)\)", _choices, text)
    text = text.strip().rstrip(".")
    return f"{text}{'' if text.endswith('?') else '.'}"
