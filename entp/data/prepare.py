"""Text to a prepared corpus: a folder of shards with a manifest.

Documents stream through in bounded memory. Every few seconds what is written is flushed and noted
in progress.json, so that preparing goes on after a kill, and the result is the same to the bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from entp.data.manifest import (
    MANIFEST,
    SPLITS,
    VERSION,
    manifest_hash,
    read_manifest,
)
from entp.data.places import add_place, cache_folder, corpus_folders, find_file, is_hash, places
from entp.data.shards import Corpus, open_corpus
from entp.data.sources import (
    SUFFIXES,
    Files,
    Pydoc,
    Source,
    is_text,
    openwebtext,
    stem,
    text_files,
)
from entp.data.splits import Fractions, Part, Splitter, as_settings, lengths_if_few
from entp.data.tokenizers import (
    KINDS,
    TOKENIZER,
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    gpt2_tokenizer,
    train_bpe,
)
from entp.data.writer import SplitWriter, explain_failed_writes
from entp.errors import InputError, one_of
from entp.files import json_bytes, lock_folder, parse_json, write_file

PROGRESS = "progress.json"
LEFT_OVER = (PROGRESS, "*.documents.part", ".*.tmp")
SHARD_TOKENS = 100_000_000
BATCH = 4_000_000
"""Characters that are encoded at once."""
BPE_BYTES = 100_000_000
"""Bytes of training documents from which a BPE is learned."""
NAMES = {"pydoc": Fractions(0.05, 0.05), "openwebtext": Fractions(0.0005, 0.0005)}
"""Corpora that need no files, and the fractions of their documents that are held out."""
EMPTY: dict[str, Any] = {"source": None, "splitter": None, "splits": None}
"""The progress before anything is written."""
FRACTIONS = Fractions(0.01, 0.01)
MOST_NAMES = 3
"""Sources whose names make the name of a corpus."""


def prepare(
    source: str | Path | Sequence[str | Path],
    out: Path | None = None,
    *,
    tokenizer: str = "bytes",
    vocab: int = 16384,
    valid: float | None = None,
    test: float | None = None,
    name: str | None = None,
    gpt2: Path | None = None,
    shard_tokens: int = SHARD_TOKENS,
    save_seconds: float = 10.0,
    quiet: bool = False,
) -> Path:
    """The folder of the prepared corpus, which is made unless it is there.

    source: pydoc, openwebtext, a name below a place, or text files and folders of them.
    out: None for a folder of the cache.
    tokenizer: bytes; bpe, trained on the corpus with `vocab` tokens; or gpt2, from the files in
    the folder `gpt2`.
    valid, test: fractions of the documents.
    """
    if tokenizer not in KINDS:
        raise one_of("tokenizer", tokenizer, KINDS)
    found = _source(source)
    usual = NAMES.get(source, FRACTIONS) if isinstance(source, str) else FRACTIONS
    fractions = Fractions(
        usual.valid if valid is None else valid, usual.test if test is None else test
    )
    fractions.check()
    given = _gpt2(gpt2) if tokenizer == "gpt2" else None
    settings = _settings(found, tokenizer, vocab, given, fractions, shard_tokens)
    label = name or found.name
    folder = out or cache_folder() / _cache_name(label, tokenizer, settings)
    work = _Work(folder, label, found, fractions, settings, given, save_seconds, quiet)
    return work.run()


def resolve(
    data: str, *, tokenizer: str | None = None, vocab: int = 16384, gpt2: Path | None = None
) -> Corpus:
    """The corpus that --data means: a prepared folder, a hash, text files, or a name.

    Text that is not prepared yet is prepared into the cache, with bytes unless another tokenizer is
    asked for. The corpus can then be found by its hash, also in processes that this one starts.
    """
    folder = _prepared(data, tokenizer)
    if folder is None and data == "openwebtext":
        raise InputError(
            "openwebtext is not prepared yet, which takes hours and 20 GB: entp data prepare "
            "openwebtext --tokenizer gpt2."
        )
    if folder is None:
        folder = prepare(data, tokenizer=tokenizer or "bytes", vocab=vocab, gpt2=gpt2)
    folder = folder.absolute()
    corpus = open_corpus(folder)
    kind = corpus.manifest["tokenizer"]["kind"]
    if tokenizer not in (None, kind):
        raise InputError(
            f"{folder} is prepared with the tokenizer {kind}, not {tokenizer}: leave the tokenizer "
            "out, or give the text itself."
        )
    if not any(folder == place or folder.parent == place for place in places()):
        add_place(folder)
    return corpus


def _prepared(data: str, tokenizer: str | None) -> Path | None:
    """The prepared corpus that is meant: by its folder, its hash or its name; None if none is."""
    if (Path(data) / MANIFEST).is_file():
        return Path(data)
    if is_hash(data):
        return open_corpus(data).folder
    if data == "pydoc" or Path(data).exists():
        return None
    named = {}
    for folder in corpus_folders():
        with contextlib.suppress(InputError):
            manifest = read_manifest(folder)
            if data in (manifest["name"], folder.name):
                named[manifest_hash(manifest)] = (folder, manifest["tokenizer"]["kind"])
    fitting = {key: pair for key, pair in named.items() if tokenizer in (None, pair[1])}
    if len(fitting) > 1:
        choices = ", ".join(f"{key} ({pair[1]})" for key, pair in fitting.items())
        raise InputError(f"several corpora are called {data}: say which by its hash, {choices}.")
    return next((pair[0] for pair in fitting.values()), None)


def _source(source: str | Path | Sequence[str | Path]) -> Source:
    """Where the documents come from."""
    if source == "pydoc":
        return Pydoc()
    if source == "openwebtext":
        return openwebtext()
    words = [source] if isinstance(source, str | Path) else list(source)
    paths = [_path_of(word) if isinstance(word, str) else word for word in words]
    if not paths:
        raise InputError("no text is given: give text files, or folders of them.")
    names = [stem(path) for path in paths]
    more = f"+{len(names) - MOST_NAMES}" if len(names) > MOST_NAMES else ""
    return Files(text_files(paths), "+".join(names[:MOST_NAMES]) + more)


def _path_of(name: str) -> Path:
    """The text that a word means: a path, or a file or folder below a place or its `corpus`."""
    if Path(name).exists():
        return Path(name)
    if "/" not in name:
        for place in places():
            for folder in (place, place / "corpus"):
                for suffix in (*SUFFIXES, ""):
                    path = folder / f"{name}{suffix}"
                    if (path.is_file() and is_text(path)) or (path.is_dir() and not suffix):
                        return path
    raise InputError(
        f"there is no text {name!r}: give a text file or a folder of them, a prepared corpus, one "
        f"of {', '.join(NAMES)}, or a name below ENTP_DATA; `entp data list` shows what is found."
    )


def _gpt2(folder: Path | None) -> Tokenizer:
    return gpt2_tokenizer(folder or find_file("gpt2_bpe/encoder.json").parent)


def _settings(
    source: Source,
    kind: str,
    vocab: int,
    given: Tokenizer | None,
    fractions: Fractions,
    shard_tokens: int,
) -> dict[str, Any]:
    """All that decides what is written."""
    if shard_tokens < 1:
        raise InputError(f"shard_tokens is {shard_tokens}: it must be at least 1.")
    return {
        "version": VERSION,
        "sources": source.described(),
        "tokenizer": {"kind": kind, "sha256": given.sha256 if given else None},
        "vocab": vocab if kind == "bpe" else None,
        "fractions": as_settings(fractions),
        "shard_tokens": shard_tokens,
    }


def _cache_name(label: str, kind: str, settings: dict[str, Any]) -> str:
    """A folder for these settings alone."""
    key = hashlib.sha256(json.dumps(_unnamed(settings), sort_keys=True).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^0-9A-Za-z_.-]+', '_', label)}-{kind}-{key}"


def _unnamed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by which corpora are told apart, whatever their files are called."""
    sources = [{**source, "name": ""} for source in settings["sources"]]
    return {**settings, "sources": sources}


@dataclass
class _Work:
    """One preparation: from its settings to the manifest."""

    folder: Path
    label: str
    source: Source
    fractions: Fractions
    settings: dict[str, Any]
    given: Tokenizer | None
    save_seconds: float
    quiet: bool

    def run(self) -> Path:
        with explain_failed_writes(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if (self.folder / MANIFEST).is_file():
                self._check_same(_settings_of(read_manifest(self.folder)))
                self._clean()
                return self.folder
            self._make()
        return self.folder

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
            with explain_failed_writes(self.folder):
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

    def _check_same(self, settings: dict[str, Any]) -> None:
        """InputError for a folder that holds something else."""
        there, wanted = _unnamed(settings), _unnamed(self.settings)
        other = [key for key in wanted if there.get(key) != wanted[key]]
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
            return BpeTokenizer(path.read_bytes(), str(path))
        found = self.given or self._train(lengths)
        with explain_failed_writes(self.folder):
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
        with explain_failed_writes(self.folder):
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
            with explain_failed_writes(self.folder):
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
        with explain_failed_writes(self.folder):
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
        with explain_failed_writes(self.folder):
            write_file(self.folder / MANIFEST, json_bytes(manifest))
        self._clean()
        self._say(_summary(manifest))

    def _clean(self) -> None:
        """Remove what only preparing needs."""
        parts = [path for name in LEFT_OVER for path in self.folder.glob(name)]
        for path in parts:
            path.unlink(missing_ok=True)

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


def _settings_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The settings that a finished corpus was prepared with."""
    about = manifest["tokenizer"]
    given = about["sha256"] if about["kind"] == "gpt2" else None
    return {
        "version": manifest["version"],
        "sources": manifest["sources"],
        "tokenizer": {"kind": about["kind"], "sha256": given},
        **manifest.get("settings", {}),
    }


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
