"""Checks that config dataclasses make of themselves."""

from __future__ import annotations

import math
import operator
import types
import typing
from typing import Any, Literal, get_args

from entp.errors import InputError, one_of

_KNOWN: dict[type, dict[str, Any]] = {}


def _hints(kind: type) -> dict[str, Any]:
    """The types of a class's fields: reading them takes most of the time of a check."""
    if kind not in _KNOWN:
        _KNOWN[kind] = typing.get_type_hints(kind)
    return _KNOWN[kind]


def choice_problems(config: Any, prefix: str) -> list[str]:
    """Fields with a fixed list of values that have another one."""
    hints = _hints(type(config)).items()
    choices = {name: get_args(hint) for name, hint in hints if typing.get_origin(hint) is Literal}
    wrong = {
        name: allowed for name, allowed in choices.items() if getattr(config, name) not in allowed
    }
    return [
        str(one_of(f"{prefix}{name}", getattr(config, name), allowed)).rstrip(".")
        for name, allowed in wrong.items()
    ]


LARGEST = 10**12
"""No number of a configuration is larger: what is computed with it stays inside 64 bits, and
float32."""


def as_int(value: Any) -> int | None:
    """A whole number of any type, numpy's included, as an int; None for anything else, True and
    False among it."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_numbers(config: Any, prefix: str) -> None:
    """Whole numbers must be whole, others finite, switches on or off; makes 1 in a float field 1.0:
    equal runs hash equal."""
    problems = []
    for name, hint in _hints(type(config)).items():
        value, where = getattr(config, name), f"{prefix}{name}"
        kinds = set(get_args(hint)) if typing.get_origin(hint) is types.UnionType else {hint}
        if value is None and type(None) in kinds:
            continue
        if kinds == {bool} and not isinstance(value, bool):
            problems.append(f"{where} is {value!r}: it must be True or False")
        elif int in kinds or float in kinds:
            number = as_int(value) if int in kinds else value
            endless = isinstance(number, float) and not math.isfinite(number)
            if endless or isinstance(number, bool) or not isinstance(number, int | float):
                problems.append(
                    f"{where} is {value!r}: it must be a {'whole' if int in kinds else 'finite'} "
                    "number"
                )
            elif abs(number) > LARGEST:
                problems.append(f"{where} is {value!r}: it must be at most {LARGEST:g}")
            else:
                object.__setattr__(config, name, number if int in kinds else float(number))
    raise_problems(problems)


def raise_problems(problems: list[str]) -> None:
    """One InputError about all problems, if there are any."""
    if problems:
        text = "; ".join(problems)
        raise InputError(text if text.endswith("?") else f"{text}.")
