"""Text to a prepared corpus, and the corpus that a word means."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from entp.data.manifest import MANIFEST, manifest_hash, read_manifest
from entp.data.places import add_place, cache_folder, corpus_folders, find_file, is_hash, places
from entp.data.preparation import Preparation
from entp.data.settings import cache_name, settings_for
from entp.data.shards import Corpus, open_corpus
from entp.data.sources import SUFFIXES, Files, Pydoc, Source, is_text, openwebtext, stem, text_files
from entp.data.splits import Fractions
from entp.data.tokenizers import KINDS, Tokenizer, check_vocab, gpt2_tokenizer
from entp.errors import InputError, one_of

SHARD_TOKENS = 100_000_000
NAMES = {"pydoc": Fractions(0.05, 0.05), "openwebtext": Fractions(0.0005, 0.0005)}
"""Corpora that need no files, and the fractions of their documents that are held out."""
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
    if tokenizer == "bpe":
        check_vocab(vocab)
    found = _source(source)
    usual = NAMES.get(source, FRACTIONS) if isinstance(source, str) else FRACTIONS
    fractions = Fractions(
        usual.valid if valid is None else valid, usual.test if test is None else test
    )
    fractions.check()
    given = _gpt2(gpt2) if tokenizer == "gpt2" else None
    settings = settings_for(found, tokenizer, vocab, given, fractions, shard_tokens)
    label = name or found.name
    folder = out or cache_folder() / cache_name(label, tokenizer, settings)
    work = Preparation(folder, label, found, fractions, settings, given, save_seconds, quiet)
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
