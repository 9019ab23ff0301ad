"""Continuations of any length in windows that a model can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Window(NamedTuple):
    """Some tokens, of which only the last `scored` get a score, each after those before it."""

    tokens: list[int]
    scored: int


def windows(
    context: Sequence[int], continuation: Sequence[int], length: int, stride: int | None = None
) -> list[Window]:
    """The continuation in windows that read at most `length` tokens and score each token once.

    A context that is too long loses its beginning. stride: tokens that each window after the first
    scores, after length - stride others; None: as many as fit.
    """
    tokens, found, done = [*context, *continuation], [], 0
    while done < len(continuation):
        most = length if not done else stride or length
        count = min(most, len(continuation) - done)
        end = len(context) + done + count
        found.append(Window(tokens[max(0, end - 1 - length) : end], count))
        done += count
    return found
