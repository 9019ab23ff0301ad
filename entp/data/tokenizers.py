"""Text to tokens and back: bytes, byte-level BPE, such as GPT-2's, or any of a pretrained model.

Every token of the first two but the special ones stands for some bytes, so bits per byte are exact.
Special tokens are never read out of a text: the end token only follows documents. Only encoding
with BPE needs the `tokenizers` library.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from entp.data.manifest import MANIFEST, read_manifest
from entp.data.text_tokenizer import TextTokenizer
from entp.data.tokenizer import TOKENIZER, Tokenizer, load_library, utf8
from entp.data.vocabulary import END, NotBytes, read_vocabulary
from entp.data.words import WordEncoder
from entp.errors import InputError, one_of
from entp.files import json_bytes, parse_json

MADE = ("bytes", "bpe", "gpt2")
"""Tokenizers that are made here, or from GPT-2's own files."""
KINDS = (*MADE, "pretrained")
GPT2_VOCAB = 50257
SMALLEST_BPE = 257
"""Every byte, and the end token."""
MUCH_TEXT = 100_000
"""Bytes from which on words are looked up."""
PROBE = "a b  Bé\n\n\t x12345 don't\u00a0漢字!?  "
"""What a tokenizer must give back as it is."""


class ByteTokenizer(Tokenizer):
    """A token for each byte of UTF-8."""

    kind = "bytes"
    vocab = 257
    end = 256

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(utf8(text), dtype=np.uint8) for text in texts]

    @cached_property
    def pieces(self) -> list[bytes]:
        return [*(bytes([byte]) for byte in range(256)), b""]


class BpeTokenizer(Tokenizer):
    """Byte-level BPE from the contents of a tokenizer.json of the `tokenizers` library."""

    def __init__(self, file: bytes, where: str = TOKENIZER) -> None:
        self._file, self._where = file, where
        self._known = read_vocabulary(file, where)
        self.vocab, self.end = self._known.size, self._known.end
        if self._known.is_plain and (self.vocab, self.end) == (GPT2_VOCAB, GPT2_VOCAB - 1):
            self.kind = "gpt2"
        else:
            self.kind = "bpe" if self._known.is_plain else "pretrained"

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        if self._known.composes:
            texts = [unicodedata.normalize("NFC", text) for text in texts]
        data = [utf8(text) for text in texts]
        self._check_bytes(data)
        if self._words is not None and sum(map(len, data)) >= MUCH_TEXT:
            return self._words.encode(data)
        found = [np.array(ids, dtype=np.int32) for ids in self._encode(texts)]
        self._check_whole(data, found)
        return found

    def _check_bytes(self, data: list[bytes]) -> None:
        """InputError for a byte that is no token, and that no other token has."""
        if not self._known.missing:
            return
        there = self._known.there
        strange = next(filter(None, (text.translate(None, there) for text in data)), None)
        if strange is not None:
            raise InputError(
                f"the text has the byte 0x{strange[0]:02x}, for which the tokenizer of "
                f"{self._where} has no token: leave such characters out of the text."
            )

    def _check_whole(self, data: list[bytes], found: list[np.ndarray]) -> None:
        """InputError where tokens do not stand for all bytes of their text."""
        sizes = self._sizes
        for text, tokens in zip(data, found, strict=True):
            if sizes[tokens].sum() != len(text):
                start = text[:40].decode("utf-8", "replace")
                raise InputError(
                    f"the tokenizer of {self._where} does not keep all bytes of the text that "
                    f"begins with {start!r}: it cuts something off, or replaces it."
                )

    def _encode(self, texts: list[str]) -> list[list[int]]:
        found = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [one.ids for one in found]

    @cached_property
    def _words(self) -> WordEncoder | None:
        """The faster way to the same tokens, where text is cut as GPT-2 does."""
        return WordEncoder(self._encode, self._sizes) if self._known.cuts_as_gpt2 else None

    @cached_property
    def _sizes(self) -> np.ndarray:
        return self.token_bytes()

    @cached_property
    def pieces(self) -> list[bytes]:
        return self._known.pieces()

    def file(self) -> bytes:
        return self._file

    @cached_property
    def sha256(self) -> str:
        """Of what decides how text is cut: versions of the library write the rest differently."""
        return hashlib.sha256(json_bytes(self._known.identity())).hexdigest()

    @cached_property
    def _library(self) -> Any:
        """The library's tokenizer, which takes the names of special tokens for ordinary text."""
        library = load_library()
        try:
            found = library.Tokenizer.from_str(self._file.decode())
        except Exception as error:
            raise InputError(
                f"{self._where} cannot be read by tokenizers {library.__version__} ({error})."
            ) from None
        found.no_truncation()
        found.no_padding()
        found.encode_special_tokens = True
        for one in self._known.added:
            if found.token_to_id(one.text) != one.number:
                raise InputError(
                    f"{self._where} numbers {one.text!r} as {one.number}, and tokenizers "
                    f"{library.__version__} as {found.token_to_id(one.text)}: its tokens have gaps."
                )
        text = PROBE.encode().translate(None, bytes(self._known.missing)).decode("utf-8", "ignore")
        if self.decode_bytes(found.encode(text, add_special_tokens=False).ids) != text.encode():
            raise InputError(
                f"{self._where} changes texts: {text!r} does not come back from its tokens. "
                "Allowed are tokenizers whose tokens stand for the bytes of the text."
            )
        return found


def make_tokenizer(file: bytes, where: str = TOKENIZER) -> Tokenizer:
    """The tokenizer of a tokenizer.json's contents."""
    try:
        return BpeTokenizer(file, where)
    except NotBytes:
        return TextTokenizer(file, where)


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a prepared corpus or of a run: its tokenizer.json, or bytes if there is
    none."""
    path = folder / TOKENIZER
    found = make_tokenizer(path.read_bytes(), str(path)) if path.is_file() else ByteTokenizer()
    if (folder / MANIFEST).is_file():
        _check_fits(found, read_manifest(folder)["tokenizer"], folder)
    return found


def tokenizer_at(place: Path) -> Tokenizer:
    """The tokenizer of a folder with a tokenizer.json, or of such a file."""
    path = place / TOKENIZER if place.is_dir() else place
    if not path.is_file():
        raise InputError(
            f"there is no tokenizer {str(place)!r}: allowed are {', '.join(MADE)}, or a folder "
            f"with a {TOKENIZER}, such as that of a pretrained model, a corpus or a run."
        )
    return make_tokenizer(path.read_bytes(), str(path))


def gpt2_tokenizer(folder: Path) -> Tokenizer:
    """GPT-2's tokenizer, from its files encoder.json and vocab.bpe."""
    vocab, merges = folder / "encoder.json", folder / "vocab.bpe"
    for path in (vocab, merges):
        if not path.is_file():
            raise InputError(
                f"{path} is missing: GPT-2's tokenizer is its files encoder.json and vocab.bpe. "
                "Name their folder by --gpt2, or put it below ENTP_DATA as gpt2_bpe."
            )
    try:
        tokens = parse_json(vocab.read_bytes())
        lines = merges.read_text(encoding="utf-8").splitlines()
        pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#v")]
        found = _library_bpe(tokens, pairs)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{folder} does not hold GPT-2's files: {error}.") from None
    tokenizer = BpeTokenizer(found.to_str().encode(), str(vocab))
    if tokenizer.kind != "gpt2":
        raise InputError(
            f"{vocab} has {tokenizer.vocab} tokens; GPT-2's has {GPT2_VOCAB}, {END} the last."
        )
    return tokenizer


def check_vocab(vocab: int) -> None:
    """InputError for fewer tokens than a BPE has."""
    if vocab < SMALLEST_BPE:
        raise InputError(
            f"vocab is {vocab}: BPE has at least {SMALLEST_BPE} tokens, one for each byte and the "
            "end token."
        )


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE with at most `vocab` tokens, trained on these texts."""
    check_vocab(vocab)
    library = load_library()
    found = _library_bpe({}, [])
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(texts, trainer)
    return BpeTokenizer(found.to_str().encode())


def _library_bpe(vocab: dict[str, int], merges: list[Any]) -> Any:
    """A tokenizer of the library like GPT-2's, with these tokens and merges."""
    library = load_library()
    try:
        model = library.models.BPE(vocab=vocab, merges=merges)
    except Exception as error:
        raise ValueError(str(error)) from None
    found = library.Tokenizer(model)
    found.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = library.decoders.ByteLevel()
    if vocab:
        found.add_special_tokens([END])
    return found


def _check_fits(tokenizer: Tokenizer, told: dict[str, Any], folder: Path) -> None:
    """InputError unless the tokenizer is the one that the manifest tells of."""
    if told["kind"] not in KINDS:
        raise one_of(f"tokenizer in {folder / MANIFEST}", told["kind"], KINDS)
    if told["kind"] != "bytes" and tokenizer.kind == "bytes":
        raise InputError(f"{folder / TOKENIZER} is missing: prepare the corpus again.")
    is_bytes = told["kind"] == "bytes"
    if is_bytes != (tokenizer.kind == "bytes") or told.get("sha256") != tokenizer.sha256:
        raise InputError(
            f"{folder / TOKENIZER} is not the file that {MANIFEST} tells of: prepare the corpus "
            "again."
        )
