"""The vocabulary of a tokenizer.json: which bytes each of its tokens stands for.

That of byte-level BPE, whose tokens are written in GPT-2's alphabet, which has a character for each
byte. Tokens that were added to it are special, and stand for no bytes, or are pieces of text. Where
a tokenizer composes texts (NFC), as Qwen's does, bytes are those of the composed text.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from entp.errors import InputError
from entp.files import parse_json

END = "<|endoftext|>"
ENDS = (END, "<|end_of_text|>", "</s>", "<|eos|>", "<eos>")
"""Names of the token that ends a document: the first that is there."""
GPT2_CUT = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
COMPOSING = ({"type": "NFC"}, {"type": "Sequence", "normalizers": [{"type": "NFC"}]})
"""Normalizers that leave most texts as they are, and are done here as well."""
NOT_BYTES = {
    "continuing_subword_prefix": "its tokens begin with a prefix",
    "end_of_word_suffix": "its tokens end with a suffix",
    "byte_fallback": "its tokens are characters, and bytes only where these have none",
}
"""Options of the library's BPE with which tokens do not stand for the bytes of a text."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself if it can be printed, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class NotBytes(InputError):
    """The tokens of a tokenizer do not stand for the bytes of a text."""


class Added(NamedTuple):
    """A token that was added to the vocabulary."""

    number: int
    text: str
    special: bool


class Vocabulary:
    """Tokens by their texts, and what decides how a text is cut into them."""

    def __init__(self, file: dict[str, Any]) -> None:
        self.model, self.file = file["model"], file
        self.added = [
            Added(int(one["id"]), str(one["content"]), bool(one.get("special")))
            for one in file["added_tokens"]
        ]
        texts = {one.text for one in self.added}
        every = {str(text): int(number) for text, number in self.model["vocab"].items()}
        self.tokens = {text: number for text, number in every.items() if text not in texts}
        """Those of BPE, in the alphabet of bytes."""
        self.numbers = [*every.values(), *(one.number for one in self.added)]
        self.size = max(self.numbers) + 1

    @cached_property
    def end(self) -> int:
        """The token after each document; -1 where none has a known name."""
        special = {one.text: one.number for one in self.added if one.special}
        return next((special[name] for name in ENDS if name in special), -1)

    @cached_property
    def missing(self) -> list[int]:
        """Bytes that are no token: texts that have them cannot be encoded."""
        return [byte for letter, byte in BYTE_OF.items() if letter not in self.tokens]

    @cached_property
    def there(self) -> bytes:
        """All other bytes."""
        return bytes(set(range(256)) - set(self.missing))

    @cached_property
    def cuts_as_gpt2(self) -> bool:
        """Whether text is cut by GPT-2's regular expression, and nothing but BPE happens to
        words."""
        cut = dict(self.file.get("pre_tokenizer") or {})
        cut.pop("trim_offsets", None)  # of places in the text, which nobody asks for
        pieces = [one for one in self.added if not one.special]
        return cut == GPT2_CUT and not (pieces or self.model.get("ignore_merges"))

    @property
    def composes(self) -> bool:
        """Whether texts are brought to Unicode's composed form, NFC, first: é is one character."""
        return self.file.get("normalizer") in COMPOSING

    @property
    def is_plain(self) -> bool:
        """Whether it is cut as GPT-2's is and has its end token, and no other special one."""
        changes = bool(self.file.get("normalizer"))
        return self.cuts_as_gpt2 and not changes and [one.text for one in self.added] == [END]

    def pieces(self) -> list[bytes]:
        """The bytes of every token."""
        found = [b""] * self.size
        for text, number in self.tokens.items():
            found[number] = bytes(BYTE_OF[letter] for letter in text)
        for one in self.added:
            found[one.number] = b"" if one.special else one.text.encode()
        return found

    def identity(self) -> list[Any]:
        """What tells it from others; of one that is plain tokens and merges alone."""
        merges = [
            pair if isinstance(pair, str) else " ".join(pair)
            for pair in self.model.get("merges", [])
        ]
        added = {one.text: one.number for one in self.added}
        found: list[Any] = [sorted({**self.tokens, **added}.items()), merges]
        if not self.is_plain:
            special = sorted(one.number for one in self.added if one.special)
            cut = self.file.get("pre_tokenizer")
            found += [special, _without(cut, "trim_offsets"), bool(self.model.get("ignore_merges"))]
            found += ["NFC"] if self.composes else []
        return found

    def not_bytes(self) -> list[str]:
        """Why its tokens do not stand for the bytes of texts."""
        found = [why for name, why in NOT_BYTES.items() if self.model.get(name)]
        if self.file.get("normalizer") and not self.composes:
            found.append("it changes texts before it cuts them (its normalizer)")
        if set("".join(self.tokens)) - set(BYTE_OF):
            found.append("its tokens are not written in bytes")
        strip = [one for one in self.file["added_tokens"] if not one.get("special")]
        if any(one.get("lstrip") or one.get("rstrip") for one in strip):
            found.append("an added token takes spaces around it away")
        return found

    def problems(self) -> list[str]:
        """Why it cannot be used."""
        found = ["its BPE drops merges at random"] if self.model.get("dropout") else []
        if not self.tokens:
            found.append("it has no tokens")
        if len(set(self.numbers)) < len({*self.tokens, *(one.text for one in self.added)}):
            found.append("two of its tokens have the same number")
        if min(self.numbers) < 0:
            found.append("a token has a number below 0")
        if self.end < 0:
            found.append(f"it has no special token that ends a text ({', '.join(ENDS)})")
        return found


def _without(part: Any, name: str) -> Any:
    """A part of the file without an entry, at any depth."""
    if isinstance(part, dict):
        return {key: _without(value, name) for key, value in part.items() if key != name}
    return [_without(one, name) for one in part] if isinstance(part, list) else part


def read_vocabulary(file: bytes, where: str) -> Vocabulary:
    """That of a tokenizer.json; NotBytes where its tokens do not stand for bytes."""
    try:
        data = parse_json(file)
        kind = data["model"]["type"]
        if kind != "BPE":
            raise NotBytes(f"{where} is {kind}, whose tokens do not stand for the bytes of a text.")
        found = Vocabulary(data)
        not_bytes, problems = found.not_bytes(), found.problems()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} is not a file of the tokenizers library ({error!r}).") from None
    if not_bytes:
        raise NotBytes(f"{where} is no byte-level BPE: {'; '.join(not_bytes)}.")
    if problems:
        raise InputError(
            f"{where} is not byte-level BPE as is needed: {'; '.join(problems)}. Make a tokenizer "
            "by `entp data prepare --tokenizer bpe`."
        )
    return found
