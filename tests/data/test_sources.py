"""Sources give out the same documents whatever they are packed in, go on after any piece, and name
what is broken."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from small_texts import PACK, as_jsonl, documents, write_jsonl

from entp.data import sources
from entp.data.sources import (
    SUFFIXES,
    Files,
    HubDataset,
    Piece,
    Pydoc,
    Source,
    cut,
    stem,
    text_files,
)
from entp.data.tokenizers import train_bpe
from entp.errors import InputError

BPE = train_bpe(documents(100), 300)


def read(*paths: Path) -> list[str]:
    """The documents of some files."""
    return joined(list(Files(text_files(list(paths)), "x").pieces()))


def joined(pieces: list[Piece]) -> list[str]:
    found: list[str] = []
    for piece in pieces:
        found += [""] if piece.first else []
        found[-1] += piece.text
    return found


def in_chunks(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@given(
    text=st.text("ab1.' \n\té日\u3000\x1c", max_size=200), size=st.integers(1, 60), most=st.just(12)
)
def test_pieces_join_to_the_document(text: str, size: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE", most)
        pieces = list(cut(in_chunks(text, size)))
        assert pieces == list(cut([text]))
    assert "".join(piece.text for piece in pieces) == text
    assert all(0 < len(piece.text) <= most for piece in pieces)
    assert [piece.first for piece in pieces] == [at == 0 for at in range(len(pieces))]
    assert [piece.last for piece in pieces] == [at == len(pieces) - 1 for at in range(len(pieces))]


def slow_boundary(window: str) -> int:
    """The last place before a space or line feed after something visible."""
    places = range(len(window) - 1, 0, -1)
    found = (at for at in places if window[at] in " \n" and not window[at - 1].isspace())
    return next(found, len(window))


@given(text=st.text("ab \n\t\u3000", min_size=1, max_size=60))
def test_boundary_is_the_last_place_to_cut(text: str) -> None:
    assert sources._boundary(text) == slow_boundary(text)


def test_long_runs_of_blanks_are_passed_at_once() -> None:
    start = time.process_time()
    assert sources._boundary("a" + " " * 2_000_000) == 1
    assert time.process_time() - start < 5  # 30 s where each blank was searched for


@given(text=st.text("ab1.' \n\té\u3000\x1c", min_size=20, max_size=120))
def test_cutting_changes_no_token(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE", 12)
        pieces = [piece.text for piece in cut([text])]
    borders = pairwise(pieces)
    assume(all(b[0] in " \n" and not a[-1].isspace() for a, b in borders))  # none was forced
    tokens = [token for piece in pieces for token in BPE.encode(piece)]
    assert tokens == BPE.encode(text)


def test_text_without_spaces_is_cut_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE", 4)
    assert [piece.text for piece in cut(["abcdefghij"])] == ["abcd", "efgh", "ij"]
    assert [piece.text for piece in cut(["a   b cd"])] == ["a", "   b", " cd"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_is_read(suffix: str, tmp_path: Path) -> None:
    texts = documents(5)
    kind, packed = suffix[:4], suffix[4:]
    if suffix.startswith(".jsonl"):
        path = write_jsonl(tmp_path / f"a{suffix}", texts)
        assert read(path) == texts
    else:
        assert kind == ".txt"
        path = tmp_path / f"a{suffix}"
        path.write_bytes(PACK[packed](texts[0].encode()))
        assert read(path) == texts[:1]
    assert stem(path) == "a"


@pytest.mark.parametrize("packed", PACK)
def test_files_packed_one_after_the_other_are_read(packed: str, tmp_path: Path) -> None:
    """As `cat a.gz b.gz` makes them."""
    texts = documents(4)
    path = tmp_path / f"a.jsonl{packed}"
    path.write_bytes(PACK[packed](as_jsonl(texts[:3])) + PACK[packed](as_jsonl(texts[3:])))
    assert read(path) == texts


def test_long_lines_and_small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK", 16)
    monkeypatch.setattr(sources, "PIECE", 20)
    texts = documents(6)
    assert read(write_jsonl(tmp_path / "a.jsonl", texts)) == texts
    (tmp_path / "b.txt").write_text("é日 " * 50, encoding="utf-8")
    assert read(tmp_path / "b.txt") == ["é日 " * 50]


def test_empty_documents_and_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "a"}\r\n \n{"text": ""}\n{"text": "b"}')
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"c\r\n")
    assert read(tmp_path) == ["a", "b", "c\r\n"]


@pytest.mark.parametrize("packed", [".xz", ".gz", ".zst"])
def test_file_that_is_cut_off_is_named(packed: str, tmp_path: Path) -> None:
    whole = write_jsonl(tmp_path / f"a.jsonl{packed}", documents(400)).read_bytes()
    part = tmp_path / f"cut.jsonl{packed}"
    part.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(InputError, match=rf"cut\.jsonl\{packed} is cut off"):
        read(part)


@pytest.mark.parametrize("packed", [".xz", ".gz", ".zst"])
def test_file_of_another_format_is_named(packed: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl{packed}"
    path.write_bytes(as_jsonl(documents(3)))
    with pytest.raises(InputError, match=rf"a\.jsonl\{packed} cannot be "):
        read(path)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"text": "a', "is not JSON"),
        (b"\xff\xfe\xfa", "is not JSON"),
        (b"[" * 100_000, "is not JSON: it is nested too deeply"),
        (b'{"txt": "a"}', "is not an object with the text in a field `text`"),
        (b'{"text": 3}', "is not an object with the text in a field `text`"),
        (b'["text"]', "is not an object with the text in a field `text`"),
        (rb'{"text": "\ud800"}', "has half of a surrogate pair"),
    ],
)
def test_broken_line_is_named_by_its_number(line: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_jsonl(documents(2)) + b"\n" + line + b"\n" + as_jsonl(documents(1)))
    with pytest.raises(InputError, match=rf"a\.jsonl, line 4 {fault}"):
        read(path)


@pytest.mark.parametrize("chunk", [1, 2, 3, 1000])
@pytest.mark.parametrize(("data", "at"), [(b"ab\xc3\xa9\xffcd", 4), (b"abc\xe6\x97", 3)])
def test_text_that_is_not_utf8_is_named(
    chunk: int, data: bytes, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CHUNK", chunk)
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(InputError, match=rf"a\.txt is not UTF-8: byte {at} "):
        read(tmp_path / "a.txt")


def test_folders_stand_for_the_text_files_in_them(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/y.jsonl", "a.txt", ".hidden/c.txt", "b/.d.txt", "e.md", "f.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    found = text_files([tmp_path])
    assert [name for name, _ in found] == ["a.txt", "b/y.jsonl", "b/z.txt", "f.txt"]
    assert all(path == tmp_path / name for name, path in found)


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(InputError, match=r"a\.md is not a text file: allowed are \.txt"):
        text_files([tmp_path / "a.md"])
    with pytest.raises(InputError, match="has no text files"):
        text_files([tmp_path])
    with pytest.raises(InputError, match=r"b\.txt does not exist"):
        text_files([tmp_path / "b.txt"])
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(InputError, match=r"pipe\.txt is not a text file"):
        text_files([tmp_path / "pipe.txt"])
    (tmp_path / "c.txt").write_text("x")
    with pytest.raises(InputError, match=r"c\.txt is given twice"):
        text_files([tmp_path / "c.txt", tmp_path])


def goes_on_anywhere(make: object, every: int = 1) -> None:
    """Whatever was read before: the pieces after a position are the others."""
    new: Source = make()  # type: ignore[operator]
    whole = list(new.pieces())
    assert len(whole) > 5
    for read_before in range(1, len(whole) + 1, every):
        source: Source = make()  # type: ignore[operator]
        pieces = source.pieces()
        before = [next(pieces) for _ in range(read_before)]
        position = json.loads(json.dumps(source.position()))
        assert before + list(make().pieces(position)) == whole  # type: ignore[operator]


def test_files_go_on_after_any_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE", 30)
    write_jsonl(tmp_path / "a.jsonl.xz", documents(4))
    (tmp_path / "b.txt").write_text(documents(1, seed=1)[0] * 3)
    (tmp_path / "c.txt").write_text("")
    write_jsonl(tmp_path / "d.jsonl", ["", *documents(3, seed=2), ""])
    goes_on_anywhere(lambda: Files(text_files([tmp_path]), "x"))


def test_pydoc_goes_on_after_any_topic() -> None:
    goes_on_anywhere(Pydoc, every=20)
    about = Pydoc().described()[0]
    assert about["bytes"] == sum(len(piece.text.encode()) for piece in Pydoc().pieces())
    assert about["bytes"] > 300_000


def test_progress_ends_at_the_size_of_the_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl.xz", documents(400))
    write_jsonl(tmp_path / "b.jsonl", documents(400))
    source = Files(text_files([tmp_path]), "x")
    seen = [source.done() for _ in source.pieces()]
    assert seen == sorted(seen)
    assert seen[-1] == source.total == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_hub_dataset_goes_on_after_any_document(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    write_jsonl(tmp_path / "train.jsonl", ["", *documents(30)])
    goes_on_anywhere(lambda: HubDataset(str(tmp_path), "x", ("no such revision", None)), every=7)


def test_hub_dataset_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(InputError, match=r"cannot be read from the HuggingFace hub.*network"):
        HubDataset(str(tmp_path / "nowhere"), "x")
