"""Tokenizers by name, for tasks on text that a run which read other text is measured on.

A name is "bytes", "gpt2", or the first 16 digits of the checksum of a tokenizer.json: of what
decides how it cuts text, or of the whole file. A task stores the name and never a path: the file is
searched in the places of the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from entp.data.json_tokenizer import JsonTokenizer, file_name
from entp.data.places import add_place, find_file, places
from entp.data.tokenizer import TOKENIZER, Tokenizer
from entp.data.tokenizers import ByteTokenizer, gpt2_tokenizer, read_tokenizer
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
    for found in _tokenizers():
        if name in (tokenizer_name(found), file_name(found.file() or b"")):
            return found
    raise InputError(
        f"the tokenizer {name} is not found: no {TOKENIZER} with this sha256 is in "
        f"{_searched()}. Name the folder of its run or corpus by --data or ENTP_DATA."
    )


def _find_gpt2() -> Tokenizer:
    """GPT-2's, from its own files or from the tokenizer.json of a run or corpus."""
    for found in _tokenizers():
        if found.kind == "gpt2":
            return found
    try:
        return gpt2_tokenizer(find_file("gpt2_bpe/encoder.json").parent)
    except InputError as error:
        raise InputError(f"GPT-2's tokenizer is not found: {error}") from None


def _tokenizers() -> Iterator[Tokenizer]:
    """Those of the places that tasks on text can have; pretrained models may have others."""
    for folder in _folders():
        try:
            yield read_tokenizer(folder)
        except InputError:
            continue


def _folders() -> Iterator[Path]:
    """Folders with a tokenizer.json: the places, and those directly below one."""
    for place in places():
        below = sorted(place.iterdir()) if place.is_dir() else []
        for folder in (place, *below):
            if (folder / TOKENIZER).is_file():
                yield folder


def _searched() -> str:
    return ", ".join(str(place) for place in places())


def json_name_problems(name: str) -> list[str]:
    """What is wrong with the name of a tokenizer of any kind."""
    if name == "bytes" or re.fullmatch(f"[0-9a-f]{{{DIGITS}}}", str(name)):
        return []
    return [
        f"task.tokenizer is {name!r}: allowed are bytes, or the first {DIGITS} digits of the "
        f"sha256 of a {TOKENIZER}, which --data with its folder fills in"
    ]


@lru_cache(maxsize=8)
def find_json_tokenizer(name: str) -> JsonTokenizer:
    """The tokenizer.json, of any kind, whose file has this name, from the places of the data."""
    for folder in _folders():
        file = (folder / TOKENIZER).read_bytes()
        if file_name(file) == name:
            return JsonTokenizer(file, str(folder / TOKENIZER))
    raise InputError(
        f"the tokenizer {name} is not found: no {TOKENIZER} with this sha256 is in "
        f"{_searched()}. Name its folder by --init, --data or ENTP_DATA."
    )


def model_vocab(name: str) -> int:
    """The vocabulary of a model that reads these tokens."""
    return MODEL_VOCAB[name] if name in MODEL_VOCAB else find_tokenizer(name).vocab


def tokenizer_of_run(folder: Path) -> str:
    """The name of the tokenizer of a run, or of one of its checkpoints, which is found from now
    on."""
    place = look_into(folder)
    return "bytes" if place is None else tokenizer_name(read_tokenizer(place))


def any_tokenizer_of_run(folder: Path) -> str:
    """The same, or the name of a pretrained model's, which only `find_json_tokenizer` finds."""
    try:
        return tokenizer_of_run(folder)
    except InputError:
        place = look_into(folder)
        assert place is not None
        return file_name((place / TOKENIZER).read_bytes())


def look_into(folder: Path) -> Path | None:
    """Let the tokenizer of a run, or of one of its checkpoints, be found; the folder that it is
    in, or None."""
    folder = folder.absolute()
    for place in (folder, folder.parent.parent):
        if (place / TOKENIZER).is_file():
            add_place(place)
            return place
    return None
