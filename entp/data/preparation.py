"""One preparation of a corpus: from a source of documents to shards and their manifest.

Documents stream through in bounded memory. Every few seconds what is written is flushed and noted
in progress.json, so that preparing goes on after a kill, and the result is the same to the bit.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from entp.data.manifest import MANIFEST, SPLITS, VERSION, manifest_hash, read_manifest
from entp.data.places import CACHE, cache_folder
from entp.data.settings import Settings, differences, settings_of
from entp.data.sources import Source
from entp.data.splits import Fractions, Part, Splitter, lengths_if_few
from entp.data.tokenizer import TOKENIZER, Tokenizer
from entp.data.tokenizers import ByteTokenizer, make_tokenizer, train_bpe
from entp.data.writer import SplitWriter
from entp.errors import InputError
from entp.files import explain_failed_writes, json_bytes, lock_folder, parse_json, write_file

PROGRESS = "progress.json"
LEFT_OVER = (PROGRESS, "*.documents.part", ".*.tmp")
BATCH = 4_000_000
"""Characters that are encoded at once."""
BPE_BYTES = 100_000_000
"""Bytes of training documents from which a BPE is learned."""
EMPTY: dict[str, Any] = {"source": None, "splitter": None, "splits": None}
"""The progress before anything is written."""


@dataclass
class Preparation:
    """One preparation: from its settings to the manifest."""

    folder: Path
    label: str
    source: Source
    fractions: Fractions
    settings: Settings
    given: Tokenizer | None
    save_seconds: float
    quiet: bool

    def run(self) -> Path:
        with self._explained():
            self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if (self.folder / MANIFEST).is_file():
                self._check_same(settings_of(read_manifest(self.folder)))
                self._clean()
                return self.folder
            self._make()
        return self.folder

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        """Errors of writing, explained: a folder in the cache is given by no --out where `entp
        train` prepares a text."""
        cached = self.folder.parent == cache_folder()
        return explain_failed_writes(self.folder, CACHE if cached else "--out")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder, once other processes that prepare it are done."""
        busy = f"another process prepares {self.folder}"
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock_folder(self.folder, busy))
            except InputError:
                self._say(f"{busy}: waiting for it")
                stack.enter_context(lock_folder(self.folder))
            yield

    def _make(self) -> None:
        state = self._begin()
        lengths = lengths_if_few(self.source)
        tokenizer = self._tokenizer(lengths)
        splitter = Splitter(self.fractions, lengths, state["splitter"])
        writers = self._writers(tokenizer, state["splits"])
        try:
            self._write(tokenizer, splitter, writers, state["source"])
            with self._explained():
                splits = {split: writer.finish() for split, writer in writers.items()}
        finally:
            for writer in writers.values():
                writer.close()
        self._finish(tokenizer, splits)

    def _begin(self) -> dict[str, Any]:
        """The state to go on from, which for a new folder is the beginning."""
        path = self.folder / PROGRESS
        if path.is_file():
            state = _read_progress(path)
            self._check_same(state["settings"])
            self._say(f"going on with {self.folder}")
            return state
        if any(not other.name.startswith(".") for other in self.folder.iterdir()):
            raise InputError(f"{self.folder} has other files in it: give a new folder by --out.")
        self._say(f"preparing {self.label} in {self.folder}")
        state = {"settings": self.settings, **EMPTY}
        self._save(state)
        return state

    def _check_same(self, settings: Settings) -> None:
        """InputError for a folder that holds something else."""
        other = differences(settings, self.settings)
        if other:
            raise InputError(
                f"{self.folder} holds a corpus with other {' and '.join(other)}: give another "
                "folder by --out, or delete it."
            )

    def _tokenizer(self, lengths: list[int] | None) -> Tokenizer:
        """The tokenizer, which is also in the folder unless it is bytes."""
        if self.settings["tokenizer"]["kind"] == "bytes":
            return ByteTokenizer()
        path = self.folder / TOKENIZER
        if path.is_file():
            return make_tokenizer(path.read_bytes(), str(path))
        found = self.given or self._train(lengths)
        with self._explained():
            write_file(path, found.file() or b"")
        return found

    def _train(self, lengths: list[int] | None) -> Tokenizer:
        self._say(f"learning a BPE of {self.settings['vocab']} tokens")
        splitter = Splitter(self.fractions, lengths)
        texts = _training_texts(self.source, splitter, BPE_BYTES)
        found = train_bpe(texts, self.settings["vocab"])
        if found.vocab < self.settings["vocab"]:
            self._say(f"the text has no more to join: the BPE has {found.vocab} tokens")
        return found

    def _writers(self, tokenizer: Tokenizer, states: Any) -> dict[str, SplitWriter]:
        with self._explained():
            return {
                split: SplitWriter(
                    self.folder,
                    split,
                    tokenizer.vocab,
                    self.settings["shard_tokens"],
                    states and states[split],
                )
                for split in SPLITS
            }

    def _write(
        self,
        tokenizer: Tokenizer,
        splitter: Splitter,
        writers: dict[str, SplitWriter],
        position: Any,
    ) -> None:
        """Encode and append everything after the position, and save now and then."""
        progress = _Progress(self.label, self.source.total, self.quiet)
        saved = time.monotonic()
        for batch in _batches(self.source, splitter, position):
            tokens = tokenizer.encode_arrays([part.text for part in batch])
            with self._explained():
                _append(writers, batch, tokens, tokenizer.end)
                if time.monotonic() - saved >= self.save_seconds:
                    self._save(
                        {
                            "settings": self.settings,
                            "source": self.source.position(),
                            "splitter": splitter.state(),
                            "splits": {split: one.save() for split, one in writers.items()},
                        }
                    )
                    saved = time.monotonic()
            progress.show(self.source.done(), sum(one.tokens for one in writers.values()))
        progress.close()

    def _save(self, state: dict[str, Any]) -> None:
        with self._explained():
            write_file(self.folder / PROGRESS, json_bytes(state))

    def _finish(self, tokenizer: Tokenizer, splits: dict[str, Any]) -> None:
        about = {"kind": tokenizer.kind, "vocab": tokenizer.vocab, "end": tokenizer.end}
        manifest = {
            "version": VERSION,
            "name": self.label,
            "tokenizer": {**about, "sha256": tokenizer.sha256},
            "sources": self.settings["sources"],
            "settings": {key: self.settings[key] for key in ("vocab", "fractions", "shard_tokens")},
            "splits": splits,
        }
        with self._explained():
            write_file(self.folder / MANIFEST, json_bytes(manifest))
        self._clean()
        self._say(_summary(manifest))
        if not tokenizer.counts_bytes:
            self._say("its tokens do not stand for bytes of the text: no bits per byte")

    def _clean(self) -> None:
        """Remove what only preparing needs, if the disk lets it: the corpus is whole without."""
        parts = [path for name in LEFT_OVER for path in self.folder.glob(name)]
        for path in parts:
            with contextlib.suppress(OSError):
                path.unlink()

    def _say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)


def _read_progress(path: Path) -> dict[str, Any]:
    """What progress.json says."""
    try:
        state = parse_json(path.read_bytes())
    except ValueError:
        state = None
    if not isinstance(state, dict) or not {*EMPTY, "settings"} <= set(state):
        raise InputError(f"{path} is not one of entp's: give a new folder by --out.")
    return state


def _training_texts(source: Source, splitter: Splitter, most: int) -> Iterator[str]:
    """The texts of train, up to so many bytes."""
    read = 0
    for piece in source.pieces():
        for part in splitter.parts(piece):
            if part.split == "train":
                read += len(part.text.encode())
                yield part.text
        if read >= most:
            return


def _batches(source: Source, splitter: Splitter, position: Any) -> Iterator[list[Part]]:
    """What follows the position, some documents at a time."""
    batch: list[Part] = []
    size = 0
    for piece in source.pieces(position):
        batch += splitter.parts(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _append(
    writers: dict[str, SplitWriter], batch: list[Part], tokens: list[np.ndarray], end: int
) -> None:
    """Hand each split its part of a batch, with the end token after each document."""
    closing = np.array([end])
    for split, writer in writers.items():
        mine = [(part, ids) for part, ids in zip(batch, tokens, strict=True) if part.split == split]
        if not mine:
            continue
        arrays = [np.concatenate([ids, closing]) if part.last else ids for part, ids in mine]
        begins = np.cumsum([0, *map(len, arrays[:-1])]).tolist()
        starts = [at for at, (part, _) in zip(begins, mine, strict=True) if part.first]
        writer.add(arrays, starts, sum(len(part.text.encode()) for part, _ in mine))


def _summary(manifest: dict[str, Any]) -> str:
    counts = ", ".join(f"{split} {manifest['splits'][split]['tokens']:,}" for split in SPLITS)
    return f"corpus {manifest_hash(manifest)}: tokens of {counts}"


class _Progress:
    """How far preparing is: a bar on a terminal, elsewhere a line every half minute."""

    EVERY = 30.0

    def __init__(self, label: str, total: int | None, quiet: bool) -> None:
        self.label, self.total, self.quiet = label, total, quiet
        self.told = time.monotonic()
        self.bar = None
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            unit = "document" if total is None else "B"
            self.bar = tqdm(total=total, desc=label, unit=unit, unit_scale=True, dynamic_ncols=True)

    def show(self, done: int, tokens: int) -> None:
        if self.bar is not None:
            self.bar.update(done - self.bar.n)
            self.bar.set_postfix_str(f"{tokens:,} tokens")
        elif not self.quiet and time.monotonic() - self.told >= self.EVERY:
            self.told = time.monotonic()
            share = f"{done / self.total:.0%}" if self.total else f"{done:,} documents"
            print(f"{self.label}: {share}, {tokens:,} tokens", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
