"""Tokens are read across shards as they were written, and a folder that is not what its manifest
says is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_texts import documents, write_jsonl

from entp.data.manifest import manifest_hash, token_type
from entp.data.prepare import prepare
from entp.data.shards import Corpus, TokenStream, open_corpus
from entp.data.writer import SplitWriter
from entp.errors import InputError


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """30 documents as bytes, 100 tokens in a shard."""
    text = write_jsonl(tmp_path / "a.jsonl", documents(30))
    folder = prepare([text], tmp_path / "out", shard_tokens=100, valid=0.2, test=0.2, quiet=True)
    return open_corpus(folder)


@given(data=st.data(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_rows_are_those_of_the_whole_stream(data: st.DataObject, sizes: list[int]) -> None:
    whole = np.arange(sum(sizes), dtype="<u2") * 7
    stream = TokenStream(np.split(whole, np.cumsum(sizes)[:-1]))
    assert len(stream) == len(whole)
    length = data.draw(st.integers(0, len(whole)))
    starts = data.draw(st.lists(st.integers(0, len(whole) - length), max_size=8))
    rows = stream.take(np.array(starts, dtype=np.int64), length)
    assert rows.dtype == np.int64
    assert rows.shape == (len(starts), length)
    assert rows.tolist() == [whole[s : s + length].tolist() for s in starts]


@pytest.mark.parametrize("start", [-1, 8])
def test_rows_outside_the_stream_are_refused(start: int) -> None:
    stream = TokenStream([np.zeros(10, dtype="<u2")])
    with pytest.raises(IndexError, match="outside a stream of 10"):
        stream.take(np.array([0, start]), 3)


def test_corpus_with_many_shards(corpus: Corpus) -> None:
    assert len(corpus.tokens("train").shards) > 3
    for split in ("train", "valid", "test"):
        tokens, starts = corpus.tokens(split), corpus.documents(split)
        told = corpus.manifest["splits"][split]
        assert (len(tokens), len(starts)) == (told["tokens"], told["documents"])
        ends = np.append(starts[1:], len(tokens)) - 1
        assert (tokens.take(ends, 1) == corpus.end).all()
        whole = tokens.take(np.array([0]), len(tokens))[0]
        assert (whole == corpus.end).sum() == len(starts)
        assert corpus.tokenizer.token_bytes()[whole].sum() == told["bytes"]
    with pytest.raises(InputError, match="unknown split of a corpus 'dev'"):
        corpus.tokens("dev")


@pytest.mark.parametrize(("vocab", "size"), [(65536, 2), (65537, 4)])
def test_larger_vocabularies_take_four_bytes(vocab: int, size: int, tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, "train", vocab, 3)
    writer.add([np.array([0, vocab - 1, 5, 6])], [0], 4)
    writer.finish()
    writer.close()
    assert token_type(vocab).itemsize == size
    shard = np.fromfile(tmp_path / "train-00000.bin", dtype=f"<u{size}")
    assert shard.tolist() == [0, vocab - 1, 5]


def test_opened_corpus_is_kept(corpus: Corpus) -> None:
    assert open_corpus(corpus.folder) is corpus
    change(corpus, lambda manifest: manifest.update(name="another"))
    assert open_corpus(corpus.folder).name == "another"
    assert open_corpus(corpus.folder).hash == corpus.hash


def change(corpus: Corpus, how: Any) -> None:
    manifest = json.loads((corpus.folder / "manifest.json").read_text())
    how(manifest)
    (corpus.folder / "manifest.json").write_text(json.dumps(manifest))


def test_hash_changes_with_everything_but_names(corpus: Corpus) -> None:
    manifest = json.loads(json.dumps(corpus.manifest))
    manifest["name"] = manifest["sources"][0]["name"] = "x"
    assert manifest_hash(manifest) == corpus.hash
    assert len(corpus.hash) == 16
    manifest["splits"]["valid"]["shards"][0]["sha256"] = "0"
    assert manifest_hash(manifest) != corpus.hash


def test_damaged_shards_are_named(corpus: Corpus) -> None:
    first = corpus.folder / "train-00000.bin"
    data = first.read_bytes()
    first.write_bytes(data[:-1])
    with pytest.raises(InputError, match=r"train-00000\.bin is cut off: it has 199 bytes.* 200\."):
        Corpus(corpus.folder)
    first.write_bytes(data + b"x")
    with pytest.raises(InputError, match=r"train-00000\.bin is too long"):
        Corpus(corpus.folder)
    first.unlink()
    with pytest.raises(InputError, match=r"train-00000\.bin cannot be read"):
        Corpus(corpus.folder)
    first.write_bytes(data[:-1] + b"x")
    with pytest.raises(InputError, match=r"train-00000\.bin is not what was written"):
        Corpus(corpus.folder).verify()
    first.write_bytes(data)
    Corpus(corpus.folder).verify()
    (corpus.folder / "train-00099.bin").write_bytes(b"x")
    with pytest.raises(InputError, match=r"train-00099\.bin does not belong to the corpus"):
        Corpus(corpus.folder)


def test_damaged_document_starts_are_named(corpus: Corpus) -> None:
    path = corpus.folder / "valid.documents.npy"
    starts = np.load(path)
    for other in (starts[:-1], starts + 1, starts.astype(np.int32), starts * 1000):
        np.save(path, other)
        with pytest.raises(InputError, match=r"valid\.documents\.npy does not fit manifest"):
            Corpus(corpus.folder).documents("valid")
    path.write_bytes(b"\x93NUMPY nothing")
    with pytest.raises(InputError, match=r"valid\.documents\.npy cannot be read"):
        Corpus(corpus.folder).documents("valid")
    np.save(path, np.array([{}]), allow_pickle=True)  # nothing is run to read it
    with pytest.raises(InputError, match=r"valid\.documents\.npy cannot be read"):
        Corpus(corpus.folder).documents("valid")


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        (lambda m: m.update(version=2), "has version 2; this entp reads version 1"),
        (lambda m: m.pop("tokenizer"), "it has no tokenizer"),
        (lambda m: m["tokenizer"].update(vocab="many"), "vocab of tokenizer is 'many'"),
        (lambda m: m["splits"].pop("valid"), "split valid is not an object"),
        (lambda m: m["splits"]["valid"].update(tokens=-1), "tokens of split valid is -1"),
        (lambda m: m["splits"]["train"].update(tokens=7), "do not have its 7 tokens together"),
        (lambda m: m["splits"]["test"]["shards"][0].pop("sha256"), "a shard of test has no sha256"),
        (
            lambda m: m["splits"]["test"]["shards"][0].update(file="../test-00000.bin"),
            "'../test-00000.bin' is no name for a shard",
        ),
        (lambda m: m.update(sources=[3]), "its sources are not a list of objects"),
        (lambda m: m["splits"]["test"].update(documents=True), "documents of split test is True"),
    ],
)
def test_manifest_that_does_not_fit_is_refused(corpus: Corpus, how: Any, fault: str) -> None:
    change(corpus, how)
    with pytest.raises(InputError, match=fault):
        open_corpus(corpus.folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "[" * 100_000])
def test_other_files_are_no_manifest(corpus: Corpus, text: str) -> None:
    (corpus.folder / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=r"manifest\.json is not"):
        open_corpus(corpus.folder)


def test_folder_without_a_manifest_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a prepared corpus.*entp data prepare"):
        open_corpus(tmp_path)
