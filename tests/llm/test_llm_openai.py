"""`entp llm openai submit | status | evaluate` against a service on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from openai_server import KEY, MODEL, Service, job_of

from entp.cli.main import main
from entp.llm import openai_jobs
from entp.llm.chat_files import read_test

pytest.importorskip("openai")

Shown = pytest.CaptureFixture[str]
CREATE = "POST /fine_tuning/jobs"
CHAT = "POST /chat/completions"
DOCUMENT = Path(__file__).parents[2] / "docs/llm.md"
PRINTED = "{'well_formed': 0.5, 'exact_match': 0.5, 'token_accuracy': 0.5, 'n': 2}"


def openai(*words: str | Path) -> int:
    return main(["llm", "openai", *map(str, words)])


def right_answers(folder: Path) -> Callable[[str], str]:
    answers = {item.messages[0]["content"]: str(item.sequence) for item in read_test(folder)}
    return answers.__getitem__


def stored(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def answer_lines(folder: Path) -> list[str]:
    return (folder / "answers.jsonl").read_text().splitlines()


@pytest.fixture
def submitted(service: Service, prepared: Path, capsys: Shown) -> Path:
    assert openai("submit", prepared, "--yes") == 0
    capsys.readouterr()
    return prepared


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_jobs, "LOOK_AFTER", (0.0, 0.0))


def test_nothing_is_sent_without_yes(
    service: Service, prepared: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    assert openai("submit", prepared, "--epochs", "3") == 0
    shown = capsys.readouterr().out
    assert "train.jsonl to 127.0.0.1" in shown
    assert "batch_size 4, learning_rate_multiplier 10.0, n_epochs 3" in shown
    tokens = stored(prepared, "report.json")["estimates"]["train_tokens_per_epoch"]
    assert f"{3 * tokens:,} training tokens" in shown
    assert openai("evaluate", prepared, "--limit", "4") == 0
    assert "for 4 answers; 0 are there already" in capsys.readouterr().out
    assert service.requests == []
    assert not (prepared / "job.json").exists()


def test_from_submit_to_scores(service: Service, prepared: Path, capsys: Shown) -> None:
    assert openai("submit", prepared, "--epochs", "2", "--seed", "7", "--yes") == 0
    assert "job ftjob-0 on gpt-4o-2024-08-06: validating_files" in capsys.readouterr().out
    (job,) = service.jobs
    assert (job["model"], job["seed"], job["suffix"]) == ("gpt-4o-2024-08-06", 7, "count3")
    numbers = {"batch_size": 4, "learning_rate_multiplier": 10, "n_epochs": 2}
    assert job["method"] == {"type": "supervised", "supervised": {"hyperparameters": numbers}}
    for split, name in (("train", job["training_file"]), ("valid", job["validation_file"])):
        assert (prepared / f"{split}.jsonl").read_bytes() in service.files[name]
        assert b"fine-tune" in service.files[name]

    assert openai("status", prepared, "--events", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["  Step 10/25", "  The job has ended"]
    assert f"model: {MODEL}" in lines
    assert stored(prepared, "job.json")["fine_tuned_model"] == MODEL

    service.answer = right_answers(prepared)
    assert openai("evaluate", prepared, "--limit", "4", "--yes") == 0
    table = capsys.readouterr().out
    assert "exact_match     1.0000  0.5101 to 1.0000" in table
    assert len(service.asked) == 4
    assert {(body["model"], body["temperature"]) for body in service.asked} == {(MODEL, 0)}

    service.answer = lambda prompt: "I cannot say."
    assert openai("evaluate", prepared, "--yes") == 0
    assert len(service.asked) == 6
    found = stored(prepared, "results.json")
    assert (found["n"], found["model"], found["job"]) == (6, MODEL, "ftjob-0")
    for name in ("well_formed", "exact_match", "token_accuracy"):
        assert found[name]["value"] == pytest.approx(4 / 6)
    assert list(found["token_accuracy_by_position"]) == ["4", "5", "6", "7"]
    assert found["output_tokens"] == 6 * 190
    assert all(KEY not in path.read_text() for path in prepared.iterdir())


def test_second_submit_is_refused(service: Service, submitted: Path, capsys: Shown) -> None:
    before = len(service.requests)
    for words in (["--yes"], []):
        assert openai("submit", submitted, *words) == 2
        assert "has job ftjob-0 already, and nothing was sent" in capsys.readouterr().err
    assert len(service.requests) == before


def test_job_whose_answer_was_lost_is_found(
    service: Service, prepared: Path, capsys: Shown
) -> None:
    service.drop_creation = "after"
    service.jobs.append(job_of(0, {"model": "gpt-4o", "training_file": "file-older"}))
    service.newer_jobs.append(job_of(2, {"model": "gpt-4o", "training_file": "file-newer"}))
    assert openai("submit", prepared, "--yes") == 0
    assert "job ftjob-1" in capsys.readouterr().out
    assert service.count(CREATE) == 1
    assert len(service.jobs) == 3
    assert stored(prepared, "job.json")["job"] == "ftjob-1"


@pytest.mark.usefixtures("quick_looks")
def test_lost_creation_is_looked_for_by_the_next_submit(
    service: Service, prepared: Path, capsys: Shown
) -> None:
    """The job exists but cannot be listed: the next submit finds it and creates none."""
    service.drop_creation, service.listed = "after", False
    assert openai("submit", prepared, "--yes") == 2
    error = capsys.readouterr().err
    assert "it is not known whether a job was created: the connection to 127.0.0.1" in error
    assert "jobs cannot be listed" in error
    assert not (prepared / "job.json").exists()
    assert openai("submit", prepared, "--yes") == 2
    assert "not known whether the last submit created a job" in capsys.readouterr().err
    service.drop_creation, service.listed = "", True
    assert openai("submit", prepared, "--yes") == 0
    assert service.count(CREATE) == 1
    assert stored(prepared, "job.json")["job"] == "ftjob-0"


@pytest.mark.usefixtures("quick_looks")
def test_creation_is_repeated_only_by_a_later_submit_that_finds_no_job(
    service: Service, prepared: Path, capsys: Shown
) -> None:
    service.drop_creation = "before"
    assert openai("submit", prepared, "--yes") == 2
    assert "none with these files is listed so far" in capsys.readouterr().err
    service.drop_creation = ""
    assert openai("submit", prepared, "--yes") == 2
    assert "run the same command again in 10 minutes" in capsys.readouterr().err
    assert service.count(CREATE) == 1
    state = stored(prepared, "uploads.json")
    state["creating_since"] -= openai_jobs.UNSURE_FOR
    (prepared / "uploads.json").write_text(json.dumps(state))
    assert openai("submit", prepared, "--yes") == 0
    assert (service.count(CREATE), len(service.jobs), len(service.files)) == (2, 1, 2)


@pytest.mark.parametrize("code", [400, 429])
def test_refused_creation_can_be_repeated_at_once(
    code: int, service: Service, prepared: Path, capsys: Shown
) -> None:
    service.refuse_creation = code
    assert openai("submit", prepared, "--yes") == 2
    error = capsys.readouterr().err
    assert "no job was created: " in error
    assert "not this model" in error
    assert service.count(CREATE) == 1
    service.refuse_creation = 0
    assert openai("submit", prepared, "--yes") == 0
    assert (len(service.jobs), len(service.files)) == (1, 2)


@pytest.mark.usefixtures("quick_looks")
def test_server_error_at_creation_is_not_repeated(
    service: Service, prepared: Path, capsys: Shown
) -> None:
    service.refuse_creation = 500
    assert openai("submit", prepared, "--yes") == 2
    assert "it is not known whether a job was created" in capsys.readouterr().err
    assert service.count(CREATE) == 1


def test_failed_job_says_why(service: Service, submitted: Path, capsys: Shown) -> None:
    error = {"code": "invalid_training_file", "message": "line 3 is too long", "param": None}
    service.outcome = {"status": "failed", "error": error}
    assert openai("status", submitted) == 1
    shown = capsys.readouterr().out
    assert "job ftjob-0 on gpt-4o-2024-08-06: failed" in shown
    assert "error: invalid_training_file: line 3 is too long" in shown
    assert openai("evaluate", submitted, "--yes") == 2
    assert "job ftjob-0 is failed (invalid_training_file" in capsys.readouterr().err
    assert service.asked == []


def test_evaluation_waits_for_the_job(service: Service, submitted: Path, capsys: Shown) -> None:
    service.outcome = {"status": "running"}
    assert openai("status", submitted) == 0
    assert openai("evaluate", submitted, "--yes") == 2
    assert "job ftjob-0 is running" in capsys.readouterr().err
    service.outcome = {"status": "succeeded", "fine_tuned_model": MODEL}
    assert openai("evaluate", submitted, "--limit", "1", "--yes") == 0


def test_rate_limits_are_heeded(service: Service, submitted: Path) -> None:
    service.limited = 1
    service.answer = right_answers(submitted)
    assert openai("evaluate", submitted, "--limit", "2", "--yes") == 0
    times = [at for name, at in service.requests if name == CHAT]
    first, second = (later - sooner for sooner, later in pairwise(times))
    assert first >= 1.0 > second
    assert len(service.asked) == 2


def test_limit_beyond_patience_keeps_the_answers(
    service: Service, submitted: Path, capsys: Shown
) -> None:
    service.answer = right_answers(submitted)
    assert openai("evaluate", submitted, "--limit", "2", "--yes") == 0
    service.limited, service.retry_after = 1, "3600"
    assert openai("evaluate", submitted, "--yes") == 2
    error = capsys.readouterr().err
    assert "(429): Rate limit reached." in error
    assert "run the same command again to go on" in error
    assert openai("evaluate", submitted, "--yes") == 0
    assert len(service.asked) == len(answer_lines(submitted)) == 6


@pytest.mark.parametrize("key", ["sk-wrong-9876543210", "another*key"])
def test_wrong_key_is_not_shown(
    key: str, service: Service, prepared: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert openai("submit", prepared, "--yes") == 2
    shown = capsys.readouterr()
    assert "does not accept the key in OPENAI_API_KEY (401)" in shown.err
    assert key not in shown.err + shown.out
    assert service.files == {}


@pytest.mark.parametrize("key", ["", "  ", "sk-one sk-two", "sk-höchst-geheim", "sk-a\nb"])
def test_key_that_cannot_be_one_is_not_sent_or_shown(
    key: str, service: Service, prepared: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert openai("submit", prepared, "--yes") == 2
    error = capsys.readouterr().err
    assert "OPENAI_API_KEY" in error
    assert "sk-" not in error
    assert service.requests == []


@pytest.mark.parametrize("url", ["nowhere", "http://", "ftp://127.0.0.1", "http://127.0.0.1:x"])
def test_address_that_is_none_is_named(
    url: str, prepared: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    assert openai("submit", prepared, "--yes") == 2
    assert "OPENAI_BASE_URL is not an address" in capsys.readouterr().err


def test_interrupted_evaluation_goes_on(service: Service, submitted: Path) -> None:
    service.answer = right_answers(submitted)
    service.slow_after = 3
    words = ["-m", "entp", "llm", "openai", "evaluate", str(submitted), "--yes"]
    process = subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "OPENAI_LOG": "debug"},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # even if ignored here
    )
    patience = time.monotonic() + 60
    while service.count(CHAT) < 4 and time.monotonic() < patience:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "3 of 6 answers came" in error
    assert KEY not in error
    assert len(answer_lines(submitted)) == 3
    with open(submitted / "answers.jsonl", "a") as file:
        file.write('{"id": "cut o')  # as a kill in the middle of a line leaves it
    service.slow_after = None
    assert openai("evaluate", submitted, "--yes") == 0
    assert len(service.asked) == len(answer_lines(submitted)) == 6
    assert stored(submitted, "results.json")["exact_match"]["value"] == 1


def test_broken_answer_is_named(service: Service, submitted: Path, capsys: Shown) -> None:
    (submitted / "answers.jsonl").write_text('{"id": "a", "text": "b"}\n{"id": 3}\n')
    assert openai("evaluate", submitted, "--yes") == 2
    assert "answers.jsonl line 2 is not an answer" in capsys.readouterr().err
    assert service.asked == []


def test_examples_of_the_document_run_as_written(
    service: Service, tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = DOCUMENT.read_text()
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for line in "".join(blocks).splitlines() if line.startswith("entp llm openai ")]
    assert [line.split()[3] for line in lines if line.endswith("--yes")] == ["submit", "evaluate"]
    for line in lines:
        assert main(line.split()[1:]) == 0, f"{line}: {capsys.readouterr().err}"
    assert len(service.jobs) == 1
    assert "well_formed     0.0000" in capsys.readouterr().out
    code, _ = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.splitlines()[-1] == PRINTED
