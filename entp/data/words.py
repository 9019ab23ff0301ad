"""Byte-level BPE of much text: a word that was met before is looked up, not encoded again.

GPT-2's BPE cuts a text by a regular expression and never joins across a cut. Here text is cut only
at places where that expression cuts whatever stands around them, so the tokens are the same:

    before whitespace, after something visible             the| cat
    between ASCII letters, digits and other visible ones   (|the|)  3|rd  it|'s

Only after an apostrophe nothing is cut, since 's is one piece. Words of at most 15 bytes and 4
tokens are kept in a table of fixed size, in which a newer word takes the place of an older one.
Keys are the words themselves, so a wrong entry is never found.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

OTHER, LETTER, DIGIT, MARK, QUOTE, SPACE, BEYOND = range(7)
"""Kinds of bytes. MARK: ASCII that is visible and no letter or digit. BEYOND: the last byte of a
character beyond ASCII that is no space in any version of Unicode. OTHER: all that may be either."""
VISIBLE = (LETTER, DIGIT, MARK, QUOTE)
SPACES = b"\t\n\v\f\r "
LAST_OF_SPACES = bytes([*range(0x80, 0x8C), 0x8E, 0x9F, 0xA0, 0xA8, 0xA9, 0xAF])
"""Last bytes of spaces beyond ASCII, and of those that once were spaces or look like them."""
LONGEST = 15
"""Bytes of a word that is kept, so that they and their number are two numbers of 64 bits."""
MOST_TOKENS = 4
SLOTS_LOG2 = 19
AT_ONCE = 1 << 15
"""Words that are looked up before new ones are kept."""
FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)


def _kinds() -> np.ndarray:
    """(256,) the kind of each byte."""
    found = np.full(256, OTHER, dtype=np.uint8)
    found[0x21:0x7F] = MARK
    found[ord("0") : ord("9") + 1] = DIGIT
    for first, last in ("AZ", "az"):
        found[ord(first) : ord(last) + 1] = LETTER
    found[ord("'")] = QUOTE
    found[list(SPACES)] = SPACE
    found[0x80:0xC0] = BEYOND
    found[list(LAST_OF_SPACES)] = OTHER
    return found


def _cuts() -> np.ndarray:
    """(64,) whether to cut between two kinds, by 8 times the first plus the second."""
    found = np.zeros((8, 8), dtype=bool)
    found[[*VISIBLE, BEYOND], SPACE] = True
    for kind in (LETTER, DIGIT, MARK):
        found[kind, VISIBLE] = True
        found[kind, kind] = False
    found[MARK, QUOTE] = False
    found[QUOTE, DIGIT] = True
    return found.ravel()


KINDS = _kinds()
CUTS = _cuts()
LOW_BYTES = np.array([(1 << 8 * size) - 1 for size in range(9)], dtype=np.uint64)
"""Masks of the first bytes of 8."""


class WordEncoder:
    """Encodes texts as `encode` does, which is byte-level BPE with GPT-2's regular expression."""

    def __init__(
        self, encode: Callable[[list[str]], list[list[int]]], token_bytes: np.ndarray
    ) -> None:
        """`token_bytes`: the number of bytes that each token stands for."""
        self._encode, self._token_bytes = encode, token_bytes
        slots = 1 << SLOTS_LOG2
        self._keys = np.zeros((2, slots), dtype=np.uint64)
        self._counts = np.zeros(slots, dtype=np.uint8)
        self._tokens = np.zeros((MOST_TOKENS, slots), dtype=np.int32)

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """The tokens of each text, which is UTF-8."""
        sizes = np.array([len(text) for text in texts], dtype=np.int64)
        data = b"".join(texts)
        padded = np.frombuffer(data + bytes(16), dtype=np.uint8)
        kinds = KINDS[padded]
        begins = np.cumsum(sizes) - sizes
        starts = _starts(kinds[: len(data)], begins[sizes > 0])
        words = _Words(data, padded, kinds, starts, np.append(starts[1:], len(data)))
        found = [self._some(words[at : at + AT_ONCE]) for at in range(0, len(starts), AT_ONCE)]
        tokens = np.concatenate([np.zeros(0, np.int32), *(one for one, _ in found)])
        counts = np.concatenate([np.zeros(1, np.int64), *(one for _, one in found)])
        ends = np.cumsum(counts)[np.searchsorted(starts, begins + sizes)]
        return np.split(tokens, ends)[: len(texts)]

    def _some(self, words: _Words) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of some words, and how many each has."""
        keys = words.keys()
        slots = _slots(keys)
        known = (self._keys[0, slots] == keys[0]) & (self._keys[1, slots] == keys[1])
        known &= words.sizes <= LONGEST
        counts = np.where(known, self._counts[slots], 0).astype(np.int64)
        new = np.flatnonzero(~known)
        fresh, counts[new] = self._encoded(words[new])
        begins = np.cumsum(counts) - counts
        tokens = np.empty(counts.sum(), dtype=np.int32)
        tokens[_ranges(begins[new], counts[new])] = fresh
        for at in range(MOST_TOKENS):
            some = np.flatnonzero(known & (counts > at))
            tokens[begins[some] + at] = self._tokens[at, slots[some]]
        kept = new[(words.sizes[new] <= LONGEST) & (counts[new] <= MOST_TOKENS)]
        self._keep(kept, slots, keys, tokens, begins, counts)
        return tokens, counts

    def _keep(
        self,
        kept: np.ndarray,
        slots: np.ndarray,
        keys: np.ndarray,
        tokens: np.ndarray,
        begins: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """Write words into the table, one for each slot."""
        taken, first = np.unique(slots[kept], return_index=True)
        kept = kept[first]
        self._keys[:, taken] = keys[:, kept]
        self._counts[taken] = counts[kept]
        for at in range(MOST_TOKENS):
            some = counts[kept] > at
            self._tokens[at, taken[some]] = tokens[begins[kept[some]] + at]

    def _encoded(self, words: _Words) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of words that are not known, and how many each has.

        Words follow each other in few long texts, with a line feed before one that begins with
        something visible. Which tokens belong to which word is told by their bytes.
        """
        apart = np.isin(words.first_kinds, VISIBLE)
        opens = ~(apart | (words.first_kinds == SPACE))
        opens[1:] |= ~np.isin(words.last_kinds[:-1], [*VISIBLE, BEYOND])
        sizes = words.sizes + apart
        spans = zip(words.starts.tolist(), words.ends.tolist(), apart.tolist(), strict=True)
        pieces = [b"\n" * gap + words.data[start:end] for start, end, gap in spans]
        borders = [0, *np.flatnonzero(opens[1:]) + 1, len(pieces)]
        texts = [b"".join(pieces[one:next_one]).decode() for one, next_one in pairwise(borders)]
        tokens = np.array([token for ids in self._encode(texts) for token in ids], dtype=np.int32)
        ends = np.append(0, np.cumsum(self._token_bytes[tokens]))
        word_ends = np.cumsum(sizes)
        first = np.searchsorted(ends, word_ends - words.sizes)
        last = np.searchsorted(ends, word_ends)
        assert np.array_equal(ends[last], word_ends), "a token reaches across two words"
        return tokens[_ranges(first, last - first)], last - first


class _Words:
    """Parts of a text, with the kinds of their first and last bytes."""

    def __init__(
        self,
        data: bytes,
        padded: np.ndarray,
        kinds: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
    ) -> None:
        self.data, self.padded, self.kinds = data, padded, kinds
        self.starts, self.ends = starts, ends
        self.sizes = ends - starts

    def __getitem__(self, some: slice | np.ndarray) -> _Words:
        return _Words(self.data, self.padded, self.kinds, self.starts[some], self.ends[some])

    @property
    def first_kinds(self) -> np.ndarray:
        return self.kinds[self.starts]

    @property
    def last_kinds(self) -> np.ndarray:
        return self.kinds[self.ends - 1]

    def keys(self) -> np.ndarray:
        """(2, words): the bytes of each word of at most 15, with their number in the last byte."""
        total = len(self.padded) - 7
        eights = np.ndarray(total, dtype="<u8", buffer=self.padded.data, strides=(1,))
        low = eights[self.starts] & LOW_BYTES[self.sizes.clip(0, 8)]
        high = eights[self.starts + 8] & LOW_BYTES[(self.sizes - 8).clip(0, 7)]
        return np.stack([low, high | (self.sizes.clip(0, 255).astype(np.uint64) << np.uint64(56))])


def _starts(kinds: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Where words begin: at every cut, and at the begin of every text."""
    cut = np.zeros(len(kinds), dtype=bool)
    cut[1:] = CUTS[kinds[:-1] * 8 + kinds[1:]]
    cut[begins] = True
    return np.flatnonzero(cut)


def _slots(keys: np.ndarray) -> np.ndarray:
    """(words,) the place of each word in the table."""
    mixed = keys[0] * FACTORS[0] + keys[1] * FACTORS[1]
    mixed ^= mixed >> np.uint64(29)
    return (mixed * FACTORS[0]) >> np.uint64(64 - SLOTS_LOG2)


def _ranges(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers from each begin on, as many as are counted, one range after the other."""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(begins - before, counts)
