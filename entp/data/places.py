"""Where data is searched: folders that were added, those of ENTP_DATA, then the cache.

A run stores the hash of its corpus and never a path, so every process has to find the corpus again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from entp.data.manifest import MANIFEST, manifest_hash, read_manifest
from entp.errors import InputError

VARIABLE = "ENTP_DATA"
CACHE = "ENTP_CACHE"


def add_place(folder: Path) -> None:
    """Search this folder first, in this process and, through the environment, in those it
    starts."""
    place = str(Path(folder).absolute())
    if os.pathsep in place:
        raise InputError(
            f"the folder {place} has {os.pathsep!r} in its name, which separates the folders of "
            f"{VARIABLE}: rename it."
        )
    others = [other for other in _listed() if other != place]
    os.environ[VARIABLE] = os.pathsep.join([place, *others])


def places() -> list[Path]:
    """The folders to search, in order: those of ENTP_DATA, with added ones first, and the cache."""
    return [*map(Path, _listed()), cache_folder()]


def cache_folder() -> Path:
    """Where corpora are prepared by default: $ENTP_CACHE, $XDG_CACHE_HOME/entp or
    ~/.cache/entp."""
    if own := os.environ.get(CACHE):
        return Path(own)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "entp"
    return Path.home() / ".cache" / "entp"


def corpus_folders() -> list[Path]:
    """All prepared corpora that are found: a place itself, or a folder directly below one."""
    found = [folder for place in places() for folder in (place, *_below(place))]
    return list(dict.fromkeys(folder for folder in found if (folder / MANIFEST).is_file()))


def corpora_below(folder: Path) -> dict[str, Path]:
    """The prepared corpora directly below a folder, by their hashes."""
    found = {_hash_of(path): path for path in _below(folder) if (path / MANIFEST).is_file()}
    return {key: path for key, path in found.items() if key is not None}


def find_corpus(corpus: str) -> Path:
    """The folder of the prepared corpus with this hash."""
    if not is_hash(corpus):
        raise InputError(
            f"{corpus!r} is not the hash of a corpus, 16 digits from 0 to f: `entp data list` "
            "shows those that are found."
        )
    for folder in corpus_folders():
        if _hash_of(folder) == corpus:
            return folder
    raise InputError(
        f"the corpus {corpus} is not in {_searched()}: prepare it again (entp data prepare), or "
        f"name its folder by --data or {VARIABLE}."
    )


def find_file(name: str) -> Path:
    """A file by its path below one of the places, such as clutrr/train.csv.xz."""
    for place in places():
        if (place / name).is_file():
            return place / name
    raise InputError(
        f"{name} is not in {_searched()}: set {VARIABLE} to the folder that has it, or several, "
        f"separated by {os.pathsep!r}."
    )


def is_hash(text: str) -> bool:
    """Whether it looks like the hash of a corpus."""
    return re.fullmatch("[0-9a-f]{16}", text) is not None


def _listed() -> list[str]:
    return [place for place in os.environ.get(VARIABLE, "").split(os.pathsep) if place]


def _below(place: Path) -> list[Path]:
    """The folders directly below a place; none where it cannot be read."""
    try:
        return sorted(path for path in place.iterdir() if path.is_dir())
    except OSError:
        return []


def _hash_of(folder: Path) -> str | None:
    """The hash of a corpus; None for a manifest of something else."""
    try:
        return manifest_hash(read_manifest(folder))
    except InputError:
        return None


def _searched() -> str:
    return ", ".join(str(place) for place in places())
