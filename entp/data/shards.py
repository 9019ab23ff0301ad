"""Prepared corpora as they are read: tokens of a split from memory-mapped shards."""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from entp.data.manifest import (
    MANIFEST,
    SPLITS,
    file_hash,
    manifest_hash,
    read_manifest,
    token_type,
)
from entp.data.places import find_corpus, places
from entp.data.tokenizer import Tokenizer
from entp.data.tokenizers import read_tokenizer
from entp.errors import InputError, one_of


class TokenStream:
    """The tokens of a split, one document after the other, in one or more shards."""

    def __init__(self, shards: list[np.ndarray]) -> None:
        self.shards = shards
        self.ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)
        self.firsts: list[int] = [0, *self.ends[:-1].tolist()]

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def take(self, starts: np.ndarray, length: int) -> np.ndarray:
        """(n, length) int64: the tokens from each of n starts on."""
        starts = np.asarray(starts, dtype=np.int64)
        if len(starts) and not 0 <= starts.min() <= starts.max() <= len(self) - length:
            raise IndexError(
                f"rows of {length} tokens from {starts.min()} to {starts.max()} on are outside a "
                f"stream of {len(self)}"
            )
        out = np.empty((len(starts), length), dtype=np.int64)
        shards = np.searchsorted(self.ends, starts, side="right")
        for row, start, shard in zip(out, starts.tolist(), shards.tolist(), strict=True):
            self._fill(row, start, shard)
        return out

    def _fill(self, row: np.ndarray, start: int, shard: int) -> None:
        """Fill a row with the tokens from `start` on, which is in this shard."""
        filled = 0
        while filled < len(row):
            tokens = self.shards[shard]
            at = start + filled - self.firsts[shard]
            part = tokens[at : at + len(row) - filled]
            row[filled : filled + len(part)] = part
            filled, shard = filled + len(part), shard + 1


class Corpus:
    """A prepared corpus; `open_corpus` makes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.hash = manifest_hash(self.manifest)
        self._check_files()

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.folder)

    @property
    def vocab(self) -> int:
        """The number of tokens, without reading the tokenizer."""
        return int(self.manifest["tokenizer"]["vocab"])

    @property
    def end(self) -> int:
        """The token that follows a document."""
        return int(self.manifest["tokenizer"]["end"])

    def tokens(self, split: str) -> TokenStream:
        """The tokens of a split."""
        return _stream(self, _known(split))

    def documents(self, split: str) -> np.ndarray:
        """(documents,) int64: the first token of each document of a split."""
        return _documents(self, _known(split))

    def verify(self) -> None:
        """Read every file again: InputError for one that is not what was written."""
        for split in SPLITS:
            for shard in self.manifest["splits"][split]["shards"]:
                path = self.folder / shard["file"]
                if file_hash(path) != shard["sha256"]:
                    raise InputError(
                        f"{path} is not what was written (its checksum differs): prepare the "
                        "corpus again."
                    )
            self.documents(split)
        _ = self.tokenizer

    def _check_files(self) -> None:
        """InputError for a shard that is missing, cut off, too long, or not in the manifest."""
        size = token_type(self.vocab).itemsize
        told = {
            shard["file"]: shard["tokens"] * size
            for split in SPLITS
            for shard in self.manifest["splits"][split]["shards"]
        }
        for file, wanted in told.items():
            _check_size(self.folder / file, wanted)
        for path in sorted(self.folder.glob("*.bin")):
            if path.name not in told:
                raise InputError(
                    f"{path} does not belong to the corpus ({MANIFEST} has no such shard): move it "
                    "away, or prepare the corpus again."
                )


def open_corpus(corpus: str | Path) -> Corpus:
    """The prepared corpus with this hash, or in this folder.

    One that was opened before is not read again, unless its manifest changed.
    """
    if isinstance(corpus, Path):
        return _open(corpus.absolute(), _changed(corpus))
    folder = _found(corpus, tuple(places()))
    if _changed(folder):
        found = _open(folder.absolute(), _changed(folder))
        if found.hash == corpus:
            return found
    _found.cache_clear()  # it moved
    folder = find_corpus(corpus)
    return _open(folder.absolute(), _changed(folder))


def _changed(folder: Path) -> int:
    """When the manifest was written; 0 if there is none."""
    try:
        return (folder / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=64)
def _found(corpus: str, searched: tuple[Path, ...]) -> Path:
    """The folder of a corpus, for as long as the same places are searched."""
    return find_corpus(corpus)


@lru_cache(maxsize=16)
def _open(folder: Path, changed: int) -> Corpus:
    return Corpus(folder)


@lru_cache(maxsize=64)
def _stream(corpus: Corpus, split: str) -> TokenStream:
    kind = token_type(corpus.vocab)
    told = corpus.manifest["splits"][split]["shards"]
    files = [corpus.folder / shard["file"] for shard in told if shard["tokens"]]
    return TokenStream([np.asarray(np.memmap(file, dtype=kind, mode="r")) for file in files])


@lru_cache(maxsize=64)
def _documents(corpus: Corpus, split: str) -> np.ndarray:
    path = corpus.folder / documents_file(split)
    told = corpus.manifest["splits"][split]
    try:
        found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): prepare the corpus again.") from None
    fits = found.dtype == np.int64 and found.shape == (told["documents"],)
    if not fits or (len(found) and not 0 == found[0] <= found[-1] < told["tokens"]):
        raise InputError(
            f"{path} does not fit {MANIFEST}, which tells of {told['documents']} documents: "
            "prepare the corpus again."
        )
    return np.asarray(found)


def documents_file(split: str) -> str:
    """The name of the file with the first token of each document."""
    return f"{split}.documents.npy"


def _known(split: str) -> str:
    if split not in SPLITS:
        raise one_of("split of a corpus", split, SPLITS)
    return split


def _check_size(path: Path, wanted: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}), and {MANIFEST} tells of it: prepare the "
            "corpus again."
        ) from None
    if size != wanted:
        fault = "is cut off" if size < wanted else "is too long"
        raise InputError(
            f"{path} {fault}: it has {size:,} bytes, {MANIFEST} tells of {wanted:,}. Prepare the "
            "corpus again."
        )
