"""Files for fine-tuning by a service: train and validation lines in the chat format, test prompts.

    prepare(task, {"train": 1000, "valid": 100, "test": 200}, seed=0, folder)
    read_report(folder), read_split(folder, "train"), read_test(folder)

report.json is written last: it has the checksum of each file, what was dropped, and estimates.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from entp.errors import InputError
from entp.files import json_bytes, lock_folder, parse_json, write_file
from entp.llm.prompts import Counting, answer_text, counting_task, parse_answer, prompt_text

VERSION = 1
REPORT = "report.json"
BUSY = "another command of entp works in this folder: wait until it has ended."
DRAWN_FIRST = ("test", "valid", "train")
"""A sequence that comes up in two splits stays in the first of these."""
LEAST = {"train": 10, "valid": 10, "test": 1}
"""Lines that a file needs; OpenAI takes no fewer than 10 for training."""
CHUNK = 256
ESTIMATE = (
    "estimates: tokens are pieces of text as GPT-4o's tokenizer splits it before it merges, and 4 "
    "more per message; prices are those that were given to prepare"
)
PIECES = re.compile(
    r"[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What the tokenizer of GPT-4o never merges across, for ASCII."""


class Prices(NamedTuple):
    """US dollars per million tokens."""

    train: float
    input: float
    output: float


class Drawn(NamedTuple):
    """The sequences (n, length) of a split, and what was dropped on the way."""

    sequences: np.ndarray
    duplicates: int
    leaks: int


class Item(NamedTuple):
    """A prompt of test.jsonl, and the sequence that answers it."""

    key: str
    messages: list[dict[str, str]]
    sequence: list[int]


def prepare(
    task: Counting, sizes: Mapping[str, int], seed: int, folder: Path, prices: Prices
) -> dict[str, Any]:
    """The report, after the files of all splits are written."""
    for split, least in LEAST.items():
        if sizes[split] < least:
            raise InputError(f"--{split} is {sizes[split]}: it must be at least {least}.")
    if min(prices) < 0:
        raise InputError(f"the prices are {', '.join(map(str, prices))}: none may be below 0.")
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, BUSY):
        if (folder / REPORT).exists():
            raise InputError(f"{folder} is prepared already: choose another folder by --out.")
        drawn = draw_splits(task, sizes, seed)
        files = {split: _file(task, split, drawn[split].sequences) for split in LEAST}
        for split, data in files.items():
            write_file(folder / f"{split}.jsonl", data)
        report = _report(task, seed, drawn, files, prices)
        write_file(folder / REPORT, json_bytes(report))
    return report


def draw_splits(task: Counting, sizes: Mapping[str, int], seed: int) -> dict[str, Drawn]:
    """Different sequences for each split, none of them in two."""
    taken: set[bytes] = set()
    drawn: dict[str, Drawn] = {}
    for split in DRAWN_FIRST:
        drawn[split] = _draw(task, split, sizes[split], seed, frozenset(taken))
        taken |= {row.tobytes() for row in drawn[split].sequences}
    return drawn


def estimated_tokens(messages: list[dict[str, str]]) -> int:
    """About how many tokens GPT-4o reads in these messages."""
    pieces = sum(len(PIECES.findall(message["content"])) for message in messages)
    return pieces + 4 * len(messages)


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a prepared folder."""
    try:
        report = parse_json((folder / REPORT).read_bytes())
        if report["version"] == VERSION and set(report["splits"]) == set(LEAST):
            return report
    except FileNotFoundError:
        raise InputError(
            f"{folder} has no {REPORT}: make it by entp llm openai prepare --out {folder}."
        ) from None
    except (ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{folder / REPORT} is not one of version {VERSION}: prepare a new folder.")


def read_task(report: Mapping[str, Any]) -> Counting:
    """The task that a folder was prepared for."""
    settings = dict(report["task"])
    return counting_task(settings.pop("name"), **settings)


def read_split(folder: Path, split: str) -> bytes:
    """The contents of a split's file, which must be what prepare wrote."""
    path = folder / f"{split}.jsonl"
    if not path.exists():
        raise InputError(f"{path} is not there: prepare a new folder.")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != read_report(folder)["splits"][split]["sha256"]:
        raise InputError(
            f"{path} is not what was written, by its checksum in {REPORT}: prepare a new folder."
        )
    return data


def read_test(folder: Path) -> list[Item]:
    """The prompts of test.jsonl with the sequences that answer them."""
    length = read_task(read_report(folder)).length
    rows = [json.loads(line) for line in read_split(folder, "test").splitlines()]
    return [
        Item(row["id"], row["messages"], parse_answer(row["answer"], length).integers)
        for row in rows
    ]


def _draw(task: Counting, split: str, size: int, seed: int, taken: frozenset[bytes]) -> Drawn:
    found: dict[bytes, np.ndarray] = {}
    duplicates = leaks = 0
    for row in _stream(task, split, size, seed):
        key = row.tobytes()
        leaks += key in taken
        duplicates += key in found
        if key not in taken:
            found.setdefault(key, row)
        if len(found) == size:
            return Drawn(np.stack(list(found.values())), duplicates, leaks)
    raise InputError(
        f"{split}.jsonl has {len(found)} different sequences of {size}: with {task.num_values} "
        f"values in the {task.prompt_length} integers of a seed there are too few. Make --{split} "
        "smaller, or --num-values or --prompt-length larger."
    )


def _stream(task: Counting, split: str, size: int, seed: int) -> Iterator[np.ndarray]:
    """Sequences of a split in order, four times as many as are asked for and some more."""
    for step in range(4 * (size // CHUNK + 1)):
        batch = task.batch(seed, split, step, CHUNK)
        yield from np.concatenate([batch.x, batch.y[:, -1:]], axis=1)


def _file(task: Counting, split: str, sequences: np.ndarray) -> bytes:
    lines = (json.dumps(_line(task, split, row)) for row in sequences)
    return "".join(f"{line}\n" for line in lines).encode()


def _line(task: Counting, split: str, sequence: np.ndarray) -> dict[str, Any]:
    """A conversation; in test the prompt alone, with the answer beside it."""
    prompt = prompt_text(task, sequence[: task.prompt_length])
    asked, answer = [{"role": "user", "content": prompt}], answer_text(sequence)
    if split == "test":
        key = hashlib.sha256(prompt.encode()).hexdigest()[:16]
        return {"id": key, "messages": asked, "answer": answer}
    return {"messages": [*asked, {"role": "assistant", "content": answer}]}


def _report(
    task: Counting,
    seed: int,
    drawn: Mapping[str, Drawn],
    files: Mapping[str, bytes],
    prices: Prices,
) -> dict[str, Any]:
    settings = {name: getattr(task, name) for name in ("prompt_length", "length", "num_values")}
    return {
        "version": VERSION,
        "task": {"name": task.name, **settings},
        "seed": seed,
        "splits": {
            split: {
                "lines": len(drawn[split].sequences),
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "duplicates_dropped": drawn[split].duplicates,
                "leaks_dropped": drawn[split].leaks,
            }
            for split, data in files.items()
        },
        "estimates": _estimates(files, prices),
    }


def _estimates(files: Mapping[str, bytes], prices: Prices) -> dict[str, Any]:
    """Tokens and US dollars, roughly."""
    rows = {
        split: [json.loads(line) for line in data.splitlines()] for split, data in files.items()
    }
    read = {split: sum(estimated_tokens(r["messages"]) for r in rows[split]) for split in rows}
    written = sum(len(PIECES.findall(row["answer"])) for row in rows["test"])
    return {
        "about": ESTIMATE,
        "dollars_per_million_tokens": prices._asdict(),
        "train_tokens_per_epoch": read["train"],
        "valid_tokens": read["valid"],
        "test_input_tokens": read["test"],
        "test_output_tokens": written,
        "train_dollars_per_epoch": read["train"] * prices.train / 1e6,
        "test_dollars": (read["test"] * prices.input + written * prices.output) / 1e6,
    }
