"""The shards of a split as they are written: append, save, go on after a kill."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from entp.data.manifest import file_hash, token_type
from entp.data.shards import documents_file
from entp.errors import InputError
from entp.files import write_file

START = np.dtype("<i8")
"""The first token of a document, as it is stored."""


class SplitWriter:
    """Appends documents to a split. `save` says what is on disk for good; a writer with that state
    goes on from there, and forgets what was written after it."""

    def __init__(
        self,
        folder: Path,
        split: str,
        vocab: int,
        shard_tokens: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.kind = token_type(vocab)
        state = state or {"documents": 0, "tokens": 0, "bytes": 0, "shards": []}
        self.documents, self.tokens, self.bytes = (
            int(state[name]) for name in ("documents", "tokens", "bytes")
        )
        self.shards: list[dict[str, Any]] = list(state["shards"])
        self._check_finished()
        self._shard: io.FileIO | None = None
        self._restore_shard()
        self._starts = _shortened(self.starts_path, self.documents * START.itemsize)

    @property
    def starts_path(self) -> Path:
        return self.folder / f"{self.split}.documents.part"

    @property
    def open_tokens(self) -> int:
        """Tokens in the shard that is not full yet."""
        return self.tokens - sum(int(shard["tokens"]) for shard in self.shards)

    def add(self, tokens: list[np.ndarray], starts: list[int], size: int) -> None:
        """Append tokens; `starts` are places among them where documents begin, `size` the bytes of
        their text."""
        together = np.concatenate([one.astype(self.kind, copy=False) for one in tokens])
        _write_all(self._starts, (np.array(starts, dtype=START) + self.tokens).tobytes())
        self.documents += len(starts)
        self.bytes += size
        while len(together):
            room = self.shard_tokens - self.open_tokens
            self._append(together[:room])
            together = together[room:]

    def save(self) -> dict[str, Any]:
        """Flush everything to disk; the state to go on from."""
        for file in (self._shard, self._starts):
            if file is not None:
                os.fsync(file.fileno())
        return self._state()

    def finish(self) -> dict[str, Any]:
        """Close the last shard and write the documents' starts; what the manifest says."""
        self.save()
        if self._shard is not None:
            self._close_shard()
        starts = np.fromfile(self.starts_path, dtype=START)
        file = io.BytesIO()
        np.save(file, starts)
        write_file(self.folder / documents_file(self.split), file.getvalue())
        return self._state()

    def close(self) -> None:
        for file in (self._shard, self._starts):
            if file is not None:
                file.close()

    def _state(self) -> dict[str, Any]:
        counts = {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes}
        return {**counts, "shards": list(self.shards)}

    def _append(self, tokens: np.ndarray) -> None:
        """Append tokens to the open shard, which has room for them."""
        if self._shard is None:
            self._shard = _shortened(self._shard_path(), 0)
            self._hash = hashlib.sha256()
        data = tokens.tobytes()
        _write_all(self._shard, data)
        self._hash.update(data)
        self.tokens += len(tokens)
        if self.open_tokens == self.shard_tokens:
            self._close_shard()

    def _close_shard(self) -> None:
        assert self._shard is not None
        os.fsync(self._shard.fileno())
        self._shard.close()
        told = {"file": self._shard_path().name, "tokens": self.open_tokens}
        self.shards.append({**told, "sha256": self._hash.hexdigest()})
        self._shard = None

    def _shard_path(self) -> Path:
        """The shard that is being written."""
        return self.folder / f"{self.split}-{len(self.shards):05}.bin"

    def _check_finished(self) -> None:
        """InputError for a finished shard that is not what was written; later ones are removed."""
        for shard in self.shards:
            path = self.folder / shard["file"]
            if not path.is_file() or file_hash(path) != shard["sha256"]:
                raise _damaged(path)
        known = {shard["file"] for shard in self.shards} | {self._shard_path().name}
        for path in self.folder.glob(f"{self.split}-*.bin"):
            if path.name not in known:
                path.unlink()

    def _restore_shard(self) -> None:
        """Open the shard that was being written, as long as it was when the state was saved."""
        path, size = self._shard_path(), self.open_tokens * self.kind.itemsize
        if size == 0:
            path.unlink(missing_ok=True)
            return
        self._shard = _shortened(path, size)
        self._hash = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                self._hash.update(chunk)


def _shortened(path: Path, size: int) -> io.FileIO:
    """The file open at its end, cut to this size."""
    path.touch()
    file = io.FileIO(path, "r+")
    if os.fstat(file.fileno()).st_size < size:
        file.close()
        raise _damaged(path)
    file.truncate(size)
    file.seek(size)
    return file


def _write_all(file: io.FileIO, data: bytes) -> None:
    """Write all of the data: a file without a buffer may take less at once."""
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


def _damaged(path: Path) -> InputError:
    return InputError(
        f"{path} is not what was written before: delete the folder {path.parent}, and prepare the "
        "corpus again from the beginning."
    )
