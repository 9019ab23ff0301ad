"""What all tokenizers have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from entp.errors import InputError

TOKENIZER = "tokenizer.json"


class Tokenizer:
    """Text to tokens 0..vocab-1 and back; `end` is the token that follows a document."""

    kind: str
    vocab: int
    end: int
    counts_bytes = True
    """Whether each token stands for bytes of the text: else there are no bits per byte."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text."""
        return [tokens.tolist() for tokens in self.encode_arrays(texts)]

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """The tokens of each text, as arrays."""
        raise NotImplementedError

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", "replace")

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """The bytes that some tokens stand for; the end token stands for none."""
        self._check(tokens)
        return b"".join(self.pieces[token] for token in tokens)

    def _check(self, tokens: Sequence[int]) -> None:
        """InputError for a token that there is not."""
        bad = [token for token in tokens if not 0 <= token < self.vocab]
        if bad:
            raise InputError(f"there is no token {bad[0]}: the tokenizer has {self.vocab}.")

    @property
    def pieces(self) -> list[bytes]:
        """The bytes of every token."""
        raise NotImplementedError

    def token_bytes(self) -> np.ndarray:
        """(vocab,) the number of bytes that each token stands for; 0 for the end token."""
        return np.array([len(piece) for piece in self.pieces], dtype=np.int64)

    def file(self) -> bytes | None:
        """What tokenizer.json holds; None if there is none."""
        return None

    @property
    def sha256(self) -> str | None:
        """The checksum of its tokens and merges; None where there is no tokenizer.json."""
        return None


def load_library() -> Any:
    """The `tokenizers` library."""
    try:
        import tokenizers
    except ImportError:
        raise InputError(
            "BPE needs the tokenizers library: pip install 'entp[text]', or use bytes."
        ) from None
    return tokenizers


def utf8(text: str) -> bytes:
    """The bytes of a text; InputError for one that has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text has half of a surrogate pair, {text[error.start]!r}, at character "
            f"{error.start}: it is no Unicode text."
        ) from None
