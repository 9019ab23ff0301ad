"""A preparation whose disk fails, or whose process ends, at any of its calls: going on gives the
same bits, and a manifest is never of another text."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_disk import Copies, Disk, Fails, contents, in_memory
from small_texts import documents, write_jsonl

from entp.data import preparation
from entp.data.prepare import prepare
from entp.errors import InputError


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder. Preparing is saved every few documents."""
    monkeypatch.setattr(preparation, "BATCH", 300)
    with in_memory() as folder:
        yield folder


@pytest.fixture
def text(place: Path) -> Path:
    return write_jsonl(place / "a.jsonl", documents(18, most_words=12))


def make(text: Path, out: Path, tokenizer: str = "bytes") -> dict[str, bytes | None]:
    """A corpus of several shards: what its folder holds."""
    made = {"valid": 0.2, "test": 0.2, "vocab": 262, "shard_tokens": 250}
    prepare([text], out, tokenizer=tokenizer, save_seconds=0, quiet=True, **made)
    return contents(out)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("lost", [False, True], ids=["end", "power failure"])
def test_preparation_survives_an_end_at_any_call(
    lost: bool, tokenizer: str, place: Path, text: Path
) -> None:
    copies = Copies(place / "copies", lost)
    with Disk(place / "run", copies):
        whole = make(text, place / "run", tokenizer)
    assert sum(name.endswith(".bin") for name in whole) > 3
    for call, out in copies:
        assert make(text, out, tokenizer) == whole, call
    assert len(copies.found) > 40


@pytest.mark.parametrize(("code", "lasting"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_preparation_survives_an_error_at_any_call(
    code: int, lasting: bool, place: Path, text: Path
) -> None:
    whole, out = make(text, place / "whole"), place / "out"
    for number in itertools.count(1):
        with Disk(out, Fails(number, code, lasting)) as disk:
            told = error_of(text, out)
        if number > len(disk.calls):
            break
        assert "cannot be written" in told or (out / "manifest.json").exists()
        assert make(text, out) == whole, disk.calls[number - 1]
        shutil.rmtree(out)
    assert number > 100


def error_of(text: Path, out: Path) -> str:
    """What preparing says when it cannot go on; empty if it can."""
    try:
        make(text, out)
    except InputError as error:
        return str(error)
    return ""


def test_what_is_left_of_one_text_never_becomes_another(place: Path, text: Path) -> None:
    other = write_jsonl(place / "b.jsonl", documents(18, seed=1, most_words=12))
    whole, refused = make(other, place / "other"), 0
    copies = Copies(place / "copies")
    with Disk(place / "run", copies):
        make(text, place / "run")
    for call, out in copies:
        told = error_of(other, out)
        refused += "other sources" in told
        assert told or contents(out) == whole, call
    assert 0 < refused < len(copies.found)
