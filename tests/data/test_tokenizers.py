"""Tokens stand for bytes: every text can be encoded and comes back, and BPE is what its definition
says."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from small_texts import REAL, documents, needs_real_data
from small_tokenizers import (
    DIGITS_CUT,
    LLAMA_CUT,
    added,
    changed,
    changed_model,
    gpt2_like,
    pretrained_file,
    small_bpe,
)

from entp.data.prepare import prepare
from entp.data.tokenizer import TOKENIZER
from entp.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    gpt2_tokenizer,
    read_tokenizer,
    train_bpe,
)
from entp.data.vocabulary import BYTE_OF, END
from entp.errors import InputError

TOKENIZERS = {"bytes": ByteTokenizer, "bpe": small_bpe}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_text_comes_back_and_bytes_add_up(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.token_bytes()[tokens].sum() == len(text.encode())
    assert tokenizer.end not in tokens
    assert tokenizer.encode_batch([text, "a"]) == [tokens, tokenizer.encode("a")]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_end_token_is_never_read_out_of_a_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    tokens = tokenizer.encode(f"a{END}b")
    assert tokenizer.end not in tokens
    assert tokenizer.decode(tokens) == f"a{END}b"
    assert tokenizer.decode([tokenizer.end, *tokenizer.encode("x"), tokenizer.end]) == "x"
    assert tokenizer.token_bytes()[tokenizer.end] == 0
    assert len(tokenizer.token_bytes()) == tokenizer.vocab


def merged(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """BPE by its definition: join the pair that was learned first, until none is left."""
    letters = {byte: letter for letter, byte in BYTE_OF.items()}
    parts = [letters[byte] for byte in word.encode()]
    while len(parts) > 1:
        pairs = list(pairwise(parts))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        at = pairs.index(best)
        parts[at : at + 2] = ["".join(best)]
    return parts


def test_bpe_joins_by_the_order_of_merges() -> None:
    file = small_bpe().file()
    assert file is not None
    model = json.loads(file)["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    for word in ("houses", "naïve", "über", "again", "catmat", "日本"):
        assert small_bpe().encode(word) == [model["vocab"][part] for part in merged(word, ranks)]
    assert len(small_bpe().encode("houses")) < len("houses")


def test_bpe_trained_twice_is_the_same() -> None:
    assert train_bpe(documents(200), 400).file() == small_bpe().file()
    assert small_bpe().vocab == 400
    assert train_bpe(documents(200, seed=1), 300).file() != train_bpe(documents(200), 300).file()


def test_bpe_of_little_text_has_fewer_tokens() -> None:
    tokenizer = train_bpe(["ab ab"], 1000)
    assert 257 < tokenizer.vocab < 270
    assert tokenizer.decode(tokenizer.encode("äß z")) == "äß z"


def test_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(InputError, match="vocab is 100: BPE has at least 257"):
        train_bpe(["a"], 100)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_that_is_no_unicode_is_refused(kind: str) -> None:
    with pytest.raises(InputError, match="half of a surrogate pair"):
        TOKENIZERS[kind]().encode("ab\ud800")


@pytest.mark.parametrize("token", [-1, 257])
def test_unknown_token_is_refused(token: int) -> None:
    with pytest.raises(InputError, match=f"there is no token {token}: the tokenizer has 257"):
        ByteTokenizer().decode([97, token])


def test_incomplete_characters_are_decoded_as_bytes() -> None:
    assert ByteTokenizer().decode("é".encode()[:1]) == "\ufffd"
    assert ByteTokenizer().decode_bytes("é".encode()[:1]) == b"\xc3"


def test_gpt2_is_read_from_its_two_files(tmp_path: Path) -> None:
    tokenizer = gpt2_tokenizer(gpt2_like(tmp_path))
    assert (tokenizer.kind, tokenizer.vocab, tokenizer.end) == ("gpt2", 50257, 50256)
    letters = list(BYTE_OF)
    tokens = json.loads((tmp_path / "encoder.json").read_text())
    assert tokenizer.encode("ab") == [tokens["ab"]]
    assert tokenizer.encode("cab") == [tokens["c"], tokens["ab"]]  # ab comes before ca
    assert tokenizer.token_bytes().tolist() == [1] * len(letters) + [2] * 50_000 + [0]
    again = BpeTokenizer(tokenizer.file() or b"")
    assert (again.kind, again.encode("cab")) == ("gpt2", tokenizer.encode("cab"))


def test_other_files_are_not_taken_for_gpt2(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"encoder.json is missing.*--gpt2"):
        gpt2_tokenizer(tmp_path)
    gpt2_like(tmp_path, merges=10)
    with pytest.raises(InputError, match="has 267 tokens; GPT-2's has 50257"):
        gpt2_tokenizer(tmp_path)
    (tmp_path / "vocab.bpe").write_text("x y z\n")
    with pytest.raises(InputError, match="does not hold GPT-2's files"):
        gpt2_tokenizer(tmp_path)
    (tmp_path / "encoder.json").write_text("[1")
    with pytest.raises(InputError, match="does not hold GPT-2's files"):
        gpt2_tokenizer(tmp_path)


@needs_real_data
def test_real_gpt2_tokens() -> None:
    tokenizer = gpt2_tokenizer(REAL / "gpt2_bpe")
    text = "Hello world, this is ENTP."
    assert tokenizer.encode(text) == [15496, 995, 11, 428, 318, 12964, 7250, 13]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        (b"{", "is not a file of the tokenizers library"),
        (b"[]", "is not a file of the tokenizers library"),
        (b'{"model": {"type": "BPE", "vocab": {}}}', "is not a file of the tokenizers library"),
        (changed({"model": {"type": "Unigram"}}), "cannot be read by tokenizers"),
        (changed({"added_tokens": []}), "no special token that ends a text"),
        (changed_model({"dropout": 0.1}), "drops merges at random"),
        (changed({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}}}), "have the same number"),
    ],
)
def test_foreign_tokenizer_file_is_refused(file: bytes, fault: str, tmp_path: Path) -> None:
    (tmp_path / TOKENIZER).write_bytes(file)
    with pytest.raises(InputError, match=fault):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("cut", [LLAMA_CUT, DIGITS_CUT])
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_pretrained_tokenizers_keep_all_bytes(cut: object, text: str) -> None:
    tokenizer = BpeTokenizer(pretrained_file(cut))
    text = f"{text} 12345 <|end_of_text|> <x>"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.token_bytes()[tokens].sum() == len(text.encode())
    assert not {400, 401} & set(tokens)  # special ones are never read out of a text
    assert tokens[-1] == 402  # one that is not special is
    assert (tokenizer.kind, tokenizer.end, tokenizer.vocab) == ("pretrained", 401, 403)


def test_pretrained_tokenizer_cuts_as_the_library_does() -> None:
    file, text = pretrained_file(), "the cat, in 2024: naïve houses\n\n again"
    theirs = tokenizers.Tokenizer.from_str(file.decode())
    assert BpeTokenizer(file).encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert BpeTokenizer(file).encode(text) != small_bpe().encode(text)


def test_pretrained_tokenizers_are_told_apart_by_how_they_cut() -> None:
    one, other = BpeTokenizer(pretrained_file()), BpeTokenizer(pretrained_file(DIGITS_CUT))
    assert one.sha256 != other.sha256
    trimmed = json.loads(json.dumps(LLAMA_CUT).replace('"trim_offsets": true', '"trim_offsets": 0'))
    assert BpeTokenizer(pretrained_file(trimmed)).sha256 == one.sha256  # changes no token
    plain = BpeTokenizer(small_bpe().file() or b"")
    assert (plain.kind, plain.sha256) == ("bpe", small_bpe().sha256)


def test_tokenizer_that_composes_texts_has_the_bytes_of_the_composed_text() -> None:
    """As Qwen's: NFC."""
    tokenizer = BpeTokenizer(pretrained_file(normalizer={"type": "NFC"}))
    apart, composed = "nai\u0308ve", "naïve"
    assert tokenizer.encode(apart) == tokenizer.encode(composed)
    assert tokenizer.decode(tokenizer.encode(apart)) == composed
    assert tokenizer.token_bytes()[tokenizer.encode(apart)].sum() == len(composed.encode())
    plain = BpeTokenizer(pretrained_file())
    assert plain.decode(plain.encode(apart)) == apart
    assert plain.sha256 != tokenizer.sha256


def test_tokenizer_that_changes_texts_is_refused() -> None:
    last: dict[str, object] = LLAMA_CUT["pretokenizers"][1]  # type: ignore[assignment, index]
    begins_with_space = {**last, "add_prefix_space": True}
    drops = {**LLAMA_CUT["pretokenizers"][0], "behavior": "Removed"}  # type: ignore[index]
    both = {"type": "Sequence", "pretokenizers": [drops, last]}
    for cut in (begins_with_space, both):
        with pytest.raises(InputError, match=r"changes texts: .* does not come back"):
            BpeTokenizer(pretrained_file(cut)).encode("a b")


def test_tokens_that_the_library_numbers_otherwise_are_refused() -> None:
    tokens = [added(401, "<|end_of_text|>")]
    with pytest.raises(InputError, match=r"as 401, and tokenizers .* as 400: its tokens have gaps"):
        BpeTokenizer(pretrained_file(tokens=tokens)).encode("a b")


@pytest.mark.parametrize("length", [10, 200_000])
def test_byte_without_a_token_is_named(length: int) -> None:
    """Also where words are looked up."""
    model = json.loads(small_bpe().file() or b"")["model"]
    gone = next(letter for letter, byte in BYTE_OF.items() if byte == 6)
    model["vocab"] = {text: n for text, n in model["vocab"].items() if text != gone}
    tokenizer = BpeTokenizer(changed({"model": model}))
    text = "the cat " * (length // 8)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(InputError, match=r"the byte 0x06, for which the tokenizer of .* no token"):
        tokenizer.encode_batch([text, f"{text}\x06"])


def test_run_folder_has_the_tokenizer_of_its_file_or_bytes(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path).kind == "bytes"
    (tmp_path / TOKENIZER).write_bytes(small_bpe().file() or b"")
    assert read_tokenizer(tmp_path).encode("the cat") == small_bpe().encode("the cat")


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_tokenizer_that_does_not_fit_the_manifest_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello " * 99)
    folder = prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer=kind, vocab=300, quiet=True)
    assert read_tokenizer(folder).kind == kind
    (folder / TOKENIZER).write_bytes(small_bpe().file() or b"")
    with pytest.raises(InputError, match=r"is not the file that manifest\.json tells of"):
        read_tokenizer(folder)
    if kind == "bpe":
        (folder / TOKENIZER).unlink()
        with pytest.raises(InputError, match="is missing: prepare the corpus again"):
            read_tokenizer(folder)


def test_without_the_library_bpe_still_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = small_bpe().encode("the cat")
    fresh = BpeTokenizer(small_bpe().file() or b"")
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    assert fresh.decode(tokens) == "the cat"
    assert fresh.token_bytes()[np.array(tokens)].sum() == len("the cat")
    with pytest.raises(InputError, match=r"pip install 'entp\[text\]'"):
        fresh.encode("the cat")
