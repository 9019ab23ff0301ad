"""Words that are looked up give the tokens that the library gives for the whole text."""

from __future__ import annotations

import json
import unicodedata
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_texts import REAL, documents, needs_real_data

from entp.data import tokenizers as module
from entp.data import words
from entp.data.tokenizers import BpeTokenizer, gpt2_tokenizer, train_bpe
from entp.data.words import WordEncoder

ALPHABET = "ab 'stl3!.\n\t\r\x1c\x85\xa0\u3000\u2028\u200b\u180e\ufeffé中рш½٣\u0301😀\x00_"
"""Letters, digits, marks and spaces in and beyond ASCII, apostrophes and control characters."""


@cache
def bpe() -> BpeTokenizer:
    texts = [*documents(100), "it's we'll they're I'd 'tis 333 33 ... !! \n\n a  b \t\t", ALPHABET]
    found = train_bpe(texts * 3, 400)
    assert isinstance(found, BpeTokenizer)
    return found


def library(texts: list[str]) -> list[list[int]]:
    return bpe()._encode(texts)


def looked_up(encoder: WordEncoder, texts: list[str]) -> list[list[int]]:
    found = encoder.encode([text.encode() for text in texts])
    return [tokens.tolist() for tokens in found]


@given(st.lists(st.text(st.sampled_from(ALPHABET), max_size=30), max_size=6))
def test_tokens_are_those_of_the_library(texts: list[str]) -> None:
    encoder = WordEncoder(library, bpe().token_bytes())
    for _ in range(2):  # encoded, then looked up
        assert looked_up(encoder, texts) == library(texts)


def test_few_slots_and_small_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "SLOTS_LOG2", 4)
    monkeypatch.setattr(words, "AT_ONCE", 7)
    rng = np.random.default_rng(0)
    encoder = WordEncoder(library, bpe().token_bytes())
    for _ in range(300):
        sizes = rng.integers(0, 40, size=4)
        texts = ["".join(rng.choice(list(ALPHABET), size)) for size in sizes]
        assert looked_up(encoder, texts) == library(texts)


def test_no_character_is_taken_for_a_space_or_none() -> None:
    """All spaces, marks and control characters of Unicode, and some others, at ends of words."""
    spaces = ("Zs", "Zl", "Zp", "Cc", "Cf")
    several = [
        one
        for one in map(chr, range(0x30000))
        if unicodedata.category(one) != "Cs"
        and (ord(one) < 1000 or ord(one) % 101 == 0 or unicodedata.category(one) in spaces)
    ]
    assert len(several) > 2_000
    texts = [f"ab{one} a{one}{one} {one}b {one}  {one}'s 3{one}\n{one}" for one in several]
    encoder = WordEncoder(library, bpe().token_bytes())
    expected = library(texts)
    for text, tokens, wanted in zip(texts, looked_up(encoder, texts), expected, strict=True):
        assert tokens == wanted, ascii(text)


def test_known_words_are_not_encoded_again() -> None:
    given: list[str] = []

    def encode(texts: list[str]) -> list[list[int]]:
        given.extend(texts)
        return library(texts)

    encoder = WordEncoder(encode, bpe().token_bytes())
    texts = documents(200)
    looked_up(encoder, texts)
    given.clear()
    assert looked_up(encoder, texts) == library(texts)
    assert sum(map(len, given)) < 0.01 * sum(map(len, texts))


def test_much_text_is_encoded_like_little(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*documents(50), "", "a  b's"]
    few = bpe().encode_batch(texts)
    monkeypatch.setattr(module, "MUCH_TEXT", 0)
    assert bpe().encode_batch(texts) == few == library(texts)
    assert bpe().encode_batch([]) == []
    assert bpe().encode_batch([""]) == [[]]


def test_tokenizer_that_cuts_otherwise_is_left_to_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = json.loads(bpe().file())
    file["pre_tokenizer"]["use_regex"] = False
    other = BpeTokenizer(json.dumps(file).encode())
    monkeypatch.setattr(module, "MUCH_TEXT", 0)
    texts = documents(20)
    found = [one.tolist() for one in other.encode_arrays(texts)]
    assert found == other._encode(texts)
    assert other._words is None
    assert bpe()._words is not None


@needs_real_data
def test_real_text_has_gpt2s_tokens() -> None:
    tokenizer = gpt2_tokenizer(REAL / "gpt2_bpe")
    assert isinstance(tokenizer, BpeTokenizer)
    text = (REAL / "wikitext2_eval" / "valid.txt").read_text(encoding="utf-8")
    assert len(text) > module.MUCH_TEXT
    assert tokenizer.encode(text) == tokenizer._encode([text])[0]
