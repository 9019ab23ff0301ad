"""Documents are split by their number; one or two documents are cut."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_texts import documents, write_jsonl

from entp.data import sources
from entp.data.manifest import SPLITS
from entp.data.sources import Files, Piece, text_files
from entp.data.splits import Fractions, Splitter, borders, lengths_if_few, split_of
from entp.errors import InputError

HALF = Fractions(0.1, 0.2)


def test_fractions_of_documents() -> None:
    found = [split_of(number, HALF) for number in range(20_000)]
    assert abs(found.count("valid") / 20_000 - 0.1) < 0.01
    assert abs(found.count("test") / 20_000 - 0.2) < 0.01
    assert found[:3] == list(SPLITS)


def test_smaller_fractions_take_from_the_same_documents() -> None:
    small = [split_of(n, Fractions(0.01, 0.01)) for n in range(5000)]
    large = [split_of(n, Fractions(0.01, 0.3)) for n in range(5000)]
    assert all(b == "test" for a, b in zip(small, large, strict=True) if a == "test")
    assert 25 < small.count("test") < 80


@pytest.mark.parametrize("fractions", [(0, 0.1), (0.1, 0), (0.5, 0.5), (-1, 0.1)])
def test_fractions_that_leave_a_split_empty_are_refused(fractions: tuple[float, float]) -> None:
    with pytest.raises(InputError, match="both must be above 0, and together below 1"):
        Fractions(*fractions).check()


@given(length=st.integers(3, 10_000), valid=st.floats(0.001, 0.4), test=st.floats(0.001, 0.4))
def test_every_part_of_a_document_has_text(length: int, valid: float, test: float) -> None:
    ends = borders(length, Fractions(valid, test))
    sizes = [b - a for a, b in pairwise([0, *ends])]
    assert sum(sizes) == length
    assert min(sizes) >= 1
    assert sizes[1] >= min(0.01, valid) * length - 1
    assert abs(sizes[2] - max(test, 0.01) * length) <= 1


def test_document_of_two_characters_cannot_be_cut() -> None:
    with pytest.raises(InputError, match="a document of 2 characters cannot be cut"):
        borders(2, HALF)


@given(text=st.text("ab ", min_size=3, max_size=60), size=st.integers(1, 20), data=st.data())
def test_cut_documents_join_again(text: str, size: int, data: st.DataObject) -> None:
    """Also with a splitter that goes on after some piece."""
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    last = len(chunks) - 1
    pieces = [Piece(chunk, at == 0, at == last) for at, chunk in enumerate(chunks)]
    stop = data.draw(st.integers(0, len(pieces)))
    lengths = [len(text), len(text)]
    splitter = Splitter(HALF, lengths)
    parts = [part for piece in pieces[:stop] for part in splitter.parts(piece)]
    splitter = Splitter(HALF, lengths, json.loads(json.dumps(splitter.state())))
    parts += [part for piece in [*pieces[stop:], *pieces] for part in splitter.parts(piece)]
    assert "".join(part.text for part in parts) == text * 2
    for split, (begin, end) in zip(SPLITS, pairwise([0, *borders(len(text), HALF)]), strict=True):
        mine = [part for part in parts if part.split == split]
        assert "".join(part.text for part in mine) == text[begin:end] * 2
        assert sum(part.first for part in mine) == sum(part.last for part in mine) == 2
        assert mine[0].first
        assert mine[-1].last


def source(folder: Path, texts: list[str]) -> Files:
    return Files(text_files([write_jsonl(folder / "a.jsonl", texts)]), "the name")


def test_documents_are_counted_up_to_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE", 4)
    assert lengths_if_few(source(tmp_path, ["", "a b c d e f", ""])) == [11]
    assert lengths_if_few(source(tmp_path, ["abcdefg", "h i j k"])) == [7, 7]
    assert lengths_if_few(source(tmp_path, documents(3))) is None
    with pytest.raises(InputError, match="the name has no text"):
        lengths_if_few(source(tmp_path, ["", ""]))
