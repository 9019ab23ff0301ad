"""Tokenizers by name, for tasks on text that a run which read other text is measured on.

A name is "bytes", "gpt2", or the first 16 digits of the checksum of a tokenizer.json. A task stores
the name and never a path: the file is searched in the places of the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from entp.data.places import add_place, find_file, places
from entp.data.tokenizers import (
    TOKENIZER,
    ByteTokenizer,
    Tokenizer,
    gpt2_tokenizer,
    read_tokenizer,
)
from entp.errors import InputError
from entp.tasks.text import MODEL_VOCAB

DIGITS = 16


def tokenizer_name(tokenizer: Tokenizer) -> str:
    """The name under which `find_tokenizer` finds it again."""
    if tokenizer.kind in ("bytes", "gpt2"):
        return tokenizer.kind
    return str(tokenizer.sha256)[:DIGITS]


def name_problems(name: str) -> list[str]:
    """What is wrong with the name of a tokenizer."""
    if name in ("bytes", "gpt2") or re.fullmatch(f"[0-9a-f]{{{DIGITS}}}", str(name)):
        return []
    return [
        f"task.tokenizer is {name!r}: allowed are bytes, gpt2, or the first {DIGITS} digits of the "
        f"sha256 of a {TOKENIZER}"
    ]


@lru_cache(maxsize=8)
def find_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of this name, from the places of the data."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return _find_gpt2()
    for folder in _folders():
        if tokenizer_name(found := read_tokenizer(folder)) == name:
            return found
    raise InputError(
        f"the tokenizer {name} is not found: no {TOKENIZER} with this sha256 is in "
        f"{_searched()}. Name the folder of its run or corpus by --data or ENTP_DATA."
    )


def _find_gpt2() -> Tokenizer:
    """GPT-2's, from its own files or from the tokenizer.json of a run or corpus."""
    for folder in _folders():
        if (found := read_tokenizer(folder)).kind == "gpt2":
            return found
    try:
        return gpt2_tokenizer(find_file("gpt2_bpe/encoder.json").parent)
    except InputError as error:
        raise InputError(f"GPT-2's tokenizer is not found: {error}") from None


def _folders() -> Iterator[Path]:
    """Folders with a tokenizer.json: the places, and those directly below one."""
    for place in places():
        below = sorted(place.iterdir()) if place.is_dir() else []
        for folder in (place, *below):
            if (folder / TOKENIZER).is_file():
                yield folder


def _searched() -> str:
    return ", ".join(str(place) for place in places())


def model_vocab(name: str) -> int:
    """The vocabulary of a model that reads these tokens."""
    return MODEL_VOCAB[name] if name in MODEL_VOCAB else find_tokenizer(name).vocab


def tokenizer_of_run(folder: Path) -> str:
    """The name of the tokenizer of a run, or of one of its checkpoints, which is found from now
    on."""
    place = look_into(folder)
    return "bytes" if place is None else tokenizer_name(read_tokenizer(place))


def look_into(folder: Path) -> Path | None:
    """Let the tokenizer of a run, or of one of its checkpoints, be found; the folder that it is
    in, or None."""
    folder = folder.absolute()
    for place in (folder, folder.parent.parent):
        if (place / TOKENIZER).is_file():
            add_place(place)
            return place
    return None
