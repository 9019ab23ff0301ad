"""Tokenizers whose tokens do not stand for bytes: cut as by the library, and without bits per
byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_texts import documents
from small_tokenizers import added, changed, changed_model, pretrained_file, small_bpe, text_file

from entp.data.prepare import prepare
from entp.data.shards import open_corpus
from entp.data.tokenizer import TOKENIZER
from entp.data.tokenizers import make_tokenizer, read_tokenizer, tokenizer_at
from entp.data.vocabulary import END
from entp.errors import InputError
from entp.tasks.text import Text

tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers library")

KINDS = ("bert", "llama2", "t5")
ENDS = {"bert": "[SEP]", "llama2": "</s>", "t5": "</s>"}
TEXT = "The cat, in 2024: Naïve houses\n\n  and 漢 [SEP] [MASK] </S>"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_library(kind: str) -> None:
    file = text_file(kind)
    found, library = make_tokenizer(file), tokenizers.Tokenizer.from_str(file.decode())
    for text in (*documents(30), "", " ", "a"):
        assert found.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert found.decode(found.encode(text)) == library.decode(found.encode(text))
    assert found.end == library.token_to_id(ENDS[kind])
    assert found.vocab == library.get_vocab_size()
    assert (found.kind, found.counts_bytes) == ("pretrained", False)
    assert make_tokenizer(small_bpe().file() or b"").counts_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_never_read_out_of_a_text(kind: str) -> None:
    found = make_tokenizer(text_file(kind))
    text = TEXT if kind == "t5" else f"{TEXT} <s></s>"
    assert found.end not in found.encode(text)
    words = found.encode("the cat")
    assert found.decode([*words, found.end]) == found.decode(words)


def test_text_that_only_reads_as_a_special_token_is_refused() -> None:
    """Unigram finds the names of special tokens among its pieces."""
    found = make_tokenizer(text_file("t5"))
    with pytest.raises(InputError, match=r"'</s>', which .* takes for its special token"):
        found.encode_batch(["the cat", "the</s> cat"])


def test_unknown_bytes_of_llama2_come_back() -> None:
    found = make_tokenizer(text_file("llama2"))
    assert found.decode(found.encode("the 漢 cat")) == "the 漢 cat"


def test_what_bytes_there_are_is_refused() -> None:
    found = make_tokenizer(text_file("bert"))
    with pytest.raises(InputError, match="bytes cannot be counted"):
        found.token_bytes()
    with pytest.raises(InputError, match=f"there is no token {found.vocab}: the tokenizer has"):
        found.decode([1, found.vocab])
    with pytest.raises(InputError, match="half of a surrogate pair"):
        found.encode("a \ud800")


@pytest.mark.parametrize(
    "file",
    [
        changed({"normalizer": {"type": "NFKC"}}),
        changed_model({"byte_fallback": True}),
        changed({"added_tokens": [added(0, END), added(400, "<x>", False, rstrip=True)]}),
    ],
)
def test_byte_level_bpe_that_changes_texts_counts_no_bytes(file: bytes) -> None:
    assert not make_tokenizer(file).counts_bytes


def test_tokenizers_are_told_apart_by_how_they_cut() -> None:
    files = [json.loads(text_file(kind)) for kind in KINDS]
    names = [make_tokenizer(json.dumps(file).encode()).sha256 for file in files]
    assert len(set(names)) == len(KINDS)
    padded = {**files[0], "truncation": None, "padding": None, "post_processor": None}
    assert make_tokenizer(json.dumps(padded, indent=1).encode()).sha256 == names[0]
    cased = {**files[0], "normalizer": {**files[0]["normalizer"], "lowercase": False}}
    assert make_tokenizer(json.dumps(cased).encode()).sha256 != names[0]


def test_one_without_an_end_is_refused(tmp_path: Path) -> None:
    file = json.loads(text_file("bert"))
    file["added_tokens"] = [one for one in file["added_tokens"] if one["content"] != "[SEP]"]
    (tmp_path / TOKENIZER).write_text(json.dumps(file))
    with pytest.raises(InputError, match=r"no special token that ends a text .*\[SEP\]"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_corpus_has_these_tokens(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENTP_CACHE", str(tmp_path / "cache"))
    model, text = tmp_path / "model", tmp_path / "notes.jsonl"
    model.mkdir()
    (model / TOKENIZER).write_bytes(text_file(kind))
    own = documents(60)
    text.write_text("\n".join(json.dumps({"text": one}) for one in own))
    folder = prepare(text, tokenizer=str(model), out=tmp_path / "corpus")
    assert "no bits per byte" in capsys.readouterr().err
    tokenizer = tokenizer_at(model)
    assert read_tokenizer(folder).sha256 == tokenizer.sha256
    task = Text().with_data(str(folder))
    assert (task.vocab, task.stop) == (tokenizer.vocab, tokenizer.end)
    streams = [open_corpus(folder).tokens(split) for split in ("train", "valid", "test")]
    stored = [t for one in streams for t in one.take(np.array([0]), len(one))[0].tolist()]
    expected = [t for one in own for t in (*tokenizer.encode(one), tokenizer.end)]
    assert sorted(stored) == sorted(expected)
    other = tmp_path / "other"
    other.mkdir()
    (other / TOKENIZER).write_bytes(pretrained_file())
    second = prepare(text, tokenizer=str(other), out=tmp_path / "second")
    with pytest.raises(InputError, match="has another tokenizer"):
        task.with_data(str(second))
