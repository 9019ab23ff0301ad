"""Answers of a fine-tuned model to test.jsonl, each stored as it comes, and their scores."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from entp.errors import InputError
from entp.files import json_bytes, lock_folder, parse_json, write_file
from entp.llm.chat_files import BUSY, Item, estimated_tokens, read_report, read_task, read_test
from entp.llm.openai_client import open_client, plain_errors, text_of
from entp.llm.openai_jobs import status, stored_job
from entp.llm.prompts import answer_text
from entp.llm.score import score_texts, summary
from entp.tasks.metrics import Totals

if TYPE_CHECKING:
    from openai import OpenAI

ANSWERS = "answers.jsonl"
RESULTS = "results.json"
RETRIES = 8
"""Repeats of a request that is limited; the client waits as long as it is told, or 0.5 to 8 s."""


def chosen_items(folder: Path, limit: int | None) -> list[Item]:
    """The first prompts of test.jsonl."""
    items = read_test(folder)
    if limit is not None and limit < 1:
        raise InputError(f"--limit is {limit}: it must be at least 1.")
    return items[:limit]


def unanswered(folder: Path, items: Sequence[Item]) -> list[Item]:
    """Those that have no answer in answers.jsonl yet."""
    there = read_answers(folder)
    return [item for item in items if item.key not in there]


def evaluate(folder: Path, limit: int | None = None) -> Totals:
    """The totals of the fine-tuned model's answers, which are asked for where they are missing."""
    items = chosen_items(folder, limit)
    model = fine_tuned_model(folder)
    with lock_folder(folder, BUSY):
        _drop_torn_line(folder / ANSWERS)
        missing = unanswered(folder, items)
        if missing:
            _ask_all(open_client(RETRIES), model, missing, folder / ANSWERS)
        answers = read_answers(folder)
        task = read_task(read_report(folder))
        texts = [answers[item.key]["text"] for item in items]
        totals = score_texts(task, np.array([item.sequence for item in items]), texts)
        used = [answers[item.key] for item in items]
        write_file(folder / RESULTS, json_bytes(_results(folder, model, totals, used)))
    return totals


def fine_tuned_model(folder: Path) -> str:
    """The name of the model, asked for where the job had not ended when it was last read."""
    job = stored_job(folder)
    if not job["fine_tuned_model"]:
        job = status(folder).job
    if not job["fine_tuned_model"] or job["status"] != "succeeded":
        said = f" ({job['error']})" if job["error"] else ""
        raise InputError(
            f"job {job['job']} is {job['status']}{said}: only a job that succeeded has a model to "
            "evaluate."
        )
    return str(job["fine_tuned_model"])


def read_answers(folder: Path) -> dict[str, dict[str, Any]]:
    """The rows of answers.jsonl by prompt; a last line without its end does not count."""
    path = folder / ANSWERS
    if not path.exists():
        return {}
    lines = path.read_bytes().split(b"\n")[:-1]
    return {row["id"]: row for row in _rows(path, lines)}


def _rows(path: Path, lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
            if isinstance(row["id"], str) and isinstance(row["text"], str):
                yield row
                continue
        except (ValueError, KeyError, TypeError):
            pass
        raise InputError(f"{path} line {number} is not an answer: delete that line and go on.")


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that was being written when the process was killed."""
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.truncate(path, whole)


def _ask_all(client: OpenAI, model: str, items: Sequence[Item], path: Path) -> None:
    """Ask for each answer and append it to the file at once."""
    done = 0
    try:
        with open(path, "ab") as file:
            for item in items:
                file.write(json.dumps(_ask(client, model, item)).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
                done += 1
    except KeyboardInterrupt:
        print(
            f"{done} of {len(items)} answers came and are in {path}; the same command goes on.",
            file=sys.stderr,
        )
        raise


def _ask(client: OpenAI, model: str, item: Item) -> dict[str, Any]:
    """A row of answers.jsonl: the model's likeliest text, at most twice as long as the right
    one."""
    right = [{"role": "assistant", "content": answer_text(item.sequence)}]
    messages: Any = item.messages
    with plain_errors(
        "an answer is missing", "Those before it are kept: run the same command again to go on."
    ):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_completion_tokens=2 * estimated_tokens(right),
        )
    text_of(answer, "id")
    choice = answer.choices[0]
    usage = answer.usage
    return {
        "id": item.key,
        "model": model,
        "text": choice.message.content or "",
        "finish_reason": choice.finish_reason,
        "input_tokens": usage.prompt_tokens if usage else None,
        "output_tokens": usage.completion_tokens if usage else None,
    }


def _results(
    folder: Path, model: str, totals: Totals, answers: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    report = read_report(folder)
    tokens = {
        name: sum(row[name] or 0 for row in answers) for name in ("input_tokens", "output_tokens")
    }
    return {
        "version": 1,
        "task": report["task"],
        "model": model,
        "job": stored_job(folder)["job"],
        "train_lines": report["splits"]["train"]["lines"],
        **tokens,
        **summary(totals),
    }
