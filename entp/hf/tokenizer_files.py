"""What stands beside a tokenizer.json and is no part of it: special tokens, chat template,
vocabulary in older formats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from entp.data.json_tokenizer import JsonTokenizer
from entp.data.places import places
from entp.data.tokenizer import TOKENIZER
from entp.files import parse_json

SETTINGS = "tokenizer_config.json"
BESIDE = (
    SETTINGS,
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt"),
)


def files_beside(file: bytes) -> dict[str, bytes]:
    """The files beside the same tokenizer.json, in the first of the data's places that has its
    settings too; empty if none has."""
    for folder in _folders():
        if (folder / SETTINGS).is_file() and (folder / TOKENIZER).read_bytes() == file:
            found = {name: folder / name for name in BESIDE}
            return {name: path.read_bytes() for name, path in found.items() if path.is_file()}
    return {}


def _folders() -> Iterator[Path]:
    """Folders with a tokenizer.json: the places, and those directly below one."""
    for place in places():
        for folder in (place, *sorted(place.glob("*/"))):
            if (folder / TOKENIZER).is_file():
                yield folder


def special_token(files: dict[str, bytes], name: str) -> int | None:
    """The number of a special token, such as bos_token, by a tokenizer's files."""
    for settings in (SETTINGS, "special_tokens_map.json"):
        named = parse_json(files.get(settings, b"{}")).get(name)
        text = named.get("content") if isinstance(named, dict) else named
        if isinstance(text, str):
            return JsonTokenizer(files[TOKENIZER]).token(text)
    return None
