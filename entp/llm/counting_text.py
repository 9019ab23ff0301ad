"""Count3 and Count2 as text, for language models: the paper's prompt, then the answer.

    task = CountText()                          # by bytes
    task = CountText().with_data("smollm2")     # by the tokenizer.json of a folder
    task.batch(seed=0, split="train", step=0, size=16)

The targets are the answer's tokens and the token that ends it. A sequence belongs to the split that
a hash of its random integers says, so no sequence is in two splits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from entp.data.json_tokenizer import JsonTokenizer
from entp.data.places import add_place
from entp.data.tokenizer import TOKENIZER
from entp.data.tokenizers import ByteTokenizer
from entp.data.vocabulary import ENDS
from entp.errors import InputError
from entp.fields import check_numbers, choice_problems, raise_problems
from entp.files import parse_json
from entp.hf import refuse_gguf
from entp.hf.tokenizer_files import files_beside
from entp.llm.prompts import (
    Answer,
    Counting,
    answer_text,
    counting_task,
    parse_answer,
    prompt_text,
)
from entp.llm.score import WELL_FORMED, padded
from entp.tasks.base import IGNORE, SPLITS, Batch, Split, Task
from entp.tasks.metrics import (
    EXACT_MATCH,
    LOSS,
    TOKEN_ACCURACY,
    Metric,
    Predicted,
    Score,
    exact_match,
    mean_loss,
    right_answers,
)
from entp.tasks.tokens import find_json_tokenizer, json_name_problems

PARTS = 16
"""Sequences whose hash is 0 modulo this are for validation, 1 for test, all others for training."""
MOST_DRAWS = 64
"""Times that sequences are drawn anew until enough are of the split."""
SEPARATORS = ",]"
"""What ends an integer of the answer."""


@dataclass(frozen=True)
class CountText(Task):
    """Write what the code of Count3 or Count2 prints; the loss is on the answer and its end.

    input   ...  x = [52, 14]  ...  code ? \\n  [  5  2  ,     1  4 ,     0  ]
    target  .    .             .    .      [   5  2  ,     1  4  ,    0  ]  end
    """

    name: ClassVar[str] = "count-text"
    about: ClassVar[str] = (
        "Count3 or Count2 as text: the paper's prompt for language models, which --init names"
    )
    takes_data: ClassVar[bool] = True
    writes: ClassVar[bool] = True

    rule: Literal["count3", "count2"] = "count3"
    """Which code the prompt has; count2 is the paper's control."""
    prompt_length: int = 16
    """Random integers at the start of each sequence."""
    length: int = 64
    """Integers of the answer: the random ones again, then those made by the rule."""
    num_values: int = 64
    """The random integers are drawn from 0..num_values-1."""
    tokenizer: str = "bytes"
    """bytes, or the first 16 digits of the sha256 of a tokenizer.json. `--init` or `--data` with a
    folder in HuggingFace's format takes its."""
    end: int | None = None
    """The token that ends the answer. None: the tokenizer's, which is filled in with it."""
    vocab: int | None = None
    """Tokens of the model. None: those of the tokenizer, or of the model beside it."""
    longest: int | None = None
    """Most tokens of a prompt with its answer. None: as many as the tokenizer makes of the longest
    one."""

    def __post_init__(self) -> None:
        check_numbers(self, "task.")
        problems = choice_problems(self, "task.") + json_name_problems(self.tokenizer)
        for name, least in (("end", 0), ("vocab", 1), ("longest", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                problems.append(f"task.{name} is {value}: it must be at least {least}, or None")
        if self.end is not None and self.vocab is not None and self.end >= self.vocab:
            problems.append(f"task.end is {self.end}: tokens are 0 to {self.vocab - 1}")
        raise_problems(problems)
        self.counting  # noqa: B018  checks the other numbers

    @property
    def counting(self) -> Counting:
        """The task on integers."""
        return counting_task(
            self.rule,
            prompt_length=self.prompt_length,
            length=self.length,
            num_values=self.num_values,
        )

    def with_data(self, data: str | None) -> CountText:
        """The task with all that the tokenizer says; data: a folder with a tokenizer.json."""
        task = self
        if data is not None:
            task = self._of(Path(data))
            if self.tokenizer not in ("bytes", task.tokenizer):
                raise InputError(
                    f"{Path(data) / TOKENIZER} is {task.tokenizer}, and the task was made with the "
                    f"tokenizer {self.tokenizer}: give the folder that has that one."
                )
        return task._filled()

    def for_model(self, folder: Path) -> CountText:
        """With the tokenizer of a folder in HuggingFace's format, whatever it was."""
        found = replace(self, end=None)._of(folder)
        return found if self.longest is None else found._filled()

    def _of(self, folder: Path) -> CountText:
        """With what the files of a folder say of its tokenizer."""
        refuse_gguf(folder)
        path = folder.expanduser().absolute() / TOKENIZER
        if not path.is_file():
            raise InputError(
                f"{folder} has no {TOKENIZER}, and {self.name} is cut into tokens by the model's "
                "own: give a folder in HuggingFace's format that has it."
            )
        found = JsonTokenizer(path.read_bytes(), str(path))
        add_place(path.parent)
        if self.tokenizer == found.name and self.end is not None:
            return self
        end = self.end if self.end is not None else _end_of(path.parent, found)
        vocab = max(found.vocab, _config(path.parent, "config.json").get("vocab_size") or 0)
        return replace(self, tokenizer=found.name, end=end, vocab=vocab, longest=None)

    def _filled(self) -> CountText:
        """With numbers that otherwise only the tokenizer has."""
        return replace(
            self,
            end=self.stop,
            vocab=self.vocab or _tokenizer(self.tokenizer).vocab,
            longest=self.longest or _longest(self).both,
        )

    def files(self) -> dict[str, bytes]:
        """The tokenizer, if it has a file, with those beside it."""
        found = _tokenizer(self.tokenizer)
        if not isinstance(found, JsonTokenizer):
            return {}
        return {TOKENIZER: found.file, **files_beside(found.file)}

    def model_needs(self) -> dict[str, Any]:
        vocab = self.vocab or _tokenizer(self.tokenizer).vocab
        return {"vocab": vocab, "context_length": self.longest or _longest(self).both}

    @property
    def has_prefix(self) -> bool:
        """The prompt is the prefix of mode prefix-lm; its length differs from row to row."""
        return True

    @property
    def stop(self) -> int:
        """The token that ends an answer."""
        if self.end is not None:
            return self.end
        if self.tokenizer == "bytes":
            return ByteTokenizer.end
        raise InputError(
            f"the tokenizer {self.tokenizer} does not say which token ends an answer: give "
            "--task.end."
        )

    @property
    def most_new_tokens(self) -> int:
        """As many as the longest answer has."""
        return _longest(self).answer

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (EXACT_MATCH, TOKEN_ACCURACY, WELL_FORMED, LOSS)

    def caveats(self, sequences_read: int) -> list[str]:
        """Which values are of the model's own text."""
        return [
            "Validation and test values are teacher-forced: every token is predicted after the "
            "right ones. Values of generated answers are of the text that the model writes."
        ]

    def measure(self, batch: Batch, got: Predicted) -> dict[str, Score | None]:
        """Teacher-forced: every token is predicted after the right ones. An integer is right if
        all its tokens are, with the comma or bracket after it."""
        places = self._places(batch)
        key = batch.row * (self.length + 1) + places.integer
        wrong = np.bincount(key, ~right_answers(batch, got))
        return {
            "exact_match": exact_match(batch, got),
            "token_accuracy": places.score(wrong[key] == 0),
            "loss": mean_loss(got),
        }

    def measure_texts(self, batch: Batch, rows: list[list[int]]) -> dict[str, Score | None]:
        """Of what a model wrote after each prompt: as in entp/llm/score.py, and an answer without
        its end is not well-formed."""
        there = [self._answer(batch.y[row][batch.target_mask[row]]) for row in range(len(rows))]
        answers = [self._answer(row) for row in rows]
        right = np.array([padded(answer.integers, self.length) for answer in there])
        grid = np.array([padded(answer.integers, self.length) for answer in answers])
        formed = np.array([answer.well_formed for answer in answers])
        places = self._places(batch)
        same = np.pad(grid == right, ((0, 0), (0, 1)))
        ones = np.ones(len(rows))
        return {
            "exact_match": Score(formed & (grid == right).all(axis=1), ones),
            "token_accuracy": places.score(same[batch.row, places.integer]),
            "well_formed": Score(formed, ones),
        }

    def _answer(self, tokens: Any) -> Answer:
        """What the tokens say up to the one that ends the answer."""
        row = [int(token) for token in tokens]
        ended = self.stop in row
        found = parse_answer(
            self.to_text(row[: row.index(self.stop)] if ended else row), self.length
        )
        return found._replace(well_formed=found.well_formed and ended)

    def _places(self, batch: Batch) -> _Places:
        """Which integer of the answer each target belongs to."""
        pieces, number = np.unique(batch.targets, return_inverse=True)
        ends = np.array([_separators(self.tokenizer, int(token)) for token in pieces])[number]
        before = np.cumsum(ends) - ends
        first = before[np.searchsorted(batch.row, batch.row)]
        integer = np.minimum(before - first, self.length)
        last = np.append((np.diff(integer) != 0) | (np.diff(batch.row) != 0), True)
        made = (integer >= self.prompt_length) & (integer < self.length)
        return _Places(integer, last & made)

    def batch(self, seed: int, split: Split, step: int, size: int) -> Batch:
        counting = self.counting
        sequences = counting.extend(self._seeds(self.rng(seed, split, step), split, size))
        return self.encode(sequences)

    def encode(self, sequences: np.ndarray) -> Batch:
        """Whole sequences (n, length) as prompts with their answers, padded on the right."""
        counting, tokenizer = self.counting, _tokenizer(self.tokenizer)
        prompts = [_asked(counting, row[: self.prompt_length]) for row in sequences]
        answers = [answer_text(row) for row in sequences]
        found = tokenizer.encode_batch([*prompts, *answers])
        start, count = _start(tokenizer), len(sequences)
        asked = [start + tokens for tokens in found[:count]]
        told = [[*tokens, self.stop] for tokens in found[count:]]
        lengths = np.array([len(a) + len(b) - 1 for a, b in zip(asked, told, strict=True)])
        x = np.zeros((count, int(lengths.max())), np.int64)
        y = np.full(x.shape, IGNORE)
        for row, (prompt, answer) in enumerate(zip(asked, told, strict=True)):
            x[row, : lengths[row]] = (prompt + answer)[:-1]
            y[row, len(prompt) - 1 : lengths[row]] = answer
        return Batch(x, y, lengths, prefix_lengths=np.array([len(prompt) for prompt in asked]))

    def _seeds(self, rng: np.random.Generator, split: Split, size: int) -> np.ndarray:
        """Random integers (size, prompt_length) of sequences that belong to this split."""
        found: list[np.ndarray] = []
        for _ in range(MOST_DRAWS):
            drawn = rng.integers(0, self.num_values, (PARTS * size, self.prompt_length))
            found.append(drawn[_split_of(drawn) == SPLITS[split]])
            if sum(map(len, found)) >= size:
                return np.concatenate(found)[:size]
        raise InputError(
            f"no {size} sequences of {self.prompt_length} integers below {self.num_values} belong "
            f"to split {split}: raise task.num_values or task.prompt_length."
        )

    def split_batches(self, split: Split, size: int) -> int | None:
        """No split has an end; without its tokenizer there is none."""
        _tokenizer(self.tokenizer)
        return None

    def to_text(self, tokens: list[int]) -> str:
        found = _tokenizer(self.tokenizer)
        return found.decode([token for token in tokens if token < found.vocab])

    def from_text(self, text: str) -> list[int]:
        """The tokens of a prompt. Integers alone are those that the paper's prompt begins with."""
        counting, tokenizer = self.counting, _tokenizer(self.tokenizer)
        words = text.replace(",", " ").strip("[] \n").split()
        if words and all(word.isdecimal() for word in words):
            text = _asked(counting, np.array([int(word) for word in words]))
        return _start(tokenizer) + tokenizer.encode_batch([text])[0]

    def draw(self, seed: int = 0) -> str:
        """A prompt and its answer."""
        row = self.counting.extend(self._seeds(self.rng(seed, "train", 0), "train", 1))[0]
        return f"{_asked(self.counting, row[: self.prompt_length])}{answer_text(row)}"


class _Places(NamedTuple):
    """Where the integers of the answers are, with a row per target."""

    integer: np.ndarray
    """The number of the integer that a token belongs to; task.length for what follows the list."""
    counted: np.ndarray
    """Whether it is the last token of an integer that the rule made."""

    def score(self, right: np.ndarray) -> Score:
        """The accuracy of integers, given for each target whether its integer is right."""
        return Score(right & self.counted, self.counted.astype(float), {"length": self.integer})


class _Longest(NamedTuple):
    """Most tokens of an answer, and of a prompt with an answer."""

    answer: int
    both: int


def _asked(counting: Counting, seed: np.ndarray) -> str:
    """The prompt, up to where the answer begins."""
    return prompt_text(counting, seed) + "\n"


def _tokenizer(name: str) -> ByteTokenizer | JsonTokenizer:
    return ByteTokenizer() if name == "bytes" else find_json_tokenizer(name)


def _start(tokenizer: ByteTokenizer | JsonTokenizer) -> list[int]:
    """The special tokens that a text begins with."""
    return tokenizer.start if isinstance(tokenizer, JsonTokenizer) else []


@lru_cache(maxsize=2**16)
def _separators(tokenizer: str, token: int) -> int:
    """How many integers end with this token."""
    found = _tokenizer(tokenizer)
    text = found.decode([token]) if token < found.vocab else ""
    return sum(text.count(one) for one in SEPARATORS)


@lru_cache(maxsize=32)
def _longest(task: CountText) -> _Longest:
    """Of sequences of the integer that has the most tokens."""
    tokenizer, counting = _tokenizer(task.tokenizer), task.counting
    values = range(max(task.num_values, task.length))
    sizes = [len(tokens) for tokens in tokenizer.encode_batch([f" {n}" for n in values])]
    row = np.full(task.length, int(np.argmax(sizes)))
    prompt = _asked(counting, row[: task.prompt_length])
    asked, told = map(len, tokenizer.encode_batch([prompt, answer_text(row)]))
    return _Longest(told + 1, len(_start(tokenizer)) + asked + told + 1)


def _split_of(seeds: np.ndarray) -> np.ndarray:
    """The number of the split that each row of integers (n, prompt_length) belongs to."""
    mixed = np.zeros(len(seeds), np.uint64)
    for column in seeds.T.astype(np.uint64):
        mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    part = mixed % np.uint64(PARTS)
    found = np.full(len(seeds), SPLITS["train"])
    found[part == 0] = SPLITS["valid"]
    found[part == 1] = SPLITS["test"]
    return found


def _end_of(folder: Path, tokenizer: JsonTokenizer) -> int:
    """The token that ends a text, as the files beside a tokenizer.json say, or by its name."""
    named = _config(folder, "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    if isinstance(text, str) and (token := tokenizer.token(text)) is not None:
        return token
    numbers = _config(folder, "config.json").get("eos_token_id")
    first = numbers[0] if isinstance(numbers, list) and numbers else numbers
    if isinstance(first, int):
        return first
    found = next(
        (tokenizer.token(name) for name in ENDS if tokenizer.token(name) is not None), None
    )
    if found is not None:
        return found
    raise InputError(
        f"the files in {folder} do not say which token ends a text: give it as eos_token in "
        "tokenizer_config.json, or where --data names the folder by --task.end."
    )


def _config(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a folder; empty if it is not there."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        found = parse_json(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}
