"""Text to a prepared corpus, and the corpus that a word means."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entp.data.manifest import MANIFEST, manifest_hash, read_manifest
from entp.data.places import add_place, cache_folder, corpus_folders, find_file, is_hash, places
from entp.data.preparation import Preparation
from entp.data.settings import cache_name, settings_for
from entp.data.shards import Corpus, open_corpus
from entp.data.sources import SUFFIXES, Files, Pydoc, Source, is_text, openwebtext, stem, text_files
from entp.data.splits import Fractions
from entp.data.tokenizer import Tokenizer
from entp.data.tokenizers import check_vocab, gpt2_tokenizer, tokenizer_at
from entp.errors import InputError

SHARD_TOKENS = 100_000_000
NAMES = {"pydoc": Fractions(0.05, 0.05), "openwebtext": Fractions(0.0005, 0.0005)}
"""Corpora that need no files, and the fractions of their documents that are held out."""
FRACTIONS = Fractions(0.01, 0.01)
MOST_NAMES = 3
"""Sources whose names make the name of a corpus."""
VOCAB = 16384
"""Tokens of a BPE that is learned from a corpus."""


def prepare(
    source: str | Path | Sequence[str | Path],
    out: Path | None = None,
    *,
    tokenizer: str | Tokenizer = "bytes",
    vocab: int = VOCAB,
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
    tokenizer: bytes; bpe, trained on the corpus with `vocab` tokens; gpt2, from the files in the
    folder `gpt2`; a folder with a tokenizer.json; or a tokenizer at hand.
    valid, test: fractions of the documents.
    """
    if tokenizer == "bpe":
        check_vocab(vocab)
    if isinstance(tokenizer, Tokenizer) and tokenizer.kind == "bytes":
        tokenizer = "bytes"
    given = _given(tokenizer, gpt2)
    kind = str(tokenizer) if given is None else given.kind
    found = _source(source)
    usual = NAMES.get(source, FRACTIONS) if isinstance(source, str) else FRACTIONS
    fractions = Fractions(
        usual.valid if valid is None else valid, usual.test if test is None else test
    )
    fractions.check()
    settings = settings_for(found, kind, vocab, given, fractions, shard_tokens)
    label = name or found.name
    folder = out or cache_folder() / cache_name(label, kind, settings)
    work = Preparation(folder, label, found, fractions, settings, given, save_seconds, quiet)
    return work.run()


def resolve(data: str, tokenizer: Tokenizer | None = None) -> Corpus:
    """The corpus that --data means: a prepared folder, a hash, text files, or a name.

    Text that is not prepared yet is prepared into the cache, with bytes unless a tokenizer is
    given; of prepared corpora of one name, that with this tokenizer is meant. The corpus can then
    be found by its hash, also in processes that this one starts.
    """
    folder = _prepared(data, tokenizer)
    if folder is None and data == "openwebtext":
        raise InputError(
            "openwebtext is not prepared yet, which takes hours and 20 GB: entp data prepare "
            "openwebtext --tokenizer gpt2."
        )
    if folder is None:
        folder = prepare(data, tokenizer=tokenizer or "bytes")
    folder = folder.absolute()
    corpus = open_corpus(folder)
    if not any(folder == place or folder.parent == place for place in places()):
        add_place(folder)
    return corpus


def _prepared(data: str, tokenizer: Tokenizer | None) -> Path | None:
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
                named[manifest_hash(manifest)] = (folder, manifest["tokenizer"])
    if tokenizer is not None:
        own = (tokenizer.kind, tokenizer.sha256)
        fits = {key: one for key, one in named.items() if _is(one[1]) == own}
        named = fits if fits or _is_text(data) else named
    if len(named) > 1:
        choices = ", ".join(f"{key} ({told['kind']})" for key, (_, told) in named.items())
        raise InputError(f"several corpora are called {data}: say which by its hash, {choices}.")
    return next((folder for folder, _ in named.values()), None)


def _is(told: dict[str, Any]) -> tuple[str, str | None]:
    """What a manifest says that tells a tokenizer from others."""
    return told["kind"], told.get("sha256")


def _is_text(name: str) -> bool:
    """Whether there is a text of this name, which can be prepared."""
    try:
        _path_of(name)
    except InputError:
        return False
    return True


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


def _given(tokenizer: str | Tokenizer, gpt2: Path | None) -> Tokenizer | None:
    """The tokenizer that is there before the text is read; None for bytes and for one that is
    learned from the text."""
    if tokenizer in ("bytes", "bpe"):
        return None
    if tokenizer == "gpt2":
        return gpt2_tokenizer(gpt2 or find_file("gpt2_bpe/encoder.json").parent)
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    return tokenizer_at(Path(tokenizer).expanduser())
