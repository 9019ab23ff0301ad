"""Help texts: the list of commands, and the options of a command that matter most."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Mapping

from entp.cli.derive import Option, about

WIDEST = 120
COLUMN = 40
"""Characters for an option and its value; longer ones push their help to the right."""
MOST_OF_PART = 6
"""Options of a part that the short help shows."""


def command_list(commands: Mapping[str, str]) -> str:
    """The help of `entp`: each command with what it does."""
    lines = [f"  {name:20} {text}" for name, text in commands.items()]
    return "\n".join(
        [
            "entp: encoder-only next-token prediction",
            "",
            "usage: entp COMMAND [OPTIONS]      entp COMMAND --help      entp --version",
            "",
            *lines,
            "",
            "first: entp train addition --mode entp --steps 200 --batch-size 16 --out runs/first",
        ]
    )


def part_list(command: str, parts: Mapping[str, type], default: str) -> str:
    """The help of a command that has parts, such as `entp bench`."""
    lines = [f"  {name:16} {about(kind)}" for name, kind in parts.items()]
    usage = f"usage: entp {command} [WHAT] [OPTIONS]      entp {command} WHAT --help"
    return "\n".join([usage, "", *lines, "", f"default: {default}"])


def short_help(
    program: str, text: str, options: Mapping[str, Option], chosen: Collection[str]
) -> str:
    """Help about the chosen options, a line or two each; a name that ends in a dot stands for the
    first options of that part."""
    shown = [options[name] for name in _chosen(options, chosen)]
    usage = f"usage: {program} [OPTIONS]"
    rest = [
        f"All {len(options)} options: {program} --help-all",
        "Short names work as well: --lr, --bs, --bf16, --layers, --warmup, --wandb and the like.",
    ]
    return "\n".join([usage, "", text, "", *(_entry(option) for option in shown), "", *rest])


def first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".") + "."


def _chosen(names: Collection[str], chosen: Collection[str]) -> list[str]:
    """The names to show, in their order."""
    parts = [part for part in chosen if part.endswith(".")]
    first = {
        name
        for part in parts
        for name in [name for name in names if name.startswith(f"--{part}")][:MOST_OF_PART]
    }
    return [name for name in names if name.removeprefix("--") in chosen or name in first]


def _entry(option: Option) -> str:
    """An option, its first sentence of help and its default."""
    head = f"  {option.name} {option.takes}".rstrip()
    text = f"{first_sentence(option.help)} {option.told_default}".strip()
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
    indent = " " * (COLUMN + 2)
    lines = textwrap.wrap(
        text,
        max(width, COLUMN + 30),
        initial_indent=f"{head:<{COLUMN}}  ",
        subsequent_indent=indent,
    )
    return "\n".join(lines)
