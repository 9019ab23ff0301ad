"""Fine-tuning jobs at OpenAI: start one, exactly once, and follow it.

uploads.json has the ids of the uploaded files, and since when a job is being created. It is
written before the request, so that after a dropped connection, or a kill, the next `submit` looks
for a job with our files before it creates one. job.json has the job.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from entp.errors import InputError
from entp.files import json_bytes, lock_folder, parse_json, write_file
from entp.llm.chat_files import BUSY, read_report, read_split
from entp.llm.openai_client import (
    explained,
    open_client,
    plain_errors,
    text_of,
    was_refused,
    without_key,
)

if TYPE_CHECKING:
    from openai import OpenAI

JOB = "job.json"
UPLOADS = "uploads.json"
SENT = ("train", "valid")
LOOK_AFTER = (0.0, 2.0, 5.0)
"""Seconds before each look for a job whose creation was not answered."""
UNSURE_FOR = 600.0
"""Seconds in which a creation that was not answered may still become a job."""
MOST_LISTED = 1000
ENDED_BADLY = ("failed", "cancelled")


class JobRequest(NamedTuple):
    """What a job is created with; the paper's batch size and learning rate multiplier."""

    model: str
    epochs: int
    seed: int
    batch_size: int = 4
    learning_rate_multiplier: float = 10.0

    @property
    def hyperparameters(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "learning_rate_multiplier": self.learning_rate_multiplier,
            "n_epochs": self.epochs,
        }


class Status(NamedTuple):
    """A job as it is now, and its last events, the newest at the end."""

    job: dict[str, Any]
    events: list[str]


def check_request(request: JobRequest) -> None:
    """An InputError for numbers that no job can have."""
    least = {"epochs": 1, "batch_size": 1}
    for name, low in least.items():
        if getattr(request, name) < low:
            raise InputError(f"{name} is {getattr(request, name)}: it must be at least {low}.")
    if not request.learning_rate_multiplier > 0:
        raise InputError(
            f"learning_rate_multiplier is {request.learning_rate_multiplier}: it must be above 0."
        )


def planned(folder: Path, request: JobRequest) -> dict[str, Any]:
    """What submit would send: lines and bytes of each file, and estimates; nothing is sent."""
    _refuse_second(folder)
    check_request(request)
    report = read_report(folder)
    for split in SENT:
        read_split(folder, split)
    estimates = report["estimates"]
    return {
        "files": {f"{split}.jsonl": report["splits"][split] for split in SENT},
        "tokens": estimates["train_tokens_per_epoch"] * request.epochs,
        "dollars": estimates["train_dollars_per_epoch"] * request.epochs,
    }


def submit(folder: Path, request: JobRequest) -> dict[str, Any]:
    """The job, which is created by this call or was by one before whose answer was lost."""
    planned(folder, request)
    with lock_folder(folder, BUSY):
        _refuse_second(folder)
        client = open_client()
        state = _read(folder / UPLOADS) or {"files": {}, "creating_since": None}
        if state["creating_since"] is not None:
            job = _created_before(client, state)
            if job is not None:
                return _store(folder, job)
        _upload(client, folder, state)
        return _store(folder, _create(client, folder, state, request))


def status(folder: Path, events: int = 5) -> Status:
    """The job as the service has it, stored in job.json, and its last events."""
    with lock_folder(folder, BUSY):
        name = stored_job(folder)["job"]
        client = open_client()
        with plain_errors(f"job {name} cannot be read"):
            job = client.fine_tuning.jobs.retrieve(name)
            last = client.fine_tuning.jobs.list_events(name, limit=max(1, events)).data or []
        lines = [without_key(" ".join(str(event.message).split())) for event in last[:events]]
        return Status(_store(folder, job), lines[::-1])


def stored_job(folder: Path) -> dict[str, Any]:
    """What job.json holds."""
    job = _read(folder / JOB)
    if job is None:
        read_report(folder)
        raise InputError(
            f"{folder} has no {JOB}: start a job by entp llm openai submit {folder} --yes."
        )
    return job


def _refuse_second(folder: Path) -> None:
    job = _read(folder / JOB)
    if job is not None:
        raise InputError(
            f"{folder} has job {job['job']} already, and nothing was sent. Follow it by entp llm "
            f"openai status {folder}; for another job prepare another folder."
        )


def _created_before(client: OpenAI, state: Mapping[str, Any]) -> Any:
    """The job of an earlier submit that got no answer; None if there is none by now."""
    with plain_errors("it is not known whether the last submit created a job", "Try again."):
        job = _find(client, state)
    left = state["creating_since"] + UNSURE_FOR - time.time()
    if job is None and left > 0:
        raise InputError(
            "the last submit got no answer, and no job with its files is listed. It may still "
            f"come, so nothing was sent: run the same command again in {left / 60:.0f} minutes."
        )
    return job


def _find(client: OpenAI, state: Mapping[str, Any]) -> Any:
    """The job on our training file, if the service lists one."""
    ours = state["files"]["train"]["id"]
    for job in islice(client.fine_tuning.jobs.list(limit=100), MOST_LISTED):
        if job.training_file == ours:
            return job
    return None


def _upload(client: OpenAI, folder: Path, state: dict[str, Any]) -> None:
    """Send the files that are not there yet; a file sent twice does no harm."""
    checksums = read_report(folder)["splits"]
    for split in SENT:
        if split in state["files"]:
            continue
        name = f"{split}.jsonl"
        with plain_errors(f"{name} cannot be uploaded", "No job was created."):
            sent = client.files.create(file=(name, read_split(folder, split)), purpose="fine-tune")
        state["files"][split] = {"id": text_of(sent, "id"), "sha256": checksums[split]["sha256"]}
        write_file(folder / UPLOADS, json_bytes(state))


def _create(client: OpenAI, folder: Path, state: dict[str, Any], request: JobRequest) -> Any:
    """A new job: one request that is never repeated."""
    import openai

    _mark(folder, state, time.time())
    name = read_report(folder)["task"]["name"]
    hyperparameters: Any = request.hyperparameters
    try:
        job = client.with_options(max_retries=0).fine_tuning.jobs.create(
            model=request.model,
            training_file=state["files"]["train"]["id"],
            validation_file=state["files"]["valid"]["id"],
            seed=request.seed,
            suffix=name,
            method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        )
        text_of(job, "id")
        return job
    except openai.OpenAIError as error:
        if was_refused(error):
            _mark(folder, state, None)
            raise InputError(f"no job was created: {explained(error)}") from None
        lost = explained(error)
    return _look(client, state, lost)


def _look(client: OpenAI, state: Mapping[str, Any], lost: str) -> Any:
    """The job that was created although its creation was not answered."""
    import openai

    found = "none with these files is listed so far"
    for seconds in LOOK_AFTER:
        time.sleep(seconds)
        try:
            job = _find(client, state)
        except openai.OpenAIError as error:
            found = f"jobs cannot be listed: {explained(error).rstrip('.')}"
            continue
        if job is not None:
            return job
    raise InputError(
        f"it is not known whether a job was created: {lost} Looking for it, {found}. Run the same "
        f"command again in {UNSURE_FOR / 60:.0f} minutes: it looks for the job before it creates "
        "one."
    )


def _mark(folder: Path, state: dict[str, Any], since: float | None) -> None:
    """Store since when a job is being created; None: none is."""
    state["creating_since"] = since
    write_file(folder / UPLOADS, json_bytes(state))


def _store(folder: Path, job: Any) -> dict[str, Any]:
    """What job.json holds from now on."""
    error = getattr(job, "error", None)
    said = without_key(f"{error.code}: {error.message}") if error and error.message else None
    stored = {
        "version": 1,
        "job": text_of(job, "id"),
        "status": text_of(job, "status"),
        "model": job.model,
        "fine_tuned_model": job.fine_tuned_model,
        "error": said,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "trained_tokens": job.trained_tokens,
        "seed": job.seed,
    }
    write_file(folder / JOB, json_bytes(stored))
    return stored


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON file of ours; None if it is not there."""
    if not path.exists():
        return None
    try:
        data = parse_json(path.read_bytes())
    except ValueError:
        data = None
    if not isinstance(data, dict) or not ({"job", "files"} & set(data)):
        raise InputError(f"{path} cannot be read: it is not what entp llm openai submit wrote.")
    return data
