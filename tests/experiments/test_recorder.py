"""What runs under way have is recorded again and again, and once more when their process dies."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import killed_runs
import pytest
from killed_runs import QUICK, carry_out, two_runs
from noted_study import DamagedStudy, NotedStudy
from small_runs import environment

from entp.experiments import recorder
from entp.experiments import study as study_module
from entp.experiments.recorder import recording
from entp.results.schema import Record, RunRecord
from entp.results.store import read_record
from entp.training.loggers import read_metrics

LIMIT = 120.0


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without figures, which have tests of their own."""
    monkeypatch.setattr(recorder, "FIRST", QUICK[0])
    monkeypatch.setattr(recorder, "EVERY", QUICK[1])
    monkeypatch.setattr(study_module, "draw_record", lambda *_: False)


def until(true: Callable[[], bool]) -> bool:
    """Wait until it is true, which it should be soon."""
    end = time.monotonic() + LIMIT
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def test_another_process_writes_until_it_is_over(tmp_path: Path) -> None:
    study = NotedStudy(tmp_path / "written")
    with recording(study):
        assert until(lambda: len(study.writers()) >= 3)
    found = study.writers()
    assert len(set(found)) == 1
    assert found[0] != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(found[0], 0)
    time.sleep(4 * QUICK[1])
    assert study.writers() == found


def test_what_another_process_could_not_find_is_written_here(tmp_path: Path) -> None:
    class OwnStudy(NotedStudy):
        pass

    study = OwnStudy(tmp_path / "written")
    with recording(study):
        assert until(lambda: len(study.writers()) >= 3)
    found = study.writers()
    assert set(found) == {os.getpid()}
    time.sleep(4 * QUICK[1])
    assert study.writers() == found


def test_writing_that_fails_is_told_once_and_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    study = DamagedStudy(tmp_path / "written")
    with recording(study):
        assert until(lambda: len(study.writers()) >= 4)
    assert capfd.readouterr().err == "nothing is recorded just now: the disk is full\n"


def test_work_that_is_over_at_once_costs_no_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "FIRST", 1e6)
    study = NotedStudy(tmp_path / "written")
    with recording(study):
        pass
    assert study.writers() == []


def test_slow_writing_is_done_less_often(tmp_path: Path) -> None:
    class Slow(NotedStudy):
        def write_so_far(self) -> None:
            time.sleep(0.1)

    assert recorder._write(Slow(tmp_path), 0.01) >= 0.1 / recorder.SHARE
    assert recorder._write(NotedStudy(tmp_path / "a"), 55.0) == 55.0


def start(record: Path, jobs: int, steps: int, test_sequences: int = 16) -> Popen[bytes]:
    """Carry two runs out in a process, which has a group of its own with those that it starts."""
    words = [str(word) for word in (record, jobs, steps, test_sequences)]
    return Popen(
        [sys.executable, killed_runs.__file__, *words],
        env={**environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )


def recorded(record: Path) -> list[RunRecord]:
    return read_record(record).arms["decoder"].runs if record.exists() else []


def trained(record: Path) -> list[int]:
    """The last step of each run that its folder knows."""
    files = (record.parent / "runs" / "small").glob("*/metrics.jsonl")
    rows = [read_metrics(path.parent) for path in files]
    return [max(row["step"] for row in own if row["kind"] == "train") for own in rows]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_killed_runs_are_recorded_and_go_on(jobs: int, tmp_path: Path) -> None:
    record = tmp_path / "all.json"
    with start(record, jobs, 10**6) as process:
        assert until(lambda: len(recorded(record)) == jobs)
        before = [run.steps for run in recorded(record)]
        assert until(lambda: all(run.steps > before[0] for run in recorded(record)))
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
    last = trained(record)
    assert len(last) == jobs
    assert until(lambda: sorted(run.steps for run in recorded(record)) == sorted(last))
    for run in recorded(record):
        assert run.status == f"{run.steps} of 1000000 steps"
        assert run.test is None
        assert run.curve[-1].step > run.steps - 4
    assert verdict_of(read_record(record)) == "undecided"
    found = carry_out(record, two_runs(max(last) + 3))
    assert [(run.status, run.steps) for run in found.arms["decoder"].runs] == [
        ("done", max(last) + 3)
    ] * 2
    assert verdict_of(found) == "shown"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jobs", "how"), [(1, signal.SIGTERM), (2, signal.SIGTERM), (1, signal.SIGKILL)]
)
def test_run_whose_test_is_interrupted_is_recorded_as_untested(
    jobs: int, how: signal.Signals, tmp_path: Path
) -> None:
    record = tmp_path / "all.json"
    with start(record, jobs, 6, test_sequences=10**8) as process:
        assert until(lambda: sum(run.done for run in recorded(record)) == jobs)
        os.kill(process.pid, how)
        assert process.wait(LIMIT) == (how if how == signal.SIGTERM else -how)
    stopped = read_record(record)
    assert [(run.status, run.test) for run in stopped.arms["decoder"].runs] == [
        ("done", None)
    ] * jobs
    assert verdict_of(stopped) == "undecided"
    found = carry_out(record, two_runs(6))
    for run in found.arms["decoder"].runs[:jobs]:
        assert run.test is not None
        assert run.environment.resumed == []  # it was not trained again
    assert verdict_of(found) == "shown"


def verdict_of(record: Record) -> str | None:
    return None if record.verdict is None else record.verdict.verdict
