"""Data is searched in added folders, in those of ENTP_DATA, then in the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_texts import documents, write_jsonl

from entp.data.places import add_place, cache_folder, find_corpus, find_file, places
from entp.data.prepare import prepare
from entp.data.shards import open_corpus
from entp.errors import InputError


def test_places_are_in_order(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three, four = (tmp_path / name for name in ("one", "two", "three", "four"))
    assert places() == [cache]
    monkeypatch.setenv("ENTP_DATA", f"{one}{os.pathsep}{two}")
    assert places() == [one, two, cache]
    add_place(three)
    add_place(four)
    add_place(three)
    assert places() == [three, four, one, two, cache]


def test_added_place_is_known_to_processes_that_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENTP_DATA", "")
    monkeypatch.chdir(tmp_path)
    add_place(Path("here"))
    code = "from entp.data.places import places; print(places()[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stdout == f"{tmp_path / 'here'}\n"


def test_folder_with_the_separator_in_its_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rename it"):
        add_place(tmp_path / f"a{os.pathsep}b")


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTP_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("ENTP_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "entp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "entp"


def test_files_are_found_below_the_first_place_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("b", "c"):
        (tmp_path / place / "x").mkdir(parents=True)
        (tmp_path / place / "x" / "y.csv").write_text(place)
    (tmp_path / "a" / "x" / "y.csv").mkdir(parents=True)  # not a file
    names = os.pathsep.join(str(tmp_path / place) for place in "abc")
    monkeypatch.setenv("ENTP_DATA", names)
    assert find_file("x/y.csv").read_text() == "b"
    with pytest.raises(InputError, match=rf"x/z\.csv is not in {tmp_path}/a, .*ENTP_DATA"):
        find_file("x/z.csv")


def test_corpus_is_found_by_its_hash(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", documents(5))
    folder = prepare([text], tmp_path / "place" / "corpus", quiet=True)
    key = open_corpus(folder).hash
    (tmp_path / "place" / "other").mkdir()
    (tmp_path / "place" / "other" / "manifest.json").write_text("{}")  # of something else
    with pytest.raises(InputError, match=rf"{key} is not in {cache}: prepare it again"):
        find_corpus(key)
    for place in (folder, folder.parent):
        monkeypatch.setenv("ENTP_DATA", str(place))
        assert find_corpus(key) == folder
        assert open_corpus(key) is open_corpus(folder)
    moved = folder.rename(tmp_path / "place" / "moved")
    assert find_corpus(key) == moved
    assert open_corpus(key).folder == moved


@pytest.mark.parametrize("name", ["", "pydoc", "0123456789abcdeg", "../0123456789abcdef"])
def test_what_is_no_hash_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="is not the hash of a corpus"):
        find_corpus(name)
