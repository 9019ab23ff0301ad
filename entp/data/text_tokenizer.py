"""Tokenizers whose tokens stand for pieces of text and not for bytes: BERT's, Llama 2's, T5's.

They may change a text, as BERT's does that writes it in lower case, put a space before it, or have
one token for all characters that they do not know. Loss and perplexity are per token as elsewhere;
there are no bits per byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from entp.data.json_tokenizer import JsonTokenizer
from entp.data.tokenizer import TOKENIZER, Tokenizer, utf8
from entp.data.vocabulary import ENDS
from entp.errors import InputError
from entp.files import json_bytes, parse_json

SEPARATOR = "[SEP]"
"""BERT's token after each text."""
DECIDES = ("added_tokens", "normalizer", "pre_tokenizer", "model", "decoder")
"""Parts of the file that decide which tokens a text has, and which text tokens have."""


class TextTokenizer(Tokenizer):
    """Any tokenizer.json of the `tokenizers` library with a token that ends texts."""

    kind = "pretrained"
    counts_bytes = False

    def __init__(self, file: bytes, where: str = TOKENIZER) -> None:
        self._file, self._where = file, where
        self._tokens = JsonTokenizer(file, where, special_are_text=True)
        self._parts = parse_json(file)
        self.vocab = self._tokens.vocab
        special = {
            str(one["content"]): int(one["id"])
            for one in self._parts.get("added_tokens", [])
            if one.get("special")
        }
        names = (*ENDS, SEPARATOR)
        self.end = next((special[name] for name in names if name in special), -1)
        if self.end < 0:
            raise InputError(f"{where} has no special token that ends a text ({', '.join(names)}).")
        self._special = {number: name for name, number in special.items() if name != self._unknown}

    @property
    def _unknown(self) -> str | None:
        """The name of the token for what is not known."""
        model = self._parts["model"]
        if model.get("unk_token") is not None:
            return str(model["unk_token"])
        number = model.get("unk_id")
        return None if number is None else str(model["vocab"][number][0])

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        for text in texts:
            utf8(text)
        found = [np.array(ids, dtype=np.int32) for ids in self._tokens.encode_batch(texts)]
        special = np.array(list(self._special), dtype=np.int32)
        for tokens in found:
            wrong = tokens[np.isin(tokens, special)]
            if len(wrong):
                raise InputError(
                    f"a text has {self._special[int(wrong[0])]!r}, which the tokenizer of "
                    f"{self._where} takes for its special token: leave it out of the text."
                )
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; the end token and other special ones have none."""
        self._check(tokens)
        return self._tokens.decode(tokens, special=False)

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """The bytes of that text."""
        return self.decode(tokens).encode()

    @property
    def pieces(self) -> list[bytes]:
        raise InputError(
            f"the tokens of {self._where} do not stand for bytes of a text: bytes cannot be "
            "counted."
        )

    def file(self) -> bytes:
        return self._file

    @cached_property
    def sha256(self) -> str:
        parts: list[Any] = [self._parts.get(name) for name in DECIDES]
        return hashlib.sha256(json_bytes(parts)).hexdigest()
