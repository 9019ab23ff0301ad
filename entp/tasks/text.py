"""Language modelling: predict the next token of a text.

A prepared corpus (`entp data prepare`) is one stream of tokens for each split, with an end token
after every document. Training reads windows that begin anywhere. Validation and test are cut into
windows that have every token as a target exactly once, so sums over all of them are exact; the
first one reads the end token before the split's first token.

    task = Text().with_data("pydoc")        # or the hash of a corpus, a folder, a file of text
    task.batch(seed=0, split="valid", step=0, size=32)
    Text().with_tokenizer(Path("gpt2")).with_data("notes.txt")       # by the tokenizer of a folder
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from entp.data.manifest import MANIFEST, manifest_hash
from entp.data.places import add_place, corpora_below, places
from entp.data.prepare import resolve
from entp.data.shards import Corpus, TokenStream, open_corpus
from entp.data.sources import is_text
from entp.data.tokenizer import TOKENIZER, Tokenizer
from entp.data.tokenizers import read_tokenizer, tokenizer_at
from entp.errors import InputError
from entp.fields import check_numbers, choice_problems, raise_problems
from entp.files import json_bytes, parse_json
from entp.tasks.base import IGNORE, Baseline, Batch, Split, Task
from entp.tasks.metrics import (
    BITS_PER_BYTE,
    LOSS,
    PERPLEXITY,
    TOKEN_ACCURACY,
    Metric,
    Predicted,
    Score,
    mean_loss,
    token_accuracy,
)

DEFAULT = "pydoc"
"""The corpus that every Python has."""
MODEL_VOCAB = {"gpt2": 50304}
"""Tokens of the model by kind of tokenizer, where they are more than the tokenizer's: with GPT-2's
50,257 the paper's models have 50,304. Those beyond the tokenizer are never targets."""
MANIFEST_COPY = "corpus.json"
"""The manifest of the corpus in a run folder."""
PROMPT = 8
"""Tokens of a prompt of the task's own."""
COUNTED = 10_000_000
"""Training tokens that the unigram baseline counts."""
BY_CONTEXT = ("context",)
"""Slice: tokens read, rounded up to a power of two."""


@dataclass(frozen=True)
class Text(Task):
    """Predict the next token of a text."""

    name: ClassVar[str] = "text"
    about: ClassVar[str] = "predict the next token of a text, of your own (--data) or prepared"
    takes_data: ClassVar[bool] = True
    one_test: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    corpus: str = ""
    """Hash of the prepared corpus. `--data` sets it, and vocab."""
    vocab: int = 257
    """Tokens of the model: those of the corpus' tokenizer, with GPT-2's 50304, or those of the
    pretrained model that `--init` names."""
    block: int = 128
    """Tokens read per sequence."""
    rows: Literal["windows", "documents"] = "windows"
    """windows: begin anywhere in training. documents: each document is cut from its start on, the
    last part of it is padded."""
    stride: int | None = None
    """For evaluation: a window begins every so many tokens, and targets count once, with the
    longest context. None: block."""
    train_tokens: int | None = None
    """Read only the first so many training tokens. None: all."""

    def __post_init__(self) -> None:
        check_numbers(self, "task.")
        problems = choice_problems(self, "task.")
        for name, value in (("vocab", self.vocab), ("block", self.block)):
            if value < 1:
                problems.append(f"task.{name} is {value}: it must be at least 1")
        if self.stride is not None and not 1 <= self.stride <= self.block:
            problems.append(
                f"task.stride is {self.stride}: allowed are 1 to task.block, {self.block}"
            )
        if self.train_tokens is not None and self.train_tokens <= self.block:
            problems.append(
                f"task.train_tokens is {self.train_tokens}: it must be above task.block, "
                f"{self.block}"
            )
        if self.train_tokens is not None and self.rows == "documents":
            problems.append("task.train_tokens is for windows: leave task.rows documents out")
        raise_problems(problems)

    @property
    def more_splits(self) -> tuple[str, ...]:
        """seen: windows of the training text, as many as the test has rows and always the same."""
        return ("seen",)

    def with_data(self, data: str | None) -> Text:
        """On another corpus only one with the same tokenizer is taken; a text that is not prepared
        yet is prepared with it."""
        found = self._named(data)
        if self.corpus and found.hash != self.corpus:
            self._check_tokenizer(found)
        own = self.corpus and self.vocab >= found.vocab
        vocab = self.vocab if own else _model_vocab(found)
        return replace(self, corpus=found.hash, vocab=vocab)

    def _named(self, data: str | None) -> Corpus:
        """The corpus that `data` names, whatever is found elsewhere."""
        if data is None:
            return open_corpus(self.corpus) if self.corpus else resolve(DEFAULT)
        folder = Path(data)
        if not self.corpus or not folder.is_dir() or (folder / MANIFEST).is_file():
            return resolve(data, self._own_tokenizer())
        return self._below(folder)

    def with_tokenizer(self, folder: Path) -> Text:
        """On the default corpus, until `with_data` names another; unchanged where the folder has no
        tokenizer with a token that ends texts."""
        if self.corpus or not (folder / TOKENIZER).is_file():
            return self
        try:
            own = tokenizer_at(folder)
        except InputError:
            return self
        found = resolve(DEFAULT, own)
        return replace(self, corpus=found.hash, vocab=_model_vocab(found))

    def _own_tokenizer(self) -> Tokenizer | None:
        """That of the task's corpus, if there is one at hand."""
        try:
            return _tokenizer(self.corpus) if self.corpus else None
        except InputError:
            return None

    def _below(self, folder: Path) -> Corpus:
        """The task's own corpus in a folder that is none itself, or the text in it."""
        there = corpora_below(folder)
        if self.corpus in there:
            add_place(folder)
            return open_corpus(there[self.corpus])
        if not there and any(is_text(path) for path in folder.iterdir()):
            return resolve(str(folder), self._own_tokenizer())
        others = ", ".join(path.name for path in there.values()) or "none"
        raise InputError(
            f"{folder} is no prepared corpus, and of those directly below it ({others}) none is "
            f"{self.corpus}: give --data the folder of a corpus, one that holds {self.corpus}, or "
            "text."
        )

    def _check_tokenizer(self, other: Corpus) -> None:
        """InputError unless the other corpus has the tokenizer of this one."""
        its = other.manifest["tokenizer"]
        try:
            mine = _manifest(self.corpus)["tokenizer"]
        except InputError:  # not at hand: all that is known is the vocabulary
            unknown = {"kind": "a tokenizer", "vocab": self.vocab}
            mine = unknown if _model_vocab(other) != self.vocab else its
        if any(mine.get(key) != its.get(key) for key in ("kind", "vocab", "sha256")):
            raise InputError(
                f"{other.name} has another tokenizer ({its['kind']} of {its['vocab']} tokens) than "
                f"the corpus {self.corpus} ({mine['kind']} of {mine['vocab']}): give --data the "
                "run's own corpus, or a text prepared with its tokenizer."
            )

    def files(self) -> dict[str, bytes]:
        """The manifest, which says what was read, and the tokenizer."""
        found = {MANIFEST_COPY: json_bytes(_manifest(self.corpus))}
        file = self.tokenizer.file()
        return found if file is None else {**found, TOKENIZER: file}

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the corpus, or its copy in a run folder."""
        return _tokenizer(self.corpus)

    def model_needs(self) -> dict[str, Any]:
        return {"vocab": self.vocab, "context_length": self.block}

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Loss and accuracy also by the tokens read."""
        return (
            replace(LOSS, slices=BY_CONTEXT),
            PERPLEXITY,
            BITS_PER_BYTE,
            replace(TOKEN_ACCURACY, slices=BY_CONTEXT),
        )

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        context = {"context": 2 ** np.ceil(np.log2(batch.position + 1)).astype(np.int64)}
        found: dict[str, Score | None] = {
            "token_accuracy": token_accuracy(batch, got, context),
            "loss": mean_loss(got, context),
            "perplexity": mean_loss(got),
        }
        if got.loss is not None and self.tokenizer.counts_bytes:
            found["bits_per_byte"] = Score(got.loss, _token_bytes(self.corpus)[batch.targets])
        return found

    def baselines(self) -> dict[str, Baseline]:
        """unigram: tokens as often as in training, whatever was read."""
        return {"unigram": self._unigram}

    def _unigram(self, batch: Batch) -> Predicted:
        nats = _unigram_nats(self.corpus)
        return Predicted(np.full(len(batch.targets), nats.argmin()), nats[batch.targets])

    def caveats(self, sequences_read: int) -> list[str]:
        """How often training read the corpus, where it did so more than once."""
        read, there = sequences_read * self.block, self.train_tokens
        there = there or int(_manifest(self.corpus)["splits"]["train"]["tokens"])
        if read <= there:
            return []
        return [
            f"Training read {read:,} tokens of a text that has {there:,}: "
            f"{read / there:.1f} epochs."
        ]

    @property
    def stop(self) -> int:
        return int(_manifest(self.corpus)["tokenizer"]["end"])

    def to_text(self, tokens: list[int]) -> str:
        """The text of the tokens; those that the tokenizer does not have are left out."""
        return self.tokenizer.decode([t for t in tokens if t < self.tokenizer.vocab])

    def from_text(self, text: str) -> list[int]:
        """The tokens of a text; of none the end token, after which a document begins."""
        return self.tokenizer.encode(text) or [self.stop]

    def _cell(self, value: Any) -> str:
        return repr(self.to_text([int(value)]))[1:-1]

    def prompts(self, seed: int, size: int) -> list[list[int]]:
        """The first tokens of test documents."""
        rows, stream = self._rows("test", documents=True), self._corpus().tokens("test")
        rng = self.rng(seed, "test", 0)
        some = rng.choice(len(rows.begins), size, replace=len(rows.begins) < size)
        begins, ends = rows.begins[some], rows.ends[some]
        ends = np.minimum(ends - 1, begins + PROMPT).clip(begins + 1)
        return [
            stream.take(np.array([begin]), int(end - begin))[0].tolist()
            for begin, end in zip(begins, ends, strict=True)
        ]

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        rng = self.rng(seed, split, step)
        if split == "seen":
            return self._windows(self.rng(0, split, step % self._batches("test", size)), size)
        if split == "train" and self.rows == "windows":
            return self._windows(rng, size)
        rows = self._rows(split)
        if split == "train":
            return self._parts(split, rows.at(rng.integers(0, rows.total, size)))
        number = step % self._batches(split, size) * size + np.arange(size)
        return self._parts(split, rows.spread(number))

    def split_batches(self, split: Split, size: int) -> int | None:
        if split == "train":
            return None
        return self._batches("test" if split == "seen" else split, size)

    def _batches(self, split: Split, size: int) -> int:
        return -(-self._rows(split).total // size)

    def _windows(self, rng: np.random.Generator, size: int) -> Batch:
        """Windows that begin anywhere."""
        stream = self._corpus().tokens("train")
        there = self.train_tokens or len(stream)
        if not self.block < there <= len(stream):
            field, least = "block", self.block + 1
            if self.train_tokens is not None:
                field, least = "train_tokens", self.train_tokens
            raise InputError(
                f"the training text of corpus {self.corpus} has {len(stream)} tokens: task.{field} "
                f"{getattr(self, field)} needs at least {least}. Lower it, or give more text."
            )
        tokens = stream.take(rng.integers(0, there - self.block, size), self.block + 1)
        return Batch(tokens[:, :-1], tokens[:, 1:])

    def _parts(self, split: Split, parts: _Parts) -> Batch:
        """These parts of a split; targets are those from `fresh` to `end`."""
        corpus = self._corpus()
        place = parts.start[:, None] + np.arange(-1, self.block)
        tokens = np.where(place < 0, corpus.end, _gather(corpus.tokens(split), place))
        place = place[:, 1:]
        read = place < parts.end[:, None]
        counted = read & (place >= parts.fresh[:, None])
        x, y = np.where(read, tokens[:, :-1], 0), np.where(counted, tokens[:, 1:], IGNORE)
        lengths = None
        if self.rows == "documents":
            lengths = (parts.end - parts.start).clip(1)
        return Batch(x, y, lengths)

    def _rows(self, split: Split, documents: bool = False) -> _Rows:
        """The rows of a split; overlapping ones are for evaluation."""
        stride = self.block if split == "train" or self.stride is None else self.stride
        by_document = documents or self.rows == "documents"
        self._corpus()
        return _rows(self.corpus, split, by_document, self.block, stride)

    def _corpus(self) -> Corpus:
        found = _corpus(self.corpus)
        if found.vocab > self.vocab:
            raise InputError(
                f"the corpus {self.corpus} has {found.vocab} tokens and task.vocab is "
                f"{self.vocab}: leave task.vocab to --data."
            )
        return found


def _model_vocab(corpus: Corpus) -> int:
    """Tokens of a model that reads this corpus."""
    return MODEL_VOCAB.get(corpus.manifest["tokenizer"]["kind"], corpus.vocab)


class _Parts(NamedTuple):
    """Parts of a stream of tokens: targets start..end-1, of which those from `fresh` on count."""

    start: np.ndarray
    fresh: np.ndarray
    end: np.ndarray


class _Rows(NamedTuple):
    """All rows of a split: stretches of tokens, each cut from its beginning on."""

    begins: np.ndarray
    ends: np.ndarray
    first: np.ndarray
    """(stretches + 1,) the number of each one's first row, and of all rows."""
    block: int
    stride: int

    @property
    def total(self) -> int:
        return int(self.first[-1])

    def at(self, number: np.ndarray) -> _Parts:
        """The rows with these numbers; those beyond the last have nothing that counts."""
        there = number < self.total
        number = np.minimum(number, self.total - 1)
        stretch = np.searchsorted(self.first, number, side="right") - 1
        within = number - self.first[stretch]
        start = self.begins[stretch] + within * self.stride
        fresh = np.where(within > 0, start + self.block - self.stride, start)
        end = np.minimum(start + self.block, self.ends[stretch])
        return _Parts(start, fresh, np.where(there, end, start))

    def spread(self, number: np.ndarray) -> _Parts:
        """Rows in an order in which any first few lie all over the split."""
        step = max(1, round(self.total * 0.618))
        while gcd(step, self.total) > 1:
            step += 1
        return self.at(np.where(number < self.total, number * step % self.total, number))


@lru_cache(maxsize=32)
def _rows(corpus: str, split: str, by_document: bool, block: int, stride: int) -> _Rows:
    found = _corpus(corpus)
    total = len(found.tokens(split))
    begins: np.ndarray = np.zeros(1, np.int64)
    if by_document:
        begins = found.documents(split)
    if not total:
        raise InputError(
            f"corpus {corpus} has no text in its split {split}: prepare it with a larger one."
        )
    ends = np.append(begins[1:], total)
    counts = 1 + -(-(ends - begins - block).clip(0) // stride)
    return _Rows(begins, ends, np.append(0, np.cumsum(counts)), block, stride)


def _gather(stream: TokenStream, places: np.ndarray) -> np.ndarray:
    """The tokens at these places; any token where there is none."""
    inside = places.clip(0, len(stream) - 1)
    return stream.take(inside.ravel(), 1).reshape(places.shape)


@lru_cache(maxsize=16)
def _corpus(corpus: str) -> Corpus:
    """The corpus of a hash, which is looked for once."""
    if not corpus:
        raise InputError(
            "the task text has no corpus: give --data, or in Python Text().with_data('pydoc')."
        )
    return open_corpus(corpus)


@lru_cache(maxsize=16)
def _tokenizer(corpus: str) -> Tokenizer:
    try:
        return _corpus(corpus).tokenizer
    except InputError:
        copy = _copy_folder(corpus)
        if copy is None:
            raise
        return read_tokenizer(copy)


@lru_cache(maxsize=16)
def _manifest(corpus: str) -> dict[str, Any]:
    try:
        return _corpus(corpus).manifest
    except InputError:
        copy = _copy_folder(corpus)
        if copy is None:
            raise
        return dict(parse_json((copy / MANIFEST_COPY).read_bytes()))


def _copy_folder(corpus: str) -> Path | None:
    """A run folder that has the manifest of this corpus, and with it the tokenizer."""
    for place in places():
        try:
            if manifest_hash(json.loads((place / MANIFEST_COPY).read_bytes())) == corpus:
                return place
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


@lru_cache(maxsize=16)
def _token_bytes(corpus: str) -> np.ndarray:
    """Bytes of each token."""
    return _tokenizer(corpus).token_bytes()


@lru_cache(maxsize=16)
def _unigram_nats(corpus: str) -> np.ndarray:
    """Minus the logarithm of each token's frequency in training, each being seen once more."""
    stream = _corpus(corpus).tokens("train")
    some = stream.take(np.zeros(1, np.int64), min(len(stream), COUNTED))[0]
    counts = np.bincount(some, minlength=_corpus(corpus).vocab) + 1.0
    return -np.log(counts / counts.sum())
