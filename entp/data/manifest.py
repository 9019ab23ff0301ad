"""The manifest of a prepared corpus: what is in its folder, and the hash by which runs name it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from entp.errors import InputError
from entp.files import parse_json

MANIFEST = "manifest.json"
VERSION = 1
SPLITS = ("train", "valid", "test")
LARGEST_16_BIT = 65536
Manifest = dict[str, Any]


def manifest_hash(manifest: Manifest) -> str:
    """16 hex digits for what the manifest says, whatever the corpus and its sources are called."""
    unnamed = {key: value for key, value in manifest.items() if key != "name"}
    unnamed["sources"] = [
        {key: value for key, value in source.items() if key != "name"}
        for source in manifest["sources"]
    ]
    text = json.dumps(unnamed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared corpus, with everything in it of the right kind."""
    path = folder / MANIFEST
    try:
        manifest = parse_json(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{folder} is not a prepared corpus: {MANIFEST} cannot be read ({error.strerror}). "
            "`entp data prepare` makes one."
        ) from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}): prepare the corpus again.") from None
    if isinstance(manifest, dict) and manifest.get("version", VERSION) != VERSION:
        raise InputError(
            f"{path} has version {manifest['version']!r}; this entp reads version {VERSION}: "
            "prepare the corpus again, or install the entp that wrote it."
        )
    if problem := _problem(manifest):
        raise InputError(f"{path} is not the manifest of a corpus: {problem}.")
    return manifest


def token_type(vocab: int) -> np.dtype:
    """How a token is stored: 16 bits if they are enough, else 32, the low byte first."""
    return np.dtype("<u2" if vocab <= LARGEST_16_BIT else "<u4")


def file_hash(path: Path) -> str:
    """The sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _problem(manifest: Any) -> str:
    """What is wrong with a manifest; nothing for a good one."""
    shape = {"version": int, "name": str, "tokenizer": dict, "sources": list, "splits": dict}
    if problem := _misses("it", manifest, shape):
        return problem
    tokenizer = {"kind": str, "vocab": int, "end": int}
    if problem := _misses("tokenizer", manifest["tokenizer"], tokenizer):
        return problem
    if not all(isinstance(source, dict) for source in manifest["sources"]):
        return "its sources are not a list of objects"
    problems = (_split_problem(name, manifest["splits"].get(name)) for name in SPLITS)
    return next(filter(None, problems), "")


def _split_problem(name: str, split: Any) -> str:
    shape = {"documents": int, "tokens": int, "bytes": int, "shards": list}
    if problem := _misses(f"split {name}", split, shape):
        return problem
    for shard in split["shards"]:
        if problem := _misses(
            f"a shard of {name}", shard, {"file": str, "tokens": int, "sha256": str}
        ):
            return problem
        if not re.fullmatch(rf"{name}-\d{{5,}}\.bin", shard["file"]):
            return f"{shard['file']!r} is no name for a shard of {name}"
    if sum(shard["tokens"] for shard in split["shards"]) != split["tokens"]:
        return f"the shards of {name} do not have its {split['tokens']} tokens together"
    return ""


def _misses(what: str, found: Any, shape: dict[str, type]) -> str:
    """The first field that is missing or of another kind."""
    if not isinstance(found, dict):
        return f"{what} is not an object"
    for name, kind in shape.items():
        value = found.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"{what} has no {name}" if value is None else f"{name} of {what} is {value!r}"
        if isinstance(value, int) and value < 0:
            return f"{name} of {what} is {value}"
    return ""
