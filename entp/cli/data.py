"""`entp data prepare` and `entp data list`: text to a prepared corpus, and the corpora that are
found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from entp.cli.parse import HELP, parse, part_of
from entp.errors import InputError
from entp.terminal import format_table


@dataclass(frozen=True)
class PrepareOptions:
    """Make a corpus of text: pydoc, openwebtext, a name below ENTP_DATA, or text files and folders
    of them."""

    tokenizer: str = "bytes"
    """bytes; bpe, trained on the corpus; gpt2, from its files; or a folder with a tokenizer.json,
    such as a pretrained model's."""
    vocab: int | None = None
    """For bpe: the number of tokens. None: 16,384."""
    gpt2: Path | None = None
    """For gpt2: folder with encoder.json and vocab.bpe. None: gpt2_bpe below ENTP_DATA."""
    out: Path | None = None
    """Folder of the corpus. None: one in the cache."""
    name: str | None = None
    """What it is called. None: what its source is called."""
    valid: float | None = None
    """Fraction of the documents for validation. None: 0.01, pydoc 0.05, openwebtext 0.0005."""
    test: float | None = None
    """Fraction of the documents for test. None: as for validation."""


@dataclass(frozen=True)
class ListOptions:
    """List the corpora that are found in the folders of ENTP_DATA and in the cache."""

    verify: bool = False
    """Read all of every corpus, and compare it with its checksums."""


DATA: dict[str, type] = {"prepare": PrepareOptions, "list": ListOptions}


def data_command(args: list[str]) -> int:
    """data [prepare|list]: prepare a corpus of text, or list those that are found"""
    part, words = part_of(args, "data", "part of entp data", DATA, "list")
    if part == "prepare":
        return _prepare(words)
    return _list(parse(ListOptions, words, "entp data list"))


def _prepare(args: list[str]) -> int:
    """Prepare what the words before the first option name."""
    first = next((at for at, word in enumerate(args) if word.startswith("-")), len(args))
    sources = args[:first]
    asks_help = bool(set(args) & {*HELP, "--help-all"})
    options = parse(PrepareOptions, args[first:], "entp data prepare")
    if not sources and not asks_help:
        raise InputError(
            "entp data prepare needs a source before its options: pydoc, openwebtext, a name below "
            "ENTP_DATA, or text files."
        )
    from entp.data.prepare import VOCAB, prepare
    from entp.data.shards import open_corpus

    for name, value in (("vocab", options.vocab), ("gpt2", options.gpt2)):
        kind = "bpe" if name == "vocab" else "gpt2"
        if value is not None and options.tokenizer != kind:
            raise InputError(
                f"--{name} is for --tokenizer {kind}, and the tokenizer is {options.tokenizer}: "
                f"leave --{name} out, or give --tokenizer {kind}."
            )
    folder = prepare(
        sources[0] if len(sources) == 1 else sources,
        options.out,
        tokenizer=options.tokenizer,
        vocab=VOCAB if options.vocab is None else options.vocab,
        valid=options.valid,
        test=options.test,
        name=options.name,
        gpt2=options.gpt2,
    )
    print(f"{open_corpus(folder).hash} {folder}")
    return 0


def _list(options: ListOptions) -> int:
    """A table of what is found; exit code 2 if a corpus cannot be used."""
    from entp.data.places import corpus_folders, places

    folders = corpus_folders()
    if not folders:
        searched = ", ".join(map(str, places()))
        print(f"no prepared corpus in {searched}: make one, such as by entp data prepare pydoc")
        return 0
    rows, problems = [], []
    for folder in folders:
        try:
            rows.append(_row(folder, options.verify))
        except InputError as error:
            problems.append(str(error))
    if rows:
        print(format_table(["name", "hash", "tokenizer", "vocab", "tokens", "place"], rows))
    if problems:
        raise InputError(" ".join(problems))
    return 0


def _row(folder: Path, verify: bool) -> list[str]:
    from entp.data.shards import open_corpus

    corpus = open_corpus(folder)
    if verify:
        corpus.verify()
    tokens = sum(split["tokens"] for split in corpus.manifest["splits"].values())
    kind = corpus.manifest["tokenizer"]["kind"]
    return [corpus.name, corpus.hash, kind, f"{corpus.vocab:,}", f"{tokens:,}", str(folder)]
