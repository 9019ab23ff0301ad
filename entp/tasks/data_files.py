"""Files that tasks read: found below the places of the data, plain or compressed."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from pathlib import Path
from typing import Any

from entp.data.places import add_place, find_file
from entp.errors import InputError

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def find_any(name: str) -> Path:
    """The file of this name, or with .gz or .xz behind it."""
    for ending in ("", *OPENERS):
        try:
            return find_file(f"{name}{ending}")
        except InputError as error:
            missing = error
    said = str(missing).removeprefix(f"{name}{ending}")
    raise InputError(f"{name} (or with {' or '.join(OPENERS)}){said}")


def read_bytes(path: Path) -> bytes:
    """The contents of a file, without its compression."""
    if path.suffix not in OPENERS:
        return path.read_bytes()
    try:
        with OPENERS[path.suffix](path, "rb") as file:
            return bytes(file.read())
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"{path} is damaged ({error}): get it again.") from None


def read_lines(name: str) -> list[dict[str, Any]]:
    """The objects of a file with one in JSON on each line."""
    path = find_any(name)
    rows = []
    for number, line in enumerate(read_bytes(path).decode().splitlines(), start=1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            raise InputError(f"{path} is not JSON with an object on line {number}.") from None
    return rows


def add_folder(data: str) -> None:
    """Search a folder of data too."""
    if not Path(data).is_dir():
        raise InputError(f"--data {data} is no folder: give the one that the task's files are in.")
    add_place(Path(data))
