"""How predictions attend: the modes, and the implementations of the engine."""

from __future__ import annotations

import re
from typing import Literal, get_args

from entp.errors import one_of
from entp.fields import raise_problems

Mode = str
"""One of MODES, or refresh-N, such as refresh-8: ENTP that is computed anew every N tokens only
(engine/refreshed.py). refresh-1 would be entp: it has one name."""
CurriculumMode = str
"""A mode, or random-prefix."""
Impl = Literal["auto", "reference", "packed", "triton"]
MODES = ("entp", "decoder", "prefix-lm")
IMPLS: tuple[str, ...] = get_args(Impl)
RANDOM_PREFIX = "random-prefix"
LONGEST = 10**6
"""The largest N of a mode refresh-N."""
REFRESH = f"refresh-N (N from 2 to {LONGEST})"


def refresh_of(mode: object) -> int | None:
    """N in mode refresh-N, the tokens from one re-encoding to the next; None in other modes."""
    found = re.fullmatch("refresh-([1-9][0-9]{0,6})", mode) if isinstance(mode, str) else None
    every = int(found[1]) if found else 0
    return every if 2 <= every <= LONGEST else None


def mode_problems(mode: object, *more: str, name: str = "mode") -> list[str]:
    """What is wrong with a mode that may also be one of `more`, if anything is."""
    if mode in (*MODES, *more) or refresh_of(mode) is not None:
        return []
    return [str(one_of(name, mode, (*MODES, *more, REFRESH))).rstrip(".")]


def check_mode(mode: object) -> None:
    """InputError for what is no mode."""
    raise_problems(mode_problems(mode))
