"""Zero-shot tasks: which of some continuations does a language model find likeliest?

An item is a few rows, one for each option: a context, and the continuation whose tokens are the
targets. A continuation that is longer than the model reads has several rows, each token in one. In
mode entp no other prefix is computed. A run is measured by `entp evaluate RUN --on winogrande`;
nothing is trained here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from entp.data.places import places
from entp.data.tokenizer import Tokenizer
from entp.errors import InputError
from entp.fields import check_numbers, choice_problems, raise_problems
from entp.tasks.base import IGNORE, Baseline, Batch, Split, Task
from entp.tasks.data_files import add_folder, read_lines
from entp.tasks.metrics import (
    BITS_PER_BYTE,
    PERPLEXITY,
    Metric,
    Predicted,
    Score,
    right_answers,
)
from entp.tasks.tokens import find_tokenizer, model_vocab, name_problems
from entp.tasks.windows import Window, windows

ACCURACY = Metric("accuracy", unit="sequence", bounds=(0.0, 1.0))
"""Items whose likeliest option is the right one."""
BYTE_ACCURACY = Metric("byte_accuracy", unit="sequence", bounds=(0.0, 1.0))
"""The same by log-likelihood per byte of the continuation, so that length does not count."""
NORMALISATION = 1_000_000
"""Stored requests from this number on have no question; they are of use to normalise only."""


class Request(NamedTuple):
    """A text, and the one whose likelihood after it is asked for."""

    context: str
    continuation: str


class Item(NamedTuple):
    """The options of a question, and which one is right."""

    options: list[Request]
    label: int


@dataclass(frozen=True)
class ZeroShot(Task):
    """Base of tasks that score continuations: give `read_items`."""

    takes_data: ClassVar[bool] = True
    one_test: ClassVar[bool] = True
    only_tests: ClassVar[bool] = True

    tokenizer: str = "bytes"
    """bytes, gpt2, or the first 16 digits of the checksum of a tokenizer.json. `--on` takes the
    run's."""
    block: int = 128
    """Most tokens read; longer contexts lose their beginning, longer continuations are read in
    windows. `--on` takes the run's."""
    vocab: int | None = None
    """Tokens of the model. None: those of the tokenizer, and with GPT-2's 50304. `--on` takes those
    of a pretrained model that is measured as it is."""

    def __post_init__(self) -> None:
        check_numbers(self, "task.")
        problems = choice_problems(self, "task.") + name_problems(self.tokenizer)
        for name, value in (("block", self.block), ("vocab", self.vocab)):
            if value is not None and value < 1:
                problems.append(f"task.{name} is {value}: it must be at least 1")
        raise_problems(problems)

    def with_data(self, data: str | None) -> Self:
        """The same task, after the folder `data` is searched too."""
        if data is not None:
            add_folder(data)
        return self

    def read_items(self) -> list[Item]:
        """The questions, from their files."""
        raise NotImplementedError

    def model_needs(self) -> dict[str, Any]:
        vocab = self.vocab or model_vocab(self.tokenizer)
        return {"vocab": vocab, "context_length": self.block}

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        """Whole items of the file in order, at most `size` rows; each comes once before any comes
        twice."""
        self._check_split(split)
        table = _table(self)
        some = table.per_batch(size)
        first = step % self._batches(size) * some
        begin, end = table.first[first], table.first[min(first + some, len(table.first) - 1)]
        return table.batch(np.arange(begin, end))

    def split_batches(self, split: Split, size: int) -> int | None:
        self._check_split(split)
        return self._batches(size)

    def _check_split(self, split: Split) -> None:
        if split != "test":
            raise InputError(
                f"{self.name} has no split {split}, only test: it measures models of text that "
                "were not trained on it."
            )

    def _batches(self, size: int) -> int:
        table = _table(self)
        return -(-(len(table.first) - 1) // table.per_batch(size))

    def caveats(self, sequences_read: int) -> list[str]:
        """How many requests lost the beginning of their context or were read in windows, where some
        did."""
        table, longer = _table(self), f"longer than {self.block} tokens and"
        long, total = table.options_in_windows, len(table.cut)
        cut = int((table.cut & ~long).sum())
        found = [f"{cut:,} of {total:,} requests are {longer} were cut left."] if cut else []
        if long.any():
            found.append(
                f"{int(long.sum()):,} of {total:,} continuations are {longer} were scored in "
                "windows, each token once."
            )
        return found

    def to_text(self, tokens: list[int]) -> str:
        found = find_tokenizer(self.tokenizer)
        return found.decode([t for t in tokens if t < found.vocab])

    def from_text(self, text: str) -> list[int]:
        return find_tokenizer(self.tokenizer).encode(text)

    def _cell(self, value: Any) -> str:
        return repr(self.to_text([int(value)]))[1:-1]

    def draw(self, seed: int = 0) -> str:
        """Contexts and continuations of the first item."""
        try:
            options = self.read_items()[0].options
        except InputError as error:
            return f"No example: {error}"
        return "\n".join(" | ".join(repr(text)[1:-1] for text in option) for option in options)

    def _bits(self, batch: Batch, got: Predicted, rows: np.ndarray) -> Score | None:
        """Nats and bytes of the targets of these rows, (batch,) whether they count."""
        tokenizer = find_tokenizer(self.tokenizer)
        if got.loss is None or not tokenizer.counts_bytes:
            return None
        counts = rows[batch.row]
        size = tokenizer.token_bytes()[batch.targets]
        return Score(np.where(counts, got.loss, 0.0), np.where(counts, size, 0))


@dataclass(frozen=True)
class Choices(ZeroShot):
    """Base of tasks with several options."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """bits_per_byte is that of the right continuation."""
        return (ACCURACY, BYTE_ACCURACY, BITS_PER_BYTE)

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        """Ties go to the first option. Without losses, an option is as good as it has no wrong
        answer."""
        table = _table(self)
        rows = table.rows_of(batch)
        nats = _row_sums(batch, ~right_answers(batch, got) if got.loss is None else got.loss)
        found: dict[str, Score | None] = {
            "accuracy": table.chosen(rows, nats),
            "bits_per_byte": self._bits(batch, got, table.is_right[table.option[rows]]),
        }
        if got.loss is not None:
            found["byte_accuracy"] = table.chosen(rows, nats, per_byte=True)
        return found

    def baselines(self) -> dict[str, Baseline]:
        """One option, whatever is asked."""
        return {"always first": self._always_first, "always last": self._always_last}

    def _always_first(self, batch: Batch) -> Predicted:
        table = _table(self)
        return _only(table.place[table.option[table.rows_of(batch)]] == 0, batch)

    def _always_last(self, batch: Batch) -> Predicted:
        table = _table(self)
        last = np.append(table.place[1:] == 0, True)
        return _only(last[table.option[table.rows_of(batch)]], batch)


@dataclass(frozen=True)
class Winogrande(Choices):
    """Which of two names or things a pronoun's place stands for."""

    name: ClassVar[str] = "winogrande"
    about: ClassVar[str] = "zero-shot: which of two options fits into a sentence"

    items: Literal["tiny", "all"] = "all"
    """tiny: the 100 items of TinyWinoGrande; all: the 1,267 of the development set."""
    scoring: Literal["partial", "full"] = "partial"
    """partial: the likelihood of what follows the option; full: of the option as well."""

    def read_items(self) -> list[Item]:
        tiny = self.items == "tiny"
        name = "winogrande/tinyWinogrande.jsonl" if tiny else "winogrande/dev.jsonl"
        return [self._item(row, name) for row in read_lines(name)]

    def _item(self, row: dict[str, Any], name: str) -> Item:
        try:
            before, _, after = row["sentence"].partition("_")
            options = [self._request(before, row[key], after) for key in ("option1", "option2")]
            return Item(options, ("1", "2").index(row["answer"]))
        except (KeyError, ValueError, AttributeError) as error:
            raise InputError(f"{name} has a row without {error}: it is not WinoGrande.") from None

    def _request(self, before: str, option: str, after: str) -> Request:
        rest = " " + after.strip()
        if self.scoring == "partial":
            return Request(before + option, rest)
        return Request(before, option + rest)


@dataclass(frozen=True)
class StoredChoices(Choices):
    """Base of tasks whose requests are stored ready made."""

    file: ClassVar[str] = ""

    def read_items(self) -> list[Item]:
        found = _stored(self.file)
        wrong = [item for item in found if not 0 <= item.label < len(item.options)]
        if wrong:
            raise InputError(f"{self.file} has a label {wrong[0].label} that is no option.")
        return found


@dataclass(frozen=True)
class Piqa(StoredChoices):
    """Which of two ways to reach a goal works."""

    name: ClassVar[str] = "piqa"
    about: ClassVar[str] = "zero-shot: which of two ways reaches a goal"
    file: ClassVar[str] = "zeroshot_eval/piqa.rc_0shot.jsonl"


@dataclass(frozen=True)
class Sciq(StoredChoices):
    """Science questions with four answers."""

    name: ClassVar[str] = "sciq"
    about: ClassVar[str] = "zero-shot: science questions with four answers"
    file: ClassVar[str] = "zeroshot_eval/sciq.rc_0shot.jsonl"


@dataclass(frozen=True)
class ArcEasy(StoredChoices):
    """School questions with three to five answers."""

    name: ClassVar[str] = "arc_easy"
    about: ClassVar[str] = "zero-shot: school questions with three to five answers"
    file: ClassVar[str] = "zeroshot_eval/arc_easy.rc_0shot.jsonl"


@dataclass(frozen=True)
class Lambada(ZeroShot):
    """The last word of a passage, which only the whole passage tells."""

    name: ClassVar[str] = "lambada"
    about: ClassVar[str] = "zero-shot: the last word of a passage"
    file: ClassVar[str] = "zeroshot_eval/lambada.bpb_0shot.jsonl"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """accuracy: every token of the word is the likeliest one; perplexity is per word."""
        return (ACCURACY, replace(PERPLEXITY, unit="sequence"), BITS_PER_BYTE)

    def read_items(self) -> list[Item]:
        return _stored(self.file)

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        table = _table(self)
        rows = table.rows_of(batch)
        words = table.begins[rows]
        wrong = table.sums(rows, _row_sums(batch, ~right_answers(batch, got)))
        found: dict[str, Score | None] = {"accuracy": Score(words & (wrong == 0), words)}
        if got.loss is not None:
            found["perplexity"] = Score(table.sums(rows, _row_sums(batch, got.loss)), words)
        every = np.ones(len(rows), bool)
        return {**found, "bits_per_byte": self._bits(batch, got, every)}


def _stored(file: str) -> list[Item]:
    """The items of a file of requests, without those that only normalise."""
    found: dict[int, Item] = {}
    try:
        for row in read_lines(file):
            if row["doc_id"] < NORMALISATION:
                label = row["label"] if isinstance(row["label"], int) else 0
                item = found.setdefault(row["doc_id"], Item([], label))
                item.options.append(Request(**row["request"]))
    except (KeyError, TypeError) as error:
        raise InputError(f"{file} has a row that is no request ({error!r}).") from None
    return list(found.values())


def _row_sums(batch: Batch, values: np.ndarray) -> np.ndarray:
    """(batch,) the sum of the values of each row's targets."""
    return np.bincount(batch.row, values.astype(np.float64), len(batch.x))


def _only(rows: np.ndarray, batch: Batch) -> Predicted:
    """Right answers in these rows alone."""
    return Predicted(np.where(rows[batch.row], batch.targets, -1), None)


class _Table(NamedTuple):
    """The rows of all items: a window for each option, or several where its continuation is
    long."""

    windows: list[Window]
    option: np.ndarray
    """(rows,) the option that each row is of, counted over all items."""
    begins: np.ndarray
    """(rows,) whether a row is its option's first."""
    sizes: np.ndarray
    """(options,) bytes of the continuation."""
    cut: np.ndarray
    """(options,) whether there are more tokens than fit."""
    place: np.ndarray
    """(options,) which option of its item it is."""
    is_right: np.ndarray
    """(options,) whether it is the right one."""
    first: np.ndarray
    """(items + 1,) the first row of each item, and the number of rows."""

    @property
    def options_in_windows(self) -> np.ndarray:
        """(options,) whether there are several rows."""
        return np.bincount(self.option) > 1

    def per_batch(self, size: int) -> int:
        """Items in a batch of at most so many rows, at least one."""
        return max(1, size // int(np.diff(self.first).max()))

    def batch(self, rows: np.ndarray) -> Batch:
        """These rows, padded on the right; `note` has their numbers."""
        some = [self.windows[row] for row in rows]
        lengths = np.array([len(one.tokens) - 1 for one in some])
        x = np.zeros((len(rows), int(lengths.max())), np.int64)
        y = np.full(x.shape, IGNORE)
        for at, (tokens, scored) in enumerate(some):
            length = lengths[at]
            x[at, :length] = tokens[:-1]
            y[at, length - scored : length] = tokens[-scored:]
        return Batch(x, y, lengths, note=rows)

    def rows_of(self, batch: Batch) -> np.ndarray:
        """The numbers of a batch's rows, which must be those of whole items in order."""
        rows = batch.note
        if rows is None:
            raise InputError("the batch does not say which items it has: it is another task's.")
        begins, ends = np.isin(rows, self.first[:-1]), np.isin(rows + 1, self.first)
        last = np.append(begins[1:], True)
        follows = np.append(np.diff(rows) == 1, True)
        if not (begins[0] and ends[last].all() and follows[~last].all()):
            raise InputError(
                "the batch has some options of an item and not others: measure in one process."
            )
        return rows

    def sums(self, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """(rows,) the sum over all rows of an option at its first one, 0 at the others."""
        begins = self.begins[rows]
        found = np.zeros(len(rows))
        found[begins] = np.add.reduceat(values, np.flatnonzero(begins))
        return found

    def chosen(self, rows: np.ndarray, cost: np.ndarray, per_byte: bool = False) -> Score:
        """A score at the first row of each item: whether the option of least cost is the right
        one. The cost of an option is the sum over its rows."""
        begins = np.flatnonzero(self.begins[rows])
        option, total = self.option[rows[begins]], self.sums(rows, cost)[begins]
        if per_byte:
            total = total / np.maximum(self.sizes[option], 1)
        starts = np.flatnonzero(self.place[option] == 0)
        item = np.cumsum(self.place[option] == 0) - 1
        best = np.flatnonzero(total == np.minimum.reduceat(total, starts)[item])
        _, at = np.unique(item[best], return_index=True)
        value, weight = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
        value[begins[starts]] = self.is_right[option[best[at]]]
        weight[begins[starts]] = True
        return Score(value, weight)


def _table(task: ZeroShot) -> _Table:
    return _read_table(task, tuple(places()))


@lru_cache(maxsize=8)
def _read_table(task: ZeroShot, where: tuple[Path, ...]) -> _Table:
    """The rows of a task whose files are searched in these places."""
    items = task.read_items()
    if not items:
        raise InputError(f"the file of {task.name} has no items.")
    requests = [request for item in items for request in item.options]
    pairs = encode_pairs(find_tokenizer(task.tokenizer), requests)
    counts = np.array([len(item.options) for item in items])
    place = np.concatenate([np.arange(count) for count in counts])
    parts = [windows(context, rest, task.block) for context, rest in pairs]
    each = np.array([len(some) for some in parts])
    option = np.repeat(np.arange(len(parts)), each)
    first_option = np.append(0, np.cumsum(counts))
    return _Table(
        [one for some in parts for one in some],
        option,
        np.diff(option, prepend=-1) > 0,
        np.array([len(request.continuation.encode()) for request in requests]),
        np.array([len(context) + len(rest) > task.block + 1 for context, rest in pairs]),
        place,
        place == np.repeat([item.label for item in items], counts),
        np.append(0, np.cumsum(each))[first_option],
    )


def encode_pairs(
    tokenizer: Tokenizer, requests: list[Request]
) -> list[tuple[list[int], list[int]]]:
    """The tokens of each context and continuation, as lm-eval cuts them: spaces at the end of the
    context belong to the continuation, and without a context the end token stands for it."""
    moved = [_without_spaces(request) for request in requests]
    contexts = tokenizer.encode_batch([one.context for one in moved])
    wholes = tokenizer.encode_batch([one.context + one.continuation for one in moved])
    found = []
    for one, context, whole in zip(moved, contexts, wholes, strict=True):
        rest = whole[len(context) :]
        if not rest:
            raise InputError(f"there is nothing to score after {one.context[-40:]!r}.")
        found.append((context or [tokenizer.end], rest))
    return found


def _without_spaces(request: Request) -> Request:
    context = request.context.rstrip()
    return Request(context, request.context[len(context) :] + request.continuation)
