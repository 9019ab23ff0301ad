"""Any tokenizer.json of the `tokenizers` library, such as those of pretrained language models.

Unlike in entp/data/tokenizers.py its tokens need not stand for bytes, and there may be special
tokens, such as one that every text begins with. Which token ends a text is not in the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from entp.data.tokenizer import TOKENIZER, load_library
from entp.errors import InputError

DIGITS = 16
"""Of the file's sha256 in its name."""


class JsonTokenizer:
    """Text to tokens and back, from the contents of a tokenizer.json."""

    def __init__(self, file: bytes, where: str = TOKENIZER, special_are_text: bool = False) -> None:
        """special_are_text: the names of special tokens are ordinary text where they are read."""
        self.file, self._where, self._special_are_text = file, where, special_are_text

    @property
    def name(self) -> str:
        """The first digits of the file's sha256."""
        return file_name(self.file)

    @cached_property
    def vocab(self) -> int:
        """Tokens are 0 to vocab - 1."""
        return max(self._library.get_vocab(with_added_tokens=True).values()) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without special ones."""
        found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(one.ids) for one in found]

    @cached_property
    def start(self) -> list[int]:
        """The special tokens that a text begins with."""
        marked = self._library.encode("a", add_special_tokens=True)
        first = marked.special_tokens_mask.index(0) if 0 in marked.special_tokens_mask else 0
        return list(marked.ids[:first])

    def token(self, text: str) -> int | None:
        """The token that is written like this, special ones included; None if there is none."""
        found: int | None = self._library.token_to_id(text)
        return found

    def decode(self, tokens: Sequence[int], special: bool = True) -> str:
        """The text of some tokens; special: special ones are written out, else left out."""
        text: str = self._library.decode([int(t) for t in tokens], skip_special_tokens=not special)
        return text

    @cached_property
    def _library(self) -> Any:
        library = load_library()
        try:
            found = library.Tokenizer.from_str(self.file.decode())
        except Exception as error:
            raise InputError(
                f"{self._where} cannot be read by tokenizers {library.__version__} ({error})."
            ) from None
        found.no_truncation()  # some files cut texts off
        found.no_padding()
        found.encode_special_tokens = self._special_are_text
        return found


def file_name(file: bytes) -> str:
    """The name of a tokenizer: the first digits of its file's sha256."""
    return hashlib.sha256(file).hexdigest()[:DIGITS]
