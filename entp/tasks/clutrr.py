"""CLUTRR: how are two people of a story related?

A sequence is the story and the question as the beginning of a sentence, " Nicholas is Ashley's".
With head `tokens`, as the authors do, the language-model head says the relation, " son". With head
`class` the model has an output for each relation at the last position. Data: the files train.csv,
validation.csv and test.csv of gen_train234_test2to10, in a folder clutrr below ENTP_DATA.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import io
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from entp.data.places import places
from entp.errors import InputError
from entp.fields import check_numbers, choice_problems, raise_problems
from entp.tasks.base import IGNORE, Baseline, Batch, Split, Task
from entp.tasks.choices import Request, encode_pairs
from entp.tasks.data_files import add_folder, find_any, read_bytes
from entp.tasks.metrics import LOSS, Metric, Predicted, Score, exact_match, mean_loss
from entp.tasks.tokens import find_tokenizer, model_vocab, name_problems

FILES = {"train": "train", "valid": "validation", "test": "test"}
RELATIONS = (
    *("aunt", "son-in-law", "grandfather", "brother", "sister", "father", "mother"),
    *("grandmother", "uncle", "daughter-in-law", "grandson", "granddaughter", "father-in-law"),
    *("mother-in-law", "nephew", "son", "daughter", "niece"),
)
"""By the number that the files give them."""
ACCURACY = Metric("accuracy", unit="sequence", slices=("chain",), bounds=(0.0, 1.0))
"""Right relations, also by the number of relations that the story tells."""


@dataclass(frozen=True)
class Clutrr(Task):
    """Say how two people of a story are related; chains are longer in test than in training.

    input   [story]  Nicholas  is  Ashley  's
    target  .        .         .   .       son
    """

    name: ClassVar[str] = "clutrr"
    about: ClassVar[str] = "say how two people of a story are related; fine-tuned with --init"
    takes_data: ClassVar[bool] = True
    one_test: ClassVar[bool] = True
    sequence_targets: ClassVar[int | None] = 1

    tokenizer: str = "bytes"
    """bytes, gpt2, or the first 16 digits of the checksum of a tokenizer.json. `--init` takes the
    run's."""
    head: Literal["tokens", "class"] = "tokens"
    """tokens: the language-model head says the relation. class: an output for each relation."""
    train_examples: int = 10_000
    """Random stories to train on, of those that are left."""
    split_seed: int = 0
    """Decides which stories are for training. Each seed of a recipe's arm has its own."""
    filter: bool = True
    """Without the four relations in law, as the authors do."""
    block: int = 128
    """Most tokens read. `--init` takes the run's context length."""
    long: Literal["drop", "cut"] = "drop"
    """Stories beyond block. drop: are left out, as the authors do, in test mostly long chains. cut:
    lose their beginning."""
    vocab: int | None = None
    """Tokens of the model. None: those of the tokenizer; the command line fills it in, so that a
    run can be read without the tokenizer."""
    data: str = ""
    """First 16 digits of the sha256 of the three files. Empty: whatever is found; the command line
    fills it in."""

    def __post_init__(self) -> None:
        check_numbers(self, "task.")
        problems = choice_problems(self, "task.") + name_problems(self.tokenizer)
        for name, least in (("train_examples", 1), ("split_seed", 0), ("block", 1)):
            if getattr(self, name) < least:
                problems.append(
                    f"task.{name} is {getattr(self, name)}: it must be at least {least}"
                )
        if self.vocab is not None and self.vocab < 1:
            problems.append(f"task.vocab is {self.vocab}: it must be at least 1, or None")
        raise_problems(problems)

    def with_data(self, data: str | None) -> Clutrr:
        """The task with the hash of its files, which are searched in the folder `data` too."""
        if data is not None:
            add_folder(data)
        return replace(
            self,
            vocab=self.vocab or model_vocab(self.tokenizer),
            data=self.data or _files().hash,
        )

    def for_seed(self, seed: int) -> Clutrr:
        """The seed draws the training stories too."""
        return replace(self, split_seed=seed)

    def files(self) -> dict[str, bytes]:
        """The tokenizer, if it has a file."""
        file = find_tokenizer(self.tokenizer).file()
        return {} if file is None else {"tokenizer.json": file}

    def model_needs(self) -> dict[str, Any]:
        vocab = self.vocab or model_vocab(self.tokenizer)
        needs = {"vocab": vocab, "context_length": self.block}
        return {**needs, "outputs": len(RELATIONS)} if self.head == "class" else needs

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (ACCURACY, replace(LOSS, slices=("chain",)))

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        assert batch.note is not None
        chain = _stories(self).chain[batch.note]
        return {
            "accuracy": exact_match(batch, got, {"chain": chain}),
            "loss": mean_loss(got, {"chain": chain[batch.row]}),
        }

    def baselines(self) -> dict[str, Baseline]:
        """The commonest relation of the training stories, whatever is asked."""
        return {"commonest": self._commonest}

    def _commonest(self, batch: Batch) -> Predicted:
        stories = _stories(self)
        train = stories.numbers["train"]
        relation = int(np.bincount(stories.relation[train]).argmax())
        example = train[stories.relation[train] == relation][0]
        answer = np.append(stories.answers[example], np.full(len(batch.targets), -1))
        place = np.arange(len(batch.row)) - np.searchsorted(batch.row, batch.row)
        return Predicted(answer[place], None)

    def caveats(self, sequences_read: int) -> list[str]:
        """Which files were read, and how many stories were left out or cut."""
        stories = _stories(self)
        what = "cut to" if self.long == "cut" else "left out, beyond"
        told = [
            f"{count:,} of {total:,} in {split}" for split, (count, total) in stories.long.items()
        ]
        return [
            f"The files of CLUTRR have the hash {_files().hash}.",
            f"Stories {what} {self.block} tokens: {', '.join(told)}.",
        ]

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        """Training stories at random; those of validation and test in an order by the seed, each
        once before any comes twice."""
        rng = self.rng(seed, split, step)
        numbers = _stories(self).numbers[split]
        if split == "train":
            return self._batch(numbers[rng.integers(0, len(numbers), size)], size)
        some = _order(self, seed, split)
        first = step % self._batches(split, size) * size
        return self._batch(some[first : first + size], size)

    def split_batches(self, split: Split, size: int) -> int | None:
        return None if split == "train" else self._batches(split, size)

    def _batches(self, split: Split, size: int) -> int:
        return -(-len(_stories(self).numbers[split]) // size)

    def _batch(self, numbers: np.ndarray, size: int) -> Batch:
        """These stories, padded on the right; missing rows up to `size` have no target."""
        stories = _stories(self)
        lengths = np.ones(size, np.int64)
        lengths[: len(numbers)] = [len(stories.tokens[n]) for n in numbers]
        x = np.zeros((size, int(lengths.max())), np.int64)
        y = np.full(x.shape, IGNORE)
        note = np.zeros(size, np.int64)
        note[: len(numbers)] = numbers
        for row, number in enumerate(numbers):
            length, answer = lengths[row], stories.answers[number]
            x[row, :length] = stories.tokens[number]
            y[row, length - len(answer) : length] = answer
        return Batch(x, y, lengths, note=note)

    def to_text(self, tokens: list[int]) -> str:
        found = find_tokenizer(self.tokenizer)
        return found.decode([t for t in tokens if t < found.vocab])

    def from_text(self, text: str) -> list[int]:
        return find_tokenizer(self.tokenizer).encode(text)

    def draw(self, seed: int = 0) -> str:
        """A story with its question, and the relation."""
        try:
            first = _kept(self, "train", _files().rows["train"])[0]
        except InputError as error:
            return f"No example: {error}"
        return " | ".join(first.request)


class _Files(NamedTuple):
    """The rows of the three files, and their hash."""

    rows: dict[str, list[dict[str, str]]]
    hash: str


def _files() -> _Files:
    return _read_files(tuple(places()))


@lru_cache(maxsize=2)
def _read_files(where: tuple[Path, ...]) -> _Files:
    """The files as they are found in these places."""
    contents = {split: read_bytes(find_any(f"clutrr/{name}.csv")) for split, name in FILES.items()}
    sums = [hashlib.sha256(content).hexdigest() for content in contents.values()]
    rows = {
        split: list(csv.DictReader(io.StringIO(content.decode())))
        for split, content in contents.items()
    }
    return _Files(rows, hashlib.sha256("".join(sums).encode()).hexdigest()[:16])


class _Stories(NamedTuple):
    """All stories that are left, those of all splits together."""

    tokens: list[np.ndarray]
    """What the model reads: story, question, and the answer but for its last token."""
    answers: list[np.ndarray]
    """Targets at the last positions: the relation's tokens, or its number."""
    relation: np.ndarray
    chain: np.ndarray
    """How many relations the story tells."""
    numbers: dict[str, np.ndarray]
    """The stories of each split."""
    long: dict[str, tuple[int, int]]
    """By split, stories beyond the block, and all."""


def _stories(task: Clutrr) -> _Stories:
    return _read_stories(task, tuple(places()))


@lru_cache(maxsize=8)
def _read_stories(task: Clutrr, where: tuple[Path, ...]) -> _Stories:
    files = _read_files(where)
    if task.data not in ("", files.hash):
        raise InputError(
            f"the files of CLUTRR that are found have the hash {files.hash}, and the task was made "
            f"with {task.data}: name the folder that has those by --data or ENTP_DATA."
        )
    rows = {split: _kept(task, split, rows) for split, rows in files.rows.items()}
    every = [row for some in rows.values() for row in some]
    split = np.repeat(list(rows), [len(some) for some in rows.values()])
    tokens, answers = _encoded(task, every)
    is_long = np.array([len(ids) > task.block for ids in tokens])
    numbers = {
        name: np.flatnonzero((split == name) & ~(is_long & (task.long == "drop"))) for name in rows
    }
    numbers["train"] = _chosen(task, numbers["train"])
    return _Stories(
        [ids[-task.block :] for ids in tokens],
        answers,
        np.array([row.relation for row in every]),
        np.array([row.chain for row in every]),
        numbers,
        {name: (int(is_long[split == name].sum()), len(some)) for name, some in rows.items()},
    )


class _Row(NamedTuple):
    request: Request
    relation: int
    chain: int


def _kept(task: Clutrr, split: str, rows: list[dict[str, str]]) -> list[_Row]:
    """The rows of a file, without relations in law if they are filtered."""
    try:
        found = [_row(row) for row in rows]
    except (KeyError, ValueError, SyntaxError, IndexError, TypeError) as error:
        raise InputError(
            f"clutrr/{FILES[split]}.csv has a row that is not CLUTRR's ({error!r}): get the files "
            "of gen_train234_test2to10."
        ) from None
    return [row for row in found if not (task.filter and RELATIONS[row.relation].endswith("-law"))]


def _row(row: dict[str, str]) -> _Row:
    one, other = ast.literal_eval(row["query"])
    relation, text = int(row["target"]), row["target_text"]
    if RELATIONS[relation] != text:
        raise ValueError(f"relation {relation} is {text}")
    story = row["story"].replace("[", "").replace("]", "")
    request = Request(f"{story} {other} is {one}'s", f" {text}")
    return _Row(request, relation, int(row["task_name"].rpartition(".")[2]))


def _encoded(task: Clutrr, rows: list[_Row]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What is read and answered of each row, whatever its length."""
    tokenizer = find_tokenizer(task.tokenizer)
    if task.head == "class":
        texts = tokenizer.encode_batch([row.request.context for row in rows])
        return [np.array(text) for text in texts], [np.array([row.relation]) for row in rows]
    pairs = encode_pairs(tokenizer, [row.request for row in rows])
    read = [np.array(text + answer[:-1]) for text, answer in pairs]
    return read, [np.array(answer) for _, answer in pairs]


def _chosen(task: Clutrr, numbers: np.ndarray) -> np.ndarray:
    """The stories to train on."""
    if task.train_examples > len(numbers):
        raise InputError(
            f"task.train_examples is {task.train_examples}: with task.filter {task.filter} and "
            f"block {task.block} there are {len(numbers)} stories."
        )
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(task.split_seed)))
    return np.sort(rng.permutation(numbers)[: task.train_examples])


def _order(task: Clutrr, seed: int, split: str) -> np.ndarray:
    """The stories of validation or test in the order of this seed."""
    return task.rng(seed, split, 0).permutation(_stories(task).numbers[split])
