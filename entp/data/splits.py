"""Which split a document belongs to: by a hash of its number, or, of fewer than three documents, by
cutting each into three parts."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from entp.data.manifest import SPLITS
from entp.data.sources import Piece, Source
from entp.errors import InputError

SEED = 0
LEAST_PART = 0.01
"""Least fraction of a document that is cut for validation, and for test."""


class Fractions(NamedTuple):
    """The fractions of documents for validation and test."""

    valid: float
    test: float

    def check(self) -> None:
        """InputError for fractions that leave a split empty."""
        if not (self.valid > 0 and self.test > 0 and self.valid + self.test < 1):
            raise InputError(
                f"valid is {self.valid} and test {self.test}: both must be above 0, and together "
                "below 1."
            )


class Part(NamedTuple):
    """Text for a split; `first` and `last` of a document there."""

    split: str
    text: str
    first: bool
    last: bool


class Splitter:
    """Hands the pieces of a source to the splits, and can go on after any piece."""

    def __init__(
        self, fractions: Fractions, lengths: list[int] | None, state: dict[str, int] | None = None
    ) -> None:
        """`lengths`: the characters of each document, if they are to be cut."""
        self.fractions, self.lengths = fractions, lengths
        self.number = state["document"] if state else 0
        self.offset = state["characters"] if state else 0

    def state(self) -> dict[str, int]:
        """How many documents were read, and how many characters of the next."""
        return {"document": self.number, "characters": self.offset}

    def parts(self, piece: Piece) -> list[Part]:
        """What each split gets of a piece."""
        if self.lengths is None:
            found = [Part(split_of(self.number, self.fractions), *piece)]
        else:
            found = self._cut(piece.text, borders(self.lengths[self.number], self.fractions))
        self.offset += len(piece.text)
        if piece.last:
            self.number, self.offset = self.number + 1, 0
        return found

    def _cut(self, text: str, ends: list[int]) -> list[Part]:
        found = []
        for split, begin, end in zip(SPLITS, [0, *ends], ends, strict=False):
            first, last = max(begin, self.offset), min(end, self.offset + len(text))
            if first < last:
                inside = text[first - self.offset : last - self.offset]
                found.append(Part(split, inside, first == begin, last == end))
        return found


def split_of(number: int, fractions: Fractions) -> str:
    """The split of a document; the first three go to one each, so that none stays empty."""
    if number < len(SPLITS):
        return SPLITS[number]
    digest = hashlib.sha256(f"{SEED} {number}".encode()).digest()
    drawn = int.from_bytes(digest[:8], "big") / 2**64
    if drawn < fractions.test:
        return "test"
    return "valid" if drawn < fractions.test + fractions.valid else "train"


def borders(length: int, fractions: Fractions) -> list[int]:
    """Where train, valid and test end within a document of so many characters."""
    if length < len(SPLITS):
        raise InputError(
            f"a document of {length} characters cannot be cut into train, valid and test: give "
            "more text."
        )
    valid, test = (max(1, round(length * max(part, LEAST_PART))) for part in fractions)
    return [length - valid - test, length - test, length]


def lengths_if_few(source: Source) -> list[int] | None:
    """The characters of each document, if there are fewer than three."""
    if source.has_many:
        return None
    lengths: list[int] = []
    for piece in source.pieces():
        if piece.first:
            lengths.append(0)
        if len(lengths) == len(SPLITS):
            return None
        lengths[-1] += len(piece.text)
    if not lengths:
        raise InputError(f"{source.name} has no text: every document of it is empty.")
    return lengths


def as_settings(fractions: Fractions) -> dict[str, Any]:
    return {"valid": fractions.valid, "test": fractions.test, "seed": SEED}
